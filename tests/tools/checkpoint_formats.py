"""Print the tables of quantized checkpoints in docs: `python -m tests.tools.checkpoint_formats`.

`error` compares the demo model, rounded to the nearest codes of each format, with its weights.
`speed DIRECTORY` makes checkpoints of Qwen3-0.6B's shape with random weights there, serves each in
a process of its own, in turn, and prints memory, processor time and wall time. Output layers stay
plain, but for those of the rows that name them; NAME:w8a16 rounds them at the load. Layouts that
end with .gguf are files of one type, such as Q4_K.gguf.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from protocol.config import Quantization
from protocol.config.settings import configure
from protocol.sampling import SamplingParams
from scripts.gguf.directory import make_directory
from tests.paths import DEMO_MODEL
from tests.tools.quantization_error import Rounding, held_out_windows, measure
from tests.worker.driving import drive
from tests.worker.gguf.gguf_files import write_random_gguf
from tests.worker.quantization.layouts import Layout
from tests.worker.quantization.quantized_checkpoints import LAYOUTS, is_quantized
from worker_proc.model_runner import ModelRunner
from worker_proc.runner import ReportProgress
from worker_proc.startup.load_runner import load_model_runner

SHAPE = Qwen3Config(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    dtype="bfloat16",
)
MEASURED = (
    *("gptq4_128_sym_v1", "gptq4_64_asym_order_v1", "awq_128", "pack_quantized4_32_asym"),
    *("pack_quantized8_-1_sym", "int_quantized_w8a8", "float_quantized_channel", "fp8_blocks"),
)
TURNS = (
    *("pack_quantized8_-1_sym", MEASURED[0], "awq_128", "bitsandbytes_nf4_nested"),
    *("Q8_0.gguf", "Q4_K.gguf"),
)
NUM_TOKENS = 24
NUM_TURN_TOKENS = 8
HEAD = "+head"
GGUF = ".gguf"


def layout_named(name: str) -> Layout:
    """Return a layout of the tests by its name."""
    [found] = [layout for layout in LAYOUTS if layout.name == name.removesuffix(HEAD)]
    return found


def quantize(source: Path, target: Path, name: str, *, repeats_shapes: bool = False) -> None:
    """Write a checkpoint with the weights of another one in a layout.

    With `repeats_shapes` all weights of a shape are the first one: for figures of speed and memory.
    A GGUF file has the shape only.
    """
    if name.endswith(GGUF):
        write_random_gguf(target, SHAPE, GGMLQuantizationType[name.removesuffix(GGUF)])
        return
    shutil.copytree(source, target)
    layout, stored = layout_named(name), {}
    encoded: dict[torch.Size, dict[str, torch.Tensor]] = {}
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    if name.endswith(HEAD):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        config["tie_word_embeddings"] = False
    for key, tensor in tensors.items():
        if is_quantized(key, tensor) or key == "lm_head.weight":
            parts = encoded.get(tensor.shape) or layout.encode(tensor.float())[0]
            if repeats_shapes:
                encoded[tensor.shape] = parts
            layer = key.removesuffix("weight")
            stored |= {layer + part: value.contiguous().clone() for part, value in parts.items()}
        else:
            stored[key] = tensor
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    config["quantization_config"] = layout.settings
    (target / "config.json").write_text(json.dumps(config))


def print_errors(num_tokens: int) -> None:
    """Print how far each format is from the demo model."""
    windows = held_out_windows(DEMO_MODEL, num_tokens)
    print("| layout | mean divergence, nats | same most likely token | loss, nats per token |")
    print("|---|---|---|---|")
    for name in MEASURED:
        with TemporaryDirectory() as scratch:
            quantize(DEMO_MODEL, Path(scratch) / "coded", name)
            error = measure(DEMO_MODEL, Rounding(model=Path(scratch) / "coded"), windows)
        print(f"| {name} | {error.divergence:.5f} | {error.agreement:.2%} | {error.loss:.4f} |")


def write_random(directory: Path) -> None:
    """Write a plain checkpoint of the shape."""
    from tests.worker.checkpoints import build_checkpoint

    build_checkpoint(directory, SHAPE, torch.bfloat16, max_shard_size="8GB")


def resident(field: str) -> int:
    """Return a field of this process's status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(field + ":")]
    return int(line.split()[1]) // 1000


def load_in_bf16(
    directory: Path, quantization: str | None, progress: ReportProgress = lambda *_: None
) -> ModelRunner:
    """Load a checkpoint, for one thread."""
    config = configure(
        model=str(make_directory(directory) if directory.suffix == GGUF else directory),
        dtype="bfloat16",
        device="cpu",
        quantization=Quantization(quantization) if quantization else None,
        num_gpu_blocks_override=200,
        num_threads=1,
    )
    return load_model_runner(config, progress)


def print_speed(directory: Path, quantization: str | None) -> None:
    """Load a checkpoint in this process, and print one row."""
    before, peak = resident("RssAnon"), 0

    def watch(*_: object) -> None:
        nonlocal peak
        peak = max(peak, resident("RssAnon"))

    runner = load_in_bf16(directory, quantization, watch)
    loaded = resident("RssAnon")
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    processor, wall = [], []
    for first in range(4):
        started = time.process_time(), time.monotonic()
        drive(runner, [[5 + first, 7, 9]], params, max_num_seqs=1)
        processor.append((time.process_time() - started[0]) / NUM_TOKENS * 1000)
        wall.append((time.monotonic() - started[1]) / NUM_TOKENS * 1000)
    started_prompt = time.process_time()
    drive(runner, [list(range(100, 612))], SamplingParams(max_tokens=1), max_num_seqs=1)
    prompt = time.process_time() - started_prompt
    times = statistics.median(processor[1:]), statistics.median(wall[1:]), prompt
    print(before, loaded, peak, *times, flush=True)


def print_turns(directory: Path, names: list[str], num_rounds: int) -> None:
    """Serve checkpoints in this process, decode with each in turn, and print medians."""
    cases: dict[str, tuple[Path, str]] = {"bf16": (directory / "plain", "")}
    for each in (Quantization.W8A16, Quantization.W4A16):
        cases[f"`{each}` at load"] = directory / "plain", str(each)
    for name in names:
        layout, _, quantization = name.partition(":")
        if not (directory / layout).exists():
            quantize(directory / "plain", directory / layout, layout, repeats_shapes=True)
        cases[name] = directory / layout, quantization
    runners = {name: load_in_bf16(*case) for name, case in cases.items()}
    params = SamplingParams(max_tokens=NUM_TURN_TOKENS, temperature=0.0, ignore_eos=True)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    for number in range(num_rounds + 1):
        for name, runner in runners.items():
            processor, wall = time.process_time(), time.monotonic()
            drive(runner, [[5 + number, 7, 9]], params, max_num_seqs=1)
            taken = time.process_time() - processor, time.monotonic() - wall
            if number:  # the first round touches weights for the first time
                times[name].append(taken)
    print("| weights | processor time of a token | wall time of a token |")
    print("|---|---|---|")
    for name, rounds in times.items():
        cells = []
        for taken in zip(*rounds, strict=True):
            each = sorted(1000 * one / NUM_TURN_TOKENS for one in taken)
            cells.append(f"{statistics.median(each):.0f} ms [{each[0]:.0f} to {each[-1]:.0f}]")
        print(f"| {name} | {' | '.join(cells)} |")


def print_speeds(directory: Path, names: list[str], num_rounds: int) -> None:
    """Make what is missing, and print medians for each checkpoint, served in turn."""
    plain = directory / "plain"
    if not plain.exists():
        write_random(plain)
    rows: list[tuple[str, Path, str]] = [("bf16", plain, "")]
    rows += [(f"`{each}` at load", plain, str(each)) for each in Quantization]
    for name in names:
        layout, _, quantization = name.partition(":")
        if not (directory / layout).exists():
            quantize(plain, directory / layout, layout, repeats_shapes=True)
        rows.append((name, directory / layout, quantization))
    results: dict[str, list[list[float]]] = {title: [] for title, _, _ in rows}
    for _ in range(num_rounds):
        for title, path, quantization in rows:
            command = [sys.executable, "-m", "tests.tools.checkpoint_formats", "load", str(path)]
            command += filter(None, [quantization])
            made = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            results[title].append([float(figure) for figure in made.stdout.split()])
            print(title, made.stdout.strip(), file=sys.stderr, flush=True)
    print(
        "| weights | MB before | MB after the load | MB at its peak | token | wall | 512 tokens |"
    )
    print("|---|---|---|---|---|---|---|")
    for title, rounds in results.items():
        before, loaded, peak, token, wall, prompt = map(
            statistics.median, zip(*rounds, strict=True)
        )
        memory = f"{before:.0f} | {loaded:.0f} | {peak:.0f}"
        print(f"| {title} | {memory} | {token:.1f} ms | {wall:.1f} ms | {prompt:.2f} s |")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    error = commands.add_parser("error", help="the error of each format")
    error.add_argument("--num-tokens", type=int, default=20_000)
    speed = commands.add_parser("speed", help="memory and time of each format")
    speed.add_argument("directory", type=Path)
    speed.add_argument("--layouts", nargs="*", default=[*MEASURED, "awq_128" + HEAD])
    speed.add_argument("--rounds", type=int, default=1)
    turns = commands.add_parser("turns", help="decode in turn, in one process, after `speed`")
    turns.add_argument("directory", type=Path)
    turns.add_argument("--layouts", nargs="*", default=TURNS)
    turns.add_argument("--rounds", type=int, default=9)
    load = commands.add_parser("load", help="one row of `speed`")
    load.add_argument("directory", type=Path)
    load.add_argument("quantization", nargs="?")
    args = parser.parse_args()
    if args.command == "error":
        print_errors(args.num_tokens)
    elif args.command == "speed":
        print_speeds(args.directory, args.layouts, args.rounds)
    elif args.command == "turns":
        print_turns(args.directory, args.layouts, args.rounds)
    else:
        print_speed(args.directory, args.quantization)


if __name__ == "__main__":
    main()
