"""The language of each form of constraint: texts that it holds, and texts that it does not."""

import json
from typing import Any

import msgspec
import pytest

from api_proc.bodies import CompletionBody
from api_proc.generation.structured import grammar_of
from protocol.sampling import Grammar, GrammarKind
from worker_proc.grammar.compiler import GrammarCompiler
from worker_proc.grammar.errors import GrammarError
from worker_proc.grammar.state import GrammarState
from worker_proc.grammar.vocabulary import FIRST_BYTE_ID, Vocabulary

EOS = 2
COMPILER = GrammarCompiler(Vocabulary([EOS]))
INTEGER = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TAGS = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=x>", "schema": INTEGER, "end": "</f>"},
        {"begin": "<f=y>", "schema": {"enum": [1, 2]}, "end": ""},
        {"begin": "[t", "schema": {"type": "boolean"}, "end": "]"},
    ],
    "triggers": ["<f=", "["],
}
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"guided_json": INTEGER},
        ['{"a":1}', '{ "a" : -20}', '{\n    "a": 3\n}'],
        ['{"a":"1"}', "{}", '{"b":1}', '{"a":' + " " * 41 + "1}", ' {"a":1}', '{"a":1} '],
    ),
    (
        {"structured_outputs": {"json": INTEGER, "disable_any_whitespace": True}},
        ['{"a":1}'],
        ['{"a": 1}', '{ "a":1}'],
    ),
    (
        {"guided_json": INTEGER, "guided_whitespace_pattern": "[_]"},
        ['{"a":_1}', '{_"a"_:1}'],
        ['{"a": 1}', '{"a":__1}'],
    ),
    ({"response_format": {"type": "json_object"}}, ["{}", '{"x":[1,{"y":null}]}'], ["[]", "3"]),
    ({"guided_regex": "a{2}|b/c"}, ["aa", "b/c"], ["a", "aaa", "b"]),
    (
        {"guided_choice": ["yes", 'qu"ote', "back\\slash", "new\nline", "\u96ea", "/x/"]},
        ["yes", 'qu"ote', "back\\slash", "new\nline", "\u96ea", "/x/"],
        ["no", "ye", "yess", "/x"],
    ),
    (
        {"guided_choice": ["a", "ab", *map(str, range(3000))]},
        ["a", "ab", "7", "2999"],
        ["b", "abc", "3000"],
    ),
    ({"guided_json": True}, ["3", '[{"a": null}]'], ["a", "[3"]),
    ({"guided_grammar": 'start: "a" NUMBER\nNUMBER: /[0-9]+/'}, ["a1", "a22"], ["a", "1"]),
    ({"guided_grammar": '?start: "a" x\n!?x: "b"\n    | "c"'}, ["ab", "ac"], ["a", "?ab"]),
    (
        {"grammar": 'root ::= pair ("," pair)*\npair ::= [a-z] "=" [0-9]{1,2}'},
        ["a=1", "a=1,b=22"],
        ["a", "a=", "a=123", "a=1,"],
    ),
    (
        {"response_format": TAGS},
        ["", "text", 'see <f=x>{"a": 1}</f> and <f=y>2', "[ttrue] or <", "<f"],
        [
            "<f=z>",
            '<f=x>{"b":1}</f>',
            '<f=x>{"a":' + " " * 41 + "1}</f>",
            "<f=x>{}",
            "<f=y>3",
            "[tnull]",
            "[x]",
        ],
    ),
]


@pytest.mark.parametrize(("fields", "texts", "others"), CASES)
def test_a_constraint_holds_its_texts_and_no_others(
    fields: dict[str, Any], texts: list[str], others: list[str]
) -> None:
    body = msgspec.convert({"prompt": "x", **fields}, CompletionBody)
    grammar = grammar_of(body)
    assert grammar is not None
    for text in [*texts, *others]:
        assert may_be(COMPILER, grammar, text) == (text in texts), json.dumps(text)


def may_be(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """Whether the masks allow each byte of a text, and then EOS."""
    state = GrammarState(compiler.matcher(grammar), 0)
    token_ids: list[int] = []
    for token_id in [*(FIRST_BYTE_ID + byte for byte in text.encode()), EOS]:
        [mask] = state.masks([])
        if not mask[token_id >> 3] >> (token_id & 7) & 1:
            return False
        token_ids.append(token_id)
        state.advance(token_ids)
        assert not state.error
    return True


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('start: %json {"type": "strnig"}', "Invalid type: strnig"),
        ('start: "a" other\nother: /(/', 'invalid regex "(", character 1: unclosed group'),
    ],
)
def test_errors_show_no_line_of_the_grammar_around_a_schema(grammar: str, text: str) -> None:
    """The grammar may be the server's, as that of an answer after reasoning."""
    with pytest.raises(GrammarError) as caught:
        COMPILER.compile(Grammar(GrammarKind.LARK, grammar))
    assert str(caught.value).startswith(text)
    assert "start" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        (GrammarKind.REGEX, "a(\n(b", r'invalid regex "a(\n(b", character 5: unclosed group'),
        (
            GrammarKind.REGEX,
            "a{5,1}",
            'invalid regex "a{5,1}", character 2: invalid repetition count range, the start must be'
            " <= the end",
        ),
        (
            GrammarKind.REGEX,
            "x" * 300 + "[" + "y" * 300,
            f'invalid regex "…{"x" * 40}[{"y" * 39}…", character 301: unclosed character class',
        ),
        (
            GrammarKind.JSON_SCHEMA,
            '{"type": "string", "pattern": "é("}',
            'invalid regex "é(", character 2: unclosed group',
        ),
    ],
)
def test_errors_of_a_regular_expression_are_one_line(
    kind: GrammarKind, source: str, text: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        COMPILER.compile(Grammar(kind, source))
    assert str(caught.value) == text


def test_the_error_of_an_unknown_keyword_names_what_leaves_it_out() -> None:
    schema: dict[str, Any] = {"type": "array", "uniqueItems": True}
    with pytest.raises(GrammarError) as caught:
        COMPILER.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    hint = '"x-guidance": {"lenient": true} in the schema leaves them out'
    assert str(caught.value) == f'Unimplemented keys: ["uniqueItems"]; {hint}'
    schema["x-guidance"] = {"lenient": True}
    COMPILER.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


def test_errors_of_a_grammar_show_its_line() -> None:
    with pytest.raises(GrammarError, match=r'at 1\(8\): unknown name: "foo"\n +1 \| start: foo'):
        COMPILER.compile(Grammar(GrammarKind.LARK, "start: foo"))


def test_an_error_of_a_grammar_in_use_has_no_mark_of_its_library() -> None:
    class FailedMatcher:
        def is_error(self) -> bool:
            return True

        def get_error(self) -> str:
            return "lexer error: too many expressions constructed\n<non-verbose/>"

    state = GrammarState(FailedMatcher(), 0)  # type: ignore[arg-type]
    state.note_error()
    assert state.error == "lexer error: too many expressions constructed"
