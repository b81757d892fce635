"""What a soak sends, each request a pure function of the seed and its number, and what is right.

The null model's next token is a pure function of the context, so every answer can be checked.
"""

import enum
import random
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from protocol.core_worker import ModelFacts
from worker_proc.null_runner import CONTEXT_TOKENS, next_token_id

NUM_SHARED_PREFIXES = 16
_SHARED_TOKENS = 48
_SHARED_ONE_IN = 3
_STREAMED_ONE_IN = 4
_LONG_TOKENS = 512
"""Of an answer whose reader leaves: far more than it waits for."""
_LEAVES_AFTER = (1, 16)


class Way(enum.StrEnum):
    """How a request reaches the engine."""

    WHOLE = "whole"
    """HTTP, one JSON answer."""
    STREAM = "stream"
    """HTTP, server-sent events, read to the end."""
    LEAVE = "leave"
    """The same, but the client disconnects in the middle."""
    EMBEDDED = "embedded"
    """The embedding client, in the soak's own process."""


class SoakRequest(NamedTuple):
    """One request."""

    number: int
    way: Way
    prompt: list[int]
    max_tokens: int
    leaves_after: int
    """Events until the client disconnects; 0: never."""


class Workload:
    """All requests of a run."""

    def __init__(
        self, seed: int, facts: ModelFacts, leaving: frozenset[int], embedded_share: float
    ) -> None:
        """Send what the model of `facts` can serve.

        Args:
            seed: of everything that is drawn.
            facts: of the null model.
            leaving: numbers of the requests whose client disconnects.
            embedded_share: of the others, through the embedding client.
        """
        self._seed = seed
        self._vocab_size = facts.vocab_size
        self._eos_token_ids = facts.eos_token_ids
        self._leaving = leaving
        self._embedded_share = embedded_share
        rng = random.Random(seed)
        self._prefixes = [self._draw(rng, _SHARED_TOKENS) for _ in range(NUM_SHARED_PREFIXES)]

    def request(self, number: int) -> SoakRequest:
        """The request with this number: the same one at every call."""
        rng = random.Random((self._seed << 40) + number)
        prompt = self._draw(rng, rng.randint(4, 32))
        if rng.randrange(_SHARED_ONE_IN) == 0:
            prompt = rng.choice(self._prefixes) + prompt
        if number in self._leaving:
            return SoakRequest(number, Way.LEAVE, prompt, _LONG_TOKENS, rng.randint(*_LEAVES_AFTER))
        way = Way.WHOLE
        if rng.random() < self._embedded_share:
            way = Way.EMBEDDED
        elif rng.randrange(_STREAMED_ONE_IN) == 0:
            way = Way.STREAM
        return SoakRequest(number, way, prompt, rng.randint(4, 12), 0)

    def expected(self, request: SoakRequest, num_tokens: int) -> list[int]:
        """The first tokens of the only right answer."""
        token_ids = list(request.prompt)
        for _ in range(num_tokens):
            token_ids.append(next_token_id(token_ids, self._vocab_size, self._eos_token_ids))
        return token_ids[len(request.prompt) :]

    def _draw(self, rng: random.Random, num_tokens: int) -> list[int]:
        """Random ids, at least as many as the next one depends on."""
        count = max(num_tokens, CONTEXT_TOKENS)
        return [int(rng.random() * self._vocab_size) for _ in range(count)]


class Choice(msgspec.Struct):
    """What a soak reads of an answer's choice."""

    token_ids: list[int] = []
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    """What a soak reads of an answer's usage."""

    completion_tokens: int = -1


class Answer(msgspec.Struct):
    """What a soak reads of a completion, or of a chunk of one."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw | None = None


decode_answer: Callable[[bytes], Answer] = msgspec.json.Decoder(Answer).decode


def body_of(request: SoakRequest, model: str) -> bytes:
    """The JSON of a completion request."""
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "return_token_ids": True,
            "stream": request.way is not Way.WHOLE,
        }
    )


def problem_of(
    workload: Workload, request: SoakRequest, token_ids: list[int], finish_reason: str | None
) -> str | None:
    """What is wrong with an answer; None: it is right, or the right beginning if its client left.

    Args:
        workload: knows what is right.
        request: what was asked for.
        token_ids: what has come.
        finish_reason: of the last event; None where the client has left before the end.
    """
    if request.way is not Way.LEAVE or finish_reason is not None:
        if finish_reason != "length":
            return f"finish_reason {finish_reason!r}"
        if len(token_ids) != request.max_tokens:
            return f"{len(token_ids)} tokens of {request.max_tokens}"
    expected = workload.expected(request, len(token_ids))
    for index, (got, right) in enumerate(zip(token_ids, expected, strict=True)):
        if got != right:
            return f"token {index} is {got}, not {right}"
    return None
