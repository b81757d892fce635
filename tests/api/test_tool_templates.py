"""Tools, calls and reasoning of a chat's history, in the forms that chat templates read."""

import json
from pathlib import Path
from typing import Any

import pytest

from api_proc.bodies import ChatBody
from api_proc.text.chat_template import ChatTemplate
from api_proc.text.processor import TextProcessor
from api_proc.text.tokenizer import EncodeOptions
from protocol.config.settings import configure
from tests.api.conftest import write_json
from tests.api.session_server import play

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"é": "1"}}}
MESSAGES: list[dict[str, Any]] = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]


def rendered(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate(source, {}).render(messages or MESSAGES, **options)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("tool.arguments | tojson", '{"é": "1"}'),
        ("'' + tool['arguments']", '{"é": "1"}'),
        ("'' ~ tool.arguments", '{"é": "1"}'),
        ("tool.arguments if tool.arguments is string else tool.arguments | tojson", '{"é": "1"}'),
        ("tool.arguments['é']", "1"),
    ],
)
def test_arguments_are_an_object_unless_the_template_needs_text(expression: str, text: str) -> None:
    loops = "{%- for m in messages if m.tool_calls %}{% for c in m.tool_calls %}"
    source = (
        f"{loops}{{% set tool = c.function %}}{{{{ {expression} }}}}{{% endfor %}}{{% endfor %}}"
    )
    if "['é']" in expression:
        source = source.replace("['é']", ".values() | join")
    assert rendered(source) == text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0].content }}", ""),
        ("{{ messages[0]['content'] is none }}", "True"),
        ("{% if messages[0].content is not none %}a{% else %}b{% endif %}", "b"),
        ("{{ messages[0].content | trim }}", ""),
    ],
)
def test_absent_content_is_none_only_for_templates_that_ask(source: str, text: str) -> None:
    assert rendered(source) == text


def test_reasoning_has_the_name_that_the_template_reads() -> None:
    message = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert rendered(f"{{{{ messages[0].{name} }}}}", [message]) == "hm"
    all_three = message | {"content": "c", "tool_calls": [CALL]}
    source = "{{ messages[0].content and messages[0].thinking is defined }}"
    assert rendered(source, [all_three]) == "False"


def test_fields_of_thinking_become_template_variables() -> None:
    def variables(**fields: Any) -> dict[str, Any]:
        return ChatBody(messages=[], **fields).template_variables

    off = {"enable_thinking": False, "thinking": False}
    on = {"enable_thinking": True, "thinking": True}
    assert variables() == {}
    assert variables(enable_thinking=False) == off
    assert variables(reasoning_effort="none") == off | {"reasoning_effort": "none"}
    assert variables(reasoning_effort="low") == on | {"reasoning_effort": "low"}
    assert variables(reasoning_effort="low", enable_thinking=False)["enable_thinking"] is False
    kwargs = {"enable_thinking": True, "x": 1}
    assert variables(enable_thinking=False, chat_template_kwargs=kwargs) == off | kwargs


@play
async def test_a_setting_has_the_variables_that_a_request_does_not_set(
    checkpoint: Path, tmp_path: Path
) -> None:
    """In all routes that render a chat, with and without tools."""
    (tmp_path / "name.jinja").write_text("{{ enable_thinking }} {{ x }}")
    text = TextProcessor.load(
        configure(
            model=str(checkpoint),
            chat_template=str(tmp_path / "name.jinja"),
            default_chat_template_kwargs={"enable_thinking": False, "x": 1},
        ).model
    )
    for extra, expected in ((None, "False 1"), ({"x": 2}, "False 2")):
        for tools in (None, [{}]):
            options: Any = {"add_generation_prompt": True, "extra": extra, "tools": tools}
            assert await text.render([], **options) == expected
            ids = await text.encode_chat([], EncodeOptions(False, 100), **options)
            assert await text.decode(ids) == expected
    text.close()


@play
async def test_a_checkpoint_may_have_a_template_for_tools(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "<tool_call>{{ tools | tojson }}"},
    ]
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": templates})
    text = TextProcessor.load(configure(model=str(tmp_path)).model)
    assert text.dialect.tools is not None
    options: Any = {"add_generation_prompt": True, "extra": None}
    assert await text.render([], **options) == "plain"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert await text.render([], tools=tools, **options) == "<tool_call>" + json.dumps(tools)
    text.close()


def test_markers_stay_visible_for_a_parser(checkpoint: Path) -> None:
    """Special tokens that a parser looks for are not hidden; all others are."""
    text = TextProcessor.load(configure(model=str(checkpoint)).model)
    begin, end = (text.tokenizer.added_token_id(f"<|im_{name}|>") for name in ("start", "end"))
    assert begin is not None
    assert end is not None
    shown = frozenset({"<|im_start|>"})
    detokenizer = text.tokenizer.detokenizer([], skip_special_tokens=True, shown=shown)
    assert detokenizer.push([begin, end, begin]) == "<|im_start|>" * 2
    hiding = text.tokenizer.detokenizer([], skip_special_tokens=True)
    assert hiding.push([begin, end]) == ""
    text.close()
