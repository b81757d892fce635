"""The findings of a worker's start, as lines for the terminal."""

from collections.abc import Iterator

from protocol.model_facts import UNLIMITED_BLOCKS, ModelFacts
from worker_proc.native.build import compiler, why_cache_is_unusable
from worker_proc.runner import PORTABLE_ATTENTION

DECODERS = {
    "native": "native decoder",
    "triton": "Triton kernels",
    "modules": "modules of transformers",
}


def announcement(facts: ModelFacts, attention: str) -> Iterator[str]:
    """Yield lines about context length, KV capacity, the attention path, and optional features."""
    longest = facts.max_model_len
    num_needed = facts.num_blocks_for(longest - 1)
    if facts.num_gpu_blocks == UNLIMITED_BLOCKS:
        yield f"context {longest:,} tokens; no KV cache in this stage"
    elif facts.computes_whole_prompts or not num_needed:
        yield f"context {longest:,} tokens; no KV cache"
    else:
        concurrency = (facts.num_gpu_blocks - 1) / num_needed
        yield (
            f"context {longest:,} tokens; KV cache {int(concurrency * longest):,} tokens"
            f" ({concurrency:.1f} requests of full length)"
        )
    if facts.num_state_blocks:
        yield f"recurrent states: {facts.num_state_blocks - 1:,} requests and prefixes"
    if not attention:
        yield "null model: it computes nothing, and its text is made of numbers"
        return
    types = " with weights ".join(filter(None, (facts.dtype, facts.quantization)))
    if facts.kv_cache_dtype:
        types += f"{' and' if facts.quantization else ' with'} KV {facts.kv_cache_dtype}"
    where = " on the ".join(filter(None, (types, facts.device.upper())))
    yield f"layers: {DECODERS[facts.decoder]}; attention: {attention}, {where}"
    if facts.speculation:
        yield f"speculation: {facts.speculation}"
    if (reason := why_portable(facts, attention)) is not None:
        yield reason
    elif not facts.exact_resume:
        yield f"an interrupted request may continue with other tokens: {facts.exact_resume_reason}"


def why_portable(facts: ModelFacts, attention: str) -> str | None:
    """Return why attention has no compiled kernels, and what this costs; None if it has them."""
    if facts.device != "cpu" or attention != PORTABLE_ATTENTION:
        return None
    cost = (
        "attention is slower, and an interrupted request may continue with other tokens"
        " (docs/first_hour.md)"
    )
    if compiler() is None:
        return f"no C++ compiler: {cost}; install g++ and start again"
    if reason := why_cache_is_unusable():
        return (
            f"the native kernels cannot be stored ({reason}): {cost};"
            " set XDG_CACHE_HOME to a directory that this user can write to"
        )
    return (
        f"the native kernels are not in use: {cost}; the next start uses them if they are compiled"
    )
