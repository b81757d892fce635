"""A recurrent draft model in real processes: kill -9 changes no token and no logprob."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from protocol.client import EngineClient
from protocol.core_worker import TokenLogprobs
from protocol.lifecycle import Role
from protocol.sampling import SamplingParams
from scripts.testing import LOAD_TIMEOUT_S, EngineFactory, eventually
from tests.system.kills import PROMPTS, build_model, connected, params_of
from tests.system.offload.test_offload_states import stats_of
from tests.worker.recurrent_models import RECURRENT
from worker_proc.native.build import compiler

BY_NAME = {architecture.name: architecture for architecture in RECURRENT}
NUM_TOKENS = 200
"""Of each stream: a second of steps at least."""
DRAFTS = ("--num-speculative-tokens", "3", "--no-adaptive-speculation", "--speculative-model")
RANKS, STAGES = ("--tensor-parallel-size", "2"), ("--pipeline-parallel-size", "2")
Stream = tuple[list[int], list[TokenLogprobs] | None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.timeout(600),
]


def results(
    client: EngineClient, requests: Sequence[tuple[list[int], SamplingParams]], victim: int | None
) -> list[Stream]:
    """Return what all requests get; a process dies after the first token of each."""
    streams = [client.submit(*request) for request in requests]
    if victim is not None:
        for stream in streams:
            assert next(stream).finish_reason is None
        os.kill(victim, signal.SIGKILL)
    ended = [stream.result(LOAD_TIMEOUT_S) for stream in streams]
    return [(one.token_ids, one.logprobs) for one in ended]


@pytest.mark.parametrize(
    ("name", "division"),
    [
        *((name, ()) for name in ("qwen3_5_text", "qwen3_next", "granitemoehybrid", "lfm2")),
        *((name, RANKS) for name in ("qwen3_5_text", "lfm2")),
        *((name, STAGES) for name in ("qwen3_5_text", "bamba")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "whole",
)
def test_streams_are_those_without_drafts_after_kill_9(
    name: str, division: tuple[str, ...], tmp_path: Path, start_engine: EngineFactory
) -> None:
    """The model drafts for itself, so that nearly all drafts are right, also after each death.

    Beside ranks, whose sums round otherwise in bfloat16, most of them are.
    """
    model = build_model(tmp_path / "model", BY_NAME[name])
    flags = ("--no-api", "--num-threads", "1", "--dtype", "bfloat16", "--mamba-block-size", "64")
    params = [
        msgspec.structs.replace(one, logprobs=1) for one in params_of(len(PROMPTS), NUM_TOKENS)
    ]
    requests = list(zip(PROMPTS, params, strict=True))
    plain = start_engine(
        *flags, *division, "--standby-workers", "0", model=model, timeout_s=LOAD_TIMEOUT_S
    )
    with connected(plain) as client:
        expected = results(client, requests, None)
    plain.close()
    assert len({tuple(tokens) for tokens, _ in expected}) == len(PROMPTS)
    few_blocks = ("--num-gpu-blocks-override", "60")  # most requests are preempted
    engine = start_engine(
        *flags, *division, *few_blocks, *DRAFTS, model, model=model, timeout_s=LOAD_TIMEOUT_S
    )
    with connected(engine) as client:
        ranks = range(2 if division else 1)
        for role, rank in [*((Role.WORKER, rank) for rank in ranks), (Role.CORE, 0), (None, 0)]:
            victim = None if role is None else engine.pid(role, rank)
            assert results(client, requests, victim) == expected
        assert stats_of(client).num_preemptions > 0

        least = 0.5 if division == RANKS else 0.95

        def enough_are_right() -> bool:  # the core reports once a second
            stats = stats_of(client)
            verified = stats.spec_decode_num_draft_tokens
            return verified > 500 and stats.spec_decode_num_accepted_tokens > least * verified

        eventually(enough_are_right, "enough drafts are right", 10)
