"""Measures what adapters cost: `python -m tests.tools.lora_throughput [--model DIRECTORY]`.

A batch of 32 requests decodes in one process, in turn without adapters and with 8, each of which
has 4 of the requests. The adapters are random, and change all projections. Beside other programs,
compare the share of processor time, not that of wall time.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM, LlamaConfig

from protocol.adapters import Adapter, read_adapter
from protocol.config.settings import configure
from protocol.sampling import SamplingParams
from scripts.inprocess import InprocEngine
from tests.worker.adapters.peft_adapters import write_adapter
from tests.worker.checkpoints import build_checkpoint
from worker_proc.native.build import build

NUM_REQUESTS, NUM_ADAPTERS, NUM_PROMPT_TOKENS = 32, 8, 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHAPES: dict[str, dict[str, Any]] = {
    "100M": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 8192,
    },
    "600M": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32_000,
    },
}


class Rate(NamedTuple):
    """Tokens of all requests together."""

    per_second: float
    per_processor_second: float
    """Of all threads."""


def rate(engine: InprocEngine, adapters: list[Adapter | None], num_tokens: int) -> Rate:
    """Measure the tokens of all requests, from the second step on."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    for number in range(NUM_REQUESTS):
        prompt = [1 + (7 * number + i) % 250 for i in range(NUM_PROMPT_TOKENS)]
        engine.submit(prompt, params, adapter=adapters[number % len(adapters)], cache_salt="x")
    count, began, began_cpu = 0, 0.0, 0.0
    while engine.has_unfinished:
        outputs = engine.step()
        num_new = sum(len(output.token_ids) for output in outputs)
        if began:
            count += num_new
        elif num_new == NUM_REQUESTS:
            began, began_cpu = time.perf_counter(), time.process_time()
    engine.reset_prefix_cache()
    seconds, processor_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    return Rate(count / seconds, count / processor_seconds)


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a checkpoint, instead of a random one")
    parser.add_argument("--shape", choices=SHAPES, default="100M")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--native-decoder", default="auto")
    options = parser.parse_args()
    build()
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.model or f"{scratch}/model"
        if options.model:
            model = AutoModelForCausalLM.from_pretrained(directory)
        else:
            config = LlamaConfig(**SHAPES[options.shape], max_position_embeddings=512)
            model = build_checkpoint(Path(directory), config)
        adapters: list[Adapter | None] = []
        for number in range(NUM_ADAPTERS):
            path = Path(f"{scratch}/adapter{number}")
            write_adapter(path, model, TARGETS, rank=options.rank, seed=number, strength=0.1)
            adapters.append(read_adapter(path.name, str(path))[0])
        del model
        engine = InprocEngine(
            configure(
                model=directory,
                dtype=options.dtype,
                quantization=options.quantization,
                device="cpu",
                enable_lora=True,
                max_loras=NUM_ADAPTERS,
                max_lora_rank=options.rank,
                native_decoder=options.native_decoder,
            )
        )
        rates: dict[str, list[Rate]] = {"without": [], "with": []}
        for _ in range(options.rounds):
            rates["without"].append(rate(engine, [None], options.tokens))
            rates["with"].append(rate(engine, adapters, options.tokens))
    print(f"decoder {engine.facts.decoder}, {engine.facts.dtype}, rank {options.rank}")
    for field in Rate._fields:
        without, adapted = (
            statistics.median(getattr(one, field) for one in rates[name]) for name in rates
        )
        print(
            f"tokens {field.replace('_', ' ')}: without adapters {without:.1f}, with"
            f" {NUM_ADAPTERS} {adapted:.1f}, share {adapted / without:.3f}"
        )


if __name__ == "__main__":
    main()
