"""The text of an output becomes reasoning, content and tool calls, wherever it is cut."""

# ruff: noqa: RUF001

import itertools
import json
import random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api_proc.chat.events import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallStart,
    merged,
)
from api_proc.chat.families import find_dialect
from api_proc.chat.parser import OutputParser
from protocol.config import ConfigError

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "detailed": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "unit": {"type": ["string", "null"]},
        },
    },
    "now": {"type": "object", "properties": {}},
}
PARIS = {"city": "Paris", "days": 3}


class Parsed(NamedTuple):
    reasoning: str
    content: str
    calls: list[tuple[str, str, str]]
    """Id, name and arguments of each call."""


def parser_of(
    tools: str, reasoning: str = "off", *, is_open: bool = False, has_tools: bool = True
) -> OutputParser:
    return OutputParser(
        find_dialect(None, tools, reasoning),
        schemas=SCHEMAS if has_tools else None,
        is_reasoning_open=is_open,
        make_id=lambda index: f"id{index}",
    )


def collected(events: list[Event]) -> Parsed:
    texts = {ReasoningDelta: "", ContentDelta: ""}
    calls: list[tuple[str, str, str]] = []
    for event in events:
        if isinstance(event, ReasoningDelta | ContentDelta):
            texts[type(event)] += event.text
        elif isinstance(event, ToolCallStart):
            assert event.index == len(calls)
            calls.append((event.id, event.name, ""))
        elif isinstance(event, ArgumentsDelta):
            call_id, name, arguments = calls[event.index]
            calls[event.index] = (call_id, name, arguments + event.text)
    return Parsed(texts[ReasoningDelta], texts[ContentDelta], calls)


def parse(text: str, tools: str, reasoning: str = "off", **options: Any) -> Parsed:
    return collected(parser_of(tools, reasoning, **options).push(text, is_last=True))


OUTPUTS: dict[str, tuple[str, str, str]] = {
    "hermes": (
        "hermes",
        "qwen3",
        '<think>\nI need the "weather".\n</think>\n\nLet me look.\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "qwen3_coder": (
        "qwen3_coder",
        "off",
        "Let me look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n"
        "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "glm45": (
        "glm45",
        "glm45",
        '<think>I need the "weather".</think>\nLet me look.\n<tool_call>get_weather\n'
        "<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    ),
    "kimi_k2": (
        "kimi_k2",
        "kimi_k2",
        '<think>I need the "weather".</think>Let me look.<|tool_calls_section_begin|>'
        "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "deepseek_v3": (
        "deepseek_v3",
        "deepseek_r1",
        '<think>\nI need the "weather".\n</think>\n\nLet me look.<｜tool▁calls▁begin｜>'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
        "<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "deepseek_v31",
        "off",
        "Let me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris", "days": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "mistral_list": (
        "mistral_list",
        "mistral",
        '[THINK]I need the "weather".[/THINK]Let me look.[TOOL_CALLS][{"name": "get_weather", '
        '"arguments": {"city": "Paris", "days": 3}}, {"name": "now", "arguments": {}}]',
    ),
    "mistral_args": (
        "mistral_args",
        "off",
        'Let me look.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}'
        "[TOOL_CALLS]now[ARGS]{}",
    ),
    "granite": (
        "granite",
        "granite",
        'Here is my thought process: I need the "weather".\n\nHere is my response: Let me look.'
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"arguments": {}, "name": "now"}]',
    ),
    "phi4_mini_json": (
        "phi4_mini_json",
        "off",
        'Let me look. functools[{"name": "get_weather", "arguments": '
        '"{\\"city\\": \\"Paris\\", \\"days\\": 3}"}, {"name": "now"}]',
    ),
    "llama3_json": (
        "llama3_json",
        "off",
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}; '
        '{"name": "now", "parameters": {}}',
    ),
    "pythonic": ("pythonic", "off", '[get_weather(city="Paris", days=3), now()]'),
    "openai": (
        "openai",
        "off",
        '<|channel|>analysis<|message|>I need the "weather".<|end|><|start|>assistant<|channel|>'
        "commentary<|message|>Let me look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris", "days": 3}<|call|>'
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}",
    ),
}
WITHOUT_CONTENT = {"llama3_json", "pythonic"}


@pytest.mark.parametrize("case", OUTPUTS)
def test_output_of_each_family_is_understood(case: str) -> None:
    tools, reasoning, text = OUTPUTS[case]
    parsed = parse(text, tools, reasoning)
    has_reasoning = reasoning != "off" or tools == "openai"
    assert parsed.reasoning == ('I need the "weather".' if has_reasoning else "")
    assert parsed.content == ("" if case in WITHOUT_CONTENT else "Let me look.")
    assert [call[1] for call in parsed.calls] == ["get_weather", "now"]
    assert [json.loads(call[2]) for call in parsed.calls] == [PARIS, {}]
    ids = ["functions.get_weather:0", "functions.now:1"] if case == "kimi_k2" else ["id0", "id1"]
    assert [call[0] for call in parsed.calls] == ids


def assert_prefixes_agree(text: str, tools: str, reasoning: str, cuts: set[int]) -> None:
    """Assert that at every cut the events so far are those of the same text in one piece."""
    pieces = parser_of(tools, reasoning)
    events: list[Event] = []
    bounds = [0, *sorted(cuts), len(text)]
    for start, end in itertools.pairwise(bounds):
        events += pieces.push(text[start:end])
        assert merged(events) == merged(parser_of(tools, reasoning).push(text[:end]))
    events += pieces.push("", is_last=True)
    assert merged(events) == merged(parser_of(tools, reasoning).push(text, is_last=True))


@pytest.mark.parametrize("case", OUTPUTS)
def test_events_depend_on_the_text_and_not_on_its_pieces(case: str) -> None:
    tools, reasoning, text = OUTPUTS[case]
    assert_prefixes_agree(text, tools, reasoning, set(range(1, len(text))))


FRAGMENTS = sorted(
    {
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "\n"),
        *('{"name": "now"', '"arguments": ', '{"a": [1, "}"]}', "}", "]", "[", '"', "\\", ",", ":"),
        *("<function=now>", "<parameter=city>", "</parameter>", "</function>", "Paris", " ", "3"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "now", "now(", "city='x'", ")"),
        *("<|channel|>", "analysis", "<|message|>", "<|end|>", "to=functions.now", "<|start|>"),
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
        ),
        *(
            "<|tool_call_begin|>",
            "functions.now:0",
            "<|tool_call_argument_begin|>",
            "<",
            "null",
            "é",
        ),
        *("<|tool_call|>", "functools[", "<|python_start|>", "<|python_tag|>", "\\u00e9", "'", ";"),
    }
)


@given(
    case=st.sampled_from(sorted(OUTPUTS)),
    parts=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=400)
def test_no_text_makes_the_pieces_matter(case: str, parts: list[str], seed: int) -> None:
    """Any mixture of fragments, also one that no model writes: never an error, never a loss."""
    tools, reasoning, valid = OUTPUTS[case]
    rng = random.Random(seed)
    text = "".join(parts)
    if rng.random() < 0.5:  # a valid output that something interrupts
        position = rng.randrange(len(valid))
        text = valid[:position] + text + valid[position:]
    cuts = {rng.randrange(1, len(text)) for _ in range(8)} if len(text) > 1 else set()
    assert_prefixes_agree(text, tools, reasoning, cuts)


@pytest.mark.parametrize("tools", ["hermes", "llama3_json", "pythonic", "mistral_list", "glm45"])
def test_text_that_is_not_a_call_stays_content(tools: str) -> None:
    texts = ["{'a': 1}", '{"name": "unknown"}', "[1, 2]", "[f(1)]", "a < b", "", "<tool", "{", "["]
    for text in ["  indented\n", *texts]:
        parsed = parse(text, tools)
        assert parsed.calls == []
        assert parsed.content.strip() == text.strip()


def test_json_and_lists_that_are_content_are_streamed() -> None:
    assert collected(parser_of("llama3_json").push('{"result": [')).content == '{"result": ['
    assert collected(parser_of("pythonic").push("[1, 2")).content == "[1, 2"
    assert collected(parser_of("pythonic").push("[see (a")).content == "[see (a"
    typed = '{"type": "function", "name": "now", "parameters": {}}'
    assert [call[1] for call in parse(typed, "llama3_json").calls] == ["now"]


def test_arguments_arrive_while_they_are_generated() -> None:
    """So do XML parameters that are strings; others arrive when they are complete."""
    json_parser, xml_parser = parser_of("hermes"), parser_of("qwen3_coder")
    head = '<tool_call>\n{"name": "now", "arguments": '
    assert collected(json_parser.push(head)).calls == [("id0", "now", "")]
    assert json_parser.push('{"a": "lo') == [ArgumentsDelta(0, '{"a": "lo')]
    assert json_parser.push('ng"') == [ArgumentsDelta(0, 'ng"')]
    head = "<tool_call>\n<function=get_weather>\n<parameter=city>\n"
    assert collected(xml_parser.push(head)).calls[0][2] == '{"city": "'
    assert xml_parser.push('a "b"\n') == [ArgumentsDelta(0, 'a \\"b\\"')]
    assert xml_parser.push("c") == [ArgumentsDelta(0, "\\nc")]
    rest = "\n</parameter>\n<parameter=days>\n12"
    assert merged(xml_parser.push(rest)) == [ArgumentsDelta(0, '", "days": ')]
    assert merged(xml_parser.push("</parameter>"))[0] == ArgumentsDelta(0, "12")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "12", "12"),
        ("city", 'a "b"\nc', 'a "b"\nc'),
        ("days", "12", 12),
        ("days", "many", "many"),
        ("detailed", "True", True),
        ("detailed", "false", False),
        ("tags", '["a", "b"]', ["a", "b"]),
        ("tags", "['a', 'b']", ["a", "b"]),
        ("unit", "null", None),
        ("unit", "5", "5"),
        ("unknown", "5", 5),
        ("unknown", "text", "text"),
        ("tags", "[" * 300, "[" * 300),
        ("tags", "[" * 50_000, "[" * 50_000),
        ("days", "1e999", "1e999"),
        ("tags", f"(0x{'f' * 5000},)", f"(0x{'f' * 5000},)"),
    ],
)
def test_xml_values_have_the_types_of_the_schema(key: str, text: str, value: Any) -> None:
    call = f"<function=get_weather>\n<parameter={key}>\n{text}\n</parameter>\n</function>"
    [(_, _, arguments)] = parse(call, "qwen3_coder").calls
    assert json.loads(arguments) == {key: value}


def test_python_values_are_literals_only() -> None:
    text = "[get_weather('Paris', days=-3, tags=['a)', \"b\"], unit=None, detailed=true)]"
    [(_, _, arguments)] = parse(text, "pythonic").calls
    expected = {"city": "Paris", "days": -3, "tags": ["a)", "b"], "unit": None, "detailed": True}
    assert json.loads(arguments) == expected
    large = f"[now(x=0x{'f' * 5000})]"
    for code in (large, "[now(x=open('f'))]", "[now(**{})]", "[now(1)]", f"[now(x={'(' * 500})]"):
        assert parse(code, "pythonic") == Parsed("", code, [])


def test_reasoning_may_begin_in_the_prompt() -> None:
    text = "so\n</think>\n\nYes"
    assert parse(text, "hermes", "qwen3", is_open=True) == Parsed("so", "Yes", [])
    assert parse("<think>" + text, "hermes", "qwen3", is_open=True) == Parsed("so", "Yes", [])
    assert parse("Yes", "hermes", "qwen3") == Parsed("", "Yes", [])
    assert parse("so", "hermes", "qwen3", is_open=True) == Parsed("so", "", [])


def test_calls_stay_text_without_tools() -> None:
    text = '<tool_call>\n{"name": "now"}\n</tool_call>'
    assert parse(text, "hermes", has_tools=False) == Parsed("", text, [])


def test_a_long_value_costs_linear_time() -> None:
    """An argument of 100,000 pieces is held back until it is complete."""
    parser = parser_of("qwen3_coder")
    parser.push("<function=now>\n<parameter=x>\n")
    for _ in range(100_000):
        assert not parser.push("[1, ")
    [event, *_] = merged(parser.push("</parameter></function>", is_last=True))
    assert isinstance(event, ArgumentsDelta)


TEMPLATES = {
    "qwen3_coder": "<tool_call>\\n<function=example>\\n<parameter=a>",
    "hermes": "{{ '<tool_call>' }}",
    "mistral_args": "[TOOL_CALLS]{{ name }}[ARGS]",
    "mistral_list": "[TOOL_CALLS][",
    "llama3_json": "Environment: ipython <|python_tag|>",
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>\\n```json",
    "deepseek_v31": "<｜tool▁call▁begin｜>",
    "granite": "<|start_of_role|>assistant<|tool_call|>",
    "phi4_mini_json": "<|tool|>{{ tools }}<|/tool|>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_family_is_found_in_the_chat_template(name: str) -> None:
    template = TEMPLATES[name]
    assert find_dialect(template, "auto", "auto").tools == find_dialect("", name, "off").tools
    if name.startswith("mistral"):
        assert find_dialect(template, "mistral", "off") == find_dialect("", name, "off")


def test_unknown_names_are_refused() -> None:
    assert not find_dialect("{{ messages }}", "auto", "auto").has_tools
    with pytest.raises(ConfigError, match="tool_call_parser 'x' must be auto, off or one of"):
        find_dialect(None, "x", "auto")
