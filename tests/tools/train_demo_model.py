"""Train the demo model: a small Llama that completes Python, in scripts/demo_model/.

The engine's first command has to answer with real text on a machine without network, so the
repository carries a checkpoint small enough to keep in git.  This script makes it: it reads the
standard library of the running interpreter, trains a byte-level BPE tokenizer and a
Llama-architecture model with tied embeddings on it, and writes an ordinary Hugging Face directory.

    python tests/tools/train_demo_model.py --minutes 27

The budget is wall-clock time: the learning rate follows the elapsed fraction of ``--minutes`` and
always decays to zero, so a slower machine gives a weaker model and never an unfinished one.  The
seed fixes the first weights and the order of the data; the number of steps is the machine's.

Needs torch (2.9 or newer, for Muon), transformers and tokenizers; the engine itself does not use
this file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from torch.optim import Optimizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS, PAD = "<|endoftext|>", "<|pad|>"
EOS_ID, PAD_ID = 0, 1
SPECIAL_IDS = {"bos_token_id": EOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
EXCLUDED_PARTS = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages"}
EXCLUDED_PARTS |= {"encodings", "pydoc_data", "__pycache__"}
HELD_OUT_PERCENT = 2
# One newline, or a run of two or more spaces, is always its own piece, so that a prompt may end at
# a line break or after an indentation and still look like the training text.
PIECES = r"\n| {2,}| ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s"
SPLIT_RATE = 0.03  # see TokenSplitter
SHORT_FRACTION = 0.6  # of the time is spent on rows of half the sequence length
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '# ' + message['role'] + ': ' + (message['content'] | trim | replace('\\n', '\\n# ')) }}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '# assistant:\\n' }}{% endif %}"
)


def read_corpus(root: Path) -> tuple[list[str], list[str]]:
    """Read the library's .py files into training and held-out texts, by a hash of their names."""
    train: list[str] = []
    held_out: list[str] = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if EXCLUDED_PARTS.intersection(name.parts) or name.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_text(encoding="utf-8").replace("\r\n", "\n").expandtabs(8)
        except UnicodeDecodeError:
            continue
        if text.strip():
            bucket = int(hashlib.sha256(name.as_posix().encode()).hexdigest(), 16) % 100
            (held_out if bucket < HELD_OUT_PERCENT else train).append(text)
    return train, held_out


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train the byte-level BPE tokenizer; the two special tokens get ids 0 and 1."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Encode the texts as one stream of ids; every text starts after an end-of-text token."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids.append(EOS_ID)
        ids.extend(encoding.ids)
    return np.asarray(ids, dtype=np.int64)


class TokenSplitter:
    """Splits a few tokens after their first character, afresh for each epoch.

    BPE never shows the model ``" "`` followed by ``"x"`` where the vocabulary has ``" x"``, but
    prompts that end in a space or an opening bracket are common.
    """

    def __init__(self, tokenizer: Tokenizer, rate: float) -> None:
        vocab = tokenizer.get_vocab()
        self.rate = rate
        self.first = np.full(len(vocab), -1, dtype=np.int64)
        self.rest = np.full(len(vocab), -1, dtype=np.int64)
        for token, index in vocab.items():
            head, tail = token[:1], token[1:]
            if index <= PAD_ID or head not in vocab or tail not in vocab or set(token) == {"Ġ"}:
                continue
            if head == "Ġ" or (head.isascii() and not head.isalnum()):
                self.first[index], self.rest[index] = vocab[head], vocab[tail]

    def __call__(self, ids: np.ndarray, random: np.random.Generator) -> np.ndarray:
        chosen = (self.first[ids] >= 0) & (random.random(len(ids)) < self.rate)
        out = np.repeat(ids, 1 + chosen)
        at = np.cumsum(1 + chosen) - 1
        out[at[chosen] - 1] = self.first[ids[chosen]]
        out[at[chosen]] = self.rest[ids[chosen]]
        return out


def batches(
    ids: np.ndarray, splitter: TokenSplitter, args: argparse.Namespace
) -> Iterator[torch.Tensor]:
    """Yield (batch, sequence + 1) windows for ever: packed, shuffled, offset anew each epoch."""
    random = np.random.default_rng(args.seed)
    span = args.sequence
    while True:
        stream = splitter(ids, random)
        stream = stream[random.integers(span) :]
        starts = random.permutation((len(stream) - 1) // span) * span
        for i in range(0, len(starts) - args.batch + 1, args.batch):
            chunk = [stream[s : s + span + 1] for s in starts[i : i + args.batch]]
            yield torch.from_numpy(np.stack(chunk))


def build_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """Make the untrained model."""
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        intermediate_size=args.intermediate,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        **SPECIAL_IDS,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # every block starts as the identity, which trains faster
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def batch_loss(model: Callable[..., Any], windows: torch.Tensor, length: int) -> torch.Tensor:
    """Return the mean cross-entropy in nats per token, with windows cut into rows of `length`."""
    inputs = windows[:, :-1].reshape(-1, length)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=inputs, use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: torch.nn.Module, ids: np.ndarray, sequence: int) -> float:
    """Return the mean loss over consecutive windows of the stream, in nats per token."""
    count = (len(ids) - 1) // sequence
    windows = [ids[i * sequence : (i + 1) * sequence + 1] for i in range(count)]
    losses = [
        batch_loss(model, torch.from_numpy(np.stack(windows[i : i + 8])), sequence).item()
        * len(windows[i : i + 8])
        for i in range(0, count, 8)
    ]
    return sum(losses) / count


def make_optimizers(model: LlamaForCausalLM, args: argparse.Namespace) -> list[Optimizer]:
    """Return Muon for the matrices of the blocks, and AdamW for the embedding and the norms."""
    blocks = list(model.model.layers.parameters())
    matrices = [p for p in blocks if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    muon = torch.optim.Muon(matrices, lr=args.muon_lr, weight_decay=0.05, momentum=0.95)
    adam = torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adam]


def rate_at(progress: float) -> float:
    """Return the learning-rate factor at a fraction of the time: a rise, level, a linear fall."""
    return max(0.0, min(1.0, progress / 0.02, (1.0 - progress) / 0.65))


def train(
    model: LlamaForCausalLM, stream: Iterator[torch.Tensor], args: argparse.Namespace
) -> dict[str, float]:
    """Train until the time is up; return the number of steps and the recent training loss."""
    optimizers = make_optimizers(model, args)
    base = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    forward = torch.compile(model, dynamic=False) if args.compile else model
    short, full = args.sequence // 2, args.sequence  # short rows cost less per token
    for length in (short, full):  # compiles outside the measured time
        batch_loss(forward, next(stream), length).backward()
    model.zero_grad()
    begin = saved = time.monotonic()
    steps = 0
    recent: list[float] = []
    while (progress := (time.monotonic() - begin) / (60 * args.minutes)) < 1:
        for optimizer, lr in zip(optimizers, base, strict=True):
            optimizer.param_groups[0]["lr"] = lr * rate_at(progress)
        length = short if progress <= SHORT_FRACTION else full
        loss = batch_loss(forward, next(stream), length)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        steps, recent = steps + 1, [*recent, loss.item()][-50:]
        if steps % 25 == 0:
            pace = steps * args.batch * args.sequence / (time.monotonic() - begin)
            mean = sum(recent) / len(recent)
            print(f"{progress:6.1%} step {steps} loss {mean:.3f} {pace:.0f} tok/s", flush=True)
        if time.monotonic() - saved > 180:
            saved = time.monotonic()
            model.save_pretrained(args.checkpoints)
    return {"steps": steps, "train_loss": sum(recent) / len(recent)}


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the Hugging Face directory, with the weights in bfloat16."""
    model.to(torch.bfloat16).save_pretrained(out)
    defaults = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
    GenerationConfig(**SPECIAL_IDS, **defaults).save_pretrained(out)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=EOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(out, save_jinja_files=False)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    scripts = Path(__file__).resolve().parents[2] / "scripts"
    scratch = Path(tempfile.gettempdir()) / "troika-demo-model"
    parser.add_argument("--out", type=Path, default=scripts / "demo_model")
    parser.add_argument("--checkpoints", type=Path, default=scratch, help="kept every 3 minutes")
    parser.add_argument("--minutes", type=float, default=27.0, help="wall-clock training budget")
    for name, default in (
        ("vocab", 4096), ("hidden", 256), ("layers", 6), ("heads", 8), ("kv-heads", 4),
        ("intermediate", 704), ("sequence", 512), ("batch", 8), ("seed", 1234),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    texts, held_texts = read_corpus(Path(sysconfig.get_paths()["stdlib"]))
    tokenizer = train_tokenizer(texts, args.vocab)
    train_ids, held_ids = encode(tokenizer, texts), encode(tokenizer, held_texts)
    model = build_model(args)
    held_bytes = sum(len(text.encode()) for text in held_texts)
    report: dict[str, float] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "files": len(texts),
        "held_out_files": len(held_texts),
        "bytes": sum(len(text.encode()) for text in texts),
        "held_out_bytes": held_bytes,
        "corpus_tokens": len(train_ids),
        "held_out_tokens": len(held_ids),
    }
    print(json.dumps(report), flush=True)
    stream = batches(train_ids, TokenSplitter(tokenizer, SPLIT_RATE), args)
    report |= train(model, stream, args)
    save(model, tokenizer, args.out)
    saved = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.bfloat16)
    report["held_out_loss"] = loss = evaluate(saved, held_ids, args.sequence)
    report["bits_per_byte"] = loss / math.log(2) * len(held_ids) / held_bytes
    print(json.dumps(report, indent=1), flush=True)


if __name__ == "__main__":
    main()
