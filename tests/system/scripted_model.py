"""A checkpoint whose greedy output after one certain prompt is a given text.

It is a GPT-2 whose layers add nothing: the position alone, embedded as a unit vector, decides the
next token. Real workers load and run it.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from api_proc.text.processor import TextProcessor
from api_proc.text.tokenizer import EncodeOptions
from protocol.config.settings import configure

NUM_POSITIONS = 768
NUM_HEADS = 12
NUM_INNER = 8
EOS = "</s>"


def write_scripted_model(
    directory: Path,
    template: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    *,
    text: str,
    added_tokens: list[str],
) -> None:
    """Write a checkpoint that answers `messages` with `text`; each byte is a token."""
    write_tokenizer(directory, template, [EOS, *added_tokens])
    processor = TextProcessor.load(configure(model=str(directory)).model)
    assert processor.template is not None
    prompt = processor.template.render(messages, tools=tools)
    options = EncodeOptions(add_special_tokens=False, max_tokens=NUM_POSITIONS)
    num_prompt_tokens = len(processor.tokenizer.encode(prompt, options))
    eos_id = processor.tokenizer.added_token_id(EOS)
    assert eos_id is not None
    script = [*processor.tokenizer.encode(text, options), eos_id]
    processor.close()
    assert num_prompt_tokens + len(script) <= NUM_POSITIONS
    vocab_size = 256 + 1 + len(added_tokens)
    head = np.zeros((vocab_size, NUM_POSITIONS), np.float32)
    for index, token_id in enumerate(script):
        head[token_id, num_prompt_tokens - 1 + index] = 1.0
    save_file(_weights(vocab_size, head), directory / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_positions": NUM_POSITIONS,
        "n_embd": NUM_POSITIONS,
        "n_layer": 1,
        "n_head": NUM_HEADS,
        "n_inner": NUM_INNER,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
    }
    _write_json(directory / "config.json", config)


def write_tokenizer(directory: Path, template: str, special_tokens: list[str]) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special_tokens)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    _write_json(directory / "tokenizer_config.json", config | {"chat_template": template})


def _weights(vocab_size: int, head: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    width = NUM_POSITIONS
    shapes = {
        "wte.weight": (vocab_size, width),
        "h.0.attn.c_attn.weight": (width, 3 * width),
        "h.0.attn.c_attn.bias": (3 * width,),
        "h.0.attn.c_proj.weight": (width, width),
        "h.0.attn.c_proj.bias": (width,),
        "h.0.mlp.c_fc.weight": (width, NUM_INNER),
        "h.0.mlp.c_fc.bias": (NUM_INNER,),
        "h.0.mlp.c_proj.weight": (NUM_INNER, width),
        "h.0.mlp.c_proj.bias": (width,),
        **{f"{name}.bias": (width,) for name in ("h.0.ln_1", "h.0.ln_2", "ln_f")},
    }
    weights = {f"transformer.{name}": np.zeros(s, np.float32) for name, s in shapes.items()}
    for name in ("h.0.ln_1", "h.0.ln_2", "ln_f"):
        weights[f"transformer.{name}.weight"] = np.ones(width, np.float32)
    weights["transformer.wpe.weight"] = np.eye(width, dtype=np.float32)
    return weights | {"lm_head.weight": head}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
