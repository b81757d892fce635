"""Write a benchmark model with random weights, and a tokenizer for it.

    python -m scripts.bench.make_bench_model DIR [--shape 135m]

The shape "135m" is SmolLM2-135M's, and "0.6b" is Qwen3-0.6B's. "nano" costs almost nothing to
compute, so that it measures everything around the model. The vocabulary is the demo model's, filled
up so that every sampled id is text.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from scripts.supervisor.model_names import BUNDLED_MODELS

_SPECIAL_IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}


def _llama(**sizes: int) -> LlamaConfig:
    return LlamaConfig(
        **sizes,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        **_SPECIAL_IDS,
    )


SHAPES: dict[str, tuple[type[PreTrainedModel], PreTrainedConfig]] = {
    "135m": (
        LlamaForCausalLM,
        _llama(
            vocab_size=49_152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
        ),
    ),
    "0.6b": (
        Qwen3ForCausalLM,
        Qwen3Config(
            vocab_size=151_936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40_960,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            tie_word_embeddings=True,
            **_SPECIAL_IDS,
        ),
    ),
    "nano": (
        LlamaForCausalLM,
        _llama(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        ),
    ),
}


def make_model(shape: str) -> PreTrainedModel:
    """Make the model in bf16, with seeded weights."""
    torch.manual_seed(0)
    model_class, config = SHAPES[shape]
    return model_class(config).to(torch.bfloat16).eval()


def fill_vocabulary(file: Path, size: int) -> None:
    """Add tokens that no merge produces."""
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    for token_id in range(len(vocabulary), size):
        vocabulary[f"Ġfill{token_id}"] = token_id
    file.write_text(json.dumps(content))


def main() -> None:
    """Write the directory."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.make_bench_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where it is written")
    parser.add_argument("--shape", choices=SHAPES, default="135m", help="default: 135m")
    arguments = parser.parse_args()
    directory, shape = arguments.directory, arguments.shape
    make_model(shape).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(BUNDLED_MODELS["demo"] / name, directory / name)
    fill_vocabulary(directory / "tokenizer.json", SHAPES[shape][1].vocab_size)


if __name__ == "__main__":
    main()
