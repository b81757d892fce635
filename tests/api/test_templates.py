"""Prompts of chats without a generation: /tokenize with messages, /apply-template, continuation."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from api_proc.text.chat_template import ChatTemplate, ChatTemplateError
from api_proc.text.final_message import render_open
from api_proc.text.processor import TextProcessor
from protocol.config import ModelConfig
from protocol.config.settings import configure
from tests.api.conftest import CHAT_TEMPLATE
from tests.api.fake_engine import FakeClient, LiveServer, ids_of

TEMPLATE = (
    "{%- if tools %}tools: {{ tools | map(attribute='function.name') | join(',') }}\n{% endif %}"
    + CHAT_TEMPLATE
)
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "ab"]
USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "<|im_end|> is the end of"}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """A client of a server whose template shows tools."""
    text = TextProcessor.load(ModelConfig(model="null"))
    text.template = text.template_with_tools = ChatTemplate(TEMPLATE, {})
    with (
        LiveServer(configure(model="null"), FakeClient(), text) as live,
        httpx.Client(base_url=live.url, timeout=10) as client,
    ):
        yield client


def rendered(http: httpx.Client, *messages: dict[str, Any], **fields: Any) -> str:
    response = http.post("/apply-template", json={"messages": list(messages)} | fields)
    assert response.status_code == 200, response.text
    return str(response.json()["prompt"])


def test_template_is_rendered_with_tools(http: httpx.Client) -> None:
    chat = "<|im_start|>user\nhi<|im_end|>\n"
    assert rendered(http, USER) == chat + "<|im_start|>assistant\n"
    assert rendered(http, USER, add_generation_prompt=False) == chat
    assert rendered(http, USER, tools=TOOLS).startswith("tools: a,b\n")
    assert rendered(http, USER, tools=[]) == rendered(http, USER)


def test_templates_that_read_parts_get_parts() -> None:
    """Templates of SmolVLM and LLaVA read parts; other templates get texts."""
    begin, end = "{% for m in messages %}{{ m.role }}: ", "{% endfor %}"
    of_texts = begin + "{{ m.content }}" + end
    parts = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    of_parts = begin + parts + "{% endfor %}" + end
    failing = begin + "{{ m.content[0]['text'] + '' }}" + end
    of_both = begin + "{% if m.content is string %}{{ m.content }}{% else %}p{% endif %}" + end
    for source in (of_texts, of_parts, failing, of_both):
        assert ChatTemplate(source, {}).render([USER]) == "user: hi"
        empty = [{"role": "assistant", "content": None}]
        if source != failing:
            assert ChatTemplate(source, {}).render(empty) == "assistant: "


def test_final_message_stays_open(http: httpx.Client) -> None:
    """Its text may occur again in what the template appends."""
    prompt = rendered(http, USER, ASSISTANT, continue_final_message=True)
    assert prompt.endswith("<|im_start|>assistant\n" + ASSISTANT["content"])
    assert prompt.count("<|im_start|>") == 2
    short = {"role": "assistant", "content": "im"}
    assert rendered(http, USER, short, continue_final_message=True).endswith("assistant\nim")


def test_tokens_are_those_of_the_rendered_prompt(http: httpx.Client) -> None:
    for fields in ({}, {"tools": TOOLS}, {"continue_final_message": True}):
        messages = [USER, ASSISTANT]
        body = {"messages": messages} | fields
        answer = http.post("/tokenize", json=body).json()
        assert answer["tokens"] == ids_of(rendered(http, *messages, **fields))


def test_chat_continues_the_final_message(http: httpx.Client) -> None:
    body = {"messages": [USER, ASSISTANT], "continue_final_message": True, "max_tokens": 1}
    answer = http.post("/v1/chat/completions", json=body | {"return_token_ids": True}).json()
    prompt = rendered(http, USER, ASSISTANT, continue_final_message=True)
    assert answer["prompt_token_ids"] == ids_of(prompt)


@pytest.mark.parametrize("path", ["/tokenize", "/apply-template", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"add_generation_prompt": True}, "continue_final_message"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "continue_final_message"),
        ({"messages": []}, "messages"),
    ],
)
def test_final_message_that_cannot_be_continued(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    body = {"messages": [USER, ASSISTANT], "continue_final_message": True} | fields
    response = http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("trims", "content", "expected"),
    [("", "one ", "one "), ("| trim", "one ", "one"), ("| trim", " one", "one"), ("", "a", "a")],
)
def test_a_continued_message_is_trimmed_where_the_template_trims(
    trims: str, content: str, expected: str
) -> None:
    source = "{% for m in messages %}[{{ m['content'] " + trims + " }}]{% endfor %}"
    template = ChatTemplate(source, {})
    assert render_open([{"role": "user", "content": content}], template.render) == "[" + expected


def test_a_template_without_the_final_message_is_an_error() -> None:
    template = ChatTemplate("{{ messages[0]['content'] }}", {})
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ChatTemplateError, match="final message"):
        render_open(messages, template.render)


def test_a_final_message_without_text_is_an_error() -> None:
    template = ChatTemplate("{{ messages[0]['content'] }}", {})
    for message in ({"role": "assistant"}, {"role": "assistant", "content": [{"text": "b"}]}):
        with pytest.raises(ChatTemplateError, match="no text to continue"):
            render_open([message], template.render)


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_parts_of_every_kind_of_text_are_joined(http: httpx.Client, kind: str) -> None:
    parts = [{"type": kind, "text": "a"}, {"type": kind, "text": "b"}]
    assert "a\nb<|im_end|>" in rendered(http, {"role": "user", "content": parts})
