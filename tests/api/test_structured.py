"""The forms in which clients ask for structured output, and what each becomes."""

import json
import tracemalloc
from typing import Any

import msgspec
import pytest

from api_proc.bodies import CompletionBody
from api_proc.errors import ApiError
from api_proc.generation.structured import MAX_CHOICES, grammar_of, name_field
from api_proc.http.json_body import BodyDecoder
from protocol.api_core import ErrorCode, RequestError
from protocol.sampling import MAX_GRAMMAR_CHARS, Grammar, GrammarKind

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OBJECT = {"type": "object"}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}
LARGE_TEXT = '{"a": [' + "{}," * 90_000 + "{}]}"
decode = BodyDecoder(CompletionBody)


def body_of(**fields: Any) -> CompletionBody:
    body = decode(json.dumps({"prompt": "x", **fields}).encode())
    body.check()
    return body


def translated(**fields: Any) -> Grammar:
    grammar = grammar_of(body_of(**fields))
    assert grammar is not None
    return grammar


@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        ({"response_format": {"type": "json_object"}}, OBJECT),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, SCHEMA),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, SCHEMA),
        ({"guided_json": SCHEMA}, SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, SCHEMA),
        ({"guided_json": True}, {}),
        ({"guided_json": "true"}, {}),
        ({"json_schema": SCHEMA}, SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, SCHEMA),
        ({"structured_outputs": {"json_object": True}}, OBJECT),
    ],
)
def test_every_form_of_json_becomes_its_schema(fields: dict[str, Any], schema: Any) -> None:
    grammar = translated(**fields)
    assert grammar.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(grammar.source) == schema


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"guided_regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX, "a+"),
        (
            {"guided_choice": ["a", 'b"\n']},
            GrammarKind.LARK,
            'start: CHOICE\nCHOICE: "a" | "b\\"\\n"\n',
        ),
        (
            {"structured_outputs": {"choice": ["é"]}},
            GrammarKind.LARK,
            'start: CHOICE\nCHOICE: "é"\n',
        ),
        ({"guided_grammar": 'start: "a"'}, GrammarKind.EBNF, 'start: "a"'),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, GrammarKind.EBNF, 'root ::= "a"'),
        ({"grammar": 'root ::= "a"'}, GrammarKind.EBNF, 'root ::= "a"'),
    ],
)
def test_other_constraints_become_grammars(
    fields: dict[str, Any], kind: GrammarKind, source: str
) -> None:
    assert translated(**fields) == Grammar(kind, source)


def test_structural_tags_become_a_grammar() -> None:
    grammar = translated(response_format=TAG)
    assert grammar.kind is GrammarKind.LARK
    assert 'trigger_0[lazy]: TEXT "<f="' in grammar.source
    assert 'tag_0: trigger_0 "x>" %json' in grammar.source
    assert translated(structured_outputs={"structural_tag": json.dumps(TAG)}) == grammar


def test_whitespace_options_become_part_of_the_schema() -> None:
    compact = translated(structured_outputs={"json": SCHEMA, "disable_any_whitespace": True})
    assert json.loads(compact.source)["x-guidance"]["whitespace_flexible"] is False
    spaced = translated(guided_json=SCHEMA, guided_whitespace_pattern="[ ]?")
    assert json.loads(spaced.source)["x-guidance"] == {"whitespace_pattern": "[ ]?"}


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"grammar": None}])
def test_without_a_constraint_there_is_no_grammar(fields: dict[str, Any]) -> None:
    assert grammar_of(body_of(**fields)) is None


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
DEEP_TAG = '{"type": "structural_tag", "schema": ' + '{"a": ' * 10_000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": {}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "3"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        (
            {"guided_json": {"x-guidance": 1}, "guided_whitespace_pattern": "a"},
            "guided_json.x-guidance",
        ),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a\\"}, "guided_regex"),
        ({"structured_outputs": {"regex": "\\\\\\"}}, "structured_outputs.regex"),
        ({"guided_json": False}, "guided_json"),
        ({"structured_outputs": {"structural_tag": DEEP_TAG}}, "structured_outputs.structural_tag"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
        ({"guided_choice": ["a"] * (MAX_CHOICES + 1)}, "guided_choice"),
        ({"guided_grammar": " "}, "guided_grammar"),
        ({"grammar": ""}, "grammar"),
        ({"json_schema": {}}, "json_schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"unknown": 1}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a", "json": SCHEMA}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        (
            {"response_format": {**TAG, "triggers": ["<g="]}},
            "response_format.structures[0].begin",
        ),
        ({"response_format": {**TAG, "format": {"type": "any_text"}}}, "response_format.format"),
        ({"response_format": JSON_SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": SCHEMA, "structured_outputs": {"regex": "a"}}, "guided_json"),
        ({"guided_regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "guided_regex"),
        ({"guided_json": "[" * 10_000}, "guided_json"),
    ],
)
def test_empty_wrong_and_contradictory_constraints_are_named(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        translated(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param


def test_the_same_constraint_may_have_two_names() -> None:
    """Guidance sends these fields, for servers of different versions."""
    source = '%llguidance {}\n\nstart: answer\n\nanswer[capture]: "red" | "green"\n'
    both = translated(guided_grammar=source, structured_outputs={"grammar": source})
    assert both == translated(guided_grammar=source)
    with pytest.raises(ApiError) as caught:
        translated(guided_grammar=source, structured_outputs={"grammar": source + "\n"})
    assert caught.value.param == "guided_grammar"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": LARGE_TEXT}, "guided_json"),
        ({"structured_outputs": {"json": LARGE_TEXT}}, "structured_outputs.json"),
        (
            {"structured_outputs": {"structural_tag": LARGE_TEXT}},
            "structured_outputs.structural_tag",
        ),
    ],
)
def test_a_large_text_is_rejected_before_it_is_decoded(fields: dict[str, Any], param: str) -> None:
    """Decoded, it would take 99 MiB, and the loop 140 ms."""
    body = decode(json.dumps({"prompt": "x", **fields}).encode())
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match="characters") as caught:
            grammar_of(body)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert caught.value.param == param


def test_what_the_worker_rejects_is_named_after_its_field() -> None:
    error = RequestError(ErrorCode.INVALID, "no such rule", "grammar")
    body = body_of(guided_grammar="start: x")
    assert name_field(error, body) == RequestError(
        ErrorCode.INVALID, "guided_grammar: no such rule", "guided_grammar"
    )
    other = msgspec.structs.replace(error, param="prompt")
    assert name_field(other, body) is other
