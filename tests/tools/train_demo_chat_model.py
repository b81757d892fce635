"""Train the demo-chat model: a small Llama that chats and calls tools, in scripts/demo_chat_model/.

It starts from the demo model, which has learnt to copy names in Python code, and continues with
synthetic conversations (tests/tools/demo_chat): templates with random values, drawn anew all the
time and never stored. They are rendered by the chat template of the checkpoint, and only what the
assistant writes is learnt.

    python -m tests.tools.train_demo_chat_model --minutes 35
    python -m tests.tools.train_demo_chat_model --measure

The budget is wall-clock time: the learning rate follows the elapsed fraction of `--minutes` and
decays to zero, so that a slower machine gives a weaker model and never an unfinished one. The seed
fixes the order of the data; the number of steps is the machine's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from api_proc.text.chat_template import ChatTemplate
from tests.tools.demo_chat.conversations import (
    Conversation,
    answer_conversation,
    call_conversation,
    chat_conversation,
    conversation,
)
from tests.tools.demo_chat.samples import (
    END,
    EOS,
    START,
    Sample,
    SampleMaker,
    chat_tokenizer,
)
from tests.tools.demo_chat.values import Values
from tests.tools.train_demo_model import make_optimizers, rate_at

DIRECTORY = Path(__file__).resolve().parents[2] / "scripts" / "demo_chat_model"
BASE = DIRECTORY.with_name("demo_model")
EOS_ID = 0
# By progress: longest conversation, share of texts to repeat, share of long conversations.
PHASES = ((0.4, 320, 0.02, 0.0), (0.8, 512, 0.02, 0.05), (1.0, 1024, 0.02, 0.15))
_IGNORED = -100
_POOL = 256
"""Conversations that are sorted by length to make batches with little padding."""


def batches(
    maker: SampleMaker, args: argparse.Namespace, progress: Callable[[], float]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield inputs and labels of about `args.batch_tokens` tokens for ever."""
    random = Random(args.seed)
    values = Values(random, is_held_out=False)
    while True:
        _, max_tokens, repeat_rate, long_rate = next(
            p for p in PHASES if progress() <= p[0] or p[0] == 1
        )
        drawn = (
            maker.sample(conversation(values, repeat_rate=repeat_rate, long_rate=long_rate))
            for _ in range(_POOL)
        )
        pool = sorted((s for s in drawn if len(s.ids) <= max_tokens), key=lambda s: len(s.ids))
        groups: list[list[Sample]] = [[]]
        for sample in pool:
            if (len(groups[-1]) + 1) * len(sample.ids) > args.batch_tokens:
                groups.append([])
            groups[-1].append(sample)
        if len(groups) > 1 and len(groups[-1]) * len(groups[-1][-1].ids) < args.batch_tokens / 2:
            groups.pop()
        random.shuffle(groups)
        for group in groups:
            yield padded(group)


def padded(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and the labels of some samples, filled up at the right."""
    length = max(len(sample.ids) for sample in samples)
    length = -(-length // 16) * 16
    inputs = torch.full((len(samples), length), EOS_ID)
    labels = torch.full((len(samples), length), _IGNORED)
    for row, sample in enumerate(samples):
        ids = torch.tensor(sample.ids)
        inputs[row, : len(ids)] = ids
        learnt = torch.where(torch.tensor(sample.is_learnt), ids, _IGNORED)
        labels[row, : len(ids) - 1] = learnt[1:]
    return inputs, labels


def build_model(tokenizer: Tokenizer, start: Path) -> LlamaForCausalLM:
    """Load the base model, and give each new token the mean of the tokens that spelled it."""
    base = Tokenizer.from_file(str(start / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    num_old, num_new = base.get_vocab_size(), tokenizer.get_vocab_size()
    model.resize_token_embeddings(num_new, mean_resizing=False)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        for token_id in range(num_old, num_new):
            spelled = base.encode(tokenizer.id_to_token(token_id)).ids
            embedding[token_id] = embedding[spelled].mean(0)
    ids = {"bos_token_id": tokenizer.token_to_id(START), "eos_token_id": tokenizer.token_to_id(END)}
    model.config.update(ids | {"pad_token_id": EOS_ID})
    return model


def learnt_logits(
    model: LlamaForCausalLM, forward: Callable[..., Any], inputs: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and labels of the positions that are learnt."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = forward(input_ids=inputs, use_cache=False).last_hidden_state
        is_learnt = labels != _IGNORED
        logits = functional.linear(hidden[is_learnt], model.lm_head.weight)
    return logits.float(), labels[is_learnt]


def train(
    model: LlamaForCausalLM, maker: SampleMaker, tokenizer: Tokenizer, args: argparse.Namespace
) -> dict[str, float]:
    """Train until the time is up; return the number of steps and the recent training loss."""
    optimizers = make_optimizers(model, args)
    base = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    forward = torch.compile(model.model, dynamic=True) if args.compile else model.model
    begin = saved = time.monotonic()

    def progress() -> float:
        return (time.monotonic() - begin) / (60 * args.minutes)

    steps = num_tokens = num_learnt = 0
    recent: list[float] = []
    stream = batches(maker, args, progress)
    while progress() < 1:
        for optimizer, lr in zip(optimizers, base, strict=True):
            optimizer.param_groups[0]["lr"] = lr * rate_at(progress())
        inputs, labels = next(stream)
        logits, targets = learnt_logits(model, forward, inputs, labels)
        loss = functional.cross_entropy(logits, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        steps, recent = steps + 1, [*recent, loss.item()][-20:]
        num_tokens, num_learnt = num_tokens + inputs.numel(), num_learnt + len(targets)
        if steps % 5 == 0:
            pace = num_tokens / (time.monotonic() - begin)
            mean = sum(recent) / len(recent)
            print(f"{progress():6.1%} step {steps} loss {mean:.3f} {pace:.0f} tok/s", flush=True)
        if time.monotonic() - saved > 60 * args.checkpoint_minutes:
            saved = time.monotonic()
            save(model, tokenizer, args.checkpoints)
    mean = sum(recent) / len(recent)
    return {"steps": steps, "tokens": num_tokens, "learnt": num_learnt, "train_loss": mean}


KINDS: dict[str, Callable[[Values], Conversation]] = {
    "calls of everyday tools, thinking": partial(
        call_conversation, is_open=False, is_thinking=True
    ),
    "calls of everyday tools, not thinking": partial(
        call_conversation, is_open=False, is_thinking=False
    ),
    "calls of invented tools, thinking": partial(call_conversation, is_open=True, is_thinking=True),
    "calls of invented tools, not thinking": partial(
        call_conversation, is_open=True, is_thinking=False
    ),
    "answers to results": answer_conversation,
    "chats without tools": chat_conversation,
}


def samples(maker: SampleMaker, count: int, draw: Callable[[Values], Conversation]) -> list[Sample]:
    """Draw conversations with values that training never has; only their end is to be learnt."""
    values = Values(Random(99), is_held_out=True)
    return [_only_end(maker.sample(draw(values))) for _ in range(count)]


def _only_end(sample: Sample) -> Sample:
    num_learnt = sample.is_learnt[::-1].index(False)
    num_given = len(sample.ids) - num_learnt
    return Sample(sample.ids, [False] * num_given + [True] * num_learnt)


@torch.no_grad()
def exact(model: LlamaForCausalLM, wanted: list[Sample]) -> float:
    """Return the share of samples whose greedy answer is right in every token.

    Greedy decoding gives exactly the wanted tokens if each is the most likely one after those
    before it, so that one forward pass measures it.
    """
    num_exact = 0
    ordered = sorted(wanted, key=lambda sample: len(sample.ids))
    for start in range(0, len(ordered), 8):
        inputs, labels = padded(ordered[start : start + 8])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits
        is_right = (logits.argmax(-1) == labels) | (labels == _IGNORED)
        num_exact += int(is_right.all(1).sum())
    return num_exact / len(wanted)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the Hugging Face directory, with the weights in bfloat16."""
    weights = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    half = LlamaForCausalLM(model.config).to(torch.bfloat16)
    half.load_state_dict(weights)
    half.save_pretrained(out)
    defaults = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
    end = tokenizer.token_to_id(END)
    ids = {"bos_token_id": tokenizer.token_to_id(START), "eos_token_id": [end, EOS_ID]}
    GenerationConfig(**ids, pad_token_id=EOS_ID, **defaults).save_pretrained(out)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=EOS,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        chat_template=(DIRECTORY / "chat_template.jinja").read_text(encoding="utf-8"),
    ).save_pretrained(out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    scratch = Path(tempfile.gettempdir()) / "troika-demo-chat-model"
    parser.add_argument("--out", type=Path, default=DIRECTORY)
    parser.add_argument("--start", type=Path, default=BASE, help="base model, or a checkpoint")
    parser.add_argument("--checkpoints", type=Path, default=scratch)
    parser.add_argument("--checkpoint-minutes", type=float, default=6.0)
    parser.add_argument("--minutes", type=float, default=35.0, help="wall-clock training budget")
    parser.add_argument("--measure", action="store_true", help="only measure what is in --out")
    parser.add_argument("--samples", type=int, default=400, help="measured of each kind")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    return parser.parse_args()


def measure(out: Path, template: ChatTemplate, count: int) -> dict[str, float]:
    """Return the accuracy of calls by kind of tool, of the weights as saved."""
    maker = SampleMaker(template, Tokenizer.from_file(str(out / "tokenizer.json")))
    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    return {name: exact(model, samples(maker, count, draw)) for name, draw in KINDS.items()}


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    template = ChatTemplate((DIRECTORY / "chat_template.jinja").read_text(encoding="utf-8"), {})
    if not args.measure:
        tokenizer = chat_tokenizer(BASE / "tokenizer.json")
        model = build_model(tokenizer, args.start)
        print(sum(p.numel() for p in model.parameters()), "parameters", flush=True)
        print(json.dumps(train(model, SampleMaker(template, tokenizer), tokenizer, args), indent=1))
        save(model, tokenizer, args.out)
    print(json.dumps(measure(args.out, template, args.samples), indent=1), flush=True)


if __name__ == "__main__":
    main()
