"""Write tiny checkpoints with the libraries that people quantize models with.

    python -m tests.tools.library_checkpoints NAME DIRECTORY

runs in an environment with the library, and has made tests/worker/quantization/library_checkpoints.
For each checkpoint `expected.json` has the library's version, hashes of the weights as the library
dequantizes them, and greedy tokens of transformers' model with these weights.

    pip install gptqmodel                        # gptqmodel_gptq, gptqmodel_awq
    pip install auto-round compressed-tensors    # auto_round_gptq, auto_round_compressed
"""

import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 64
GROUP_SIZE = 32
NUM_TOKENS = 24
PROMPTS = ([5, 9, 11], [3, 60, 4, 41, 17, 23, 8], list(range(10, 50)))
KEPT_FILES = ("config.json", "generation_config.json", "model.safetensors")
EXPECTED = "expected.json"
_TEXTS, _TEXT_TOKENS = 32, 64
_FIRST_TOKEN = 3  # those before it are special

Weights = dict[str, torch.Tensor]


def write_plain(directory: Path) -> None:
    """Write the model that is quantized, and a tokenizer whose words are the numbers of tokens."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                spread = 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, 1.5 * spread)
    model.half().save_pretrained(directory)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB_SIZE)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "0", "bos_token": "1", "eos_token": "2", "pad_token": "0"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(directory)


def random_texts() -> torch.Tensor:
    """Return the tokens that a library calibrates with."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(_FIRST_TOKEN, VOCAB_SIZE, (_TEXTS, _TEXT_TOKENS), generator=generator)


def write_with_gptqmodel(plain: Path, directory: Path, method: str) -> None:
    """Quantize with gptqmodel: GPTQ with `desc_act`, or AWQ, both with zero points."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel import GPTQModel, QuantizeConfig
    from gptqmodel.quantization import FORMAT, METHOD

    is_awq = method == "awq"
    settings: dict[str, Any] = {"desc_act": True}
    if is_awq:
        settings = {"quant_method": METHOD.AWQ, "format": FORMAT.GEMM}
    config = QuantizeConfig(bits=4, group_size=GROUP_SIZE, sym=False, device="cpu", **settings)
    model = GPTQModel.load(str(plain), config)
    texts = [" ".join(map(str, row)) for row in random_texts().tolist()]
    model.quantize(texts, batch_size=4)
    model.save(str(directory))


def write_with_auto_round(plain: Path, directory: Path, format: str) -> None:
    """Quantize with auto-round, which writes the formats of other libraries."""
    from auto_round import AutoRound

    quantizer = AutoRound(
        str(plain),
        scheme="W4A16",
        group_size=GROUP_SIZE,
        iters=0,
        device_map="cpu",
        dataset=[row.unsqueeze(0) for row in random_texts()],
        nsamples=_TEXTS,
        seqlen=_TEXT_TOKENS,
    )
    quantizer.quantize_and_save(str(directory), format=format)


def read_gptq(directory: Path) -> Weights:
    """Return weights as gptqmodel's modules compute with them, with the stored scales."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel import BACKEND, GPTQModel

    stored = load_file(directory / "model.safetensors")
    model = GPTQModel.load(str(directory), backend=BACKEND.TORCH, device="cpu").model
    found = {}
    for name, module in model.named_modules():
        if f"{name}.scales" in stored:
            module.scales = stored[f"{name}.scales"].float()
            found[f"{name}.weight"] = module(torch.eye(module.in_features)).t().contiguous()
    return found


def read_awq(directory: Path) -> Weights:
    """Return weights as gptqmodel dequantizes them."""
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    stored = load_file(directory / "model.safetensors")
    found = {}
    for name in sorted({key.rpartition(".")[0] for key in stored if key.endswith(".qweight")}):
        parts = [stored[f"{name}.{key}"] for key in ("qweight", "qzeros", "scales")]
        weight = dequantize_gemm(*parts[:2], parts[2].float(), 4, GROUP_SIZE)
        found[f"{name}.weight"] = weight.t().contiguous()
    return found


def read_with_auto_round(directory: Path) -> Weights:
    """Return weights as auto-round's module for GPTQ checkpoints computes with them."""
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    stored = load_file(directory / "model.safetensors")
    found = {}
    for name in sorted({key.rpartition(".")[0] for key in stored if key.endswith(".qweight")}):
        parts = {key: stored[f"{name}.{key}"] for key in ("qweight", "qzeros", "scales", "g_idx")}
        num_inputs, num_outputs = len(parts["g_idx"]), parts["scales"].shape[1]
        module = QuantLinear(4, GROUP_SIZE, num_inputs, num_outputs, bias=False)
        for key, value in parts.items():
            setattr(module, key, value.float() if key == "scales" else value)
        module.post_init()
        del module.g_idx  # inputs are in order; with it the module takes outputs for inputs
        found[f"{name}.weight"] = module(torch.eye(num_inputs)).t().contiguous()
    return found


def read_with_compressed_tensors(directory: Path) -> Weights:
    """Return weights as compressed-tensors decompresses them."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    settings = json.loads((directory / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme(**settings["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(settings["format"])
    layers: dict[str, Weights] = {}
    for key, value in load_file(directory / "model.safetensors").items():
        layer, _, part = key.rpartition(".")
        layers.setdefault(layer, {})[part] = value.float() if part == "weight_scale" else value
    return {
        f"{layer}.weight": compressor.decompress(parts, scheme)["weight"]
        for layer, parts in layers.items()
        if "weight_packed" in parts
    }


WRITERS: dict[str, tuple[tuple[str, ...], Callable[[Path, Path], None]]] = {
    "gptqmodel_gptq": (("gptqmodel",), lambda *paths: write_with_gptqmodel(*paths, "gptq")),
    "gptqmodel_awq": (("gptqmodel",), lambda *paths: write_with_gptqmodel(*paths, "awq")),
    "auto_round_gptq": (("auto_round",), lambda *paths: write_with_auto_round(*paths, "auto_gptq")),
    "auto_round_compressed": (
        ("auto_round", "compressed_tensors"),
        lambda *paths: write_with_auto_round(*paths, "llm_compressor"),
    ),
}
"""By the names of checkpoints: the libraries that it takes, and what writes it."""
READERS: dict[str, Callable[[Path], Weights]] = {
    "gptqmodel_gptq": read_gptq,
    "gptqmodel_awq": read_awq,
    "auto_round_gptq": read_with_auto_round,
    "auto_round_compressed": read_with_compressed_tensors,
}


def digest(weight: torch.Tensor) -> str:
    """Return a hash of a weight in float32, with one kind of zeros."""
    return hashlib.sha256((weight.float() + 0.0).contiguous().numpy().tobytes()).hexdigest()[:16]


def greedy_tokens(directory: Path, weights: Weights) -> list[list[int]]:
    """Return transformers' tokens over dequantized weights in float32."""
    stored = load_file(directory / "model.safetensors")
    plain = {key: value.float() for key, value in stored.items() if key.endswith("weight")}
    settings = json.loads((directory / "config.json").read_text())
    settings.pop("quantization_config")
    model = LlamaForCausalLM(LlamaConfig(**settings | {"dtype": "float32"}))
    model.load_state_dict(plain | weights, strict=False)
    model.tie_weights()
    found = []
    for prompt in PROMPTS:
        given = torch.tensor([prompt])
        made = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        found.append(made[0, len(prompt) :].tolist())
    return found


def write(name: str, directory: Path) -> None:
    """Write a checkpoint with its library, and what is expected of it."""
    libraries, write_to = WRITERS[name]
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        write_plain(Path(scratch, "plain"))
        write_to(Path(scratch, "plain"), Path(scratch, "made"))
        [made] = Path(scratch, "made").rglob("model.safetensors")
        weights = READERS[name](made.parent)
        for kept in KEPT_FILES:
            (directory / kept).write_bytes((made.parent / kept).read_bytes())
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"].get("meta", {}).pop("offload_to_disk_path", None)
    (directory / "config.json").write_text(json.dumps(config) + "\n")
    expected = {
        "libraries": {library: importlib.metadata.version(library) for library in libraries},
        "weights": {key: digest(weight) for key, weight in sorted(weights.items())},
        "tokens": greedy_tokens(directory, weights),
    }
    (directory / EXPECTED).write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
