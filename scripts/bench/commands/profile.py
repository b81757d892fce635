"""The parts of a step, for `offline --profile`, in microseconds.

An engine in this process computes the workloads once more. What is not a part of it: the sockets,
and the API's text events; `control` has the processor time of the API.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from api_proc.text.detokenizer import Detokenizer
from api_proc.text.processor import TextProcessor
from protocol.core_worker import (
    ModelRunnerOutput,
    SchedulerOutput,
    decode_from_core,
    decode_from_worker,
)
from protocol.message import encode
from scripts.bench.commands.steps import Parts, Patch, SteppedEngine, runner_class
from scripts.bench.report import Profile
from scripts.bench.workloads import WARM_UP_REQUESTS, Request, Workload
from scripts.supervisor.checks import complete_config
from scripts.supervisor.startup import parse
from worker_proc.mirror import Mirror

if TYPE_CHECKING:
    from worker_proc.native.kernels import NativeLibrary
    from worker_proc.native.structures import ProgramArgs, RunArgs

_KINDS = ("steps with prompts", "decode steps")
_NAMES = {
    "schedule": "schedule",
    "wire": "wire",
    "mirror": "mirror",
    "inputs": "input preparation",
    "project": "forward: products",
    "attend": "forward: attention",
    "normalize": "forward: norms",
    "rotate": "forward: rotation",
    "add": "forward: additions",
    "embed": "forward: embedding",
    "forward": "forward: all else",
    "sample": "sample",
    "worker": "rest of the worker",
    "output": "output",
    "client": "client's ledger",
    "detokenize": "detokenize",
}
"""The parts in the order of the table. Without the native decoder its kinds are in "all else"."""


class _Steps:
    """The parts of all steps of a kind."""

    def __init__(self) -> None:
        self.count = 0
        self.parts_us: dict[str, float] = {}

    def add(self, parts_us: dict[str, float]) -> None:
        self.count += 1
        for name, value in parts_us.items():
            self.parts_us[name] = self.parts_us.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        sums = self.parts_us
        return {_NAMES[key]: sums[key] / self.count for key in _NAMES if key in sums}


class _Profiler:
    """Computes workloads with an engine in this process."""

    def __init__(self, model: str, flags: Sequence[str]) -> None:
        self._engine = SteppedEngine(model, flags)
        self._parts = self._engine.parts
        _, config = parse("scripts.bench", [model, *flags])
        self._tokenizer = TextProcessor.load(complete_config(config).model).tokenizer
        self._has_prompt = False

    def run(self, requests: Sequence[Request]) -> dict[str, _Steps]:
        """Compute the requests; returns the steps by kind."""
        engine = self._engine
        texts: dict[int, Detokenizer] = {}
        for request in requests:
            text = self._tokenizer.detokenizer(request.prompt, skip_special_tokens=True)
            texts[engine.submit(request)] = text
        found = {kind: _Steps() for kind in _KINDS}
        with engine.timing(list(self._patches())):
            self._parts.take()
            while engine.has_unfinished:
                self._has_prompt = False
                tokens = engine.step()
                with self._parts.part("detokenize"):
                    for request_id, token_ids in tokens.items():
                        texts[request_id].push(token_ids)
                found[_KINDS[0] if self._has_prompt else _KINDS[1]].add(self._parts.take())
        return {kind: steps for kind, steps in found.items() if steps.count}

    def _patches(self) -> Iterator[Patch]:
        timed = self._parts.timed
        yield runner_class(self._engine.model), "execute", self._over_the_wire
        yield Mirror, "apply", timed("mirror")
        yield Mirror, "advance", timed("mirror")
        yield Mirror, "move_on", timed("mirror")
        yield Mirror, "append", timed("mirror")
        if self._engine.model == "null":
            return
        from worker_proc import model_runner
        from worker_proc.attention.native import NativeBackend
        from worker_proc.attention.sdpa import SdpaBackend
        from worker_proc.inputs import SteadyDecode
        from worker_proc.native.kernels import NativeLibrary
        from worker_proc.sampling.sampler import Sampler

        yield model_runner, "pack_step", timed("inputs")
        yield SteadyDecode, "move_on", timed("inputs")
        yield NativeBackend, "begin_step", timed("inputs")
        yield SdpaBackend, "begin_step", timed("inputs")
        yield model_runner, "compute_logits", timed("forward")
        yield NativeLibrary, "execute", lambda execute: _by_kind(self._parts, execute)
        yield Sampler, "sample", timed("sample")

    def _over_the_wire(
        self, execute: Callable[[Any, SchedulerOutput], ModelRunnerOutput]
    ) -> Callable[[Any, SchedulerOutput], ModelRunnerOutput]:
        """Encode and decode a step and its results, as the processes do."""

        def over_the_wire(runner: Any, step: SchedulerOutput) -> ModelRunnerOutput:
            counts = step.num_scheduled_tokens.values()
            self._has_prompt = bool(step.scheduled_new_reqs) or max(counts, default=0) > 1
            with self._parts.part("wire"):
                received = decode_from_core(encode(step))
            assert isinstance(received, SchedulerOutput)
            output = execute(runner, received)
            with self._parts.part("wire"):
                answer = decode_from_worker(encode(output))
            assert isinstance(answer, ModelRunnerOutput)
            return answer

        return over_the_wire


def _by_kind(
    parts: Parts, execute: "Callable[[NativeLibrary, ProgramArgs, RunArgs], None]"
) -> "Callable[[NativeLibrary, ProgramArgs, RunArgs], None]":
    """Execute a program's instructions one by one, each as a part of its kind."""
    from worker_proc.native.structures import Instruction, Kind

    programs: dict[int, list[tuple[str, ProgramArgs]]] = {}

    def split(program: "ProgramArgs") -> Iterator[tuple[str, "ProgramArgs"]]:
        for index in range(program.num_instructions):
            address = program.instructions + index * ctypes.sizeof(Instruction)
            kind = Kind(Instruction.from_address(address).kind)
            yield kind.name.lower(), program.only(index)

    def run(library: "NativeLibrary", program: "ProgramArgs", run: "RunArgs") -> None:
        single = programs.get(program.instructions)
        if single is None:
            single = programs[program.instructions] = list(split(program))
        for name, instruction in single:
            parts.begin(name)
            execute(library, instruction, run)
            parts.end()

    return run


def profile(
    model: str, flags: Sequence[str], workloads: Sequence[Workload], seed: int, ids: range
) -> list[Profile]:
    """Compute each workload once, after a warm-up."""
    profiler = _Profiler(model, flags)
    found = []
    for workload in workloads:
        profiler.run(workload.requests(seed - 1, ids)[:WARM_UP_REQUESTS])
        for kind, steps in profiler.run(workload.requests(seed, ids)).items():
            found.append(Profile(workload.name, kind, steps.count, steps.means()))
    return found
