"""The simulation: a seed reproduces its run, and planted bugs are found."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any, NoReturn

import pytest
import zmq

from core_proc.scheduling.acceptance import Acceptance
from protocol.model_facts import ModelFacts
from tests.paths import ROOT
from tests.simulation import __main__ as simulate_faults
from tests.simulation.batch import Batch, Tally, run_batch, run_chunk, silence
from tests.simulation.model import expected_stream, next_token_id
from tests.simulation.oracle import VERDICTS, Oracle, Stream
from tests.simulation.patched_os import FAILPOINT_MODULES
from tests.simulation.plan import FAULTS, FRAME_FAULTS, MODES, VOCAB_SIZE, make_plan
from tests.simulation.planted import PLANTS
from tests.simulation.report import verdicts
from tests.simulation.simulation import run_seed
from tests.simulation.world import Process, World

ALL = frozenset(FAULTS)
NUM_SEEDS = 10_000
"""Number of seeds in each mode, if the machine is fast enough."""
LIMIT_S = 3.0
MIN_SEEDS = 100
"""Every kind of fault happens within this number of seeds."""
PLANT_SEEDS = 600
"""A planted bug must be found within this number of seeds."""
FIRST_SEEDS = {
    "drain-at-once": 1_100,
    "forget-pause": 100,
    "forget-grammars": 30,
    "stale-states": 10,
    "forget-adapters": 20,
    "load-for-ever": 20,
    "swap-vectors": 20,
}
"""The seed at which the search for a rare bug begins, shortly before one that shows the bug.

Of the seeds 0 to 2,220, 11 show `drain-at-once`."""
RARE = {
    "forget-pause": frozenset({"kill", "pause"}),
    "promote-old-epoch": frozenset({"kill"}),
    "resume-other-seed": frozenset({"kill", "disconnect"}),
    "drain-at-once": frozenset({"kill"}),
    "forget-grammars": frozenset({"kill"}),
    "stale-states": frozenset({"kill", "failpoint"}),
    "forget-adapters": frozenset({"kill"}),
    "load-for-ever": frozenset({"kill"}),
}
"""Faults under which a bug shows often that is rare under all of them."""
ONLY_IN_PROGRESS = {"promote-old-epoch", "drain-at-once", "load-for-ever"}
"""Bugs that are found only in the mode in which faults end."""


@pytest.mark.parametrize("mode", MODES)
def test_no_violation_under_any_fault(mode: str) -> None:
    """Run as many seeds as fit into the time; `tests.simulation` runs more."""
    jobs = min(2, len(os.sched_getaffinity(0)))
    tally = run_batch(Batch(mode, 0, MIN_SEEDS, ALL), jobs)
    rest = Batch(mode, MIN_SEEDS, NUM_SEEDS - MIN_SEEDS, ALL)
    tally.add(run_batch(rest, jobs, time.monotonic() + LIMIT_S))
    assert tally.violations == []
    assert tally.num_seeds >= MIN_SEEDS
    assert tally.num_streams > 3 * tally.num_seeds
    assert tally.num_tokens > 10 * tally.num_seeds
    assert any(kind.startswith("promoted") for kind in tally.counts)
    kinds = {
        "came back",
        "pause held",
        "disconnect",
        "kill core",
        "kill worker",
        "kill api",
        "restart core",
        "reset",
        "partition",
        "grammar",
        "grammar late",
        "grammar wrong",
        "vector",
        "adapter",
        "adapter slow",
        "adapter wrong",
        "adapter loaded again",
        "killed by a load",
        *FRAME_FAULTS,
    }
    assert kinds <= set(tally.counts), "a kind of fault did not happen"


def test_a_seed_reproduces_its_run_in_another_process() -> None:
    hashes = []
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-m", "tests.simulation", "--seeds", "6", "--jobs", "1"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        hashes.append([line for line in done.stdout.splitlines() if ": trace " in line])
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) == len(MODES)
    first, again, other = (run_seed(seed, "progress").trace_hash for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize(
    ("mode", "plant"),
    [
        (mode, plant)
        for plant in PLANTS
        for mode in MODES
        if mode == "progress" or plant not in ONLY_IN_PROGRESS
    ],
)
def test_planted_bugs_are_found(mode: str, plant: str) -> None:
    kinds = RARE.get(plant, ALL)
    begin = FIRST_SEEDS.get(plant, 0)
    for first in range(begin, begin + PLANT_SEEDS, 10):
        tally = run_chunk(Batch(mode, first, 10, kinds, plant))
        if tally.violations:
            break
    assert tally.violations, f"{plant} was not found in {PLANT_SEEDS} seeds"
    clean = run_chunk(Batch(mode, tally.violations[0][0], 1, kinds))
    assert clean.violations == [], "the planted bug was not removed"


def run_seeds(mode: str, seeds: Iterable[int], kinds: frozenset[str]) -> Tally:
    """Run some seeds here."""
    total = Tally()
    for seed in seeds:
        total.add(run_chunk(Batch(mode, seed, 1, kinds)))
    return total


@pytest.mark.parametrize("mode", MODES)
def test_clients_resume_after_the_death_of_the_api_on_a_failing_disk(mode: str) -> None:
    kinds = frozenset({"kill", "disconnect", "disk"})
    seeds = [seed for seed in range(200) if make_plan(seed, mode, kinds).journal is not None]
    tally = run_seeds(mode, seeds[:40], kinds)
    assert tally.violations == []
    assert tally.counts["came back"] > 3
    assert tally.counts["kill api"] > 3
    assert any(kind.startswith("disk") for kind in tally.counts)


def test_standbys_are_promoted_and_replaced() -> None:
    kinds = frozenset({"kill"})
    recoveries = {seed: make_plan(seed, "progress", kinds).config.recovery for seed in range(400)}
    seeds = [s for s, r in recoveries.items() if r.standby_workers and r.standby_cores]
    tally = run_seeds("progress", seeds[:25], kinds)
    assert tally.violations == []
    assert tally.counts["promoted: worker"] > 0
    assert tally.counts["promoted: core"] > 0


@pytest.mark.parametrize(
    ("plant", "name"),
    [("drop-token", "lost"), ("repeat-token", "duplicated"), ("stateful-random", "mismatched")],
)
def test_the_table_names_the_kind_of_a_bug(plant: str, name: str) -> None:
    found = verdicts(run_chunk(Batch("progress", 0, 20, ALL, plant)))
    assert found.most_common(1)[0][0] == name


def test_every_stream_ends_without_faults() -> None:
    tally = run_chunk(Batch("progress", 0, 20, frozenset()))
    assert tally.violations == []
    ends = {"end", "end at rest"}
    kinds = {kind for kind in tally.counts if not kind.startswith("adapter")}
    assert kinds == {"grammar", "grammar late", "grammar wrong", "vector", *ends}
    assert tally.counts["adapter"] > 0
    assert sum(tally.counts[kind] for kind in ends) == 20


def test_grammars_and_vectors_survive_deaths() -> None:
    """Compiled again by each worker, late or never; a vector comes once."""
    kinds = frozenset({"kill", "failpoint"})
    plans = {seed: make_plan(seed, "progress", kinds) for seed in range(200)}
    params = {s: [r.params for c in p.requests for r in c] for s, p in plans.items()}
    seeds = [s for s, found in params.items() if any(p.grammar or p.pooling for p in found)]
    tally = run_seeds("progress", seeds[:40], kinds)
    assert tally.violations == []
    for kind in ("grammar late", "grammar wrong", "vector", "kill worker", "kill core"):
        assert tally.counts[kind] > 0, kind


@pytest.mark.parametrize("mode", MODES)
def test_adapters_survive_deaths(mode: str) -> None:
    """Workers load them again, late or never; one whose loads kill workers is refused."""
    kinds = frozenset({"kill", "failpoint"})
    plans = {seed: make_plan(seed, mode, kinds).adapters for seed in range(400)}
    seeds = [seed for seed, plan in plans.items() if plan is not None and plan.deadly]
    tally = run_seeds(mode, seeds[:15], kinds)
    assert tally.violations == []
    for kind in ("adapter slow", "adapter refused", "killed by a load", "kill worker", "kill core"):
        assert tally.counts[kind] > 0, kind


@pytest.mark.parametrize("has_states", [True, False])
def test_drafts_survive_deaths(has_states: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most drafts are right; their number follows the simulated times, and prompts are cut."""
    right: list[int] = []
    observe = Acceptance.observe

    def counting(self: Acceptance, num_drafts: int, num_right: int, memory: float) -> None:
        right.append(num_right)
        observe(self, num_drafts, num_right, memory)

    monkeypatch.setattr(Acceptance, "observe", counting)
    for mode in MODES:
        configs = {seed: make_plan(seed, mode, ALL).config for seed in range(400)}
        seeds = [
            seed
            for seed, config in configs.items()
            if config.scheduler.num_speculative_tokens
            and bool(config.worker.null_state_blocks) == has_states
        ]
        outcomes = [run_seed(seed, mode) for seed in seeds[:20]]
        assert [outcome.violation for outcome in outcomes] == [None] * 20
    assert sum(right) > 20
    assert 0 in right


@pytest.mark.parametrize("kind", FRAME_FAULTS)
def test_damaged_frames_alone_violate_nothing(kind: str) -> None:
    """Frames have one kind of fault, and no process dies, whose recovery would repair it."""
    tally = run_chunk(Batch("progress", 0, 30, frozenset({kind})))
    assert tally.violations == []
    assert tally.counts[kind] > 0


def test_a_plan_has_only_the_requested_faults() -> None:
    for seed in range(50):
        plan = make_plan(seed, "safety", frozenset({"kill", "drop"}))
        assert {fault.kind for fault in plan.faults} <= {"kill"}
        assert set(plan.frame_rates) <= {"drop"}
        assert plan.failpoint_rate == 0.0


def test_the_model_depends_on_context_prompt_and_seed_only() -> None:
    known = [5, 6, 7, 8, 9]
    tokens = [next_token_id(known, n, seed, VOCAB_SIZE) for n in (2, 3) for seed in (1, 2)]
    assert len(set(tokens)) == 4
    plan = make_plan(1, "safety", frozenset())
    request = plan.requests[0][0]
    facts = simulate_facts()
    token_ids, _ = expected_stream(request.prompt, request.params, facts)
    again, _ = expected_stream(request.prompt, request.params, facts)
    assert token_ids == again
    assert len(token_ids) <= request.params.max_tokens


def simulate_facts() -> ModelFacts:
    return ModelFacts("simulated", VOCAB_SIZE, 64, 4, 33, [2])


def test_the_command_fails_and_prints_the_seed_of_a_violation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--seeds", "10", "--jobs", "1", "--mode", "progress"]
    assert simulate_faults.main(arguments) == 0
    assert "FAILED" not in capsys.readouterr().out
    assert simulate_faults.main([*arguments, "--plant", "stateful-random"]) == 1
    assert "FAILED --mode progress --first-seed " in capsys.readouterr().out


def test_the_command_prints_the_events_of_one_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate_faults.main(["--trace", "--first-seed", "5", "--mode", "safety"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert run_seed(5, "safety").trace_hash in lines[-1]
    assert len(lines) > 50


def test_a_run_replaces_no_global_but_the_failpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops get clock, poller, sockets and processes as arguments."""
    packages = ("api_proc.", "core_proc.", "worker_proc.", "protocol.", "scripts.supervisor.")
    modules = [module for name, module in sys.modules.items() if name.startswith(packages)]

    def snapshot() -> dict[tuple[str, str], object]:
        return {
            (module.__name__, name): value
            for module in modules
            for name, value in vars(module).items()
        }

    during: list[dict[tuple[str, str], object]] = []
    accepted = Oracle.accepted

    def accept(oracle: Oracle, *arguments: Any) -> Stream:
        during.append(snapshot())
        return accepted(oracle, *arguments)

    monkeypatch.setattr(Oracle, "accepted", accept)
    before = snapshot()
    run_seed(0, "progress")
    replaced = {key for key, value in during[0].items() if before.get(key) is not value}
    assert {module for module, _ in replaced} == {m.__name__ for m in FAILPOINT_MODULES}
    assert {name for _, name in replaced} == {"failpoint"}
    assert snapshot() == before


def test_a_run_calls_no_real_clock_socket_or_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that ignores its arguments would make runs depend on the machine."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the simulation must not reach the operating system")

    seeds = [s for s in range(40) if make_plan(s, "progress", ALL).journal is not None]
    with silence():
        for module, names in {
            time: ("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "sleep"),
            os: ("pidfd_open",),
            signal: ("pidfd_send_signal",),
            zmq: ("Context", "Poller"),
        }.items():
            for name in names:
                monkeypatch.setattr(module, name, refuse)
        outcomes = [run_seed(seed, "progress") for seed in (*range(5), *seeds[:3])]
        monkeypatch.undo()
    assert [outcome.violation for outcome in outcomes] == [None] * 8


def test_unknown_faults_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        simulate_faults.main(["--faults", "kill,earthquake"])
    assert ended.value.code == 2
    assert "earthquake" in capsys.readouterr().err


class Idler(Process):
    """Records when its turns are called."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "idler")
        self.times: list[int] = []

    def turn(self) -> int | None:
        self.times.append(self.world.now)
        return None


def test_a_stopped_process_takes_its_turn_after_the_resume_and_a_dead_one_none() -> None:
    world = World(1)
    idler = Idler(world)
    start = world.now
    idler.stop()
    idler.wake()
    world.run(start + 1000)
    assert idler.times == []
    idler.resume()
    world.run(start + 2000)
    assert len(idler.times) == 1
    idler.wake()
    idler.die()
    world.run(start + 3000)
    assert len(idler.times) == 1


def test_tallies_of_parts_add_up() -> None:
    total = Tally()
    parts = [run_chunk(Batch("safety", seed, 2, ALL)) for seed in (0, 2)]
    for part in parts:
        total.add(part)
    assert total.num_seeds == 4
    assert total.num_events == sum(part.num_events for part in parts)
    assert set(verdicts(total)) <= {*VERDICTS, "other"}
