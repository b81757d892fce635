"""The readers of JSON bodies: what the API does with a request before it accepts it.

Only an `ApiError` may be raised, and what was not refused must be a request that the core can read.
"""

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import msgspec

from api_proc.bodies import ChatBody, CompletionBody, SamplingBody
from api_proc.chat.grammar import output_grammar
from api_proc.chat.lark import GrammarTooLarge
from api_proc.errors import ApiError
from api_proc.generation.structured import grammar_of
from api_proc.http.json_body import BodyDecoder
from api_proc.openai.generate import GenerateBody, completion_of
from api_proc.openapi.document import document
from api_proc.openapi.operations import OPERATIONS, Operation
from api_proc.params import bad_word_ids, resolve_max_tokens, sampling_params
from api_proc.text.chat_template import ChatTemplateError
from api_proc.text.processor import TextProcessor
from protocol.api_core import AddRequest
from protocol.client.errors import RequestFailed
from protocol.client.ledger import check_request
from protocol.config.settings import configure
from protocol.model_facts import ModelFacts
from protocol.sampling import Grammar
from tests.fuzz.bodies import Bodies, damaged, encoded

FACTS = ModelFacts("null", 1000, 4096, 16, 512, [2, 3], embedding_size=16)
PROMPT = [5, 6, 7]
_PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}

Feed = Callable[[bytes], bool]


def mutate(
    bodies: Bodies, schema: Any, samples: list[bytes], rng: random.Random
) -> Iterator[bytes]:
    """Yield bodies without end: drawn from the schema, and half of them damaged."""
    example = msgspec.json.decode(samples[0])
    while True:
        body = bodies.draw(schema, example, rng)
        for _ in range(int(rng.random() * 4) * (rng.random() < 0.5)):
            body = damaged(body, rng)
        yield encoded(body, rng)


@cache
def _text() -> TextProcessor:
    return TextProcessor.load(configure(model="null", **_PARSERS).model)


def _chat_grammar(body: ChatBody, content: Grammar | None) -> Grammar | None:
    text, use = _text(), body.tool_use
    assert text.template is not None
    with contextlib.suppress(ChatTemplateError):  # answered with 400
        text.template.render(
            [message.for_template() for message in body.messages],
            extra=body.template_variables,
            tools=None if use is None else [tool.for_template() for tool in use.shown],
        )
    if content is None and (use is None or not use.needs_grammar):
        return None
    return output_grammar(
        text.dialect, use, content, is_reasoning_open=False, added_token_id=lambda name: None
    )


def _accept(body: SamplingBody) -> None:
    """Go on as `GenerationApi.serve` and the ledger do."""
    body.check()
    grammar = grammar_of(body)
    with contextlib.suppress(GrammarTooLarge):  # answered with 400
        if isinstance(body, ChatBody):
            grammar = _chat_grammar(body, grammar)
    params = sampling_params(
        body,
        _text().defaults,
        max_tokens=resolve_max_tokens(body, _text().defaults, FACTS, len(PROMPT)),
        seed=body.seed or 0,
        vocab_size=FACTS.vocab_size,
        bad_words=bad_word_ids(body.bad_words or [], _text().tokenizer),
        grammar=grammar,
    )
    with contextlib.suppress(RequestFailed):
        check_request(AddRequest(1, PROMPT, params, tenant=body.user or ""), FACTS)


@contextlib.contextmanager
def _open(kind: type[msgspec.Struct]) -> Iterator[Feed]:
    decode = BodyDecoder(kind)

    def feed(raw: bytes) -> bool:
        try:
            body = decode(raw)
            if isinstance(body, GenerateBody):
                body = completion_of(body)
            if isinstance(body, CompletionBody | ChatBody):
                _accept(body)
        except ApiError as error:
            refusal = error
        else:
            return True
        assert 400 <= refusal.status < 500
        assert json.loads(refusal.body())["error"]["message"]
        return False

    yield feed


def body_targets() -> Iterator[tuple[str, list[bytes], Any, Any]]:
    """Yield name, samples, opener and mutation for each route that takes a body."""
    made = document(OPERATIONS)
    bodies = Bodies(made)
    for item in OPERATIONS:
        if item.request is not None:
            yield _body_target(item, bodies, made)


def _body_target(
    item: Operation, bodies: Bodies, made: dict[str, Any]
) -> tuple[str, list[bytes], Any, Any]:
    assert item.request is not None
    content = made["paths"][item.path][item.method.lower()]["requestBody"]["content"]
    schema = content["application/json"]["schema"]
    samples = [msgspec.json.encode(item.example)]
    opened = partial(_open, item.request)
    return f"body of {item.path}", samples, opened, partial(mutate, bodies, schema)
