"""Print the memory of a worker while it loads: `python -m tests.tools.load_memory DIRECTORY`.

Makes checkpoints with random weights in DIRECTORY where they are missing, of Qwen3-0.6B's shape and
of a mixture of experts, and loads each in a process of its own. Anonymous memory is that of the
process beyond what its libraries take; the weights in the mapped files are not a part of it.
"""

import argparse
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PretrainedConfig, Qwen3MoeConfig

from protocol.config import Quantization
from protocol.config.settings import configure
from scripts.gguf.directory import make_directory
from tests.tools.checkpoint_formats import GGUF, SHAPE, quantize, resident
from tests.worker.hollow_checkpoints import write_hollow
from worker_proc.startup.prepare import prepare_model

MIXTURE = Qwen3MoeConfig(
    vocab_size=32_000,
    hidden_size=1024,
    intermediate_size=3072,
    moe_intermediate_size=512,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    num_experts=32,
    num_experts_per_tok=4,
    max_position_embeddings=4096,
    dtype="bfloat16",
)
SOURCES: dict[str, tuple[PretrainedConfig, torch.dtype]] = {
    "dense": (SHAPE, torch.bfloat16),
    "dense, float32": (SHAPE, torch.float32),
    "mixture": (MIXTURE, torch.bfloat16),
}
CASES: dict[str, tuple[str, str, str]] = {
    "bf16": ("dense", "", ""),
    "fp32, rounded to bf16": ("dense, float32", "", ""),
    "`w8a16` at load": ("dense", "", "w8a16"),
    "int8 (compressed-tensors)": ("dense", "int_quantized_w8a16", ""),
    "int4 (GPTQ)": ("dense", "gptq4_128_sym_v1", ""),
    "int8 (compressed-tensors), output layer `w8a16`": ("dense", "int_quantized_w8a16", "w8a16"),
    "int4 (GPTQ), output layer `w8a16`": ("dense", "gptq4_128_sym_v1", "w8a16"),
    "Q8_0 (GGUF)": ("dense", "Q8_0.gguf", ""),
    "Q4_K (GGUF)": ("dense", "Q4_K.gguf", ""),
    "nf4 (bitsandbytes)": ("dense", "bitsandbytes_nf4_nested", ""),
    "nf4 (bitsandbytes), output layer `w8a16`": ("dense", "bitsandbytes_nf4_nested", "w8a16"),
    "mixture, bf16": ("mixture", "", ""),
    "mixture, int4 (compressed-tensors)": ("mixture", "pack_quantized4_32_asym", ""),
}
"""The checkpoint of each row, its layout, and its `--quantization`."""
_NUM_VALUES = 1 << 20
_SAMPLE_S = 0.005


def write_random(directory: Path, config: PretrainedConfig, dtype: torch.dtype) -> None:
    """Write a checkpoint whose matrices repeat a million random values."""
    write_hollow(directory, config, dtype)
    path = directory / "model.safetensors"
    values = torch.randn(_NUM_VALUES, generator=torch.Generator().manual_seed(1)).to(dtype)
    tensors = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 (a file is not a mapping)
            shape = file.get_slice(name).get_shape()
            count = torch.Size(shape).numel()
            if len(shape) == 1:
                tensors[name] = torch.ones(shape, dtype=dtype)
                continue
            repeated = values.repeat(-(-count // _NUM_VALUES))[:count]
            weight = (repeated * shape[-1] ** -0.5).view(shape)
            if len(shape) == 2:
                tensors[name] = weight
            else:
                tensors |= of_experts(name, weight)
    path.unlink()
    save_file(tensors, path, {"format": "pt"})


def of_experts(name: str, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a mixture as checkpoints of the hub have them, one for each expert."""
    parent, _, part = name.rpartition(".")
    names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
    return {
        f"{parent}.{number}.{one}.weight": rows.contiguous()
        for number, weight in enumerate(weights)
        for one, rows in zip(names, weight.chunk(len(names)), strict=True)
    }


def checkpoint(directory: Path, case: str) -> Path:
    """Return the checkpoint of a row, made if it is missing."""
    source, layout, _ = CASES[case]
    plain = directory / source.replace(", ", "_")
    if not plain.exists():
        write_random(plain, *SOURCES[source])
    if not layout:
        return plain
    coded = directory / f"{plain.name}_{layout}"
    if not coded.exists():
        try:
            quantize(plain, coded, layout, repeats_shapes=True)
        except BaseException:
            shutil.rmtree(coded, ignore_errors=True)
            coded.unlink(missing_ok=True)
            raise
    return coded


def print_load(directory: Path, quantization: str | None) -> None:
    """Load a checkpoint in this process, and print what it took."""
    if directory.suffix == GGUF:
        directory = make_directory(directory)
    files = [*directory.glob("*.safetensors"), *directory.glob("*.gguf")]
    stored = sum(file.stat().st_size for file in files)
    before, most, is_loading = resident("RssAnon"), 0, True

    def watch() -> None:
        nonlocal most
        while is_loading:
            most = max(most, resident("RssAnon"))
            time.sleep(_SAMPLE_S)

    watcher = threading.Thread(target=watch)
    watcher.start()
    config = configure(
        model=str(directory),
        device="cpu",
        quantization=Quantization(quantization) if quantization else None,
    )
    torch.set_num_threads(1)
    started = time.process_time()
    prepared = prepare_model(config, lambda *_: None)
    took = time.process_time() - started
    is_loading = False
    watcher.join()
    after = resident("RssAnon")
    assert prepared.loaded.layers
    print(
        f"{stored // 10**6} | {after - before} | {most - before} | {resident('RssFile')} |"
        f" {took:.1f} s |",
        flush=True,
    )


def main() -> None:
    """Print the table, or a row of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--load", action="store_true", help="load DIRECTORY, a checkpoint, here")
    parser.add_argument("--quantization")
    args = parser.parse_args()
    if args.load:
        print_load(args.directory, args.quantization)
        return
    print("| weights | MB in files | MB after the load | MB at its peak | MB mapped | time |")
    print("|---|---|---|---|---|---|")
    for case in args.cases:
        path = checkpoint(args.directory, case)
        print(f"| {case} | ", end="", flush=True)
        command = [sys.executable, "-m", "tests.tools.load_memory", str(path), "--load"]
        rounding = CASES[case][2]
        subprocess.run([*command, *(["--quantization", rounding] if rounding else [])], check=True)


if __name__ == "__main__":
    main()
