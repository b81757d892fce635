"""All stages of a model in one process."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from core_proc.links.workers import WorkerGroup
from protocol.config import (
    CacheConfig,
    Dtype,
    EngineConfig,
    KVCacheDtype,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    RecoveryConfig,
    RunConfig,
    SchedulerConfig,
    WorkerConfig,
)
from protocol.core_worker import ModelRunnerOutput, SchedulerOutput, WorkerHello
from protocol.model_facts import ModelFacts
from protocol.sampling import SamplingParams
from tests.worker.checkpoints import SHAPE
from tests.worker.driving import Run, drive
from tests.worker.parity import BLOCK_SIZE, GREEDY
from worker_proc.runner import Runner
from worker_proc.startup.load_runner import load_model_runner

TIMEOUT_S = 60.0
NUM_LAYERS = 4
DEEP = SHAPE | {"num_hidden_layers": NUM_LAYERS}


class _InFlight:
    """A step that all stages are computing."""

    def __init__(self, outputs: list[Future[ModelRunnerOutput]]) -> None:
        self._outputs = outputs

    @property
    def is_done(self) -> bool:
        return self._outputs[-1].done()

    def finish(self) -> ModelRunnerOutput:
        """Return what the last stage has sampled."""
        outputs = [output.result(TIMEOUT_S) for output in self._outputs]
        return outputs[-1]  # all ranks of the last stage sample alike


class Stages:
    """The runners of all stages of a model as one, each in a thread of its own."""

    def __init__(
        self, directory: Path, num_stages: int, num_shares: int = 1, **settings: Any
    ) -> None:
        """Take settings of the worker, of the cache, and a `dtype` or codes of the model.

        `num_shares` ranks divide each stage.
        """
        run_dir = directory.with_name(f"{directory.name}-run")
        run_dir.mkdir(mode=0o700, exist_ok=True)
        dtype = Dtype(settings.pop("dtype", "float32"))
        recovery = settings.pop("recovery", RecoveryConfig())
        self.num_stages = num_stages
        self._config = EngineConfig(
            model=ModelConfig(
                model=str(directory),
                dtype=dtype,
                quantization=settings.pop("quantization", None),
                speculative_model=settings.pop("speculative_model", None),
            ),
            cache=CacheConfig(
                block_size=BLOCK_SIZE,
                num_gpu_blocks_override=400,
                swap_space_bytes=settings.pop("swap_space_bytes", 0),
                kv_cache_dtype=settings.pop("kv_cache_dtype", KVCacheDtype.AUTO),
                kv_offload_bytes=settings.pop("kv_offload_bytes", 0),
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=512,
                num_speculative_tokens=settings.pop("num_speculative_tokens", 0),
            ),
            parallel=ParallelConfig(
                pipeline_parallel_size=num_stages, tensor_parallel_size=num_shares
            ),
            lora=settings.pop("lora", LoraConfig()),
            worker=WorkerConfig(num_threads=1, **settings),
            run=RunConfig(run_dir=str(run_dir)),
            recovery=recovery,
        )
        self.runners = [self._load(rank) for rank in range(num_stages * num_shares)]
        self._threads = [ThreadPoolExecutor(1) for _ in self.runners]
        self._epoch = 0

    def _load(self, rank: int) -> Runner:
        return load_model_runner(self._config, lambda phase, done, total: None, rank=rank)

    @property
    def facts(self) -> ModelFacts:
        """The facts of the group, as the core has them."""
        num_shares = self._config.parallel.tensor_parallel_size
        group = WorkerGroup(len(self.runners), 1, len(self.runners) - num_shares)
        for rank, runner in enumerate(self.runners):
            assert group.enter(b"%d" % rank, 2 + rank, WorkerHello(rank, 1, runner.facts))
        assert group.find_disagreement() is None
        return group.facts

    def leave(self) -> None:
        pass

    def reset(self, epoch: int = 0) -> None:
        """Reset all stages after the steps that were launched."""
        self._epoch += 1
        resets = [
            thread.submit(runner.reset, self._epoch)
            for thread, runner in zip(self._threads, self.runners, strict=True)
        ]
        for one in resets:
            one.result(TIMEOUT_S)

    def launch(self, step: SchedulerOutput) -> _InFlight:
        return _InFlight(
            [
                thread.submit(runner.execute, step)
                for thread, runner in zip(self._threads, self.runners, strict=True)
            ]
        )

    def drive(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        **options: Any,
    ) -> Run:
        """Let the stages compute some requests, with as many steps in flight as stages."""
        options = {
            "pipeline_parallel_size": self.num_stages,
            "max_steps_in_flight": max(2, self.num_stages),
        } | options
        return drive(self, prompts, params, **options)  # type: ignore[arg-type]


SAMPLED = SamplingParams(max_tokens=8, temperature=1.1, seed=5, logprobs=2, ignore_eos=True)
