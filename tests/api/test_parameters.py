"""Every parameter is honoured, refused by name, or unknown; the page of parameters is current."""

import itertools
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from api_proc.unknown_fields import FOREIGN, MAX_LOGGED, WITHOUT_EFFECT, UnknownFields
from protocol.api_core import AddRequest, RequestOutput
from tests.api.conftest import MakeServer
from tests.api.fake_engine import FACTS, FakeClient, LiveServer, ids_of, repeating, wait_until
from tests.paths import DOCS
from tests.tools import parameter_table
from tests.tools.parameter_table import GENERATING, ONLY, STRUCTS, fields_of, is_refused

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PAGE = DOCS / "parameters.md"
REQUIRED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5, 6]},
}
EXAMPLES: dict[str, Any] = {
    "allowed_token_ids": [5, 6],
    "bad_words": ["fox"],
    "best_of": 2,
    "cache_salt": "salt",
    "chat_template_kwargs": {"x": 1},
    "length_penalty": 1.0,
    "repetition_detection": {"max_pattern_size": 3, "min_count": 5},
    "return_progress": False,
    "thinking_token_budget": -1,
    "use_beam_search": True,
    "logit_bias": {"5": 1.0},
    "max_completion_tokens": 1,
    "min_tokens": 1,
    "n": 2,
    "priority": -3,
    "seed": 5,
    "stop": ["fox"],
    "stop_token_ids": [5],
    "stream_interval": 3,
    "temperature": 0.5,
    "timeout": 30.5,
    "truncate_prompt_tokens": 1,
    "user": "tenant",
}
REPETITION = "repetition_detection"
NAMING = (*GENERATING, "/tokenize", "/detokenize")
"""Routes that name unknown fields."""
CASES = [(path, name) for path, struct in STRUCTS.items() for name in fields_of(struct)]


def post(http: httpx.Client, path: str, **fields: Any) -> httpx.Response:
    body = REQUIRED[path] | fields
    if fields.get("messages", ...) is None:
        body["prompt"] = "x"
    return http.post(path, json=body)


def repeated(largest: int, smallest: int, count: int) -> dict[str, int]:
    return {"max_pattern_size": largest, "min_pattern_size": smallest, "min_count": count}


def test_the_page_is_current() -> None:
    printed = "\n".join(parameter_table.page())
    assert PAGE.read_text().strip() == printed.strip(), (
        "run python -m tests.tools.parameter_table > docs/parameters.md"
    )


@pytest.mark.parametrize(("path", "name"), CASES)
def test_each_parameter_is_honoured_or_refused_by_name(
    http: httpx.Client, path: str, name: str
) -> None:
    if is_refused(fields_of(STRUCTS[path])[name]):
        response = post(http, path, **{name: {"x": 1}})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == name
    elif name in EXAMPLES:
        response = post(http, path, **{name: EXAMPLES[name]})
        assert (response.status_code, response.headers.get("x-unknown-fields")) == (200, None)
    if name not in REQUIRED[path]:
        assert post(http, path, **{name: None}).status_code == 200, "null is the default"


def test_only_the_default_of_some_parameters_is_accepted(http: httpx.Client) -> None:
    others = {
        "background": True,
        "modalities": ["audio"],
    }
    for path in GENERATING:
        for name in ONLY.keys() & fields_of(STRUCTS[path]).keys():
            response = post(http, path, **{name: others[name]})
            assert (response.status_code, response.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_other_servers_names_are_refused(http: httpx.Client, name: str) -> None:
    for path in GENERATING:
        if name not in fields_of(STRUCTS[path]):
            response = post(http, path, **{name: {"x": 1}})
            assert (response.status_code, response.json()["error"]["param"]) == (400, name)
            assert post(http, path, **{name: None}).status_code == 200


def test_values_that_ask_for_what_happens_anyway_are_accepted(http: httpx.Client) -> None:
    empty = ("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "stream_options")
    fields = {"truncation_side": "left", "watermarking": False} | {name: {} for name in empty}
    assert post(http, CHAT, echo=False).status_code == 200
    for path in GENERATING:
        assert post(http, path, **fields).status_code == 200
        response = post(http, path, **fields | {"truncation_side": "right"})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "truncation_side")


def test_the_template_is_the_servers_own(http: httpx.Client) -> None:
    """Ids and texts of another template would not be those of a chat."""
    for path, name in itertools.product(
        ("/tokenize", "/apply-template"), ("chat_template", "documents")
    ):
        response = http.post(path, json=REQUIRED["/v1/messages/count_tokens"] | {name: ["x"]})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


def test_names_that_constrain_outputs_pass_where_there_is_none(http: httpx.Client) -> None:
    """So a chat's body can be sent to count its tokens."""
    response = post(http, "/tokenize", max_new_tokens=5)
    assert (response.status_code, response.headers["x-unknown-fields"]) == (200, "max_new_tokens")


def test_unknown_fields_are_ignored_warned_of_or_refused(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = {"no_such_field": {"a": [1]}, "bad name\r\n": 1}

    def fields_for(path: str) -> dict[str, Any]:
        names = WITHOUT_EFFECT - fields_of(STRUCTS[path]).keys()
        return unknown | dict.fromkeys(names, "x")

    found = {}
    for mode in ("ignore", "warn", "refuse"):
        live = make_server(unknown_fields=mode)
        caplog.clear()
        with httpx.Client(base_url=live.url) as http:
            for _ in range(2):
                found[mode] = [post(http, path, **fields_for(path)) for path in NAMING]
        logged = sum("no_such_field" in record.message for record in caplog.records)
        assert logged == (mode == "warn"), "once per name"
    num = len(NAMING)
    assert [r.headers.get("x-unknown-fields") for r in found["ignore"]] == [None] * num
    assert [r.headers["x-unknown-fields"] for r in found["warn"]] == ["no_such_field"] * num
    assert {r.status_code for r in found["ignore"] + found["warn"]} == {200}
    for response in found["refuse"]:
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "no_such_field"


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (COMPLETIONS, {"stream": True, "stream_options": {"include_usag": 1}}, "include_usag"),
        (COMPLETIONS, {"prompt": [5] * 9000, "repetition_detection": {"x": 1}}, "x"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "x"),
        (CHAT, {"response_format": {"type": "text", "json_schema": {"x": {}}}}, "x"),
        (CHAT, {"structured_outputs": {"regex": "a", "regexp": "b"}}, "regexp"),
        ("/v1/responses", {"text": {"format": {"type": "text", "x": 1}}}, "x"),
        ("/v1/messages", {"metadata": {"user": "x"}}, "user"),
    ],
)
def test_unknown_fields_of_options_are_named_with_their_path(
    make_server: MakeServer, path: str, fields: dict[str, Any], name: str
) -> None:
    """They are named with their path, and those of messages and schemas are not looked at."""
    message = {"role": "user", "content": "x", "no_such_field": 1}
    more = {"messages": [message]} if path in (CHAT, "/v1/messages") else {}
    facts = msgspec.structs.replace(FACTS, max_model_len=10_000, num_gpu_blocks=10_000)
    for mode in ("ignore", "warn", "refuse"):
        live = make_server(FakeClient(facts), unknown_fields=mode)
        with httpx.Client(base_url=live.url) as http:
            response = post(http, path, **fields, **more)
        shown = response.headers.get("x-unknown-fields") or ""
        assert shown.endswith(f".{name}" if mode == "warn" else "")
        if mode == "refuse":
            assert response.json()["error"]["param"].endswith(f".{name}")
        assert response.status_code == (400 if mode == "refuse" else 200)


def test_obfuscation_is_refused(http: httpx.Client) -> None:
    for value, status in ((False, 200), (True, 400)):
        options = {"include_obfuscation": value}
        response = post(http, CHAT, stream=True, stream_options=options)
        assert (response.status_code, "x-unknown-fields" in response.headers) == (status, False)


def test_a_stream_has_the_header_too(http: httpx.Client) -> None:
    response = post(http, "/v1/completions", stream=True, no_such_field=1)
    assert response.headers["x-unknown-fields"] == "no_such_field"


def test_names_in_the_log_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    unknown = UnknownFields("warn")
    for i in range(2 * MAX_LOGGED):
        [(_, value)] = unknown.check(b"{}", [f"name_{i}", "\x00", "x" * 65])
        assert value == f"name_{i}".encode()
    assert len(caplog.records) == MAX_LOGGED
    caplog.clear()
    other = UnknownFields("warn")
    assert [other.check(b"{}", [f"tools[{i}].x"])[0][1] for i in (0, 1)] == [
        b"tools[0].x",
        b"tools[1].x",
    ]
    assert len(caplog.records) == 1
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


@pytest.mark.parametrize("fields", [{"images": ["x"]}, {"audio": {"id": "1"}}, {"prefix": True}])
def test_unknown_parts_of_messages_are_refused(http: httpx.Client, fields: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "x", **fields}]
    response = post(http, "/v1/chat/completions", messages=messages)
    [name] = fields
    assert (response.status_code, response.json()["error"]["param"]) == (400, f"messages[0].{name}")


def test_max_completion_tokens_bounds_completions(http: httpx.Client) -> None:
    response = post(http, "/v1/completions", max_completion_tokens=5, max_tokens=9)
    assert response.json()["usage"]["completion_tokens"] == 5


def test_constraints_reach_the_engine(make_server: MakeServer) -> None:
    """Bad words are as written and after a space; the byte sequence of the former covers both."""
    client = FakeClient()
    with httpx.Client(base_url=make_server(client).url) as http:
        fields = {"bad_words": ["ab", " c"], "allowed_token_ids": [7, 8]}
        assert post(http, "/v1/completions", **fields).status_code == 200
    params = client.requests[-1].sampling_params
    assert params.bad_words == [ids_of("ab"), ids_of("c")]
    assert params.allowed_token_ids == [7, 8]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1000]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [2], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": ids_of("a"), "bad_words": ["a"]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"logprob_token_ids": [1000], "logprobs": 1}, "logprob_token_ids"),
        ({"logprob_token_ids": [5] * 129, "logprobs": 1}, "logprob_token_ids"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": 1e9}, "timeout"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"length_penalty": 11, "use_beam_search": True}, "length_penalty"),
        ({"n": 11, "use_beam_search": True}, "n"),
        ({"best_of": 3, "use_beam_search": True}, "best_of"),
        ({"stream": True, "use_beam_search": True}, "stream"),
        ({"temperature": 0.5, "use_beam_search": True}, "temperature"),
        ({"stop": ["x"], "use_beam_search": True}, "stop"),
        ({"guided_regex": "x", "use_beam_search": True}, "use_beam_search"),
        ({"return_progress": True}, "return_progress"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"repetition_detection": {"max_pattern_size": 65}}, REPETITION + ".max_pattern_size"),
        ({"repetition_detection": {"max_pattern_size": 2}}, REPETITION + ".min_count"),
        ({"repetition_detection": {"min_count": 1001}}, REPETITION + ".min_count"),
        ({"repetition_detection": repeated(3, 4, 2)}, REPETITION),
        ({"repetition_detection": repeated(64, 1, 17)}, REPETITION),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name_on_every_route(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    for path in GENERATING:
        if not fields.keys() <= fields_of(STRUCTS[path]).keys():
            continue  # this route refuses the whole field
        more = fields
        if "logprobs" in fields and path != "/v1/completions":
            more = fields | {"logprobs": True}
        response = post(http, path, **more)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_candidates_are_those_of_the_request(make_server: MakeServer) -> None:
    """There are more of them than `logprobs` may ask for."""
    asked = list(range(100, 130))
    client = FakeClient(script=with_candidates)
    with httpx.Client(base_url=make_server(client).url) as http:
        completion = post(http, "/v1/completions", logprobs=0, logprob_token_ids=asked).json()
        chat = post(http, "/v1/chat/completions", logprobs=True, logprob_token_ids=asked).json()
    [choice] = completion["choices"]
    assert all(len(top) >= 30 for top in choice["logprobs"]["top_logprobs"])
    [choice] = chat["choices"]
    assert all(len(item["top_logprobs"]) == 30 for item in choice["logprobs"]["content"])


def with_candidates(add: AddRequest) -> Iterator[RequestOutput]:
    """Describe the tokens that the request names, as the worker does."""
    ids = add.sampling_params.logprob_token_ids
    for output in repeating()(add):
        for entry in output.logprobs or []:
            entry.top_ids[:] = ids
            entry.top_logprobs[:] = [-1.0] * len(ids)
        yield output


@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_ends_the_request(make_server: MakeServer, stream: bool) -> None:
    client = FakeClient()
    client.is_paused = True
    live = make_server(client, keep_alive_interval_s=0.05)
    body = {"prompt": "x", "timeout": 0.3, "stream": stream}
    response = httpx.post(live.url + "/v1/completions", json=body, timeout=10)
    if stream:
        assert response.text.endswith("data: [DONE]\n\n")
        event = response.text.split("data: ")[1]
        error = json.loads(event)["error"]
    else:
        assert (response.status_code, response.headers["x-should-retry"]) == (504, "false")
        error = response.json()["error"]
    assert (error["code"], error["param"]) == ("deadline_exceeded", "timeout")
    wait_until(lambda: client.cancelled == [1])


def test_open_streams_end_with_an_error_when_the_process_leaves(server: LiveServer) -> None:
    """Answers that are not streamed get a 503."""
    client = FakeClient()
    client.is_paused = True
    with LiveServer(server.state.config, client, keep_alive_interval_s=0.05) as live:
        url = live.url + "/v1/completions"
        with httpx.stream("POST", url, json={"prompt": "x", "stream": True}) as stream:
            lines = stream.iter_lines()
            assert next(lines) == ": keep-alive"
            live.call(live.state.fail_open)
            rest = [line for line in lines if line.startswith("data: ")]
        live.call(live.state.wait_idle)
    error = json.loads(rest[0].removeprefix("data: "))["error"]
    assert (error["code"], rest[1:]) == ("draining", ["data: [DONE]"])
