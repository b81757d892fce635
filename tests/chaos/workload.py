"""The requests of a round: streams of every kind, drawn from a seed, the same in every round."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_WORDS = (
    *("request", "token", "stream", "block", "worker", "core", "cache", "queue", "step", "batch"),
    *("return", "value", "index", "self", "list", "while", "number", "result", "string", "order"),
)
_SHORT_WORDS, _LONG_WORDS = 6, 100
_MIN_OUTPUT, _MAX_OUTPUT = 30, 150
_ABORT_EVERY, _PLAIN_EVERY = 8, 4

Body = dict[str, Any]


class ChaosRequest(msgspec.Struct, frozen=True):
    """One stream to open."""

    name: str
    """Its kind and number."""
    path: str
    body: Body
    disconnect_after: int | None = None
    """Close the connection after this number of events; None: read to the end."""
    request_id: str = ""
    """The id with which a client can resume the stream; "": it cannot."""


def make_requests(
    seed: int,
    num_streams: int,
    model: str,
    *,
    salt: str = "",
    with_extensions: bool = True,
    kinds: Sequence[str] | None = None,
) -> list[ChaosRequest]:
    """Draw the requests of a round.

    Args:
        seed: the same seed gives the same requests.
        num_streams: number of requests.
        model: its name in the API.
        salt: separates the prefix caches of rounds.
        with_extensions: use fields that are not OpenAI's, such as `return_token_ids`.
        kinds: of streams, in turn; None for all.
    """
    rng = random.Random(seed)
    names = list(kinds or _KINDS)
    found = []
    for number in range(num_streams):
        kind = names[number % len(names)]
        found.append(_request(rng, number, kind, model, salt=salt, with_extensions=with_extensions))
    return found


def _request(
    rng: random.Random, number: int, kind: str, model: str, *, salt: str, with_extensions: bool
) -> ChaosRequest:
    is_chat = kind.startswith("chat")
    body: Body = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    body["max_tokens"] = rng.randint(_MIN_OUTPUT, _MAX_OUTPUT)
    text = _text(rng, _LONG_WORDS if kind == "long" else _SHORT_WORDS)
    if is_chat:
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    body.update(_KINDS[kind](rng))
    if with_extensions:
        body["ignore_eos"] = True
        body["cache_salt"] = salt or "golden"
        body["return_token_ids"] = number % _PLAIN_EVERY != _PLAIN_EVERY - 1
    aborts = number % _ABORT_EVERY == _ABORT_EVERY // 2
    return ChaosRequest(
        name=f"{kind}-{number}",
        path=CHAT if is_chat else COMPLETIONS,
        body=body,
        disconnect_after=rng.randint(3, _MIN_OUTPUT) if aborts else None,
        request_id=f"{salt or 'golden'}:{kind}-{number}",
    )


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(num_words))


def _seeded(rng: random.Random) -> Body:
    return {"temperature": 1.0, "seed": rng.randrange(2**31)}


def _greedy(_rng: random.Random) -> Body:
    return {"temperature": 0}


def _penalties(rng: random.Random) -> Body:
    penalties = {"presence_penalty": 0.6, "frequency_penalty": 0.4}
    return {**_seeded(rng), **penalties, "top_p": 0.95}


def _two(rng: random.Random) -> Body:
    return {**_seeded(rng), "n": 2}


def _stop(rng: random.Random) -> Body:
    """Stop strings that occur by chance, early, late or never."""
    first, second = rng.sample("0123456789", 2)
    return {**_seeded(rng), "stop": [first + second, second * 3, "return"]}


def _logprobs(rng: random.Random) -> Body:
    return {**_seeded(rng), "logprobs": 3}


def _chat_logprobs(rng: random.Random) -> Body:
    return {**_seeded(rng), "logprobs": True, "top_logprobs": 2}


def _grammar(rng: random.Random) -> Body:
    return {**_seeded(rng), "guided_regex": "([a-z]{1,6} ){20,40}"}


def _chat_schema(rng: random.Random) -> Body:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 20}
    return {**_seeded(rng), "response_format": {"type": "json_schema", "schema": schema}}


_KINDS: dict[str, Callable[[random.Random], Body]] = {
    "greedy": _greedy,
    "seeded": _seeded,
    "penalties": _penalties,
    "n2": _two,
    "stop": _stop,
    "logprobs": _logprobs,
    "chat": _greedy,
    "chat-logprobs": _chat_logprobs,
    "long": _seeded,
    "grammar": _grammar,
    "chat-schema": _chat_schema,
}
