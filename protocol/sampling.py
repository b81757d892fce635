"""Sampling parameters, finish reasons, and every bound on them, written once.

The API builds its request bodies from the same annotated types, and the core decodes
`SamplingParams` from the wire with the same bounds, so both refuse the same values.
"""

import enum
from typing import Annotated

from msgspec import Meta

from protocol.message import Record, TokenId

MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 20

Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
TopK = Annotated[int, Meta(ge=-1, lt=2**31)]
MinP = Annotated[float, Meta(ge=0.0, le=1.0)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
RepetitionPenalty = Annotated[float, Meta(gt=0.0, le=10.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
LogitBias = Annotated[dict[TokenId, Bias], Meta(max_length=1024)]
MaxTokens = Annotated[int, Meta(ge=1, lt=2**31)]
MinTokens = Annotated[int, Meta(ge=0, lt=2**31)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=128)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
StopStrings = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
NumSequences = Annotated[int, Meta(ge=1, le=128)]
Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
AllowedTokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=4096)]
LogprobTokenIds = Annotated[list[TokenId], Meta(max_length=128)]
BadWord = Annotated[str, Meta(min_length=1, max_length=256)]
BadWords = Annotated[list[BadWord], Meta(max_length=128)]
SuppressedTokens = Annotated[list[TokenId], Meta(max_length=64)]
BadWordIds = Annotated[
    list[Annotated[list[TokenId], Meta(min_length=1, max_length=1024)]], Meta(max_length=320)
]
"""Two for each of `BadWords`, and one for each of `SuppressedTokens`."""
CacheSalt = Annotated[str, Meta(max_length=256)]

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_PATTERN_TOKENS = 64
MAX_REPEATED_TOKENS = 1024
"""Bound on a pattern's size times its count: the tokens that the core compares at each step."""
MAX_MARKER_TOKENS = 64
MAX_SPACE_TOKENS = 1024
MAX_EMBEDDING_SIZE = 2**14
"""Numbers in a vector: a step may return 128 of them in half a frame."""

GREEDY_TEMPERATURE = 1e-5
"""Below this temperature the sampler takes the most likely token."""


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"
    """The output has ended in a repeated pattern; see `RepetitionDetection`."""


class GrammarKind(enum.StrEnum):
    """The language in which a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    """llguidance's dialect of Lark; other kinds of constraint are translated to it."""
    EBNF = "ebnf"
    """Lark, or GBNF as llama.cpp has it; the worker finds out which."""


JSON_WHITESPACE = r"[ \t\n\r]{1,40}"
"""Between the tokens of JSON. Without a bound a model can write spaces until its last token; the
schema's key `x-guidance` may set another pattern."""


CONTENT_RULE = "troika_content"
"""In a grammar of the kind LARK: the rule for what the request itself confines, where reasoning or
calls may precede it. The worker compiles this rule alone as well: a fault in it would otherwise
end the request only when its output reaches the content. Clients name rules in their own grammars,
so the name is one that these do not have."""


class Grammar(Record):
    """A language to which the whole output is confined; the worker compiles it."""

    kind: GrammarKind
    source: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


class RepetitionDetection(Record):
    """Ends an output whose last tokens are the same pattern, `min_count` times."""

    max_pattern_size: Annotated[int, Meta(ge=1, le=MAX_PATTERN_TOKENS)]
    min_pattern_size: Annotated[int, Meta(ge=1, le=MAX_PATTERN_TOKENS)]
    min_count: Annotated[int, Meta(ge=2, le=1000)]


class ThinkingBudget(Record):
    """The bound on reasoning: after `max_tokens` tokens its end marker is forced.

    It counts from the output's first token on, or after a begin marker with which the output
    begins, after any tokens of white space. An output that begins otherwise has no reasoning.
    """

    max_tokens: Annotated[int, Meta(ge=0, lt=2**31)]
    begin_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_MARKER_TOKENS)]
    """Empty if the prompt ends within reasoning."""
    end_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_MARKER_TOKENS)]
    call_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_MARKER_TOKENS)] = []
    """Tokens that begin a tool call, and so end reasoning too."""
    space_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_SPACE_TOKENS)] = []
    """Tokens that may precede the begin marker: they are white space and nothing else."""


class PoolingType(enum.StrEnum):
    """Which hidden states of the last layer become the vector of a prompt."""

    LAST = "last"
    """That of the last token, which has attended to all others."""
    MEAN = "mean"
    """The mean over all tokens."""
    CLS = "cls"
    """That of the first token."""
    WEIGHTED_MEAN = "weighted_mean"
    """The mean over all tokens, in which the token at position p weighs p + 1."""
    MAX = "max"
    """The greatest value of each number over all tokens."""
    MEAN_SQRT_LEN = "mean_sqrt_len"
    """The sum over all tokens, divided by the square root of their number."""


class Pooling(Record):
    """How a prompt becomes one vector."""

    type: PoolingType = PoolingType.LAST
    dimensions: Annotated[int, Meta(ge=1, le=MAX_EMBEDDING_SIZE)] | None = None
    """How many numbers are kept, from the first on, before the vector is normalized; None: all."""
    normalize: bool = True
    """Whether the vector is scaled to length 1."""
    second_text_start: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Position from which on the tokens of a pair of texts have the type 1; 0: all have type 0."""


class SamplingParams(Record):
    """How the tokens of one request are chosen, with every value resolved.

    `seed` is explicit (the process that accepts the request draws one if the user gave none), so
    that a request sent again continues with the same tokens. Stop strings are handled in the API.
    """

    max_tokens: MaxTokens = 16
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    """0 or -1: off."""
    min_p: MinP = 0.0
    seed: Seed = 0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    min_tokens: MinTokens = 0
    ignore_eos: bool = False
    stop_token_ids: StopTokenIds = []
    logit_bias: LogitBias = {}
    logprobs: NumLogprobs | None = None
    """Top logprobs per output token besides the sampled one's; None: no logprobs at all."""
    prompt_logprobs: NumLogprobs | None = None
    """Top logprobs per prompt token; None: none. Such a request computes its whole prompt, and
    reads no cached KV."""
    grammar: Grammar | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    """The only tokens that may be sampled."""
    bad_words: BadWordIds = []
    """Sequences of tokens that the output never contains: their last tokens are banned."""
    logprob_token_ids: LogprobTokenIds = []
    """Where `logprobs` is set: the candidates to describe, instead of the most likely ones."""
    pooling: Pooling | None = None
    """The request returns a vector and no tokens; `max_tokens` is 1. See `pooling_params`."""
    repetition_detection: RepetitionDetection | None = None
    thinking_budget: ThinkingBudget | None = None
    return_progress: bool = False
    """Outputs without tokens report how much of the prompt is computed."""

    @property
    def computes_whole_prompt(self) -> bool:
        """Whether every prompt token must be computed, so that no cached KV can be read."""
        pools_all = self.pooling is not None and self.pooling.type is not PoolingType.LAST
        return pools_all or self.prompt_logprobs is not None

    @property
    def penalizes(self) -> bool:
        """Whether tokens that have occurred get lower or higher scores."""
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        )

    @property
    def edits_scores(self) -> bool:
        """Whether any parameter other than a grammar may change the logits before sampling."""
        return bool(
            self.penalizes
            or self.logit_bias
            or self.min_tokens
            or self.bad_words
            or self.allowed_token_ids
            or self.thinking_budget
        )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_TEMPERATURE


def pooling_params(pooling: Pooling) -> SamplingParams:
    """Return the parameters of a request for a vector.

    To the scheduler it is a prompt with one output token, which is dropped.
    """
    return SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling)
