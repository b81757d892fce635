"""A model that is divided among workers: kill -9 of any rank, and of the core, changes no token."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from protocol.lifecycle import Role
from protocol.sampling import SamplingParams
from scripts.testing import LOAD_TIMEOUT_S, TIMEOUT_S, EngineFactory
from tests.families.verification import DECIDED_BY_FORWARD
from tests.system.kills import connected, repeating, requests_of, tokens_over_kill
from tests.worker.checkpoints import ARCHITECTURES, build_checkpoint
from tests.worker.parity import generate
from tests.worker.quantization.float_layouts import fp8_blocks
from tests.worker.quantization.integer_layouts import int_quantized, pack_quantized
from tests.worker.quantization.layouts import WIDE, Layout
from tests.worker.quantization.quantized_checkpoints import write_quantized
from tests.worker.recurrent_models import RECURRENT
from worker_proc.native.build import build, compiler

SLOW = pytest.mark.slow
NUM_TOKENS = 200
"""Of each stream: a second of steps at least."""
DRAFTS = ("--num-speculative-tokens", "3", "--no-adaptive-speculation")
BY_MODEL = (*DRAFTS, "--speculative-model", "demo")
"""Drafts by the demo model for itself: most of them are right."""


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("num_ranks", "options", "victims"),
    [
        (2, BY_MODEL, [(Role.WORKER, 0), (Role.CORE, 0)]),  # rank 0 has the draft model
        pytest.param(2, BY_MODEL, [(Role.WORKER, 1)], marks=SLOW),
        pytest.param(2, DRAFTS, [(Role.WORKER, 1), (Role.CORE, 0)], marks=SLOW),
        pytest.param(2, (), [(Role.WORKER, 0), (Role.CORE, 0), (Role.CORE, 0)], marks=SLOW),
        pytest.param(4, (), [(Role.WORKER, rank) for rank in range(4)], marks=SLOW),
    ],
)
def test_streams_continue_after_kill_9(
    num_ranks: int,
    options: tuple[str, ...],
    victims: list[tuple[Role, int]],
    start_engine: EngineFactory,
) -> None:
    """The other ranks cannot go on alone: the whole group is started again.

    One of the requests has a grammar, which every rank compiles.
    """
    build()
    flags = ("--no-api", "--num-threads", "1", "--tensor-parallel-size", str(num_ranks), *options)
    engine = start_engine(*flags, model="demo", timeout_s=LOAD_TIMEOUT_S)
    requests = requests_of(NUM_TOKENS, repeating(NUM_TOKENS))
    with connected(engine) as client:
        alone = [client.submit(*request).result(TIMEOUT_S).token_ids for request in requests]
        assert all(len(tokens) == NUM_TOKENS for tokens in alone[:2])
        for victim in victims:
            assert tokens_over_kill(engine, client, requests, *victim) == alone


@SLOW
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "layout",
    [pack_quantized(4, 32, is_symmetric=False), int_quantized(codes_rows=True), fp8_blocks()],
    ids=lambda layout: layout.name,
)
def test_streams_of_a_quantized_checkpoint_continue_after_kill_9(
    layout: Layout, start_engine: EngineFactory, tmp_path: Path
) -> None:
    """Each rank has its part of the codes."""
    build()
    config = LlamaConfig(**WIDE | {"max_position_embeddings": 512})
    write_quantized(tmp_path / "model", layout, config)
    flags = ("--no-api", "--num-threads", "1", "--tensor-parallel-size", "2")
    engine = start_engine(*flags, model=str(tmp_path / "model"), timeout_s=LOAD_TIMEOUT_S)
    requests = requests_of(NUM_TOKENS)
    with connected(engine) as client:
        alone = [client.submit(*request).result(LOAD_TIMEOUT_S).token_ids for request in requests]
        for victim in ((Role.WORKER, 1), (Role.CORE, 0)):
            assert tokens_over_kill(engine, client, requests, *victim) == alone


@torch.inference_mode()
def continue_by_forward(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the most likely tokens of forwards over the whole text."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        logits = model(torch.tensor([token_ids]), use_cache=False).logits
        token_ids.append(int(logits[0, -1].argmax()))
    return token_ids[len(prompt) :]


@SLOW
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "gpt_oss", "deepseek_v3", "olmo2"),
        *("qwen3_5_text", "olmo_hybrid", "bamba", "granitemoehybrid", "falcon_h1"),
        *("lfm2", "jamba", "kimi_linear", "bailing_hybrid", "minimax", "recurrent_gemma"),
        *("rwkv", "zamba", "zamba2"),
    ],
)
def test_streams_of_other_families_continue_after_kill_9(
    name: str, start_engine: EngineFactory, tmp_path: Path
) -> None:
    """Their layers are divided in other ways; the tokens are those of transformers."""
    [architecture] = [one for one in (*ARCHITECTURES, *RECURRENT) if one.name == name]
    config = architecture.config()
    config.max_position_embeddings = max(config.max_position_embeddings, 512)
    model = build_checkpoint(tmp_path / "model", config)
    model.set_attn_implementation("eager")
    prompt = list(range(7, 40))
    if config.model_type in DECIDED_BY_FORWARD:
        expected = continue_by_forward(model, prompt, NUM_TOKENS)
    else:
        expected = generate(model, prompt, NUM_TOKENS)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    flags = ("--no-api", "--num-threads", "1", "--dtype", "float32", "--tensor-parallel-size", "2")
    engine = start_engine(*flags, model=str(tmp_path / "model"), timeout_s=LOAD_TIMEOUT_S)
    with connected(engine) as client:
        for victim in ((Role.WORKER, 1), (Role.CORE, 0)):
            for tokens in tokens_over_kill(engine, client, [(prompt, params)] * 3, *victim):
                assert tokens[: len(expected)] == expected  # transformers stops at an end
