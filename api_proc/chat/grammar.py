"""Grammars for whole outputs: reasoning, and then tool calls or content that is confined itself."""

import re
from collections.abc import Callable

import msgspec

from api_proc.chat.formats import Dialect, ToolFormat
from api_proc.chat.harmony import HarmonyMessages
from api_proc.chat.lark import LarkWriter, nested_json
from api_proc.chat.tools import ToolUse
from protocol.sampling import CONTENT_RULE, Grammar, GrammarKind

_SPACE = r"/[ \t\r\n]{0,4}/"
_BARE_CONTENT = r'(/[^{\[ \t\r\n](.|\n)*/ | "")'
"""Content that cannot be mistaken for calls without a marker."""


def output_grammar(
    dialect: Dialect,
    use: ToolUse | None,
    content: Grammar | None,
    *,
    is_reasoning_open: bool,
    is_reasoning_over: bool = False,
    added_token_id: Callable[[str], int | None],
) -> Grammar | None:
    """Return what the output is confined to: calls where they are required, else content too.

    `content` confines the content alone: reasoning and calls that are not required may precede it.
    Where the prompt ends with the end of the reasoning, there is no more of it.
    """
    has_tools = use is not None and (use.needs_grammar or content is not None)
    if not has_tools and (content is None or not dialect.has_reasoning):
        return content
    lark = LarkWriter(added_token_id)
    inner = None
    if content is not None and not (use is not None and use.is_required):
        inner = _nested(content, lark)
        if inner is None:
            return content
    if dialect.messages is not None:
        start = _messages(dialect.messages, use, inner, lark)
    else:
        start = ""
        if not is_reasoning_over:
            start = f"{_reasoning(dialect, lark, is_open=is_reasoning_open)} "
        if use is None or dialect.tools is None:
            assert inner is not None
            start += inner
        else:
            start += _answer(dialect.tools, use, inner, lark)
    return Grammar(GrammarKind.LARK, lark.source(start))


def _answer(form: ToolFormat, use: ToolUse, inner: str | None, lark: LarkWriter) -> str:
    """Return the expression for calls, or content, or content and then calls."""
    alternatives = lark.choice(
        form.syntax.body(tool.function.name, tool.function.schema, lark, is_strict=tool.is_strict)
        for tool in use.tools
    )
    if use.is_required:
        return _calls(form, use, lark, alternatives)
    if inner is None and form.trigger:
        calls = _calls(form, use, lark, alternatives, num_written=len(form.trigger))
        return f"({lark.until(form.trigger)} {calls} | TEXT)"
    return f"({_calls(form, use, lark, alternatives)} | {inner or _BARE_CONTENT})"


def _calls(
    form: ToolFormat, use: ToolUse, lark: LarkWriter, alternatives: str, num_written: int = 0
) -> str:
    """Return the expression for one call or more, without text that was written before."""
    first = lark.text((form.open + form.begin)[num_written:])
    more = ""
    if use.is_parallel:
        more = f"({lark.text(form.separator + form.begin)} {alternatives})*"
    return f"{first} {alternatives} {more} {lark.text(form.close)}"


def _reasoning(dialect: Dialect, lark: LarkWriter, *, is_open: bool) -> str:
    form = dialect.reasoning
    if form is None:
        return ""
    rest = f"{lark.until(form.end)} {_SPACE}"
    return rest if is_open else f"({lark.text(form.begin)} {rest})?"


def _messages(
    messages: HarmonyMessages, use: ToolUse | None, inner: str | None, lark: LarkWriter
) -> str:
    alternatives = [
        messages.body(tool.function.name, tool.function.schema, lark, is_strict=tool.is_strict)
        for tool in (use.tools if use is not None else [])
    ]
    if use is None or not use.is_required:
        alternatives.append(f"{messages.final(lark)} {inner or 'TEXT'}")
    return f"{messages.reasoning(lark)}? {lark.choice(alternatives)}"


def _nested(grammar: Grammar, lark: LarkWriter) -> str | None:
    """Add the rule for the content; None if its language cannot be nested in another grammar."""
    body = _nested_body(grammar)
    return None if body is None else lark.rule(body, name=CONTENT_RULE)


def _nested_body(grammar: Grammar) -> str | None:
    if grammar.kind is GrammarKind.LARK:
        return f"%lark {{\n{grammar.source}\n}}"
    if grammar.kind is GrammarKind.REGEX:
        source = re.sub(
            r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], grammar.source
        )
        return f"%lark {{\nstart: /{source}/\n}}" if "\n" not in source else None
    if grammar.kind is GrammarKind.JSON_SCHEMA and grammar.source.lstrip().startswith("{"):
        return nested_json(msgspec.json.decode(grammar.source))
    return None
