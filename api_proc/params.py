"""From a request body to resolved sampling parameters."""

from bisect import bisect_right

from api_proc.bodies import SamplingBody
from api_proc.checkpoint import SamplingDefaults
from api_proc.errors import ApiError, invalid
from protocol.api_core import ErrorCode
from protocol.core_worker import ModelFacts
from protocol.sampling import SamplingParams

_SEED_RANGE = 2**64


def sampling_params(
    body: SamplingBody,
    defaults: SamplingDefaults,
    *,
    max_tokens: int,
    seed: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Fill in what the body leaves out; the bounds were checked when it was decoded."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(body.temperature, defaults.temperature),
        top_p=_or(body.top_p, defaults.top_p),
        top_k=int(_or(body.top_k, defaults.top_k)),
        min_p=_or(body.min_p, defaults.min_p),
        seed=seed,
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=body.stop_token_ids or [],
        logit_bias=body.logit_bias or {},
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def nth_seed(seed: int, i: int) -> int:
    """The seed of the i-th of several sequences: consecutive, wrapping around at 64 bits."""
    return (seed + i + 2**63) % _SEED_RANGE - 2**63


def room_for_output(facts: ModelFacts, num_prompt_tokens: int) -> int:
    """Tokens that can follow a prompt: what is left of the context, or of the whole KV cache."""
    lengths = range(1, facts.max_model_len)
    num_slots = bisect_right(lengths, facts.num_gpu_blocks - 1, key=facts.num_blocks_for)
    return num_slots + 1 - num_prompt_tokens  # the last token needs no slot


def resolve_max_tokens(
    asked: int | None, default: int | None, facts: ModelFacts, num_prompt_tokens: int, param: str
) -> int:
    """Return how many tokens may be generated.

    Args:
        asked: what the body says.
        default: where it says nothing; None: all that fits.
        param: the field that `asked` is from.

    Raises:
        ApiError: 400 where prompt and output together are longer than the context.
    """
    if asked is None:
        room = max(1, room_for_output(facts, num_prompt_tokens))
        return room if default is None else min(default, room)
    if num_prompt_tokens + asked > facts.max_model_len:
        raise _over_context(asked, facts, num_prompt_tokens, param)
    return asked


def tokens_to_keep(body: SamplingBody, max_tokens: int | None, facts: ModelFacts) -> int | None:
    """To how many tokens `truncate_prompt_tokens` cuts a prompt; None: it is not cut.

    -1 stands for what leaves room for the output.
    """
    if body.truncate_prompt_tokens != -1:
        return body.truncate_prompt_tokens
    return max(1, facts.max_model_len - (max_tokens or 1))


def _over_context(asked: int, facts: ModelFacts, num_prompt_tokens: int, param: str) -> ApiError:
    total = num_prompt_tokens + asked
    return invalid(
        param,
        f"the model's context is {facts.max_model_len} tokens, but {total} were requested: "
        f"{num_prompt_tokens} in the prompt and {asked} for the output",
        ErrorCode.TOO_LONG,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
