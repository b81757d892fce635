"""Mutation tests of the core: `python -m tests.core.mutations [NAME...]`.

Each mutation breaks one line of a copy of the scheduler or of the KV manager, in a temporary
directory, and some test must fail. The exit status is 1 if any mutation survives, and 2 if the
check itself is out of date: a line that is changed in the code must be changed here too.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.paths import ROOT

COPIED = (
    "core_proc",
    "protocol",
    "scripts",
    "worker_proc",
    "tests",
    "docs",
    "pyproject.toml",
    "CONTRIBUTING.md",
)
TIME_LIMIT_S = 60
"""Time limit of one test: some faults make a loop endless."""
PYTEST = (
    *("-m", "pytest", "tests/core", "-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"),
    "--ignore-glob=*/test_loop*",  # real sockets: slow, and they test other properties
    "--ignore-glob=*/test_stateful*",  # slow too, and random
    "--ignore-glob=*/test_mutations*",  # a copy with a fault lacks the line that it replaces
    f"--timeout={TIME_LIMIT_S}",
    "--timeout-method=signal",
)


class Mutation(NamedTuple):
    """One deliberate fault: `old`, which occurs exactly once in `file`, is replaced by `new`."""

    name: str
    file: str
    old: str
    new: str


MUTATIONS = (
    Mutation(
        "budget not returned when a grant is withdrawn",
        "scheduling/step.py",
        "        self.grown.pop(request.req_id, None)\n        self.budget += num_tokens\n",
        "        self.grown.pop(request.req_id, None)\n",
    ),
    Mutation(
        "the first of running is the victim",
        "scheduling/victims.py",
        "return max(running, key=self._key)",
        "return running[0]",
    ),
    Mutation(
        "freed blocks in the order of the table",
        "kv/block_pool.py",
        "for block_id in reversed(block_ids):",
        "for block_id in block_ids:",
    ),
    Mutation(
        "hash of a block without the blocks before it",
        "kv/kv_cache.py",
        "            prefix.update(",
        "            prefix = kv_events.prefix_hash(prefix_root(request))\n"
        "            prefix.update(",
    ),
    Mutation(
        "a hit block stays in the free queue",
        "kv/block_pool.py",
        "            if ref_counts[block_id] == 0:\n                before, after",
        "            if ref_counts[block_id] < 0:\n                before, after",
    ),
    Mutation(
        "one token too many before a length stop",
        "scheduling/results.py",
        "elif request.num_tokens >= request.max_num_tokens:",
        "elif request.num_tokens > request.max_num_tokens:",
    ),
    Mutation(
        "watermark ignored",
        "scheduling/admission.py",
        "headroom=self._headroom(num_running),",
        "headroom=0,",
    ),
    Mutation(
        "admission in a step that ran out of blocks",
        "scheduler.py",
        "        if not step.ran_out_of_blocks:\n",
        "        if True:\n",
    ),
    Mutation(
        "computed tokens not reset on preemption",
        "scheduling/departures.py",
        "        request.num_computed_tokens = 0\n        self._queues.requeue(request)",
        "        self._queues.requeue(request)",
    ),
    Mutation(
        "finished notice sent twice",
        "scheduler.py",
        "        left.forget_named()\n",
        "        left.preempted_req_ids = []\n",
    ),
    Mutation(
        "room for the whole input not reserved",
        "scheduling/admission.py",
        "return request.num_tokens if self._options.scheduler_reserve_full_isl else 0",
        "return 0",
    ),
    Mutation(
        "a window gives its blocks back one too early",
        "kv/kv_cache.py",
        "first_visible_block(group.window, num_computed, self.block_size)",
        "first_visible_block(group.window, num_computed + 16, self.block_size)",
    ),
    Mutation(
        "resumed before its late tokens have come",
        "scheduler.py",
        "return None if request is None or request.num_late_tokens else request",
        "return request",
    ),
    Mutation(
        "host blocks given away in the step that reads them",
        "kv/host_blocks.py",
        "self._leaving += block_ids",
        "self._free += block_ids",
    ),
    Mutation(
        "drafts pass the end of a snapshot",
        "kv/state_blocks.py",
        "return min(end, (request.num_tokens // spacing + 1) * spacing)",
        "return end",
    ),
    Mutation(
        "drafts add two blocks to a state table",
        "kv/state_blocks.py",
        "end = (len(request.block_tables[-1]) + 1) * self._block_size",
        "end = (len(request.block_tables[-1]) + 2) * self._block_size",
    ),
    Mutation(
        "a fully cached prompt begins from the state after its last token",
        "kv/kv_cache.py",
        "limit = (request.num_tokens - 1) // self.block_size",
        "limit = request.num_tokens // self.block_size",
    ),
    Mutation(
        "a snapshot can be hit in the step that writes it",
        "kv/state_blocks.py",
        "        return changed\n",
        "        for request in {request for request, _ in changed}:\n"
        "            self.remember(request)\n"
        "        return changed\n",
    ),
    Mutation(
        "the only snapshot is kept while a request has taken over its block",
        "kv/state_blocks.py",
        "            self.pool.forget(snapshot)\n",
        "",
    ),
    Mutation(
        "a state is swapped while its drafts are in flight",
        "scheduling/departures.py",
        "can_swap = self._kv.states is None or not victim.num_drafts_in_flight",
        "can_swap = True",
    ),
    Mutation(
        "the KV before a lost state counts as kept",
        "kv/kv_cache.py",
        "num_blocks = len(self.states.find_hit(request, limit))",
        "num_blocks = limit",
    ),
    Mutation(
        "a state comes back to the wrong entry of the table",
        "kv/swap.py",
        "block_id = request.block_tables[-1][(start - 1) // self._block_size]",
        "block_id = request.block_tables[-1][0]",
    ),
    Mutation(
        "what sits a step out counts as computed",
        "scheduling/step.py",
        "            requests = requests[:number]\n",
        "            requests[number].num_computed_tokens += 1\n"
        "            requests = requests[:number]\n",
    ),
    Mutation(
        "a victim keeps the token that the step had granted to it",
        "scheduling/grants.py",
        "            victim.num_computed_tokens -= withdrawn\n",
        "",
    ),
    Mutation(
        "requests behind one that has left are skipped",
        "scheduler.py",
        "first = bisect_right(running, request.admission_index, key=_admission_index)",
        "pass",
    ),
    Mutation(
        "a refusal is kept although enough was freed",
        "scheduling/admission.py",
        "return self._kv.pool.num_freed - refusal.num_freed < refusal.num_missing",
        "return True",
    ),
    Mutation(
        "a refusal is kept although its prefix was cached",
        "kv/block_pool.py",
        "        blocks.append(block_id)\n        if self._watched and",
        "        blocks.append(block_id)\n        if False and",
    ),
    Mutation(
        "hits are kept although they were forgotten",
        "kv/block_pool.py",
        "        blocks.remove(block_id)\n        if self._watched and",
        "        blocks.remove(block_id)\n        if False and",
    ),
    Mutation(
        "a share of the step for all that wait",
        "scheduler.py",
        "num_sharing += min(num_free_slots, self.waiting.num_admissible)",
        "num_sharing += self.waiting.num_admissible",
    ),
    Mutation(
        "due one step too late",
        "scheduling/due_index.py",
        "self.now + 1 + num_quiet_steps",
        "self.now + 2 + num_quiet_steps",
    ),
    Mutation(
        "full blocks cached too late for admissions of the same step",
        "scheduler.py",
        "for due in self.queues.due_index.due_next():",
        "for due in []:",
    ),
    Mutation(
        "a request is cleared by its first token",
        "recovery/quarantine.py",
        "return 1 + options.max_steps_in_flight * (1 + options.num_speculative_tokens)",
        "return 1",
    ),
    Mutation(
        "a suspect is rejected without a canary",
        "recovery/quarantine.py",
        "if self._stage is Stage.RETRIAL and ran == tried:",
        "if len(tried) == 1 and ran == tried:",
    ),
    Mutation(
        "suspects are not tried in halves",
        "recovery/quarantine.py",
        "self._groups.extendleft(reversed(_halves(tried)))",
        "self._groups.extendleft([tried])",
    ),
    Mutation(
        "requests that ended stay marked",
        "recovery/quarantine.py",
        "for req_id in step.finished_req_ids:",
        "for req_id in []:",
    ),
    Mutation(
        "a mark that takes another's place is not written",
        "recovery/marks.py",
        "            self._changed.add(place)\n\n    def take",
        "\n    def take",
    ),
    Mutation(
        "wrong drafts count as computed",
        "scheduling/speculation.py",
        "request.num_computed_tokens -= num_drafts - num_accepted",
        "request.num_computed_tokens -= 0",
    ),
    Mutation(
        "drafts in flight count as computed when their request is preempted",
        "scheduling/speculation.py",
        "request.num_computed_tokens -= request.num_drafts_in_flight",
        "request.num_computed_tokens -= 0",
    ),
    Mutation(
        "a request with drafts in flight is scheduled ahead",
        "scheduling/speculation.py",
        "        if request.num_drafts_in_flight:\n            return True",
        "",
    ),
    Mutation(
        "prompt tokens are not counted",
        "scheduling/step.py",
        "self.num_prompt_tokens += num_tokens",
        "self.num_prompt_tokens += 0",
    ),
    Mutation(
        "pending tokens count as drafts",
        "scheduling/grants.py",
        "num_ahead if is_known else 0",
        "num_ahead",
    ),
    Mutation(
        "a request that is introduced again gets more drafts than its limit",
        "scheduling/draft_limits.py",
        "request.draft_limit = self._max_drafts",
        "request.draft_limit = request.draft_limit",
    ),
    Mutation(
        "a grammar keeps all requests that have ended",
        "preparation/grammars.py",
        "if len(self.requests) > self.prune_at:",
        "if False:",
    ),
    Mutation(
        "what another machine has is remembered when a request has ended",
        "scheduling/loads.py",
        "self._offload.remote.forget(request)",
        "pass",
    ),
    Mutation(
        "a turn keeps all requests that it had when another adapter asked for one",
        "preparation/adapter_turns.py",
        "for request in others[requests.num_left :]:",
        "for request in []:",
    ),
    Mutation(
        "requests join a turn past its bound",
        "preparation/adapter_turns.py",
        "if requests.has_turn and (not self._queue or requests.num_left > 0):",
        "if requests.has_turn:",
    ),
    Mutation(
        "an adapter whose requests run makes room",
        "preparation/adapters.py",
        "unused = [e for e in held if e.place is Place.READY and not e.requests.taken]",
        "unused = [e for e in held if e.place is Place.READY]",
    ),
    Mutation(
        "the adapters of lost workers count as loaded",
        "preparation/adapters.py",
        "            entry.place = Place.NOWHERE\n            for",
        "            for",
    ),
    Mutation(
        "adapters with equal ids are taken for each other",
        "preparation/adapters.py",
        "entry.adapter.digest != adapter.digest",
        "entry.adapter.digest == b''",
    ),
    Mutation(
        "the number of loads that were sent is not bounded",
        "preparation/adapters.py",
        "(1 if is_alone else MAX_SENT)",
        "(1 if is_alone else 10**9)",
    ),
    Mutation(
        "a suspected adapter is loaded beside steps",
        "preparation/adapters.py",
        "self._awaits_quiet = is_alone and self._is_busy",
        "self._awaits_quiet = False",
    ),
    Mutation(
        "steps are computed beside the load of a suspect",
        "preparation/adapters.py",
        "return self._awaits_quiet or bool(self._trials.on_trial)",
        "return self._awaits_quiet",
    ),
    Mutation(
        "two suspects are loaded at once",
        "preparation/adapters.py",
        "(1 if is_alone else MAX_SENT)",
        "MAX_SENT",
    ),
    Mutation(
        "adapters are loaded beside steps while a request is searched for",
        "preparation/adapters.py",
        "is_alone = bool(suspects) or (is_searching and bool(needed))",
        "is_alone = bool(suspects)",
    ),
    Mutation(
        "the load of an operator does not lift a refusal",
        "preparation/adapters.py",
        "        self._trials.allow(adapter.adapter_id)\n",
        "",
    ),
    Mutation(
        "signals from outside during a load do not count",
        "recovery/adapter_trials.py",
        "(FAULT_POINTS if is_fault else OTHER_POINTS)",
        "(FAULT_POINTS if is_fault else 0)",
    ),
    Mutation(
        "an adapter is refused for a death that others may have caused",
        "recovery/adapter_trials.py",
        "REFUSED_POINTS if adapter_id == alone else REFUSED_POINTS - 1",
        "REFUSED_POINTS",
    ),
    Mutation(
        "a load that ends leaves its adapter a suspect",
        "recovery/adapter_trials.py",
        "        self._points.pop(adapter_id, None)\n        if self.on_trial",
        "        if self.on_trial",
    ),
    Mutation(
        "a cause that is known late counts against a load that has ended",
        "recovery/adapter_trials.py",
        "        self._lost.discard(adapter_id)\n",
        "",
    ),
    Mutation(
        "a successor does not know what was being loaded",
        "recovery/adapter_trials.py",
        "            if state:\n                self._lost.add(adapter_id)\n",
        "",
    ),
    Mutation(
        "a successor does not know that a load was alone",
        "recovery/adapter_trials.py",
        "                self._lost_on_trial = adapter_id\n",
        "                pass\n",
    ),
    Mutation(
        "a trial goes on without its workers",
        "recovery/adapter_trials.py",
        "self._lost_on_trial, self.on_trial = self.on_trial, 0",
        "self._lost_on_trial = self.on_trial",
    ),
)


class OutOfDate(Exception):
    """A mutation does not match the code any more, or the tests fail without a fault."""


def mutated(mutation: Mutation) -> str:
    """Return the text of the file with the fault in it.

    Raises:
        OutOfDate: the old text does not occur exactly once.
    """
    text = (ROOT / "core_proc" / mutation.file).read_text()
    count = text.count(mutation.old)
    if count != 1:
        raise OutOfDate(
            f"{mutation.name}: the old text occurs {count} times in core_proc/{mutation.file},"
            f" and must occur once:\n{mutation.old}"
        )
    return text.replace(mutation.old, mutation.new)


def copy_to(directory: Path) -> None:
    """Copy all files that the tests of the core need."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, directory / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, directory / name)


def first_failure(directory: Path) -> str | None:
    """Run the tests of a copy; return the first that fails.

    Raises:
        OutOfDate: they did not run.
    """
    # Without bytecode on disk: it would hide a fault of the same length within one second.
    environment = os.environ | {"PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        [sys.executable, *PYTEST],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=20 * TIME_LIMIT_S,
        check=False,
    )
    if run.returncode == 0:
        return None
    failed = re.search(r"^FAILED (\S+)", run.stdout, re.MULTILINE)
    if failed is None:
        raise OutOfDate(f"pytest ended with {run.returncode}:\n{run.stdout[-2000:]}{run.stderr}")
    return failed[1]


def check(mutations: Sequence[Mutation]) -> int:
    """Try each mutation; return the number of survivors."""
    texts = [mutated(mutation) for mutation in mutations]
    num_survivors = 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        copy_to(directory)
        failure = first_failure(directory)
        if failure is not None:
            raise OutOfDate(f"{failure} fails without any fault")
        for mutation, text in zip(mutations, texts, strict=True):
            path = directory / "core_proc" / mutation.file
            original = path.read_text()
            path.write_text(text)
            start = time.monotonic()
            caught_by = first_failure(directory)
            seconds = time.monotonic() - start
            path.write_text(original)
            num_survivors += caught_by is None
            print(f"{mutation.name} ({seconds:.1f} s): {caught_by or 'SURVIVES'}", flush=True)
    return num_survivors


def main(argv: Sequence[str] | None = None) -> int:
    """Try all mutations, or those whose names contain an argument; return the exit status."""
    parser = argparse.ArgumentParser(prog="mutations", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="part of a mutation's name")
    names = parser.parse_args(argv).names
    chosen = [m for m in MUTATIONS if not names or any(name in m.name for name in names)]
    if not chosen:
        parser.error(f"no mutation is called {' or '.join(names)}")
    try:
        num_survivors = check(chosen)
    except OutOfDate as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{len(chosen) - num_survivors} of {len(chosen)} mutations were caught")
    return 1 if num_survivors else 0


if __name__ == "__main__":
    sys.exit(main())
