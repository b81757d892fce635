"""Quantized checkpoints in real processes: kill -9 of worker and core changes no token."""

import os
import signal
from pathlib import Path

import pytest
from transformers import LlamaConfig

from protocol.client import EngineClient
from protocol.lifecycle import Role
from protocol.sampling import SamplingParams
from scripts.testing import LOAD_TIMEOUT_S, TIMEOUT_S, EngineFactory
from tests.system.test_standby import pid_of, wait_for
from tests.worker.quantized_checkpoints import WIDE, Layout, gptq, int_quantized, write_quantized
from worker_proc.native.build import build, compiler

MAX_TOKENS = 500
"""Half a second of steps at least, so that both deaths come before the end."""
PROMPTS = [[7 + 13 * i + j for j in range(3 + 5 * i)] for i in range(6)]


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "layout",
    [gptq(4, 64, is_symmetric=False, has_order=True), int_quantized(codes_rows=True)],
    ids=lambda layout: layout.name,
)
def test_streams_go_on_after_kill_9(
    layout: Layout, tmp_path: Path, start_engine: EngineFactory
) -> None:
    """Each request alone gets the tokens that it gets beside others, and after either death."""
    build()
    write_quantized(tmp_path, layout, LlamaConfig(**WIDE | {"max_position_embeddings": 2048}))
    settings = ("--no-api", "--num-threads", "1", "--dtype", "bfloat16")
    engine = start_engine(*settings, model=str(tmp_path))
    wait_for(engine, Role.STANDBY, timeout_s=LOAD_TIMEOUT_S)
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9, seed=1 + number, ignore_eos=True)
        for number in range(len(PROMPTS))
    ]
    with EngineClient(engine.address) as client:
        facts = client.wait_ready(LOAD_TIMEOUT_S)
        assert (facts.decoder, facts.exact_resume) == ("native", True)
        assert facts.quantization == layout.description
        alone = [
            client.submit(prompt, one).result(TIMEOUT_S).token_ids
            for prompt, one in zip(PROMPTS, params, strict=True)
        ]
        assert len(set(map(tuple, alone))) == len(PROMPTS)
        for role in (Role.WORKER, Role.CORE):
            victim = wait_for(engine, role)
            streams = [client.submit(*request) for request in zip(PROMPTS, params, strict=True)]
            for stream in streams:
                assert next(stream).finish_reason is None
            os.kill(pid_of(victim), signal.SIGKILL)
            wait_for(engine, role, victim.epoch, LOAD_TIMEOUT_S)
            assert [stream.result(LOAD_TIMEOUT_S).token_ids for stream in streams] == alone
