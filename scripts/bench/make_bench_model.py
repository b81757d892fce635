"""Write the benchmark model: SmolLM2-135M's shape with random weights, and a tokenizer for it.

    python -m scripts.bench.make_bench_model DIR

The vocabulary is the demo model's, filled up to 49,152 entries so that every sampled id is text.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.supervisor.startup import BUNDLED_MODELS

VOCAB_SIZE = 49_152


def make_model() -> LlamaForCausalLM:
    """135M parameters, bf16, seeded."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def fill_vocabulary(file: Path) -> None:
    """Add tokens that no merge produces."""
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    for token_id in range(len(vocabulary), VOCAB_SIZE):
        vocabulary[f"Ġfill{token_id}"] = token_id
    file.write_text(json.dumps(content))


def main() -> None:
    """Write the directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    make_model().save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(BUNDLED_MODELS["demo"] / name, directory / name)
    fill_vocabulary(directory / "tokenizer.json")


if __name__ == "__main__":
    main()
