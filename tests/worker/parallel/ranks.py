"""All ranks of a model in one process."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from protocol.config import (
    CacheConfig,
    Dtype,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    SchedulerConfig,
    WorkerConfig,
)
from protocol.sampling import SamplingParams
from tests.worker.checkpoints import build_checkpoint
from tests.worker.driving import Run, drive
from tests.worker.parity import BLOCK_SIZE, GREEDY, MAX_TOKENS, few_prompts, generate_all
from worker_proc.model_runner import ModelRunner
from worker_proc.native.kernels import load_library
from worker_proc.parallel.adoption import Adoption
from worker_proc.parallel.exchange import RankExchange
from worker_proc.parallel.share import Share
from worker_proc.startup.load_runner import load_model_runner

TIMEOUT_S = 60.0


class Ranks:
    """The runners of all ranks of a model, in one process."""

    def __init__(self, directory: Path, num_ranks: int, **settings: Any) -> None:
        """Take settings of the worker, and a `dtype`."""
        dtype = Dtype(settings.pop("dtype", "float32"))
        run_dir = directory.with_name(f"{directory.name}-run")
        run_dir.mkdir(mode=0o700, exist_ok=True)
        config = EngineConfig(
            model=ModelConfig(
                model=str(directory),
                dtype=dtype,
                speculative_model=settings.pop("speculative_model", None),
            ),
            cache=CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=400),
            scheduler=SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=512,
                num_speculative_tokens=settings.pop("num_speculative_tokens", 0),
            ),
            parallel=ParallelConfig(tensor_parallel_size=num_ranks),
            lora=settings.pop("lora", LoraConfig()),
            worker=WorkerConfig(num_threads=1, **settings),
            run=RunConfig(run_dir=str(run_dir)),
        )
        self.runners: list[ModelRunner] = [
            load_model_runner(config, lambda phase, done, total: None, rank=rank)
            for rank in range(num_ranks)
        ]

    def drive(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        **options: object,
    ) -> Run:
        """Let all ranks compute the same requests, and return what rank 0 has computed."""
        first, *others = at_once(
            [partial(drive, runner, prompts, params, **options) for runner in self.runners]
        )
        assert all(run.output_token_ids == first.output_token_ids for run in others)
        assert isinstance(first, Run)
        return first


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Make calls in threads of their own, and return their results."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(TIMEOUT_S) for future in [threads.submit(call) for call in calls]]


def compare_with_generate(directory: Path, config: Any, num_ranks: int) -> Ranks:
    """Compare greedy tokens in fp32 with those of transformers, for a new model."""
    model = build_checkpoint(directory, config)
    model.set_attn_implementation("eager")
    prompts = few_prompts()
    expected = generate_all(model, prompts, MAX_TOKENS)
    ranks = Ranks(directory, num_ranks)
    assert ranks.drive(prompts).output_token_ids == expected
    assert ranks.drive(prompts, max_num_batched_tokens=16).output_token_ids == expected
    return ranks


def make_exchanges(
    run_dir: Path, num_ranks: int, *, timeout_s: float = TIMEOUT_S, **options: Any
) -> list[RankExchange]:
    library = load_library()
    if library is None:
        pytest.skip("no compiled kernels")
    exchanges = [
        RankExchange(
            library,
            Adoption(rank, num_ranks, str(run_dir), timeout_s=timeout_s),
            Share(rank, num_ranks),
            **options,
        )
        for rank in range(num_ranks)
    ]
    for exchange in exchanges:
        exchange.begin(1)
    return exchanges
