"""Every bad input is rejected with the right status and the name of the field."""

import json
import re
from typing import Any

import httpx
import pytest

from api_proc.http.foreign_routes import INSTEAD
from tests.api.fake_engine import LiveServer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HUGE = 2**70


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hello"} | fields


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}]} | fields


def parts(*content: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": list(content)}])


RAW_ROWS: list[tuple[bytes, int, str | None, str]] = [
    (b"", 400, None, "invalid_json"),
    (b"{", 400, None, "invalid_json"),
    (b"not json", 400, None, "invalid_json"),
    ('{"prompt": "x"}'.encode("utf-16"), 400, None, "invalid_json"),
    (b'{"prompt": "\\ud800"}', 400, None, "invalid_json"),
    (b'{"prompt": "\xff"}', 400, None, "invalid_json"),
    (b'{"prompt": "x", "temperature": NaN}', 400, None, "invalid_json"),
    (b'{"prompt": "x", "temperature": Infinity}', 400, None, "invalid_json"),
    (b'{"prompt": "x", "temperature": 1e999}', 400, "temperature", "invalid_value"),
    (b'{"prompt": "x", "logit_bias": {"1": NaN}}', 400, None, "invalid_json"),
    (b"[" * 100_000, 400, None, "too_deep"),
    (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, None, "too_deep"),
    (b'{"prompt": "x", "suffix": ' + b"[" * 100_000, 400, None, "too_deep"),
    (b'{"prompt": "x", "model": "null", "model": "y"}', 400, "model", "duplicate_name"),
    (b'{"prompt": "x", "logit_bias": {"1": 1, "1": 2}}', 400, "1", "duplicate_name"),
    (
        b'{"prompt": "x", "max_tokens": 1, "m\\u0061x_tokens": 2}',
        400,
        "max_tokens",
        "duplicate_name",
    ),
    (b'{"prompt": "x", "a-b": 1, "a-b": 2}', 400, "a-b", "duplicate_name"),
    (b'{"prompt": "x", "a": [' + b"{}," * 70_000 + b"{}]}", 400, None, "too_many_values"),
    (b"[]", 400, None, "invalid_value"),
    (b'"text"', 400, None, "invalid_value"),
    (b" " * 300_001, 413, None, "body_too_large"),
]

ROWS: list[tuple[str, dict[str, Any], str, str]] = [
    *(
        (COMPLETIONS, completion(prompt=prompt), param, code)
        for prompt, param, code in (
            ("", "prompt", "empty_prompt"),
            ([], "prompt", "empty_prompt"),
            (None, "prompt", "empty_prompt"),
            ([[]], "prompt[0]", "empty_prompt"),
            (["x", ""], "prompt[1]", "empty_prompt"),
            ([-1], "prompt[0]", "token_out_of_range"),
            ([1, 2**31], "prompt[1]", "token_out_of_range"),
            ([2**63], "prompt[0]", "token_out_of_range"),
            ([1.5], "prompt[0]", "token_out_of_range"),
            ([True], "prompt[0]", "token_out_of_range"),
            ([[1, -1]], "prompt[0][1]", "token_out_of_range"),
            ([None], "prompt[0]", "invalid_value"),
            (["x", None], "prompt[1]", "invalid_value"),
            ([[1, None]], "prompt[0][1]", "invalid_value"),
            ([5] * 9000 + [None], "prompt[9000]", "invalid_value"),
            ([1000], "prompt", "invalid_value"),
            (["x", 1], "prompt", "invalid_value"),
            ([1, "x"], "prompt", "invalid_value"),
            ([[1], 1], "prompt", "invalid_value"),
            (5, "prompt", "invalid_value"),
            ({}, "prompt", "invalid_value"),
            ("x" * 512, "prompt", "context_length_exceeded"),
            ("x" * 200_000, "prompt", "context_length_exceeded"),
            ([5] * 512, "prompt", "context_length_exceeded"),
            (["x"] * 2049, "prompt", "invalid_value"),
        )
    ),
    (COMPLETIONS, {}, "prompt", "missing_required_parameter"),
    (CHAT, {}, "messages", "missing_required_parameter"),
    *(
        (COMPLETIONS, completion(n=n), "n", "invalid_value")
        for n in (0, -1, 129, 10**9, HUGE, 1.0, "3", True)
    ),
    *(
        (COMPLETIONS, completion(best_of=value), "best_of", "invalid_value")
        for value in (10**6, 129, 0)
    ),
    (COMPLETIONS, completion(n=2, best_of=1, stream=True), "best_of", "invalid_value"),
    *(
        (path, body(**{field: value}), field, "invalid_value")
        for path, body in ((COMPLETIONS, completion), (CHAT, chat))
        for field, values in (
            ("max_tokens", (0, -1, 2**63, "5", 1.5)),
            ("temperature", (-1, 2.1, 1e308, 999999, "inf", True)),
            ("top_p", (0, -1, 1.1)),
            ("top_k", (-2, 2**40, 1.5)),
            ("min_p", (2, -0.1)),
            ("repetition_penalty", (0, -1, 11, 1e308)),
            ("presence_penalty", (2.1, 1e308)),
            ("frequency_penalty", (-2.1, 1e308)),
            ("prompt_logprobs", (21, 10**6, -1)),
            ("seed", (2**64, "a", 1.5)),
            ("stream", (1, "yes")),
            ("min_tokens", (-1, 17, HUGE)),
            ("priority", (2**31, "high")),
            ("cache_salt", ("x" * 257, 5)),
            ("truncate_prompt_tokens", (-2, 0)),
            ("stop", ("", "x" * 1025, ["x"] * 65, 5)),
            ("stop_token_ids", ([5] * 129, [1000], "5")),
            ("logit_bias", ({str(i): 1.0 for i in range(1025)}, {"-1": 1.0}, {"1e3": 1.0})),
            ("logit_bias", ({"5": 101.0}, {"5": 1e30}, {"1000": 1.0}, {str(2**61 - 1): 1.0}, [])),
        )
        for value in values
        if not (field == "min_tokens" and value == 17 and path == CHAT)
    ),
    (COMPLETIONS, completion(stop=["ok", ""]), "stop[1]", "invalid_value"),
    (COMPLETIONS, completion(stop_token_ids=[5, -1]), "stop_token_ids[1]", "invalid_value"),
    (COMPLETIONS, completion(logprobs=10**6), "logprobs", "invalid_value"),
    (COMPLETIONS, completion(logprobs=True), "logprobs", "invalid_value"),
    (COMPLETIONS, completion(max_tokens=512), "max_tokens", "context_length_exceeded"),
    (COMPLETIONS, completion(suffix="end"), "suffix", "unsupported_parameter"),
    (COMPLETIONS, completion(prompt_embeds="gASV"), "prompt_embeds", "unsupported_parameter"),
    (COMPLETIONS, {"prompt_embeds": "gASV"}, "prompt_embeds", "unsupported_parameter"),
    (COMPLETIONS, {"prompt_embeds": None}, "prompt", "missing_required_parameter"),
    (COMPLETIONS, completion(guided_regex=""), "guided_regex", "invalid_value"),
    (
        COMPLETIONS,
        completion(prompt=["ok"] * 3, n=128, guided_regex="a" * 2**17),
        "guided_regex",
        "invalid_value",
    ),
    (COMPLETIONS, completion(structured_outputs={}), "structured_outputs", "invalid_value"),
    (COMPLETIONS, completion(use_beam_search=True, stream=True), "stream", "invalid_value"),
    (
        COMPLETIONS,
        completion(stream_options={"include_usage": True}),
        "stream_options",
        "invalid_value",
    ),
    (
        COMPLETIONS,
        completion(stream=True, stream_options={"include_usage": 1}),
        "stream_options.include_usage",
        "invalid_value",
    ),
    (COMPLETIONS, completion(stream=True, prompt_logprobs=1), "prompt_logprobs", "invalid_value"),
    (CHAT, chat(max_tokens=512), "max_tokens", "context_length_exceeded"),
    (CHAT, chat(max_completion_tokens=512), "max_completion_tokens", "context_length_exceeded"),
    (CHAT, chat(max_completion_tokens=0), "max_completion_tokens", "invalid_value"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs", "invalid_value"),
    (CHAT, chat(top_logprobs=2), "top_logprobs", "invalid_value"),
    (CHAT, chat(messages=[]), "messages", "invalid_value"),
    (CHAT, chat(messages=None), "messages", "invalid_value"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": "x"}] * 4097),
        "messages",
        "invalid_value",
    ),
    (CHAT, chat(messages=["x"]), "messages[0]", "invalid_value"),
    (
        CHAT,
        chat(messages=[{"role": "", "content": "x"}]),
        "messages[0].role",
        "invalid_value",
    ),
    (
        CHAT,
        chat(messages=[{"content": "x"}]),
        "messages[0].role",
        "missing_required_parameter",
    ),
    (CHAT, chat(messages=[{"role": "user"}]), "messages[0].content", "invalid_value"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": 5}]),
        "messages[0].content",
        "invalid_value",
    ),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": "x" * 1000}]),
        "messages",
        "context_length_exceeded",
    ),
    (CHAT, parts([]), "messages[0].content[0]", "invalid_value"),
    (CHAT, parts({"type": "text"}), "messages[0].content[0].text", "invalid_value"),
    *(
        (
            CHAT,
            parts({"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": url}}),
            "messages[0].content[1].type",
            "unsupported_parameter",
        )
        for url in ("http://169.254.169.254/", "file:///etc/passwd", "data:image/png;base64,")
    ),
    (
        CHAT,
        chat(messages=[{"role": "assistant", "tool_calls": [{"id": "1"}]}]),
        "messages[0].tool_calls[0].function",
        "missing_required_parameter",
    ),
    (CHAT, chat(tools=[{"type": "function"}]), "tools[0].function", "missing_required_parameter"),
    (CHAT, chat(tool_choice="required"), "tool_choice", "invalid_value"),
    (
        CHAT,
        chat(response_format={"type": "xml"}),
        "response_format",
        "unsupported_parameter",
    ),
    (CHAT, chat(modalities=["audio"]), "modalities", "unsupported_parameter"),
    (CHAT, chat(chat_template="{{ 1 }}"), "chat_template", "unsupported_parameter"),
    (
        CHAT,
        chat(chat_template_kwargs={"tokenize": True}),
        "chat_template_kwargs.tokenize",
        "not_allowed",
    ),
    (
        CHAT,
        chat(chat_template_kwargs={"chat_template": "{% for i in range(10**9) %}{% endfor %}"}),
        "chat_template_kwargs.chat_template",
        "not_allowed",
    ),
]


def check_error(response: httpx.Response, status: int, param: str | None, code: str) -> None:
    assert (response.status_code, response.headers["content-type"]) == (
        status,
        "application/json",
    ), response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code), error
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize(("raw", "status", "param", "code"), RAW_ROWS)
def test_unreadable_body_is_rejected(
    http: httpx.Client, raw: bytes, status: int, param: str | None, code: str
) -> None:
    response = http.post(COMPLETIONS, content=raw)
    check_error(response, status, param, code)


@pytest.mark.parametrize(("path", "body", "param", "code"), ROWS)
def test_field_out_of_bounds_is_rejected(
    http: httpx.Client, path: str, body: dict[str, Any], param: str, code: str
) -> None:
    response = http.post(path, json=body)
    check_error(response, 400, param, code)
    assert response.json()["error"]["message"].startswith(param), "the field comes first"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, chat(functions=[{}]), "functions is not supported; use tools"),
        (
            COMPLETIONS,
            completion(suffix="x"),
            "suffix is not supported; write the model's own markers for a gap into prompt",
        ),
        (CHAT, chat(prediction={}), "prediction is not supported"),
        (
            "/v1/responses",
            {"input": "hi", "conversation": "conv_1"},
            "conversation is not supported; use previous_response_id",
        ),
        (
            "/v1/responses",
            {"input": "hi", "include": ["x"]},
            "include[0] 'x' is not supported, only message.output_text.logprobs and"
            " reasoning.encrypted_content are",
        ),
    ],
)
def test_the_error_of_an_unsupported_field_names_what_to_use(
    http: httpx.Client, path: str, body: dict[str, Any], message: str
) -> None:
    assert http.post(path, json=body).json()["error"]["message"] == message


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "did you mean POST /v1/chat/completions?"),
        ("/v1/v1//chat/completions/", "did you mean POST /v1/chat/completions?"),
        ("/v1/chat/completion", "did you mean POST /v1/chat/completions?"),
        ("/models", "did you mean GET /v1/models?"),
        ("/v1/images/generations", "this server lacks it; only text is supported"),
        ("/api/chat", "this server lacks it; use POST /v1/chat/completions"),
        ("/completion/", "this server lacks it; use POST /v1/completions"),
        ("/v1/x/generations", "GET /docs lists the routes"),
        ("/" + "x/" * 20_000, "GET /docs lists the routes"),
    ],
)
def test_the_error_of_an_unknown_path_names_a_similar_one(
    http: httpx.Client, path: str, hint: str
) -> None:
    response = http.post(path)
    check_error(response, 404, None, "not_found")
    assert response.json()["error"]["message"] == f"Not Found: POST {path}; {hint}"


def test_routes_that_are_used_instead_exist(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()["paths"]
    known = {f"{method.upper()} {path}" for path, methods in document.items() for method in methods}
    named = set()
    for path, instead in INSTEAD.items():
        assert path not in document
        named |= {*re.findall(r"(?:GET|POST) /[\w/-]+", instead)}
    assert named - {"POST /sleep", "POST /reset_prefix_cache"} <= known


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"prompt": "x", "user": "a\xff"}', "it is not UTF-8 (byte 26)"),
        (b'\xef\xbb\xbf{"prompt": "x"}', "it begins with a byte order mark"),
        (b'{"prompt": "x", "stop": "\\ud800"}', "half of a surrogate pair (byte 25)"),
        (b'{"prompt": "\\ud83d\\ude00", "n": ', "Input data was truncated"),
    ],
)
def test_the_error_of_wrong_characters_in_a_body_has_their_place(
    http: httpx.Client, raw: bytes, reason: str
) -> None:
    message = http.post(COMPLETIONS, content=raw).json()["error"]["message"]
    assert message == f"the body is not valid JSON: {reason}"


@pytest.mark.parametrize("raw", [b'{"\xff": 1}', b'{"\xff": 1, "prompt_embeds": "x"}'])
def test_a_missing_prompt_with_a_name_that_is_not_utf_8_is_an_error_of_the_request(
    http: httpx.Client, raw: bytes
) -> None:
    response = http.post(COMPLETIONS, content=raw)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_an_empty_body_is_called_empty(http: httpx.Client) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize", "/v1/messages"):
        assert http.post(path, content=b"").json()["error"]["message"] == "the body is empty"


def test_rejected_requests_do_not_reach_the_engine(server: LiveServer, http: httpx.Client) -> None:
    num_before = len(server.client.requests)
    for path, body, _, _ in ROWS:
        http.post(path, json=body)
    assert len(server.client.requests) == num_before
    answer = http.post(COMPLETIONS, json=completion(max_tokens=9))
    assert answer.json()["choices"][0]["text"] == "The quick"


def test_messages_name_the_bound(http: httpx.Client) -> None:
    def message(**fields: Any) -> str:
        return str(http.post(COMPLETIONS, json=completion(**fields)).json()["error"]["message"])

    assert "<= 128" in message(n=129)
    assert "<= 2.0" in message(temperature=3)
    assert "512" in message(max_tokens=510)
    assert "515" in message(max_tokens=510)
    assert "vocabulary of 1000" in message(prompt=[1000])


def test_messages_show_a_short_value_that_is_wrong(http: httpx.Client) -> None:
    def message(path: str = COMPLETIONS, **fields: Any) -> str:
        body = completion(**fields) if path == COMPLETIONS else chat(**fields)
        return str(http.post(path, json=body).json()["error"]["message"])

    assert message(n=129) == "n: must be an integer <= 128, got 129"
    assert message(n="many") == 'n: must be an integer or null, got "many"'
    assert message(n="m" * 99) == "n: must be an integer or null, got a string"
    assert message(n=[1]) == "n: must be an integer or null, got an array"
    assert len(message(n=10**4000)) < 80
    assert message(prompt="x" * 70_000, n="many").endswith("got a string"), "a large body"
    biases = {"5": 200}
    assert message(logit_bias=biases) == "logit_bias: a value in it must be a number <= 100.0"
    found = message(CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": 5}]}])
    assert found.startswith("messages[0].content[0].text: must be a string")
    assert found.endswith(", got 5")


def test_messages_name_the_values_of_a_choice(http: httpx.Client) -> None:
    def message(**fields: Any) -> str:
        return str(http.post(CHAT, json=chat(**fields)).json()["error"]["message"])

    calls = [{"type": "foo", "function": {"name": "f"}}]
    found = message(
        messages=[{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}]
    )
    assert found == "messages[1].tool_calls[0].type: 'foo' is not one of function"
    found = message(reasoning_effort="weird")
    assert found.startswith("reasoning_effort: 'weird' is not one of high, low, ")
    found = message(response_format={"type": "yaml"})
    assert found.endswith("types: text, json_object, json_schema, structural_tag")
    without = message(messages=[{"role": "user"}])
    assert without.startswith("messages[0].content: must be a string or an array")


def test_unknown_fields_are_ignored(http: httpx.Client) -> None:
    response = http.post(COMPLETIONS, json=completion(user="me", no_such_field={"a": [1]}))
    assert response.status_code == 200


def test_null_means_default(http: httpx.Client) -> None:
    names = ("max_tokens", "temperature", "n", "stop", "stream", "logprobs", "tools", "seed")
    response = http.post(COMPLETIONS, json=completion(**dict.fromkeys(names)))
    assert response.json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("fields", [{"tools": []}, {"tool_choice": "none"}, {"tools": None}])
def test_unsupported_field_without_effect_is_accepted(
    http: httpx.Client, fields: dict[str, Any]
) -> None:
    assert http.post(CHAT, json=chat(max_tokens=1, **fields)).status_code == 200


def test_unknown_model_is_not_found(http: httpx.Client) -> None:
    response = http.post(COMPLETIONS, json=completion(model="gpt-5"))
    check_error(response, 404, "model", "model_not_found")


def test_seed_outside_64_bits_is_named(http: httpx.Client) -> None:
    raw = json.dumps(completion(seed=2**63)).encode()
    check_error(http.post(COMPLETIONS, content=raw), 400, "seed", "invalid_value")
