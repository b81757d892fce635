"""POST /v1/messages: the answer, its stream, and what reaches the engine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_proc.anthropic.reply import INVALID_JSON
from api_proc.app import start_sessions
from protocol.api_core import AddRequest
from protocol.config.settings import configure
from protocol.model_facts import ModelFacts
from protocol.sampling import GrammarKind
from tests.api.conftest import MakeServer
from tests.api.fake_engine import EOS_ID, FakeClient, LiveServer, emitting, ids_of, repeating
from tests.api.message_bodies import COUNT, PATH, TOOLS, USER, body_of
from tests.api.tool_answers import ARGUMENTS, TEXT, prompt_of
from tests.message_stream import message_of, parse

CHAT = "/v1/chat/completions"
FACTS = ModelFacts("null", 1000, 1_000_000, 16, 70_000, [EOS_ID])
THINKING = {"type": "enabled", "budget_tokens": 1024}


def answering(text: str = TEXT, *, per_output: int = 1) -> FakeClient:
    return FakeClient(FACTS, emitting([*ids_of(text), EOS_ID], per_output=per_output))


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    """A server whose model reasons and calls two tools in every answer."""
    config = configure(model="null", reasoning_parser="qwen3")
    with LiveServer(config, answering(per_output=3)) as server:
        yield server


def post(live: LiveServer, path: str = PATH, **fields: Any) -> httpx.Response:
    return httpx.post(live.url + path, json=body_of(**fields))


def create(live: LiveServer, **fields: Any) -> dict[str, Any]:
    """Return the message; its stream must have the same content."""
    response = post(live, **fields)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()
    streamed = message_of(parse(post(live, stream=True, **fields).text))
    assert without_ids(streamed) == without_ids(message)
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is drawn or derived for each request."""
    blocks = [
        {name: value for name, value in block.items() if name not in ("id", "signature")}
        for block in message["content"]
    ]
    return message | {"id": "", "content": blocks}


def test_an_answer_with_reasoning_text_and_calls(live: LiveServer) -> None:
    message = create(live, tools=TOOLS, thinking=THINKING)
    thinking, text, *calls = message["content"]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "null")
    assert message["id"].startswith("msg_")
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert thinking == {
        "type": "thinking",
        "thinking": 'Which "city"?',
        "signature": message["id"],
    }
    assert text == {"type": "text", "text": "Let me look."}
    assert [call["type"] for call in calls] == ["tool_use", "tool_use"]
    assert [call["name"] for call in calls] == ["get_weather", "now"]
    assert [call["input"] for call in calls] == [json.loads(ARGUMENTS), {}]
    assert len({call["id"] for call in calls}) == 2
    usage = message["usage"]
    assert usage["output_tokens"] == len(TEXT.encode()) + 1
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["cache_read_input_tokens"] % 16 == 0


def test_a_stream_has_anthropics_events(live: LiveServer) -> None:
    events = parse(post(live, tools=TOOLS, thinking=THINKING, stream=True).text)
    starts = [e.data["content_block"] for e in events if e.name == "content_block_start"]
    assert starts[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert starts[1] == {"type": "text", "text": ""}
    assert [start["input"] for start in starts[2:]] == [{}, {}]
    signatures = [e for e in events if e.data.get("delta", {}).get("type") == "signature_delta"]
    assert len(signatures) == 1
    assert all(event.id is None for event in events), "ids only with a journal"
    assert [event.name for event in events[-2:]] == ["message_delta", "message_stop"]


def test_the_first_event_has_the_usage_of_the_prompt(live: LiveServer) -> None:
    start, *_, delta, _ = parse(post(live, stream=True).text)
    first, last = start.data["message"]["usage"], delta.data["usage"]
    assert first["input_tokens"] == last["input_tokens"] > 0
    assert first["cache_read_input_tokens"] == last["cache_read_input_tokens"]


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}])
def test_without_thinking_the_answer_begins_with_text(
    live: LiveServer, thinking: dict[str, Any] | None
) -> None:
    message = create(live, tools=TOOLS, thinking=thinking)
    assert [block["type"] for block in message["content"]] == ["text", "tool_use", "tool_use"]
    omitted = create(live, tools=TOOLS, thinking={"type": "adaptive", "display": "omitted"})
    assert without_ids(omitted) == without_ids(message)


def test_a_model_that_does_not_reason_accepts_thinking(http: httpx.Client) -> None:
    response = http.post(PATH, json=body_of(thinking=THINKING, max_tokens=5))
    assert response.status_code == 200, response.text
    assert [block["type"] for block in response.json()["content"]] == ["text"]


@pytest.mark.parametrize(
    ("fields", "text", "reason", "sequence"),
    [
        ({}, "A fox.", "end_turn", None),
        ({"max_tokens": 3}, "A fox.", "max_tokens", None),
        ({"max_tokens": 7}, "A fox.", "end_turn", None),
        ({"stop_sequences": ["dog", "fox"]}, "A fox.", "stop_sequence", "fox"),
        ({"stop_sequences": ["fox"], "max_tokens": 5}, "A fox.", "stop_sequence", "fox"),
        ({}, "", "end_turn", None),
    ],
)
def test_reasons_to_stop_have_anthropics_names(
    make_server: MakeServer, fields: dict[str, Any], text: str, reason: str, sequence: str | None
) -> None:
    message = create(make_server(answering(text)), **fields)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    shown = {"max_tokens": "A f", "stop_sequence": "A "}.get(reason, text)
    assert message["content"] == ([{"type": "text", "text": shown}] if shown else [])


def test_an_output_may_fill_the_context(make_server: MakeServer) -> None:
    """Agents ask for more tokens than the context of a small model has."""
    live = make_server(FakeClient(script=repeating(per_output=100)))
    message = create(live, max_tokens=32_000)
    assert message["stop_reason"] == "model_context_window_exceeded"
    usage = message["usage"]
    assert sum(usage.values()) == 512
    exact = create(live, max_tokens=usage["output_tokens"])
    assert exact["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("arguments", ['{"city": "Ro', "[1]"])
def test_arguments_that_are_not_an_object_are_not_lost(
    make_server: MakeServer, arguments: str
) -> None:
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}'
    live = make_server(answering(text))
    message = post(live, tools=TOOLS).json()
    assert message["content"][-1]["input"] == {INVALID_JSON: arguments}


CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "x"}}]},
    {"role": "user", "content": "there"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "xyz"},
            {"type": "text", "text": "Wait."},
            {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}},
            {"type": "tool_use", "id": "t2", "name": "now", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
            {
                "type": "tool_result",
                "tool_use_id": "t2",
                "is_error": True,
                "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "clock"}],
            },
            {"type": "text", "text": "So?"},
        ],
    },
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Go on."},
]
SAME_CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "You help.\nYou are kind."},
    {"role": "user", "content": "hi\nthere"},
    {
        "role": "assistant",
        "content": "Wait.",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "t1", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}},
            {"id": "t2", "function": {"name": "now", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "t1", "name": "get_weather", "content": "sunny"},
    {"role": "tool", "tool_call_id": "t2", "name": "now", "content": "Error: no\nclock"},
    {"role": "user", "content": "So?"},
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Go on."},
]
SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f;"},
    {"type": "text", "text": "You help."},
    {"type": "text", "text": "You are kind.", "cache_control": {"type": "ephemeral"}},
]
CHAT_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": tool["name"],
            "description": tool.get("description"),
            "parameters": tool["input_schema"],
        },
    }
    for tool in TOOLS
]
TEMPLATE = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}\n{% endfor %}<tool_call>"


def test_a_conversation_has_the_prompt_of_the_same_chat(
    make_server: MakeServer, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "all.jinja").write_text(TEMPLATE)
    facts = ModelFacts("x", 400, 100_000, 16, 10_000, [1])
    options = {"model": str(checkpoint), "chat_template": str(tmp_path / "all.jinja")}
    live = make_server(FakeClient(facts), served_model_name=["null"], **options)
    response = post(live, system=SYSTEM, messages=CONVERSATION, tools=TOOLS, max_tokens=2)
    assert response.status_code == 200, response.text
    chat = {"messages": SAME_CHAT, "tools": CHAT_TOOLS, "max_tokens": 2, "enable_thinking": False}
    assert httpx.post(live.url + CHAT, json=chat).status_code == 200
    first, second = live.client.requests
    assert first.prompt_token_ids == second.prompt_token_ids


def test_a_template_gets_further_variables_and_a_salt_separates_prefixes(
    make_server: MakeServer, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "name.jinja").write_text("{{ enable_thinking }}{{ name }}")
    facts = ModelFacts("x", 400, 100_000, 16, 10_000, [1])
    options = {"model": str(checkpoint), "chat_template": str(tmp_path / "name.jinja")}
    live = make_server(FakeClient(facts), served_model_name=["null"], **options)
    fields = {"chat_template_kwargs": {"name": "Rome"}}
    response = post(live, max_tokens=2, cache_salt="gold", **fields)
    assert response.status_code == 200, response.text
    [add] = live.client.requests
    assert add.cache_salt == "gold"
    prompt = live.state.text.tokenizer.decode(add.prompt_token_ids, skip_special_tokens=True)
    assert prompt == "FalseRome"
    assert post(live, COUNT, **fields).json()["input_tokens"] == len(add.prompt_token_ids)
    refused = post(live, chat_template_kwargs={"tokenize": True}).json()["error"]
    assert refused["param"] == "chat_template_kwargs.tokenize"


def test_a_template_may_reject_instructions_that_are_not_at_the_beginning(
    make_server: MakeServer, checkpoint: Path, tmp_path: Path
) -> None:
    """Then they become the user's."""
    is_late = "not loop.first and m.role == 'system'"
    strict = "{% if " + is_late + " %}{{ raise_exception('late') }}{% endif %}"
    (tmp_path / "strict.jinja").write_text(TEMPLATE.replace("\n{% endfor", strict + "{% endfor"))
    (tmp_path / "all.jinja").write_text(TEMPLATE.replace("\n{% endfor", "{% endfor"))
    facts = ModelFacts("x", 400, 100_000, 16, 10_000, [1])
    prompts, counts = [], []
    system, later = ({"role": "system", "content": text} for text in "ab")
    answer = {"role": "assistant", "content": "x"}
    for name, messages in (
        ("strict", [system, USER, later, answer, later]),
        ("all", [system, {"role": "user", "content": "hi\nb"}, answer, later | {"role": "user"}]),
    ):
        template = str(tmp_path / f"{name}.jinja")
        live = make_server(FakeClient(facts), model=str(checkpoint), chat_template=template)
        fields = {"messages": messages, "max_tokens": 2, "model": None}
        assert post(live, **fields).status_code == 200
        prompts.append(live.client.requests[-1].prompt_token_ids)
        counts.append(post(live, COUNT, **fields).json())
    assert prompts[0] == prompts[1]
    assert counts[0] == counts[1]


def test_tokens_are_counted_as_they_are_used(live: LiveServer) -> None:
    fields = {"system": SYSTEM, "messages": CONVERSATION, "tools": TOOLS, "thinking": THINKING}
    counted = post(live, COUNT, **fields).json()
    usage = post(live, **fields).json()["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_more_tokens_than_the_context_has_can_be_counted(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 2000}]}
    counted = http.post(COUNT, json=body)
    assert (counted.status_code, counted.json()["input_tokens"] > 2000) == (200, True)
    response = http.post(PATH, json=body | {"max_tokens": 1})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


def test_the_model_continues_a_final_message_of_the_assistant(live: LiveServer) -> None:
    messages = [USER, {"role": "assistant", "content": [{"type": "text", "text": "The sum is ("}]}]
    create(live, messages=messages)
    assert prompt_of(live.client.requests[-1]).endswith("assistant: The sum is (")
    post(live, messages=[USER, {"role": "assistant", "content": ""}])
    assert prompt_of(live.client.requests[-1]).endswith("user: hi\nassistant: ")


def test_sampling_parameters_reach_the_engine(live: LiveServer) -> None:
    user_id = json.dumps({"device_id": "d" * 300})
    for given, tenant in (("gold", "gold"), (user_id, None)):
        fields = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "metadata": {"user_id": given}}
        assert post(live, max_tokens=9, service_tier="auto", **fields).status_code == 200
        add = live.client.requests[-1]
        params = add.sampling_params
        assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.25, 3)
        assert params.max_tokens == 9
        assert (add.tenant == tenant) if tenant else (0 < len(add.tenant) <= 256)


def grammar_of(add: AddRequest) -> str | None:
    grammar = add.sampling_params.grammar
    assert grammar is None or grammar.kind is GrammarKind.LARK
    return None if grammar is None else grammar.source


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (None, None),
        ({"type": "auto"}, None),
        ({"type": "auto", "disable_parallel_tool_use": True}, ["get_weather", "now"]),
        ({"type": "any"}, ["get_weather", "now"]),
        ({"type": "any", "disable_parallel_tool_use": True}, ["get_weather", "now"]),
        ({"type": "tool", "name": "now"}, ["now"]),
        ({"type": "none"}, None),
    ],
)
def test_choices_of_tools_are_enforced(
    live: LiveServer, choice: dict[str, Any] | None, names: list[str] | None
) -> None:
    assert post(live, tools=TOOLS, tool_choice=choice).status_code == 200
    source = grammar_of(live.client.requests[-1])
    assert (source is None) == (names is None)
    found = [name for name in ("get_weather", "now") if f'\\"{name}\\"' in (source or "")]
    assert found == (names or [])
    if source is not None:
        is_single = choice is not None and (
            choice["type"] == "tool" or choice.get("disable_parallel_tool_use")
        )
        assert (")*" in source.splitlines()[1]) != is_single


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "integer"}}}},
        {"output_format": {"type": "json_schema", "schema": {"type": "integer"}}},
    ],
)
def test_an_output_format_is_enforced(live: LiveServer, fields: dict[str, Any]) -> None:
    assert post(live, **fields).status_code == 200
    assert '"integer"' in (grammar_of(live.client.requests[-1]) or "")


def test_a_silent_stream_gets_pings(make_server: MakeServer) -> None:
    client = answering("A fox.")
    client.is_paused = True
    live = make_server(client, keep_alive_interval_s=0.05)
    with httpx.stream("POST", live.url + PATH, json=body_of(stream=True)) as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in range(3)] == ["event: ping", 'data: {"type":"ping"}', ""]
        client.is_paused = False
        events = parse("\n".join(lines).replace("\n\n\n", "\n\n"))
    assert message_of(events)["content"] == [{"type": "text", "text": "A fox."}]


@pytest.mark.parametrize("per_output", [1, 3, 1000])
def test_a_stream_resumed_after_any_event_is_exact(
    make_server: MakeServer, tmp_path: Path, per_output: int
) -> None:
    """Blocks that were open stay open, and an event in the middle of a step can be the last."""
    live = make_server(
        answering(per_output=per_output), journal_dir=str(tmp_path), reasoning_parser="qwen3"
    )
    live.call(start_sessions, live.state)
    body = body_of(tools=TOOLS, thinking=THINKING, stream=True)
    with httpx.Client(base_url=live.url, headers={"X-Request-Id": "r"}) as http:
        whole = parse(http.post(PATH, json=body).text)
        expected = message_of(whole)
        assert len(expected["content"]) == 4
        ids = [event.id for event in whole]
        assert None not in ids
        assert len(set(ids)) == len(ids)
        for count, event_id in enumerate(ids, start=1):
            assert event_id is not None
            rest = http.post(PATH, json=body, headers={"Last-Event-ID": event_id})
            assert rest.status_code == 200, (event_id, rest.text)
            assert message_of([*whole[:count], *parse(rest.text)]) == expected, event_id
    assert len(live.client.requests) == 1
    live.call(live.state.sessions.close)  # type: ignore[union-attr]
