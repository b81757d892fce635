"""Greedy tokens equal those of transformers' `generate`, however the scheduler cuts the work."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.worker.checkpoints import (
    ARCHITECTURES,
    LATENT_NAMES,
    Architecture,
    build_checkpoint,
)
from tests.worker.compressed_models import DEEPSEEK_V4
from tests.worker.driving import drive
from tests.worker.families import FAMILIES
from tests.worker.own_attention_models import KINDS as OWN_KINDS
from tests.worker.own_attention_models import OWN_ATTENTION
from tests.worker.parity import (
    GREEDY,
    MAX_TOKENS,
    NUM_PROMPTS,
    ROOMY,
    TIGHT,
    Serve,
    generate,
    is_greedy,
    modes_of,
    parity_config,
)
from tests.worker.recurrent_models import KINDS, RECURRENT, RECURRENT_LATENT_NAMES
from tests.worker.runners import make_runners

WITHOUT_KERNELS = ("llama", "gemma2", "gpt_oss", "deepseek_v2", "qwen3_next", "bloom")
"""Architectures of different kinds that the default tests compute without the C++ kernels, too."""
MORE = (*FAMILIES, *RECURRENT[len(KINDS) :], *OWN_ATTENTION[3:], DEEPSEEK_V4)
"""Architectures of kinds that others stand for."""


def _paths() -> list[Any]:
    """Return every architecture with and without the kernels; most of these are slow."""
    cases = []
    for backend in ("native", "sdpa"):
        for one in (*ARCHITECTURES, *KINDS, *OWN_KINDS, *MORE):
            if backend == "sdpa" and one is DEEPSEEK_V4:
                continue  # it is refused
            is_slow = one in MORE or (backend == "sdpa" and one.name not in WITHOUT_KERNELS)
            marks = pytest.mark.slow if is_slow else ()
            cases.append(pytest.param(backend, one, marks=marks, id=f"{backend}-{one.name}"))
    return cases


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize(("_backend", "architecture"), _paths(), indirect=["_backend"])
def test_outputs_equal_generate_in_every_mode(architecture: Architecture, serve: Serve) -> None:
    served = serve(architecture)
    assert_varied(served.expected)
    num_preemptions = dict.fromkeys((ROOMY, TIGHT), 0)
    factor = 2 if architecture is DEEPSEEK_V4 else 1  # it has twice as many groups as others
    configs = [parity_config(served.directory, factor * number) for number in num_preemptions]
    for num_blocks, runner in zip(num_preemptions, make_runners(configs), strict=True):
        groups = runner.facts.kv_groups
        for tensors in runner._pool.tensors:
            is_latent = tensors.values is tensors.keys  # one row for keys and values of all heads
            names = LATENT_NAMES | RECURRENT_LATENT_NAMES | {DEEPSEEK_V4.name, "glm5_next"}
            assert is_latent == (architecture.name in names)
        for mode, options in modes_of(num_blocks).items():
            run = drive(runner, served.prompts, GREEDY, **({"max_num_seqs": 16} | options))
            assert served.expected == run.output_token_ids, mode
            num_preemptions[num_blocks] += run.num_preemptions
            assert (run.num_cached_tokens > 0) or mode != "prefix_cache"
    if any(group.window is None and not group.is_state for group in groups):
        # Where all layers have windows, even a tiny pool may be enough.
        assert num_preemptions[TIGHT] > 0 == num_preemptions[ROOMY]


def test_a_greedy_output_is_neither_cut_nor_continued(tmp_path: Path) -> None:
    """It ends at the first token that ends a text, or after the maximum number of tokens."""
    model = build_checkpoint(tmp_path, ARCHITECTURES[0].config())
    prompt = [5, 9, 200]
    model.generation_config.eos_token_id = None
    whole = generate(model, prompt, MAX_TOKENS)
    model.generation_config.eos_token_id = end = whole[MAX_TOKENS // 2]
    ended = generate(model, prompt, MAX_TOKENS)
    assert ended == whole[: whole.index(end) + 1]

    def greedy_lengths() -> list[int]:
        lengths = range(MAX_TOKENS + 1)
        return [n for n in lengths if is_greedy(model, prompt, whole[:n], MAX_TOKENS)]

    assert greedy_lengths() == [len(ended)]
    assert not is_greedy(model, prompt, whole, MAX_TOKENS - 1)
    assert not is_greedy(model, prompt, [*ended[:-1], end + 1], MAX_TOKENS)
    model.generation_config.eos_token_id = None
    assert greedy_lengths() == [MAX_TOKENS]


def assert_varied(outputs: Sequence[list[int]]) -> None:
    """Parity would prove little if every token were the same."""
    assert len({tuple(output) for output in outputs}) > NUM_PROMPTS // 2
    assert len({token for output in outputs for token in output}) > 12
