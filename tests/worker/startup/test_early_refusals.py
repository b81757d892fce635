"""What config.json and headers exclude is refused without torch, and nothing else is."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from protocol.config import ModelConfig
from protocol.config.settings import configure
from tests.families.configs import FAMILIES
from tests.families.table import PAGE, rows_of
from tests.worker.checkpoints import SHAPE
from worker_proc.errors import CheckpointError, InsufficientMemory, UnsupportedModel
from worker_proc.kv.kv_groups import LayerSpec, lay_out
from worker_proc.loading.context import stated_length
from worker_proc.loading.inspection import read_config
from worker_proc.startup import early_refusals
from worker_proc.startup.early_refusals import refuse_early, refuse_model, refuse_ranks
from worker_proc.startup.model_types import ModelTypes, model_types

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "unknown_type": ({"model_type": "orion"}, {}, "model_type is 'orion', for which"),
    "no_type": ({"model_type": None}, {}, "config.json has no model_type, which names the code"),
    "images": (
        {"model_type": "vit", "architectures": ["ViTForImageClassification"]},
        {},
        "vit: no causal language model: ",
    ),
    "relative": (
        {"model_type": "xlnet", "architectures": ["XLNetLMHeadModel"]},
        {},
        "xlnet: scores of attention with products of queries and relative positions are not",
    ),
    "encoder": (
        {"model_type": "bert", "architectures": ["BertLMHeadModel"]},
        {},
        "bert: its attention is causal only where config.json sets is_decoder to true",
    ),
    "positions_after_padding": (
        {"model_type": "roberta", "architectures": ["RobertaForCausalLM"], "is_decoder": True},
        {},
        "roberta: positions that leave out padding tokens are not supported in decoders",
    ),
    "other_head": (
        {"architectures": ["LlamaForTokenClassification"]},
        {},
        "llama: the output layer of LlamaForTokenClassification is not supported",
    ),
    "mixture": (
        {"model_type": "doge", "is_moe": True},
        {},
        "doge: experts that are chosen by the number of tokens in a forward are not supported",
    ),
    "encoder_decoder": (
        {"model_type": "t5", "is_encoder_decoder": True},
        {},
        "t5: encoder-decoder models are not supported",
    ),
    "decoder_of_such_a_model": (
        {
            "model_type": "whisper",
            "architectures": ["WhisperForCausalLM"],
            "is_encoder_decoder": False,
        },
        {},
        "whisper: it is the decoder of an encoder-decoder model",
    ),
    "format": (
        {"quantization_config": {"quant_method": "hqq"}},
        {},
        "quant_method is 'hqq'; supported: auto-round, awq, ",
    ),
    "format_of_the_text": (
        {"text_config": {"quantization_config": {"quant_method": "exl2"}}},
        {},
        "quant_method is 'exl2'",
    ),
    "rotated_rows": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}},
        {},
        'rotation is "hadamard"; layers whose rows are rotated first are not supported',
    ),
    "mlx": (
        {"model_type": "lfm2", "quantization": {"group_size": 64, "bits": 4}},
        {},
        "checkpoints of MLX of lfm2 are not read: mlx-lm",
    ),
    "value": ({"hidden_size": 0}, {}, "hidden_size is 0, and must be"),
    "context": ({}, {"max_model_len": 257}, "257 is greater than the 256 tokens that config.json"),
    "blocks": (
        {},
        {"max_model_len": 250, "num_gpu_blocks_override": 3},
        "max_model_len 250 needs 17 blocks of 16 tokens at least, and num_gpu_blocks_override is 3;"
        " max_model_len can be 33 with it at most",
    ),
}
PASS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pooling": ({"model_type": "vit", "architectures": ["ViTModel"]}, {}),
    "encoder_that_is_pooled": ({"model_type": "bert", "architectures": ["BertModel"]}, {}),
    "encoder_that_guesses": (
        {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]},
        {},
    ),
    "encoder_as_decoder": (
        {"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": True},
        {},
    ),
    "no_mixture": ({"model_type": "doge", "is_moe": False}, {}),
    "scaled": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"max_model_len": 257},
    ),
    "length_of_a_part": (
        {"decoder_config": {"max_position_embeddings": 512}},
        {"max_model_len": 257},
    ),
}


def write_config(directory: Path, changes: dict[str, Any]) -> None:
    LlamaConfig(**SHAPE).save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="module")
def reasons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The reasons that a process states which has loaded neither torch nor transformers."""
    directories = {name: tmp_path_factory.mktemp("refused") for name in REFUSED}
    for name, directory in directories.items():
        write_config(directory, REFUSED[name][0])
    cases = {name: (str(directories[name]), REFUSED[name][1]) for name in REFUSED}
    code = (
        "import json, sys; from protocol.config.settings import configure;"
        "from worker_proc.startup.start import refuse_early\n"
        "reasons = {}\n"
        f"for name, (model, settings) in {cases!r}.items():\n"
        "    try: refuse_early(configure(model=model, **settings))\n"
        "    except ValueError as error: reasons[name] = str(error)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "print(json.dumps(reasons))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_the_reason_needs_neither_torch_nor_transformers(
    name: str, reasons: dict[str, str]
) -> None:
    assert REFUSED[name][2] in reasons[name]
    assert "\n" not in reasons[name]


@pytest.mark.parametrize("is_draft", [False, True])
def test_files_of_weights_are_refused_early(is_draft: bool, tmp_path: Path) -> None:
    """A file that is missing, and one that is truncated; their headers show it."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for directory in (whole, broken):
        write_config(directory, {})
    weights = broken / "model.safetensors"
    save_file({"a": torch.ones(8)}, weights)
    named = str(whole if is_draft else broken)
    model = ModelConfig(model=named, speculative_model=str(broken) if is_draft else None)
    refuse_model(model)
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=r"model.safetensors is not a safetensors file: it has"
    ):
        refuse_model(model)
    weights.unlink()
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"names model-00001-of-00001.safetensors, which is"):
        refuse_model(model)


@pytest.mark.parametrize("reasons", [early_refusals._NOT_FROM_TEXT, early_refusals._NOT_COMPUTED])
def test_types_that_are_not_computed_are_refused(reasons: dict[str, str], tmp_path: Path) -> None:
    found = model_types()
    assert found is not None
    for model_type, reason in reasons.items():
        assert model_type in found.generating
        write_config(tmp_path, {"model_type": model_type})
        with pytest.raises(UnsupportedModel, match=f"^{model_type}: {reason}$"):
            refuse_model(ModelConfig(model=str(tmp_path)))


def test_each_type_that_writes_texts_is_a_verified_family_or_refused_early(tmp_path: Path) -> None:
    generating = (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        | MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
        | MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    )
    rows = (row.split("|") for row in rows_of(PAGE.read_text()).values())
    served = {cell.strip(" `") for row in rows for cell in row[1:3]}  # gpt-sw3 has another type
    for model_type, class_names in generating.items():
        if served & {model_type, f"{model_type}_thinker"}:
            continue
        name = class_names if isinstance(class_names, str) else class_names[0]
        write_config(tmp_path, {"model_type": model_type, "architectures": [name]})
        with pytest.raises(UnsupportedModel, match=f"^{model_type}: "):
            refuse_model(ModelConfig(model=str(tmp_path)))


def test_types_with_an_encoder_have_it_by_default(tmp_path: Path) -> None:
    for model_type in early_refusals._ENCODER_DECODERS:
        write_config(tmp_path, {"model_type": model_type})
        with pytest.raises(UnsupportedModel, match=f"^{model_type}: encoder-decoder models are"):
            refuse_model(ModelConfig(model=str(tmp_path)))
        if model_type != "vision-encoder-decoder":  # it has no default parts
            assert CONFIG_MAPPING[model_type]().is_encoder_decoder is True


def test_encoders_write_texts_only_as_decoders(tmp_path: Path) -> None:
    for model_type in early_refusals._ENCODERS:
        assert CONFIG_MAPPING[model_type]().is_decoder is False
        assert model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        write_config(tmp_path, {"model_type": model_type})
        with pytest.raises(
            UnsupportedModel, match=f"^{model_type}: (its attention is|positions|embeddings)"
        ):
            refuse_model(ModelConfig(model=str(tmp_path)))


@pytest.mark.parametrize("name", PASS)
def test_what_is_not_certain_passes(name: str, tmp_path: Path) -> None:
    changes, settings = PASS[name]
    write_config(tmp_path, changes)
    refuse_model(ModelConfig(model=str(tmp_path), **settings))


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_passes_with_its_context_and_its_heads(name: str, tmp_path: Path) -> None:
    """Other contexts and other heads are refused early only where transformers reads the same."""
    FAMILIES[name]().save_pretrained(tmp_path)
    model = ModelConfig(model=str(tmp_path))
    refuse_model(model)
    config = early_refusals.refuse_config(str(tmp_path))
    length, heads = early_refusals._certain_length(config), early_refusals._certain_heads(config)
    text_config = read_config(str(tmp_path)).get_text_config(decoder=True)
    assert length in (None, stated_length(text_config, 10**9))
    refuse_ranks(model, heads or 64)
    assert heads is None or heads == text_config.num_attention_heads


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["mamba", "moe"]},
        {"layer_types": ["linear_attention", "linear_attention"]},
        {"attn_layer_indices": []},
        {"mamba_n_heads": 8},
        {"num_attention_heads_per_layer": [4, 8]},
        {"attention_other_setting": {"num_attention_heads": 8}},
        {"num_attention_heads": [4, 8]},
    ],
)
def test_heads_of_some_layers_alone_refuse_no_ranks(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    model = ModelConfig(model=str(tmp_path))
    write_config(tmp_path, {})
    with pytest.raises(UnsupportedModel, match="tensor_parallel_size 64 cannot divide the model"):
        refuse_ranks(model, 64)
    write_config(tmp_path, changes)
    refuse_ranks(model, 64)


@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [
        ({"max_model_len": 33}, 3),
        ({"max_model_len": 34}, 4),
        ({"max_model_len": 250, "block_size": 32}, 9),
        ({"max_model_len": 250, "max_num_batched_tokens": 65}, 7),  # of a layer with a window of 1
        ({"max_model_len": 250, "max_num_batched_tokens": 64}, 6),
    ],
)
def test_blocks_are_refused_that_no_layer_can_do_with(
    settings: dict[str, int], num_blocks: int, tmp_path: Path
) -> None:
    write_config(tmp_path, {})
    refuse_early(configure(model=str(tmp_path), num_gpu_blocks_override=num_blocks, **settings))
    for window, is_hybrid in ((1, True), (None, False)):
        layout = lay_out(
            [LayerSpec(1, 1, 8, 8, window)],
            settings.get("block_size", 16),
            settings.get("max_num_batched_tokens", 2048),
            settings["max_model_len"],
            is_hybrid,
        )
        assert 1 + layout.num_blocks_for(settings["max_model_len"] - 1) >= num_blocks
    few = configure(model=str(tmp_path), num_gpu_blocks_override=num_blocks - 1, **settings)
    with pytest.raises(InsufficientMemory, match=f" needs {num_blocks} blocks of "):
        refuse_early(few)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["LlamaModel"]},
        {"layer_types": ["linear_attention", "linear_attention"]},
        {"mamba_n_heads": 8},
    ],
)
def test_models_that_may_have_no_cache_are_not_refused_for_its_blocks(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    write_config(tmp_path, changes)
    refuse_early(configure(model=str(tmp_path), max_model_len=250, num_gpu_blocks_override=2))


def test_the_lists_have_what_transformers_knows() -> None:
    found = model_types()
    assert found is not None
    assert set(CONFIG_MAPPING) <= found.known
    generating = {
        *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    assert generating <= found.generating
    assert "vit" in found.known - found.generating


def test_lists_that_are_not_found_refuse_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown: ModelTypes | None = None
    monkeypatch.setattr(early_refusals, "model_types", lambda: unknown)
    write_config(tmp_path, {"model_type": "orion"})
    refuse_model(ModelConfig(model=str(tmp_path)))
