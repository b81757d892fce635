"""The requests of a round: of every kind, drawn from a seed, the same in every round.

All are streams, except those for embeddings.
"""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
_WORDS = (
    *("request", "token", "stream", "block", "worker", "core", "cache", "queue", "step", "batch"),
    *("return", "value", "index", "self", "list", "while", "number", "result", "string", "order"),
)
_SHORT_WORDS, _LONG_WORDS = 6, 100
_MIN_OUTPUT, _MAX_OUTPUT = 30, 150
_ABORT_EVERY, _PLAIN_EVERY = 8, 4
_NUM_TEXTS = 6
_PARSED = ("chat-tools", "chat-reasoning", "chat-agent")
PARSER_FLAGS = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
"""The formats of the kinds with calls or reasoning."""
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"words": {"type": "array", "items": {"type": "string"}}},
                "required": ["words"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
    for name in ("write", "read")
]
_CALL = '\n<tool_call>\n{"name": "write", "arguments": {"words": ["WORDS"]}}\n</tool_call>'

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
    names = list(kinds or KINDS)
    found = []
    for number in range(num_streams):
        kind = names[number % len(names)]
        found.append(_request(rng, number, kind, model, salt=salt, with_extensions=with_extensions))
    return found


def _request(
    rng: random.Random, number: int, kind: str, model: str, *, salt: str, with_extensions: bool
) -> ChaosRequest:
    if kind == "embedding":
        return _embeddings(rng, number, model, salt, with_extensions=with_extensions)
    is_chat = kind.startswith("chat")
    body: Body = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    body["max_tokens"] = rng.randint(_MIN_OUTPUT, _MAX_OUTPUT)
    text = _text(rng, _LONG_WORDS if kind == "long" else _SHORT_WORDS)
    if is_chat:
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    body.update(KINDS[kind](rng))
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


def _embeddings(
    rng: random.Random, number: int, model: str, salt: str, *, with_extensions: bool
) -> ChaosRequest:
    """Return a request for several vectors, of which a death finds some computed and some not."""
    texts = [_text(rng, rng.randint(1, _LONG_WORDS)) for _ in range(_NUM_TEXTS)]
    body: Body = {"model": model, "input": texts}
    if with_extensions:
        body |= {"cache_salt": salt or "golden", **_vector(rng)}
    name = f"embedding-{number}"
    return ChaosRequest(name, EMBEDDINGS, body, request_id=f"{salt or 'golden'}:{name}")


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


_NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 20}


def _schema(rng: random.Random) -> Body:
    return {**_seeded(rng), "guided_json": _NUMBERS, "logprobs": 1}


def _chat_schema(rng: random.Random) -> Body:
    """Numbers, after reasoning if the model begins it."""
    return {**_seeded(rng), "response_format": {"type": "json_schema", "schema": _NUMBERS}}


def _chat_tools(rng: random.Random) -> Body:
    """A grammar makes a call of what the model writes, after reasoning if the model begins it."""
    return {**_seeded(rng), "tools": _TOOLS, "tool_choice": "required", "max_tokens": _MAX_OUTPUT}


def _chat_reasoning(rng: random.Random) -> Body:
    """A whole output with reasoning and an answer, as a model with both would write it."""
    grammar = 'start: "<think>" /[a-z ]{20,60}/ "</think>" /[a-z ]{30,60}/'
    return {**_seeded(rng), "guided_grammar": grammar, "max_tokens": _MAX_OUTPUT + 50}


def _chat_agent(rng: random.Random) -> Body:
    """Reasoning and then two calls."""
    before, after = map(json.dumps, _CALL.split("WORDS"))
    call = f"{before} /[a-z ]{{10,30}}/ {after}"
    grammar = f'start: "<think>" /[a-z ]{{10,30}}/ "</think>" {call} {call}'
    return {
        **_seeded(rng),
        "tools": _TOOLS,
        "guided_grammar": grammar,
        "max_tokens": 2 * _MAX_OUTPUT,
    }


def _vector(rng: random.Random) -> Body:
    return {"pooling": rng.choice(("last", "mean"))}


KINDS: dict[str, Callable[[random.Random], Body]] = {
    "greedy": _greedy,
    "chat-tools": _chat_tools,
    "seeded": _seeded,
    "embedding": _vector,
    "n2": _two,
    "schema": _schema,
    "stop": _stop,
    "chat-reasoning": _chat_reasoning,
    "long": _seeded,
    "grammar": _grammar,
    "penalties": _penalties,
    "logprobs": _logprobs,
    "chat-agent": _chat_agent,
    "chat-schema": _chat_schema,
    "chat": _greedy,
    "chat-logprobs": _chat_logprobs,
}
"""In the order in which requests have them."""
FOREIGN_KINDS = tuple(name for name in KINDS if name != "embedding" and name not in _PARSED)
"""Those that any server with OpenAI's API serves."""
