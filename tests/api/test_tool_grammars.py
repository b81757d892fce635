"""Grammars for tool calls, compiled by llguidance: what they accept is what parsers read."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from api_proc.chat.families import TOOL_FAMILIES, find_dialect
from api_proc.chat.formats import Dialect
from api_proc.chat.grammar import output_grammar
from api_proc.chat.parser import OutputParser
from api_proc.chat.tools import FunctionTool, Tool, ToolUse
from api_proc.text.processor import TextProcessor
from protocol.config import ModelConfig
from protocol.sampling import Grammar, GrammarKind
from tests.api.fake_engine import ids_of
from tests.api.test_chat_parser import OUTPUTS, Parsed, collected

FAMILIES = [family.names[-1] for family in TOOL_FAMILIES]
REASONING = {"gpt_oss": "off", "mistral_list": "mistral", "granite": "granite"}
WEATHER = FunctionTool(
    "get_weather",
    None,
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"$ref": "#/$defs/days"},
            "unit": {"enum": ["celsius", "kelvin"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"days": {"type": "integer", "minimum": 0, "maximum": 99}},
    },
    strict=True,
)
TOOLS = [Tool(WEATHER), Tool(FunctionTool("now", None, {"type": "object", "properties": {}}))]


class Vocabulary:
    """Bytes, and every marker of every family as one token."""

    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.added = {"</s>"}
        for name in FAMILIES:
            self.added |= dialect_of(name).markers
        self.tokenizer.add_special_tokens(sorted(self.added))
        self.eos_id = self.tokenizer.token_to_id("</s>")
        self.compiler = LLTokenizer(self.tokenizer.to_str(), eos_token=self.eos_id)

    def added_id(self, text: str) -> int | None:
        return self.tokenizer.token_to_id(text) if text in self.added else None

    def matcher(self, source: str) -> LLMatcher:
        matcher = LLMatcher(self.compiler, LLMatcher.grammar_from_lark(source))
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def accepts(
        self, source: str, text: str, added_id: Callable[[str], int | None] | None = None
    ) -> bool:
        """Whether a whole text is in the language; with `_spelled`, markers are not tokens."""
        matcher = self.matcher(source)
        ids = self.tokenizer.encode(text).ids
        if added_id is _spelled:
            ids = [i for c in text for i in self.tokenizer.encode(c).ids]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


PARSED_VARIANTS = {"phi4_mini_json", "openai"}
"""Examples in a form that parsers read and grammars do not write."""


def _spelled(text: str) -> None:
    """There are no added tokens."""


def dialect_of(name: str) -> Dialect:
    return find_dialect(None, name, REASONING.get(name, "qwen3"))


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary()


def source_of(
    name: str, added_id: Callable[[str], int | None], *, is_open: bool = False, **use: Any
) -> str:
    options = {"is_required": True, "is_parallel": True} | use
    grammar = output_grammar(
        dialect_of(name),
        ToolUse(TOOLS, TOOLS, **options),
        None,
        is_reasoning_open=is_open,
        added_token_id=added_id,
    )
    assert grammar is not None
    return grammar.source


def parsed(name: str, text: str, *, is_open: bool = False) -> Parsed:
    parser = OutputParser(
        dialect_of(name),
        schemas={tool.function.name: tool.function.schema for tool in TOOLS},
        is_reasoning_open=is_open,
        make_id=str,
    )
    return collected(parser.push(text, is_last=True))


def check(calls: list[tuple[str, str, str]]) -> None:
    """Check arguments against the schemas above."""
    for _, name, text in calls:
        arguments = json.loads(text)
        if name == "now":
            assert arguments == {}
            continue
        assert name == "get_weather"
        assert isinstance(arguments.pop("city"), str)
        assert arguments.pop("unit", "kelvin") in ("celsius", "kelvin")
        days = arguments.pop("days", 0)
        assert type(days) is int
        assert 0 <= days <= 99
        tags = arguments.pop("tags", [])
        assert len(tags) <= 2
        assert all(isinstance(tag, str) for tag in tags)
        assert not arguments


LIKELY = '"}]),:<>/= 3acx'
"""Characters that end strings and numbers; a walk over all bytes would hardly end."""


def walk(vocabulary: Vocabulary, source: str, seed: int) -> str | None:
    """Generate a text by random choices among the allowed tokens; None if it gets too long."""
    rng = random.Random(seed)
    matcher = vocabulary.matcher(source)
    ids: list[int] = []
    size = vocabulary.tokenizer.get_vocab_size()
    ends = [vocabulary.tokenizer.encode(c).ids[0] for c in '"}])'] + list(range(256, size))
    likely = [vocabulary.tokenizer.encode(c).ids[0] for c in LIKELY]
    while len(ids) < 400:
        mask = matcher.compute_bitmask()
        for preferred in (ends if rng.random() < 0.7 else [], likely, range(size)):
            allowed = [i for i in preferred if mask[i // 8] >> (i % 8) & 1]
            if allowed and allowed != [vocabulary.eos_id]:
                break
        if matcher.is_accepting() and rng.random() < 0.5:
            return str(vocabulary.tokenizer.decode(ids, skip_special_tokens=False))
        token_id = rng.choice([i for i in allowed if i != vocabulary.eos_id] or [-1])
        if token_id < 0:
            return str(vocabulary.tokenizer.decode(ids, skip_special_tokens=False))
        assert matcher.consume_token(token_id)
        ids.append(token_id)
    return None


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_grammar_generates_is_read_as_valid_calls(vocabulary: Vocabulary, name: str) -> None:
    source = source_of(name, vocabulary.added_id)
    num_ended = 0
    for seed in range(8):
        text = walk(vocabulary, source, seed)
        if text is not None:
            num_ended += 1
            found = parsed(name, text)
            assert found.calls, text
            assert found.content == "", text
            check(found.calls)
    assert num_ended >= 4


@pytest.mark.parametrize("case", sorted(OUTPUTS.keys() - PARSED_VARIANTS))
def test_a_grammar_accepts_what_models_write(vocabulary: Vocabulary, case: str) -> None:
    """A strict tool allows content before the calls; `required` allows none."""
    name = {"openai": "gpt_oss", "glm45": "glm47", "hermes": "qwen3"}.get(case, case)
    name = {"qwen3_coder": "qwen3_xml", "pythonic": "llama4_pythonic"}.get(name, name)
    name = {"llama3_json": "llama4_json"}.get(name, name)
    text = OUTPUTS[case][2].replace(
        '"arguments": {}, "name": "now"', '"name": "now", "arguments": {}'
    )
    forced = text.replace("Let me look.", "").replace("\n\n<tool", "<tool")
    for added_id in (vocabulary.added_id, _spelled):
        optional = source_of(name, added_id, is_required=False)
        required = source_of(name, added_id)
        assert vocabulary.accepts(optional, text, added_id)
        assert vocabulary.accepts(required, forced, added_id)
        if "Let me look." in text:
            assert not vocabulary.accepts(required, text, added_id)


HARMONY_CALL = (
    "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
)
PHI_CALL = '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>'


def test_grammars_accept_the_variants_of_gpt_oss_and_phi(vocabulary: Vocabulary) -> None:
    call, analysis = HARMONY_CALL
    source = source_of("gpt_oss", vocabulary.added_id)
    assert vocabulary.accepts(source, call)
    assert vocabulary.accepts(source, analysis + call)
    final = "<|channel|>final<|message|>Yes."
    assert not vocabulary.accepts(source, final)
    optional = source_of("gpt_oss", vocabulary.added_id, is_required=False)
    assert vocabulary.accepts(optional, analysis + final)
    assert vocabulary.accepts(source_of("phi4_mini_json", vocabulary.added_id), PHI_CALL)


QWEN_CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'


@pytest.mark.parametrize("has_added", [True, False])
def test_strict_and_required_calls_of_qwen(vocabulary: Vocabulary, has_added: bool) -> None:
    added_id = vocabulary.added_id if has_added else _spelled
    required = source_of("qwen3", added_id)
    one = source_of("qwen3", added_id, is_parallel=False)
    optional = source_of("qwen3", added_id, is_required=False)
    opened = source_of("qwen3", added_id, is_open=True)

    def accepts(source: str, text: str) -> bool:
        return vocabulary.accepts(source, text, added_id)

    valid = QWEN_CALL.format("get_weather", '{"city": "Paris", "days": 3}')
    compact = QWEN_CALL.format("get_weather", '{"city":"Paris","unit":"kelvin"}')
    assert accepts(required, valid)
    assert accepts(required, compact)
    assert accepts(required, f"{valid}\n{compact}")
    assert not accepts(one, f"{valid}\n{compact}")
    assert accepts(one, "<think>\nI call it.\n</think>\n\n" + valid)
    assert accepts(opened, "I call it.\n</think>\n\n" + valid)
    assert not accepts(opened, valid)
    assert accepts(optional, "No call.")
    assert accepts(optional, "I call: " + valid)
    for name, arguments in (
        ("get_weather", '{"days": 3}'),
        ("get_weather", '{"city": "Paris", "days": 100}'),
        ("get_weather", '{"city": "Paris", "unit": "x"}'),
        ("get_weather", '{"city": "Paris", "other": 1}'),
        ("other", "{}"),
    ):
        for source in (required, optional):
            assert not accepts(source, QWEN_CALL.format(name, arguments))
    assert not accepts(required, "No call.")


def test_schemas_are_enforced_strictly_only_where_that_was_asked(vocabulary: Vocabulary) -> None:
    """A keyword that llguidance cannot enforce is an error for a strict tool alone."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for is_strict in (True, False):
        tool = Tool(FunctionTool("f", None, schema, strict=is_strict))
        grammar = output_grammar(
            dialect_of("qwen3"),
            ToolUse([tool], [tool], is_required=True, is_parallel=True),
            None,
            is_reasoning_open=False,
            added_token_id=vocabulary.added_id,
        )
        assert grammar is not None
        source = LLMatcher.grammar_from_lark(grammar.source)
        matcher = LLMatcher(vocabulary.compiler, source)
        assert matcher.is_error() == is_strict


CONTENTS = {
    "json": Grammar(GrammarKind.JSON_SCHEMA, '{"enum": ["a/b"]}'),
    "regex": Grammar(GrammarKind.REGEX, r'"a/b"'),
    "escaped": Grammar(GrammarKind.REGEX, r'"a\/b"|\\/'),
    "lark": Grammar(GrammarKind.LARK, '%llguidance {}\nstart: "\\"" A\nA: "a/b" "\\""\n'),
}


COMPACT = {"whitespace_pattern": None, "whitespace_flexible": False}


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "mistral_list"])
def test_content_is_confined_after_reasoning_and_around_calls(
    vocabulary: Vocabulary, name: str, kind: str
) -> None:
    before, begin, call = {
        "qwen3": ("<think>Hm.</think>\n\n", "", QWEN_CALL.format("now", "{}")),
        "gpt_oss": (HARMONY_CALL[1], "<|channel|>final<|message|>", HARMONY_CALL[0]),
        "mistral_list": (
            "[THINK]Hm.[/THINK]",
            "",
            '[TOOL_CALLS][{"name": "now", "arguments": {}}]',
        ),
    }[name]

    def accepts(use: ToolUse | None, text: str, *, is_over: bool = False) -> bool:
        grammar = output_grammar(
            dialect_of(name),
            use,
            CONTENTS[kind],
            is_reasoning_open=False,
            is_reasoning_over=is_over,
            added_token_id=vocabulary.added_id,
        )
        assert grammar is not None
        return vocabulary.accepts(grammar.source, text)

    optional = ToolUse(TOOLS, TOOLS, is_required=False, is_parallel=True)
    required = ToolUse(TOOLS, TOOLS, is_required=True, is_parallel=True)
    for prefix in ("", before):
        for use in (None, optional):
            assert accepts(use, prefix + begin + '"a/b"')
            assert not accepts(use, prefix + begin + '"a/c"')
        assert accepts(optional, prefix + call)
        assert not accepts(None, prefix + call)
        assert accepts(required, prefix + call)
        assert not accepts(required, prefix + begin + '"a/b"')
    if name != "gpt_oss":  # its prompts never end with reasoning
        for prefix in ("", before):
            assert accepts(None, prefix + '"a/b"', is_over=True) == (not prefix)
            assert accepts(optional, prefix + '"a/b"', is_over=True) == (not prefix)
            assert accepts(required, prefix + call, is_over=True) == (not prefix)


@pytest.mark.parametrize(
    ("options", "most"), [({}, 40), ({"whitespace_pattern": " {1,3}"}, 3), (COMPACT, 0)]
)
def test_whitespace_in_an_answer_after_reasoning_is_bounded(
    vocabulary: Vocabulary, options: dict[str, Any], most: int
) -> None:
    """A greedy model could write spaces until its last token."""
    schema = {"type": "array", "maxItems": 0, "x-guidance": options}
    grammar = output_grammar(
        dialect_of("qwen3"),
        None,
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)),
        is_reasoning_open=False,
        is_reasoning_over=False,
        added_token_id=vocabulary.added_id,
    )
    assert grammar is not None
    for prefix in ("", "<think>Hm.</think>\n\n"):
        for num_spaces in (most, most + 1):
            text = f"{prefix}[{' ' * num_spaces}]"
            assert vocabulary.accepts(grammar.source, text) == (num_spaces == most)


@pytest.mark.parametrize(
    ("end", "is_open", "is_over"),
    [
        ("", False, False),
        ("<think>\n", True, False),
        ("<think>\n\n</think>\n\n", False, True),
        ("<think>\n\n</think>\n\nHi", False, False),
    ],
)
def test_a_prompt_shows_whether_reasoning_is_open_or_over(
    end: str, is_open: bool, is_over: bool
) -> None:
    text = TextProcessor.load(ModelConfig(model="null", reasoning_parser="qwen3"))
    ids = ids_of(f"assistant\n{end}")
    assert (text.is_reasoning_open(ids), text.is_reasoning_over(ids)) == (is_open, is_over)


def test_a_grammar_is_left_alone_where_nothing_precedes_the_content() -> None:
    content = CONTENTS["regex"]
    options: Any = {"is_reasoning_open": False, "added_token_id": _spelled}
    plain = find_dialect(None, "hermes", "off")
    assert output_grammar(plain, None, content, **options) is content
    assert output_grammar(plain, None, None, **options) is None
    optional = ToolUse([TOOLS[1]], TOOLS, is_required=False, is_parallel=True)
    assert output_grammar(plain, optional, None, **options) is None
