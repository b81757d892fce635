"""Results, shaped as those of vLLM."""

from dataclasses import dataclass

from api_proc.openai.logprobs import token_text
from api_proc.text.tokenizer import TextTokenizer
from protocol.core_worker import TokenLogprobs


@dataclass
class Logprob:
    """The log-probability of one candidate."""

    logprob: float
    rank: int | None = None
    """Rank of the token in the whole vocabulary, from 1."""
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One of the `n` sequences of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    """Sum over the tokens; None without logprobs."""
    logprobs: list[dict[int, Logprob]] | None
    """For each token, the log-probabilities of the token itself and of the candidates."""
    finish_reason: str | None = None
    """stop, length, repetition or abort; None while it is generated."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for the end-of-sequence token."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The state of one request, or its end."""

    request_id: str
    prompt: str | None
    """None for a prompt of token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """The same for each prompt token; None for the first one, which has no log-probability."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    """Prompt tokens that the prefix cache held."""


@dataclass
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: list[float]


@dataclass
class EmbeddingRequestOutput:
    """The result of one prompt of `LLM.embed`."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass
class ScoringOutput:
    """How well two texts belong together."""

    score: float


@dataclass
class ScoringRequestOutput:
    """The result of one pair of `LLM.score`."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass
class ClassificationOutput:
    """The probability of each label."""

    probs: list[float]


@dataclass
class ClassificationRequestOutput:
    """The result of one prompt of `LLM.classify`."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass
class PoolingOutput:
    """The vector or the probabilities of one prompt."""

    data: list[float]


@dataclass
class PoolingRequestOutput:
    """The result of one prompt of `LLM.encode`."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool = True


def candidates(tokenizer: TextTokenizer, entry: TokenLogprobs) -> dict[int, Logprob]:
    """Return the candidates at one position; the token itself comes first."""
    ids = [entry.token_id, *entry.top_ids]
    values = [entry.logprob, *entry.top_logprobs]
    ranks = [entry.rank, *range(1, len(entry.top_ids) + 1)]
    return {
        token_id: Logprob(value, rank, token_text(tokenizer, token_id))
        for token_id, value, rank in zip(ids, values, ranks, strict=True)
    }
