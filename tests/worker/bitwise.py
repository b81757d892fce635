"""Random schedules of the same texts, whose rows of logits are compared bit for bit."""

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.config import (
    CacheConfig,
    Device,
    Dtype,
    EngineConfig,
    ModelConfig,
    NativeDecoder,
    SchedulerConfig,
    WorkerConfig,
)
from protocol.core_worker import CachedRequestData, NewRequestData, SchedulerOutput
from protocol.message import pack_token_ids
from protocol.sampling import SamplingParams
from worker_proc import model_runner
from worker_proc.inputs import StepInputs
from worker_proc.model_runner import ModelRunner
from worker_proc.startup.load_runner import load_model_runner

NUM_BLOCKS = 900
BLOCK_SIZE = 16
TEXT_LENGTHS = (1, 2, 17, 40, 93, 330)
"""The longest spans several blocks, tiles and vectors of the kernels, and several windows."""
NUM_THREADS = (1, 2, 3)
NUM_SCHEDULES = (3, 1, 1)
"""Schedules for each number of threads."""
CHUNKS = (1, 1, 1, 2, 3, 7, 16, 33, 64, 65, 130)
DTYPES = ("float32", "bfloat16")


class Recorder:
    """Drives runners step by step and keeps the logits of every (text, position)."""

    def __init__(self, texts: Sequence[list[int]]) -> None:
        self.texts = texts
        self.found: dict[tuple[int, int], torch.Tensor] = {}
        self._text_of: dict[int, int] = {}

    def record(self, inputs: StepInputs, logits: torch.Tensor) -> None:
        """Note the rows of one step, which must be those found before, if they were."""
        for row, packed_row in enumerate(inputs.logits_indices.tolist()):
            number = max(i for i, first in enumerate(inputs.first_rows) if first <= packed_row)
            text = self._text_of[inputs.parts[number].request.req_id]
            key = text, int(inputs.position_ids[0, packed_row])
            known = self.found.setdefault(key, logits[row].clone())
            assert torch.equal(known, logits[row]), key

    @contextmanager
    def recording(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Record the steps of all runners meanwhile."""
        compute = model_runner.compute_logits

        def recording(*args: Any) -> torch.Tensor:
            logits = compute(*args)
            self.record(args[2], logits)
            return logits

        with monkeypatch.context() as patch:
            patch.setattr(model_runner, "compute_logits", recording)
            yield

    def run(self, runner: ModelRunner, schedule: "Schedule") -> None:
        """Compute all texts, some of them twice, as scheduled."""
        runner.reset()
        self._text_of.clear()
        for number, (step, news) in enumerate(schedule.steps()):
            self._text_of |= {new.req_id: schedule.text_of[new.req_id] for new in news}
            runner.execute(
                SchedulerOutput(
                    step_id=number,
                    scheduled_new_reqs=news,
                    scheduled_cached_reqs=CachedRequestData([], []),
                    num_scheduled_tokens=step,
                    total_num_scheduled_tokens=sum(step.values()),
                    preempted_req_ids=[],
                    finished_req_ids=schedule.take_finished(),
                )
            )


class Schedule:
    """Requests for all texts, cut into random chunks and put together at random."""

    def __init__(self, runner: ModelRunner, texts: Sequence[list[int]], rng: random.Random) -> None:
        self._texts, self._rng = texts, rng
        self._size = runner.facts.block_size
        self._num_groups = len(runner.facts.kv_groups)
        self._free = list(range(1, NUM_BLOCKS))
        rng.shuffle(self._free)
        self._finished: list[int] = []
        self._left: dict[int, int] = {}
        self.text_of: dict[int, int] = {}

    def take_finished(self) -> list[int]:
        """Requests that leave the mirror with the next step."""
        finished, self._finished = self._finished, []
        return finished

    def steps(self) -> Iterator[tuple[dict[int, int], list[NewRequestData]]]:
        """Yield the tokens of every mirrored request, and the new ones, step by step."""
        waiting = list(range(len(self._texts)))
        self._rng.shuffle(waiting)
        tables: dict[int, list[list[int]]] = {}
        while waiting or self._left:
            news = []
            while waiting and (not self._left or self._rng.random() < 0.4):
                news.append(self._admit(waiting.pop(), 0, tables))
            done = [text for text in tables if text not in self._texts_left()]
            if done and self._rng.random() < 0.3:
                # Blocks of another request, which this one neither computes nor writes.
                text = self._rng.choice(done)
                start = self._rng.randrange(len(self._texts[text]))
                news.append(self._admit(text, start - start % self._size, tables))
            step = {req: self._rng.choice((0, *CHUNKS)) for req in self._left}
            step = {req: min(count, self._left[req]) for req, count in step.items()}
            if not sum(step.values()):
                step[self._rng.choice(list(self._left))] = 1
            yield step, news
            for req, count in step.items():
                self._left[req] -= count
            self._finished = [req for req, count in self._left.items() if count == 0]
            for req in self._finished:
                del self._left[req]

    def _texts_left(self) -> set[int]:
        return {self.text_of[req] for req in self._left}

    def _admit(self, text: int, start: int, tables: dict[int, list[list[int]]]) -> NewRequestData:
        token_ids = self._texts[text]
        num_cached = start // self._size
        num_new = -(-len(token_ids) // self._size) - num_cached
        mine = [
            (tables[text][group][:num_cached] if num_cached else [])
            + [self._free.pop() for _ in range(num_new)]
            for group in range(self._num_groups)
        ]
        tables.setdefault(text, mine)
        req_id = len(self.text_of) + 1
        self.text_of[req_id] = text
        self._left[req_id] = len(token_ids) - start
        params = SamplingParams(max_tokens=9, temperature=0.0, prompt_logprobs=0)
        packed = pack_token_ids(token_ids)
        return NewRequestData(req_id, packed, len(token_ids), params, mine, start, start)


def engine_config(
    directory: Path,
    dtype: str,
    num_threads: int = 2,
    native_decoder: NativeDecoder = NativeDecoder.AUTO,
) -> EngineConfig:
    """Return settings with a pool in which every schedule fits."""
    return EngineConfig(
        model=ModelConfig(model=str(directory), dtype=Dtype(dtype), device=Device.CPU),
        cache=CacheConfig(
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=NUM_BLOCKS,
            num_state_blocks_override=NUM_BLOCKS,
        ),
        scheduler=SchedulerConfig(max_num_batched_tokens=1024),
        worker=WorkerConfig(num_threads=num_threads, native_decoder=native_decoder),
    )


def load(
    directory: Path,
    dtype: str,
    num_threads: int = 2,
    native_decoder: NativeDecoder = NativeDecoder.AUTO,
) -> ModelRunner:
    config = engine_config(directory, dtype, num_threads, native_decoder)
    return load_model_runner(config, lambda phase, done, total: None)


def make_texts(vocab_size: int, lengths: Sequence[int] = TEXT_LENGTHS) -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def exact(runner: ModelRunner) -> ModelRunner:
    """Check that requests resume exactly."""
    assert runner.facts.exact_resume
    assert not runner.facts.exact_resume_reason
    return runner


def native(runner: ModelRunner) -> ModelRunner:
    """Check that the native decoder computes the layers."""
    assert runner.facts.decoder == "native"
    return exact(runner)


def compare(
    runners: Iterable[ModelRunner],
    monkeypatch: pytest.MonkeyPatch,
    lengths: Sequence[int] = TEXT_LENGTHS,
    num_schedules: Sequence[int] = NUM_SCHEDULES,
) -> None:
    """Compute the same texts in many ways, by default more of them by the first runner."""
    recorder = Recorder([])
    with recorder.recording(monkeypatch):
        for number, runner in enumerate(runners):
            torch.set_num_threads(NUM_THREADS[number])
            texts = recorder.texts = make_texts(runner.facts.vocab_size, lengths)
            for seed in range(num_schedules[number]):
                recorder.run(runner, Schedule(runner, texts, random.Random(seed + 100 * number)))
    assert number > 0
    assert len(recorder.found) == sum(lengths)
