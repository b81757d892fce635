"""Replay scheduler traces: what the real scheduler decides, one JSON record a step.

`python -m scripts.schedule_trace FILE...` reads workloads (`.trace.json`, or the same with `.gz`)
and prints their records, one per line. A workload names every request, when it arrives, what is
aborted when and where EOS falls; tokens are a fixed function of request and position. Nothing runs
a model, so the records depend on the scheduler alone.
"""

import argparse
import gzip
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from core_proc.options import SchedulerOptions
from core_proc.request import Request
from core_proc.scheduler import Scheduler
from core_proc.scheduling.results import StepResult
from protocol.core_worker import ModelRunnerOutput, SchedulerOutput
from protocol.sampling import SamplingParams

EOS_TOKEN_ID = 2
Record = dict[str, Any]

_WORKLOAD_KEYS = {"name", "config", "requests"}
_CONFIG_DEFAULTS: dict[str, Any] = {
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 16,
    "block_size": 16,
    "num_gpu_blocks": 1024,
    "max_model_len": 4096,
    "long_prefill_token_threshold": 0,
    "policy": "fcfs",
    "enable_prefix_caching": True,
    "watermark": 0.0,
    "scheduler_reserve_full_isl": True,
    "max_num_active_seqs": None,
    "max_num_scheduled_tokens": None,
    "long_prefill_token_threshold_adaptive": False,
    "enable_chunked_prefill": True,
}
_REQUEST_DEFAULTS: dict[str, Any] = {
    "arrival_step": 0,
    "max_tokens": 16,
    "priority": 0,
    "arrival_time": None,
    "eos_at": None,
    "abort_at_step": None,
    "abort_inflight_at_step": None,
}
_PROMPT_KEYS = {"seed", "len", "shared_prefix", "continues"}


class TraceError(Exception):
    """A workload that cannot be replayed; the text names the key or the step."""


def prompt_stream(seed: object, length: int) -> list[int]:
    """Return the first `length` ids of a prompt stream."""
    return [3 + zlib.crc32(f"p{seed}:{i}".encode()) % 31997 for i in range(length)]


def sampled_token(spec: Mapping[str, Any], position: int) -> int:
    """Return the output of a request at `position`, counted from 0."""
    if position == spec["eos_at"]:
        return EOS_TOKEN_ID
    return 3 + zlib.crc32(f"{spec['id']}:{position}".encode()) % 31997


def _check_keys(
    what: str, given: Mapping[str, Any], known: Iterable[str], required: Iterable[str] = ()
) -> None:
    for key in sorted(set(given) - set(known)):
        raise TraceError(f"{what}: unknown key {key!r}")
    for key in sorted(set(required) - set(given)):
        raise TraceError(f"{what}: missing key {key!r}")


class Replay:
    """One workload on one scheduler, step by step."""

    def __init__(self, workload: Mapping[str, Any]) -> None:
        """Read a workload.

        Raises:
            TraceError: a key is unknown, missing or inconsistent.
        """
        _check_keys("workload", workload, _WORKLOAD_KEYS, ["requests"])
        _check_keys("config", workload.get("config", {}), _CONFIG_DEFAULTS)
        config = _CONFIG_DEFAULTS | workload.get("config", {})
        self._max_model_len: int = config["max_model_len"]
        # The other policies of the traces order by the step of arrival alone.
        self._has_arrival_times = config["policy"] == "priority"
        num_blocks = config.pop("num_gpu_blocks")
        num_active_seqs = config.pop("max_num_active_seqs")  # it replaces the other one, as in vLLM
        if num_active_seqs is not None:
            config["max_num_seqs"] = num_active_seqs
        self._scheduler = Scheduler(
            SchedulerOptions(**config, num_blocks=num_blocks, eos_token_ids=(EOS_TOKEN_ID,))
        )
        self._specs = [_read_request(row, i) for i, row in enumerate(workload["requests"])]
        self._by_name = {spec["id"]: spec for spec in self._specs}
        if len(self._by_name) < len(self._specs):
            raise TraceError("requests: an id occurs twice")
        # The scheduler numbers requests; numbers that rise with the names break ties as names do.
        self._names = sorted(self._by_name)
        self._req_ids = {name: req_id for req_id, name in enumerate(self._names)}
        self._num_to_arrive = len(self._specs)
        self._notice: list[str] = []
        """Names of finished requests that were not sent to the worker yet."""

    def records(self) -> Iterator[Record]:
        """Run to the end: one empty step after the last request finished.

        Raises:
            TraceError: the scheduler can make no more progress.
        """
        step = 0
        while self._num_to_arrive or self._scheduler.has_unfinished or self._notice:
            yield self._step(step)
            step += 1

    def _step(self, step: int) -> Record:
        rejected = self._arrive(step)
        aborted = self._abort("abort_at_step", step)
        if not (self._scheduler.has_unfinished or self._notice):
            return {"step": step, "idle": True}
        notice, self._notice = sorted(self._notice + aborted), []
        resumable = {r.req_id for r in self._scheduler.waiting.in_order() if r.num_preemptions}
        message = self._scheduler.schedule()
        mirror = self._scheduler.running.copy()
        record: Record = {"step": step}
        if rejected:
            record["rejected"] = rejected
        if aborted:
            record["aborted"] = aborted
        record |= self._grants(message, mirror, resumable) | {"finished_notice": notice}
        aborted_inflight = self._abort("abort_inflight_at_step", step)
        if aborted_inflight:
            record["aborted_inflight"] = aborted_inflight
        results = self._sample(message, mirror)
        record |= self._outcome(results)
        self._notice = aborted_inflight + [name for name, _ in record["finished"]]
        self._require_progress(step, message)
        return record

    def _arrive(self, step: int) -> list[str]:
        rejected = []
        for spec in self._specs:
            if spec["arrival_step"] != step:
                continue
            self._num_to_arrive -= 1
            prompt = self._prompt(spec)
            if not 0 < len(prompt) < self._max_model_len:
                rejected.append(spec["id"])
                continue
            self._scheduler.add_request(
                Request(
                    self._req_ids[spec["id"]],
                    prompt,
                    SamplingParams(max_tokens=spec["max_tokens"]),
                    priority=spec["priority"],
                    arrival_time=spec["arrival_time"] if self._has_arrival_times else 0.0,
                    owner=spec,
                )
            )
        return rejected

    def _prompt(self, spec: Mapping[str, Any]) -> list[int]:
        source = spec["prompt_token_ids"]
        if isinstance(source, list):
            return source
        head: list[int] = []
        length = source["len"]
        if "continues" in source:
            earlier = self._by_name[source["continues"]["id"]]
            outputs = range(source["continues"]["outputs"])
            head = self._prompt(earlier) + [sampled_token(earlier, i) for i in outputs]
            length += len(head)
        elif "shared_prefix" in source:
            shared = source["shared_prefix"]
            head = prompt_stream(shared["seed"], min(shared["len"], length))
        return head + prompt_stream(source["seed"], length - len(head))

    def _abort(self, key: str, step: int) -> list[str]:
        due = [spec["id"] for spec in self._specs if spec[key] == step]
        return [name for name in due if self._scheduler.abort_request(self._req_ids[name])]

    def _grants(
        self, message: SchedulerOutput | None, mirror: Sequence[Request], resumable: set[int]
    ) -> Record:
        """Read the step as the worker would: a request that is not named computes one token."""
        record: Record = {"num_scheduled_tokens": [], "new": [], "resumed": [], "preempted": []}
        if message is None:
            return record
        for request in mirror:
            num_tokens = message.num_scheduled_tokens.get(request.req_id, 1)
            if num_tokens:
                row = [self._names[request.req_id], num_tokens]
                record["num_scheduled_tokens"].append(row)
        for new in message.scheduled_new_reqs:
            kind = "resumed" if new.req_id in resumable else "new"
            record[kind].append([self._names[new.req_id], new.num_computed_tokens])
        record["preempted"] = [self._names[req_id] for req_id in message.preempted_req_ids]
        return record

    def _sample(
        self, message: SchedulerOutput | None, mirror: Sequence[Request]
    ) -> list[StepResult]:
        """Answer the step as a worker would."""
        if message is None:
            return []
        tokens = []
        for request in mirror:
            num_tokens = message.num_scheduled_tokens.get(request.req_id, 1)
            if num_tokens and request.num_computed_tokens >= request.num_tokens:
                spec: Any = request.owner
                tokens.append(sampled_token(spec, request.num_output_tokens))
        return self._scheduler.update_from_output(ModelRunnerOutput(message.step_id, tokens))

    def _outcome(self, results: Sequence[StepResult]) -> Record:
        name = self._names.__getitem__
        return {
            "tokens": [[name(r.request.req_id), r.new_token_ids[0]] for r in results],
            "finished": [
                [name(r.request.req_id), r.finish_reason.value] for r in results if r.finish_reason
            ],
            "num_free_blocks": self._scheduler.kv.num_free_blocks,
            "running": [name(r.req_id) for r in self._scheduler.running],
            "waiting": [name(r.req_id) for r in self._scheduler.waiting.in_order()],
        }

    def _require_progress(self, step: int, message: SchedulerOutput | None) -> None:
        """Raise an error if the scheduler has nothing to send and no event is still to come."""
        if message is not None or not self._scheduler.has_unfinished or self._num_to_arrive:
            return
        aborts = ("abort_at_step", "abort_inflight_at_step")
        if all(spec[key] is None or spec[key] <= step for spec in self._specs for key in aborts):
            raise TraceError(f"step {step}: requests are left, but none can be scheduled")


def _read_request(row: Mapping[str, Any], index: int) -> Record:
    required = {"id", "prompt_token_ids"}
    _check_keys(f"request {index}", row, required.union(_REQUEST_DEFAULTS), required)
    spec = _REQUEST_DEFAULTS | dict(row)
    prompt = spec["prompt_token_ids"]
    if not isinstance(prompt, list):
        what = f"request {index}: prompt_token_ids"
        _check_keys(what, prompt, _PROMPT_KEYS, {"seed", "len"})
    if spec["arrival_time"] is None:
        spec["arrival_time"] = float(index)
    return spec


def load_workload(path: Path) -> Record:
    """Read a workload file, compressed or not."""
    data = path.read_bytes()
    workload: Record = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return workload


def main(argv: Sequence[str] | None = None) -> int:
    """Replay the files named on the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.schedule_trace", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    for path in parser.parse_args(argv).files:
        try:
            for record in Replay(load_workload(path)).records():
                print(json.dumps(record, separators=(",", ":")))
        except (OSError, ValueError, KeyError, TraceError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
