"""Resolves a request body to sampling parameters."""

from bisect import bisect_right

from api_proc.bodies import SamplingBody
from api_proc.errors import invalid
from api_proc.text.checkpoint import SamplingDefaults
from api_proc.text.tokenizer import EncodeOptions, TextTokenizer, TooManyTokens
from protocol.api_core import ErrorCode
from protocol.model_facts import ModelFacts
from protocol.sampling import MAX_LOGPROBS, Grammar, SamplingParams, ThinkingBudget

MAX_WORD_TOKENS = 1024
"""Maximum number of tokens of a bad word."""
MAX_BAD_TOKENS = 4096
"""Maximum number of tokens in all bad words of a request. Each of up to 128 sequences has its own
list in the API, the core and the worker, in which a token takes 36 bytes."""


def sampling_params(
    body: SamplingBody,
    defaults: SamplingDefaults,
    *,
    max_tokens: int,
    seed: int,
    vocab_size: int,
    bad_words: list[list[int]] | None = None,
    grammar: Grammar | None = None,
    thinking_budget: ThinkingBudget | None = None,
) -> SamplingParams:
    """Fill in the fields that the body leaves out; decoding has checked the bounds.

    `bad_words` are those of the body as token ids.
    """
    suppressed = defaults.suppressed(vocab_size, body.allowed_token_ids)
    num_logprobs = body.num_logprobs
    if num_logprobs is None and body.num_sequences > (body.n or 1):
        num_logprobs = 0  # the best ones are found by them
    detection = body.repetition_detection
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
        logprobs=None if num_logprobs is None else min(num_logprobs, MAX_LOGPROBS),
        prompt_logprobs=body.num_prompt_logprobs,
        allowed_token_ids=body.allowed_token_ids,
        bad_words=[*(bad_words or []), *as_bad_words(suppressed)],
        logprob_token_ids=body.logprob_token_ids or [],
        grammar=grammar,
        repetition_detection=None if detection is None else detection.resolved(),
        thinking_budget=thinking_budget,
        return_progress=bool(body.return_progress),
    )


def bad_word_ids(words: list[str], tokenizer: TextTokenizer) -> list[list[int]]:
    """Return the token sequences that spell these words, at the start of a text and after a space.

    A sequence that ends in another one needs no separate entry. ApiError: a word has more than
    `MAX_WORD_TOKENS`, or all of them have more than `MAX_BAD_TOKENS`.
    """
    options = EncodeOptions(add_special_tokens=False, max_tokens=MAX_WORD_TOKENS)
    sequences: list[list[int]] = []
    num_tokens = 0
    for word in words:
        try:
            plain, spaced = (tokenizer.encode(each + word.lstrip(), options) for each in ("", " "))
        except TooManyTokens as error:
            message = f"have a word of {error.num_tokens} tokens, more than {MAX_WORD_TOKENS}"
            raise invalid("bad_words", message) from error
        found = [plain] if spaced[-len(plain) :] == plain else [plain, spaced]
        num_tokens += sum(map(len, found))
        if num_tokens > MAX_BAD_TOKENS:
            message = (
                f"have more than {MAX_BAD_TOKENS} tokens, of the words and of those after a space"
            )
            raise invalid("bad_words", message)
        sequences += found
    return [sequence for sequence in sequences if sequence]


def as_bad_words(token_ids: list[int]) -> list[list[int]]:
    """Return the bad words that ban these tokens."""
    return [[token_id] for token_id in token_ids]


def nth_seed(seed: int, i: int) -> int:
    """Return the seed of the i-th sequence: consecutive, wrapping around at 64 bits."""
    return (seed + i + 2**63) % 2**64 - 2**63


def room_for_output(facts: ModelFacts, num_prompt_tokens: int) -> int:
    """Return how many tokens fit after a prompt, in the context and in the whole KV cache."""
    lengths = range(1, facts.max_model_len)
    num_slots = bisect_right(lengths, facts.num_gpu_blocks - 1, key=facts.num_blocks_for)
    return num_slots + 1 - num_prompt_tokens  # the last token needs no slot


def resolve_max_tokens(
    body: SamplingBody, defaults: SamplingDefaults, facts: ModelFacts, num_prompt_tokens: int
) -> int:
    """Return the bound on output tokens.

    By default it is the route's own, that of the checkpoint or the settings, or all that fit.
    """
    param, asked = body.output_limit
    if asked is None:
        room = defaults.bounded(max(1, room_for_output(facts, num_prompt_tokens)))
        default = body.default_max_tokens or defaults.max_new_tokens
        return room if default is None else min(default, room)
    total = num_prompt_tokens + asked
    if total > facts.max_model_len:
        message = (
            f"the model's context is {facts.max_model_len} tokens, but {total} were requested: "
            f"{num_prompt_tokens} in the prompt and {asked} for the output"
        )
        raise invalid(param, message, ErrorCode.TOO_LONG)
    # The engine samples a token where only the prompt is asked for.
    return defaults.bounded(max(1, asked))


def truncated_length(body: SamplingBody, facts: ModelFacts) -> int | None:
    """Return the length to which a prompt is cut, if at all; -1 leaves just room for the output."""
    if body.truncate_prompt_tokens != -1:
        return body.truncate_prompt_tokens
    return max(1, facts.max_model_len - (body.output_limit[1] or 1))


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
