"""Write a benchmark model with random weights, and a tokenizer for it.

    python -m scripts.bench.make_bench_model DIR [--shape 135m]

The shape "135m" is SmolLM2-135M's. "nano" costs almost nothing to compute, so that it measures
everything around the model. The vocabulary is the demo model's, filled up so that every sampled id
is text.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.supervisor.model_names import BUNDLED_MODELS

SHAPES: dict[str, dict[str, Any]] = {
    "135m": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "nano": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}


def make_model(shape: str) -> LlamaForCausalLM:
    """bf16, seeded."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **SHAPES[shape],
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def fill_vocabulary(file: Path, size: int) -> None:
    """Add tokens that no merge produces."""
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    for token_id in range(len(vocabulary), size):
        vocabulary[f"Ġfill{token_id}"] = token_id
    file.write_text(json.dumps(content))


def main() -> None:
    """Write the directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    arguments = parser.parse_args()
    directory, shape = arguments.directory, arguments.shape
    make_model(shape).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(BUNDLED_MODELS["demo"] / name, directory / name)
    fill_vocabulary(directory / "tokenizer.json", SHAPES[shape]["vocab_size"])


if __name__ == "__main__":
    main()
