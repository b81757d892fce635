"""A mixture of experts in real processes: kill -9 of worker and core changes no token."""

import os
import signal
from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig

from protocol.client import EngineClient
from protocol.lifecycle import Role
from protocol.sampling import SamplingParams
from scripts.testing import LOAD_TIMEOUT_S, TIMEOUT_S, EngineFactory
from tests.system.test_standby import pid_of, wait_for
from tests.worker.checkpoints import SHAPE, build_checkpoint
from worker_proc.native.build import build, compiler

MAX_TOKENS = 500
"""Half a second of steps at least, so that both deaths come before the end."""
PROMPTS = [[7 + 13 * i + j for j in range(3 + 5 * i)] for i in range(6)]


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((), marks=pytest.mark.slow),
        ("--dtype", "bfloat16", "--quantization", "w4a16"),
        pytest.param(("--dtype", "bfloat16", "--quantization", "w8a8"), marks=pytest.mark.slow),
    ],
    ids=lambda settings: settings[-1] if settings else "float32",
)
def test_streams_go_on_after_kill_9(
    settings: tuple[str, ...], tmp_path: Path, start_engine: EngineFactory
) -> None:
    """Each request alone gets the tokens that it gets beside others, and after either death."""
    build()
    sizes = SHAPE | {"max_position_embeddings": 2048, "moe_intermediate_size": 48}
    build_checkpoint(tmp_path, Qwen3MoeConfig(**sizes, num_experts=8, num_experts_per_tok=3))
    engine = start_engine("--no-api", "--num-threads", "1", *settings, model=str(tmp_path))
    wait_for(engine, Role.STANDBY, timeout_s=LOAD_TIMEOUT_S)
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9, seed=1 + number, ignore_eos=True)
        for number in range(len(PROMPTS))
    ]
    with EngineClient(engine.address) as client:
        facts = client.wait_ready(LOAD_TIMEOUT_S)
        assert (facts.decoder, facts.exact_resume) == ("native", True)
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
