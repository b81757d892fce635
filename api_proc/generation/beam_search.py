"""Body fields that request beam search, and those that cannot be combined with it."""

from typing import Annotated, Any, Protocol

from msgspec import Meta

from api_proc.errors import invalid
from api_proc.text.beam_search import MAX_BEAM_WIDTH, BeamSearchOptions, max_beam_width

LengthPenalty = Annotated[float, Meta(ge=-10.0, le=10.0)]

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "temperature": (0.0, 1.0),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": ({},),
    "stop": ([],),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logprob_token_ids": ([],),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
}
"""Fields that beam search does not support, with the values that have no effect."""


class Searched(Protocol):
    """The body fields that are read here."""

    n: int | None
    best_of: int | None
    use_beam_search: bool | None
    length_penalty: float | None
    early_stopping: bool | None
    ignore_eos: bool | None
    stop_token_ids: list[int] | None

    @property
    def num_logprobs(self) -> int | None: ...

    @property
    def num_prompt_logprobs(self) -> int | None: ...


def check_beam_search(body: Searched) -> None:
    """Reject fields that need beam search, or that cannot be combined with it."""
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1.0):
            raise invalid("length_penalty", "needs use_beam_search")
        if body.early_stopping:
            raise invalid("early_stopping", "needs use_beam_search")
        return
    num_beams = body.n or 1
    if num_beams > MAX_BEAM_WIDTH:
        raise invalid("n", f"is {num_beams} beams, more than {MAX_BEAM_WIDTH}")
    if (body.best_of or num_beams) != num_beams:
        raise invalid("best_of", "must be equal to n with use_beam_search")
    for name, neutral in _NEUTRAL.items():
        if getattr(body, name) not in (None, *neutral):
            raise invalid(name, "cannot be combined with use_beam_search")
    if body.num_prompt_logprobs is not None:
        raise invalid("echo", "with logprobs cannot be combined with use_beam_search")


def search_options(
    body: Searched, max_tokens: int, eos_token_ids: list[int], suppressed_token_ids: list[int]
) -> BeamSearchOptions:
    """Return the options of a checked body; ApiError: the checkpoint permits fewer beams."""
    own = frozenset(body.stop_token_ids or ())
    suppressed = frozenset(suppressed_token_ids)
    if (reason := too_many_beams(body.n or 1, len(suppressed))) is not None:
        raise invalid("n", reason)
    return BeamSearchOptions(
        beam_width=body.n or 1,
        max_tokens=max_tokens,
        eos_token_ids=frozenset() if body.ignore_eos else frozenset(eos_token_ids) - own,
        stop_token_ids=own,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=bool(body.early_stopping),
        num_logprobs=body.num_logprobs or 0,
        suppressed_token_ids=suppressed,
    )


def too_many_beams(num_beams: int, num_suppressed: int) -> str | None:
    """Return why a checkpoint that suppresses tokens excludes this number of beams, or None."""
    limit = max_beam_width(num_suppressed)
    if num_beams <= limit:
        return None
    if limit < 1:
        return f"beam search is not possible: the checkpoint suppresses {num_suppressed} tokens"
    return (
        f"is {num_beams} beams, more than {limit} for a checkpoint that suppresses "
        f"{num_suppressed} tokens"
    )
