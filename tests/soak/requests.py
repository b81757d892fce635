"""The requests of a soak and their expected answers.

Each request is a pure function of the seed and its number. The null model's next token is a pure
function of the context, so every answer can be checked.
"""

import enum
import random
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from protocol.model_facts import ModelFacts
from worker_proc.null.model import CONTEXT_TOKENS, next_token_id

NUM_SHARED_PREFIXES = 16
_SHARED_TOKENS = 48
_SHARED_ONE_IN = 3
_STREAMED_ONE_IN = 4
_LONG_TOKENS = 512
"""Length of an answer whose client disconnects: far more than it waits for."""
_LEAVES_AFTER = (1, 16)


class Way(enum.StrEnum):
    """How a request reaches the engine."""

    WHOLE = "whole"
    """HTTP, one JSON answer."""
    STREAM = "stream"
    """HTTP, server-sent events, read to the end."""
    LEAVE = "leave"
    """Server-sent events, but the client disconnects in the middle."""
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
        """Send requests that the model of `facts` can serve.

        Args:
            seed: of all random numbers.
            facts: of the null model.
            leaving: numbers of the requests whose client disconnects.
            embedded_share: share of the others that uses the embedding client.
        """
        self._seed = seed
        self._vocab_size = facts.vocab_size
        self._eos_token_ids = facts.eos_token_ids
        self._leaving = leaving
        self._embedded_share = embedded_share
        rng = random.Random(seed)
        self._prefixes = [self._draw(rng, _SHARED_TOKENS) for _ in range(NUM_SHARED_PREFIXES)]

    def request(self, number: int) -> SoakRequest:
        """Return the request with this number, the same one at every call."""
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
        """Return the first tokens of the expected answer."""
        token_ids = list(request.prompt)
        for _ in range(num_tokens):
            token_ids.append(next_token_id(token_ids, self._vocab_size, self._eos_token_ids))
        return token_ids[len(request.prompt) :]

    def _draw(self, rng: random.Random, num_tokens: int) -> list[int]:
        """Draw random ids, at least as many as the next token depends on."""
        count = max(num_tokens, CONTEXT_TOKENS)
        return [int(rng.random() * self._vocab_size) for _ in range(count)]


class Choice(msgspec.Struct):
    """The fields of a choice that a soak reads."""

    token_ids: list[int] = []
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    """The fields of the usage that a soak reads."""

    completion_tokens: int = -1


class Answer(msgspec.Struct):
    """The fields of a completion, or of a chunk, that a soak reads."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw | None = None


decode_answer: Callable[[bytes], Answer] = msgspec.json.Decoder(Answer).decode


def body_of(request: SoakRequest, model: str) -> bytes:
    """Return the JSON of a completion request."""
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
    """Check an answer; None if it is right, or a right prefix and its client left.

    Args:
        workload: computes the expected answer.
        request: the request.
        token_ids: the received tokens.
        finish_reason: of the last event; None if the client has left before the end.
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
