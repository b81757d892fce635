"""Times recurrent layers on the CPU: `python -m tests.tools.recurrent_speed`.

First the gated delta rule in Qwen3-Next's sizes, the selective scan in Falcon-Mamba-7B's, and the
scans of RecurrentGemma-2B and RWKV-4-3B: transformers' functions in PyTorch, and the scan over
packed rows. Then the decode of one request at several lengths of context: a model of four layers
with the sizes of Qwen3-Next and small MLPs, of which three have a state and one attends. The
contexts are not computed: their keys, values and states are what the memory holds.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import Qwen3_5TextConfig
from transformers.models.mamba import modeling_mamba
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.rwkv import modeling_rwkv
from transformers.utils import logging as transformers_logging

from protocol.config import CacheConfig, Device, EngineConfig, ModelConfig, WorkerConfig
from protocol.core_worker import CachedRequestData, NewRequestData, SchedulerOutput
from protocol.message import pack_token_ids
from protocol.sampling import SamplingParams
from tests.worker.checkpoints import build_checkpoint
from worker_proc.model_runner import ModelRunner
from worker_proc.native.kernels import NativeLibrary, load_library
from worker_proc.recurrent.delta_rule import DeltaRule
from worker_proc.recurrent.gated_recurrence import GatedRecurrence
from worker_proc.recurrent.selective_scan import SelectiveScan
from worker_proc.recurrent.state_pool import StatePool
from worker_proc.recurrent.state_spec import RecurrentSpec, StateSpec
from worker_proc.recurrent.step_texts import NO_STATE, StepTexts, Text
from worker_proc.recurrent.weighted_average import WeightedAverage
from worker_proc.startup.load_runner import load_model_runner

KEY_HEADS, HEADS, DIM = 16, 32, 128
CHANNELS, STATE_SIZE = 8192, 16
NARROW_CHANNELS = 2560
PROMPT_LENGTH = 512
CONTEXTS = (1_000, 10_000, 100_000)
NUM_DECODES = 20
NUM_REPEATS = 7
VOCAB_SIZE = 4096
BLOCK_SIZE = 16
MAX_LENGTH = 131_072


def median_ms(work: Callable[[], object], num_repeats: int = NUM_REPEATS) -> float:
    """Return the median time of some work that has been done once before."""
    work()
    times = []
    for _ in range(num_repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return statistics.median(times) * 1000


@torch.inference_mode()
def time_functions(num_tokens: int, library: NativeLibrary) -> None:
    """Print the times of the delta rule for a prompt, or for one token."""
    generator = torch.Generator().manual_seed(1)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(1, num_tokens, *shape, generator=generator)

    query, key = (rows(KEY_HEADS, DIM) for _ in range(2))
    given: dict[str, Any] = {
        "g": -functional.softplus(rows(HEADS)),
        "beta": rows(HEADS).sigmoid(),
        "use_qk_l2norm_in_kernel": True,
    }
    value = rows(HEADS, DIM)
    spec, _ = DeltaRule.describe(query, key, value, **given)
    pool = StatePool([RecurrentSpec("", 0, (spec,))], 2, BLOCK_SIZE, torch.float32)
    scan = DeltaRule(pool, pool.tensors[""][0], library)
    is_decode = num_tokens == 1
    pool.texts = StepTexts([Text(0, num_tokens, 1 if is_decode else NO_STATE, {1: num_tokens})])
    own = (
        modeling_qwen3_5.torch_recurrent_gated_delta_rule
        if is_decode
        else modeling_qwen3_5.torch_chunk_gated_delta_rule
    )
    state = torch.zeros(1, HEADS, DIM, DIM) if is_decode else None
    more = {"initial_state": state, "output_final_state": True}
    theirs = median_ms(lambda: own(query, key, value, **given, **more))
    ours = median_ms(lambda: scan(query, key, value, **given))
    print(f"delta rule, {num_tokens} tokens: transformers {theirs:.2f} ms, here {ours:.2f} ms")


@torch.inference_mode()
def time_selective_scan(num_tokens: int, library: NativeLibrary) -> None:
    """Print the times of a selective scan for a prompt, or for one token."""
    generator = torch.Generator().manual_seed(1)

    def columns(size: int) -> torch.Tensor:
        return torch.randn(1, num_tokens, size, generator=generator).transpose(1, 2)

    inputs, steps, gates = (columns(CHANNELS) for _ in range(3))
    keys, queries = (columns(STATE_SIZE) for _ in range(2))
    decays = -torch.rand(CHANNELS, STATE_SIZE, generator=generator) * STATE_SIZE
    skips, bias = (torch.randn(CHANNELS, generator=generator) for _ in range(2))
    given = (inputs, steps, decays, keys, queries)
    options: dict[str, Any] = {"z": gates, "delta_bias": bias, "delta_softplus": True}
    spec, _ = SelectiveScan.describe(*given, skips, **options)
    pool = StatePool([RecurrentSpec("", 0, (spec,))], 2, BLOCK_SIZE, torch.float32)
    scan = SelectiveScan(pool, pool.tensors[""][0], library)
    is_decode = num_tokens == 1
    pool.texts = StepTexts([Text(0, num_tokens, 1 if is_decode else NO_STATE, {1: num_tokens})])
    if is_decode:
        state = torch.zeros(1, CHANNELS, STATE_SIZE)
        rows = [one[..., 0] for one in (inputs, steps, keys, queries, gates)]
        theirs = median_ms(
            lambda: modeling_mamba.mamba_selective_state_update(
                *(state, rows[0], rows[1], decays, rows[2], rows[3], skips),
                z=rows[4],
                dt_bias=bias,
                dt_softplus=True,
            )
        )
    else:
        theirs = median_ms(lambda: modeling_mamba.mamba_selective_scan(*given, skips, **options))
    ours = median_ms(lambda: scan(*given, skips, **options))
    print(f"selective scan, {num_tokens} tokens: transformers {theirs:.2f} ms, here {ours:.2f} ms")


@torch.inference_mode()
def time_channel_scans(num_tokens: int, library: NativeLibrary) -> None:
    """Print the times of scans whose channels have one number of state, or three."""
    generator = torch.Generator().manual_seed(1)
    inputs, others = (
        torch.randn(num_tokens, NARROW_CHANNELS, generator=generator) for _ in range(2)
    )
    decays = torch.sigmoid(others)

    def recurrence(kernels: NativeLibrary | None) -> GatedRecurrence:
        pool = _pool_of(num_tokens, NARROW_CHANNELS)
        return GatedRecurrence(pool, pool.tensors[""][0], kernels)

    pool = _pool_of(num_tokens, 3, NARROW_CHANNELS)
    average = WeightedAverage(pool, pool.tensors[""][0], library)
    given = (inputs[0], others[0], inputs[None], others[None])
    in_torch, in_kernel = recurrence(None), recurrence(library)
    theirs = median_ms(lambda: in_torch(inputs, decays))
    ours = median_ms(lambda: in_kernel(inputs, decays))
    print(f"gated recurrence, {num_tokens} tokens: PyTorch {theirs:.2f} ms, here {ours:.2f} ms")
    theirs = median_ms(lambda: modeling_rwkv.rwkv_linear_attention_cpu(*given))
    ours = median_ms(lambda: average(*given))
    print(f"average of RWKV, {num_tokens} tokens: transformers {theirs:.2f} ms, here {ours:.2f} ms")


def _pool_of(num_tokens: int, *shape: int) -> StatePool:
    """Return a pool whose step is one text from its beginning."""
    spec = RecurrentSpec("", 0, (StateSpec("", shape, is_window=False),))
    pool = StatePool([spec], 2, BLOCK_SIZE, torch.float32)
    pool.texts = StepTexts([Text(0, num_tokens, NO_STATE, {1: num_tokens})])
    return pool


def make_runner(directory: Path) -> ModelRunner:
    """Write a checkpoint of four layers, and load it."""
    config = Qwen3_5TextConfig(
        **{"vocab_size": VOCAB_SIZE, "hidden_size": 2048, "intermediate_size": 512},
        **{"num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 2},
        **{"head_dim": 256, "linear_num_key_heads": KEY_HEADS, "linear_num_value_heads": HEADS},
        **{"linear_key_head_dim": DIM, "linear_value_head_dim": DIM},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        layer_types=[*["linear_attention"] * 3, "full_attention"],
        max_position_embeddings=MAX_LENGTH,
    )
    build_checkpoint(directory, config, torch.bfloat16)
    engine_config = EngineConfig(
        model=ModelConfig(model=str(directory), device=Device.CPU),
        cache=CacheConfig(
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=MAX_LENGTH // BLOCK_SIZE + 1,
            num_state_blocks_override=3,
        ),
        worker=WorkerConfig(num_threads=torch.get_num_threads()),
    )
    return load_model_runner(engine_config, lambda phase, done, total: None)


def time_decodes(runner: ModelRunner) -> None:
    """Print the time of a token at each length of context."""
    none = CachedRequestData()
    for length in CONTEXTS:
        num_blocks = -(-(length + NUM_DECODES) // BLOCK_SIZE)
        request = NewRequestData(
            req_id=1,
            token_ids=pack_token_ids([3 + i % 1000 for i in range(length)]),
            num_prompt_tokens=length,
            sampling_params=SamplingParams(temperature=0.0, ignore_eos=True),
            block_ids=[list(range(1, 1 + num_blocks)), [1] * num_blocks],
            num_computed_tokens=length - 1,
            num_cached_tokens=length - 1,
        )
        runner.reset()
        runner.execute(SchedulerOutput(0, [request], none, {}, 1, [], []))
        times = []
        for step_id in range(1, NUM_DECODES):
            began = time.process_time()
            runner.execute(SchedulerOutput(step_id, [], none, {}, 1, [], []))
            times.append(time.process_time() - began)
        print(f"decode after {length:,} tokens: {statistics.median(times) * 1000:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")
    torch.set_num_threads(parser.parse_args().threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    library = load_library()
    assert library is not None
    for num_tokens in (PROMPT_LENGTH, 1):
        time_functions(num_tokens, library)
        time_selective_scan(num_tokens, library)
        time_channel_scans(num_tokens, library)
    with tempfile.TemporaryDirectory() as directory:
        time_decodes(make_runner(Path(directory)))


if __name__ == "__main__":
    main()
