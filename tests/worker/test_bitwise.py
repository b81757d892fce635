"""The logits of a position are the same bits however its text was scheduled: the real runner.

Each case draws random schedules (chunks, decodes one by one, batches, prefixes that another request
has computed) and compares every row of logits with what other schedules gave, bit for bit.
"""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from protocol.config import NativeDecoder
from tests.families.configs import FAMILIES
from tests.worker.bitwise import DTYPES, NUM_THREADS, compare, engine_config, exact, native
from tests.worker.checkpoints import build_checkpoint, build_checkpoints
from tests.worker.odd_models import CONFIGS, EVEN_SIZES, make_gemma3
from tests.worker.runners import make_runners
from worker_proc.attention.work import SECTION
from worker_proc.loading.unbuilt_parts import without_libraries
from worker_proc.native.build import build, compiler


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build_checkpoints(tmp_path_factory, CONFIGS)


IN_FLOAT32 = "llama"
"""The model that the default tests compute in float32."""
SLOW_IN_BFLOAT16 = (
    *("kimi_linear", "bailing_hybrid", "hy_v4", "glm5_next", "zaya", "qwen4_exp"),
    *("diffllama", "hrm_text", "deepseek_v4", "granitemoeshared", "glm4_moe"),
)


def _cases() -> list[Any]:
    cases = []
    models = [*((name, NativeDecoder.AUTO) for name in CONFIGS), ("llama", NativeDecoder.OFF)]
    for name, decoder in models:
        for dtype in DTYPES:
            is_slow = name != IN_FLOAT32 if dtype == "float32" else name in SLOW_IN_BFLOAT16
            marks = pytest.mark.slow if is_slow else ()
            case = f"{name}-{decoder}-{dtype}"
            cases.append(pytest.param(name, decoder, dtype, marks=marks, id=case))
    return cases


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(("name", "decoder", "dtype"), _cases())
def test_logits_are_the_same_bits_in_every_schedule(
    name: str,
    decoder: NativeDecoder,
    dtype: str,
    checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number of threads makes no difference either."""
    build()
    directory = checkpoints[name]
    configs = [engine_config(directory, dtype, threads, decoder) for threads in NUM_THREADS]
    compare(map(exact, make_runners(configs)), monkeypatch)


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["dbrx", "longcat_flash", "muse_spark"])
def test_mixtures_of_other_layouts_have_the_same_bits_in_every_schedule(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are in one matrix, have no weights, or have a norm each."""
    build()
    without_libraries(lambda: build_checkpoint(tmp_path, FAMILIES[name]()))  # towers need some
    configs = [engine_config(tmp_path, dtype, threads) for threads in NUM_THREADS]
    compare(map(exact, make_runners(configs)), monkeypatch)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, SECTION + 300])
def test_contexts_of_several_sections_have_the_same_bits_in_every_schedule(
    window: int | None, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread computes all sections, and several threads the sections of one request."""
    build()
    lengths = (2 * SECTION + 150, 30)
    shape = EVEN_SIZES | {"num_hidden_layers": 1, "max_position_embeddings": 4 * SECTION}
    config = (
        LlamaConfig(**shape)
        if window is None
        else make_gemma3(**shape, sliding_window=window, layer_types=["sliding_attention"])
    )
    build_checkpoint(tmp_path, config)
    configs = [engine_config(tmp_path, dtype, threads) for threads in NUM_THREADS]
    compare(map(native, make_runners(configs)), monkeypatch, lengths, (1, 1, 1))
