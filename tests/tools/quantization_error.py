"""Print the error table of docs/quantization.md: `python -m tests.tools.quantization_error`.

Compares the next-token distributions of a model with rounded weights with those of the checkpoint,
on the files of the standard library that were held out from the demo model's training.
"""

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from protocol.config import Quantization
from protocol.config.settings import configure
from tests.tools.train_demo_model import encode, read_corpus
from worker_proc.startup.prepare import prepare_model

DEMO = Path(__file__).resolve().parents[2] / "scripts" / "demo_model"
WINDOW = 512


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
    model: Path, quantization: Quantization | None, windows: list[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Yield the distributions after each token of a window, `[tokens, vocab_size]`."""
    settings = configure(
        model=str(model), dtype="bfloat16", device="cpu", quantization=quantization
    )
    loaded = prepare_model(settings, lambda *_: None).loaded
    loaded.model.set_attn_implementation("eager")
    for window in windows:
        logits = loaded.model(input_ids=window.unsqueeze(0), use_cache=False).logits[0]
        yield logits[:, : loaded.vocab_size].float().log_softmax(-1)


def measure(model: Path, quantization: Quantization | None, windows: list[torch.Tensor]) -> Error:
    """Compare with the checkpoint as it is."""
    sums = torch.zeros(3, dtype=torch.float64)
    count = 0
    both = zip(
        windows, log_probs(model, None, windows), log_probs(model, quantization, windows),
        strict=True,
    )  # fmt: skip
    for window, plain, rounded in both:
        targets = window[1:].unsqueeze(1)
        sums[0] += (plain.exp() * (plain - rounded)).sum(-1)[:-1].sum()
        sums[1] += (plain.argmax(-1) == rounded.argmax(-1))[:-1].sum()
        sums[2] -= rounded[:-1].gather(1, targets).sum()
        count += len(targets)
    return Error(*(sums / count).tolist())


def held_out_windows(model: Path, num_tokens: int) -> list[torch.Tensor]:
    """Return the first tokens of the held-out files, in windows."""
    _, texts = read_corpus(Path(sysconfig.get_paths()["stdlib"]))
    ids = encode(Tokenizer.from_file(str(model / "tokenizer.json")), texts)
    tokens = torch.from_numpy(ids[:num_tokens].astype("int64"))
    return [window for window in tokens.split(WINDOW) if len(window) > 1]


def main() -> None:
    """Print one row for each way to round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--num-tokens", type=int, default=40_000)
    args = parser.parse_args()
    windows = held_out_windows(args.model, args.num_tokens)
    print("| weights | mean divergence, nats | same most likely token | loss, nats per token |")
    print("|---|---|---|---|")
    for quantization in (None, *Quantization):
        error = measure(args.model, quantization, windows)
        print(
            f"| {quantization or 'bf16'} | {error.divergence:.5f} | {error.agreement:.2%}"
            f" | {error.loss:.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
