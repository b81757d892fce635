"""Print the error tables of docs: `python -m tests.tools.quantization_error`.

Compares the next-token distributions of a model with rounded weights, or with rounded keys and
values, with those of the checkpoint, on the files of the standard library that were held out from
the demo model's training.
"""

import argparse
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from protocol.config import KVCacheDtype, Quantization
from protocol.config.settings import configure
from tests.paths import DEMO_MODEL
from tests.tools.train_demo_model import encode, read_corpus
from worker_proc.calibration.self_check import trial_requests
from worker_proc.forward import attach_cache, compute_logits
from worker_proc.inputs import pack_step
from worker_proc.request import ScheduledRequest
from worker_proc.startup.parts import make_backend, make_layout
from worker_proc.startup.prepare import prepare_model

WINDOW, BLOCK_SIZE = 512, 16


class Rounding(NamedTuple):
    """Settings that round numbers."""

    quantization: Quantization | None = None
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO
    model: Path | None = None
    """Another checkpoint of the same model."""


class Error(NamedTuple):
    """Means over all tokens."""

    divergence: float
    """Kullback-Leibler divergence from the checkpoint's distribution, in nats."""
    agreement: float
    """Share of tokens after which both have the same most likely one."""
    loss: float
    """Of the text, in nats for each token."""


@torch.inference_mode()
def log_probs(
    model: Path, rounding: Rounding, windows: list[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Yield the distributions after each token of a window, `[tokens, vocab_size]`."""
    settings = configure(
        model=str(model),
        dtype="bfloat16",
        device="cpu",
        quantization=rounding.quantization,
        kv_cache_dtype=rounding.kv_cache_dtype,
        max_num_batched_tokens=WINDOW,
        block_size=BLOCK_SIZE,
    )
    prepared = prepare_model(settings, lambda *_: None)
    loaded, layout = prepared.loaded, make_layout(prepared.loaded, settings)
    backend = make_backend(loaded, layout, prepared.kernels)
    attach_cache(loaded, backend, layout, 1 + len(layout.groups) * (WINDOW // BLOCK_SIZE))
    for window in windows:
        [request] = trial_requests(layout, [window.tolist()])
        inputs = pack_step([ScheduledRequest(request, 0, len(window), True)], loaded.device)
        inputs = replace(inputs, logits_indices=torch.arange(len(window)))
        logits = compute_logits(loaded.model, backend, inputs, loaded.vocab_size)
        yield logits.float().log_softmax(-1)


def measure(model: Path, rounding: Rounding, windows: list[torch.Tensor]) -> Error:
    """Compare with the checkpoint as it is."""
    sums = torch.zeros(3, dtype=torch.float64)
    count = 0
    both = zip(
        windows,
        log_probs(model, Rounding(), windows),
        log_probs(rounding.model or model, rounding, windows),
        strict=True,
    )
    for window, plain, rounded in both:
        targets = window[1:].unsqueeze(1)
        sums[0] += (plain.exp() * (plain - rounded)).sum(-1)[:-1].sum()
        sums[1] += (plain.argmax(-1) == rounded.argmax(-1))[:-1].sum()
        sums[2] -= rounded[:-1].gather(1, targets).sum()
        count += len(targets)
    return Error(*(sums / count).tolist())


def print_table(title: str, rows: dict[str, Rounding], args: argparse.Namespace) -> None:
    """Measure each row and print it."""
    windows = held_out_windows(args.model, args.num_tokens)
    print(f"| {title} | mean divergence, nats | same most likely token | loss, nats per token |")
    print("|---|---|---|---|")
    for name, rounding in rows.items():
        error = measure(args.model, rounding, windows)
        print(
            f"| {name} | {error.divergence:.5f} | {error.agreement:.2%} | {error.loss:.4f} |",
            flush=True,
        )


def held_out_windows(model: Path, num_tokens: int) -> list[torch.Tensor]:
    """Return the first tokens of the held-out files, in windows."""
    _, texts = read_corpus(Path(sysconfig.get_paths()["stdlib"]))
    ids = encode(Tokenizer.from_file(str(model / "tokenizer.json")), texts)
    tokens = torch.from_numpy(ids[:num_tokens].astype("int64"))
    return [window for window in tokens.split(WINDOW) if len(window) > 1]


def main() -> None:
    """Print one row for each way to round weights, and keys and values."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--num-tokens", type=int, default=40_000)
    args = parser.parse_args()
    weights = {str(each): Rounding(quantization=each) for each in Quantization}
    print_table("weights", {"bf16": Rounding(), **weights}, args)
    types = (KVCacheDtype.INT8, KVCacheDtype.FP8)
    caches = {str(each): Rounding(kv_cache_dtype=each) for each in types}
    print_table("KV cache", {"bf16": Rounding(), **caches}, args)


if __name__ == "__main__":
    main()
