"""POST /inference/v1/generate: the tokens of /v1/completions, without text."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from protocol.api_core import AddRequest, ErrorCode, RequestError, RequestOutput
from protocol.client.errors import failure_of
from tests.api.conftest import MakeServer
from tests.api.fake_engine import FakeClient
from tests.api.test_streaming import events

PATH = "/inference/v1/generate"
IDS = [5, 6, 7]


def body(**params: Any) -> dict[str, Any]:
    return {"token_ids": IDS, "sampling_params": {"max_tokens": 6, **params}}


def completion(http: httpx.Client, **params: Any) -> dict[str, Any]:
    fields = {"prompt": IDS, "max_tokens": 6, "return_token_ids": True, **params}
    answer: dict[str, Any] = http.post("/v1/completions", json=fields).json()
    return answer


@pytest.mark.parametrize("params", [{}, {"n": 2}, {"stop": "o"}, {"prompt_logprobs": 2}])
def test_the_tokens_are_those_of_a_completion(http: httpx.Client, params: dict[str, Any]) -> None:
    response = http.post(PATH, json=body(**params), headers={"X-Request-Id": "mine"})
    assert response.status_code == 200, response.text
    answer, expected = response.json(), completion(http, **params)
    assert answer["request_id"] == "mine"
    assert answer["usage"] == expected["usage"]
    for ours, theirs in zip(answer["choices"], expected["choices"], strict=True):
        for name in ("index", "token_ids", "finish_reason", "stop_reason"):
            assert ours[name] == theirs[name]
        assert "text" not in ours
    shown = expected["choices"][0].get("prompt_logprobs")
    assert answer.get("prompt_logprobs") == shown


def test_a_stream_has_the_tokens_of_the_whole(http: httpx.Client) -> None:
    fields = body(n=2, logprobs=1)
    whole = http.post(PATH, json=fields).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(http.post(PATH, json=fields | options))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [p for chunk in chunks for p in chunk["choices"] if p["index"] == choice["index"]]
        assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"]
        found = [entry for part in parts for entry in part["logprobs"]["content"]]
        assert found == choice["logprobs"]["content"]
        assert [entry["token"] for entry in found] == [f"token_id:{i}" for i in choice["token_ids"]]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]


def test_the_output_has_all_tokens_that_fit_without_a_bound(make_server: MakeServer) -> None:
    """Chats do the same; completions have 16 tokens by default."""
    client = FakeClient()
    with httpx.Client(base_url=make_server(client).url) as http:
        assert http.post(PATH, json={"token_ids": IDS, "sampling_params": {}}).status_code == 200
    [add] = client.requests
    assert add.sampling_params.max_tokens > 400


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"sampling_params": {}}, "token_ids", "missing_required_parameter"),
        ({"token_ids": IDS}, "sampling_params", "missing_required_parameter"),
        ({**body(), "token_ids": []}, "token_ids", "invalid_value"),
        ({**body(), "token_ids": [1, -1]}, "token_ids[1]", "token_out_of_range"),
        ({**body(), "token_ids": [10**6]}, "token_ids", "invalid_value"),
        ({**body(), "token_ids": [5] * 600}, "token_ids", "context_length_exceeded"),
        (body(max_tokens=600), "sampling_params.max_tokens", "context_length_exceeded"),
        (body(n=0), "sampling_params.n", "invalid_value"),
        (body(min_tokens=9), "sampling_params.min_tokens", "invalid_value"),
        (body(guided_regex="a"), "sampling_params.guided_regex", "invalid_value"),
        (body(extra_args={"a": 1}), "sampling_params.extra_args", "unsupported_parameter"),
        ({**body(), "features": {"mm_hashes": {}}}, "features", "unsupported_parameter"),
        ({**body(), "kv_transfer_params": {"x": 1}}, "kv_transfer_params", "unsupported_parameter"),
        ({**body(), "output_mode": "text"}, "output_mode", "invalid_value"),
        ({**body(), "reasoning_ended": True}, "reasoning_ended", "unsupported_parameter"),
        (
            {**body(prompt_logprobs=1), "stream": True},
            "sampling_params.prompt_logprobs",
            "invalid_value",
        ),
        (
            body(structured_outputs={"regex": ""}),
            "sampling_params.structured_outputs.regex",
            "invalid_value",
        ),
    ],
)
def test_errors_have_the_names_of_the_body(
    http: httpx.Client, fields: dict[str, Any], param: str, code: str
) -> None:
    response = http.post(PATH, content=json.dumps(fields))
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)
    assert error["message"].startswith(param)


def test_what_concerns_text_or_another_server_has_no_effect(http: httpx.Client) -> None:
    plain = http.post(PATH, json=body()).json()["choices"]
    fields = body(detokenize=False, output_kind=2, skip_special_tokens=False) | {"request_id": "x"}
    response = http.post(PATH, json=fields)
    assert response.headers["x-unknown-fields"] == "request_id"
    assert response.json()["choices"] == plain


def test_errors_inside_a_stream_have_the_names_of_the_body(make_server: MakeServer) -> None:
    error = RequestError(ErrorCode.INVALID, "max_tokens outgrows the cache", "max_tokens")

    def script(add: AddRequest) -> Iterator[RequestOutput]:
        yield RequestOutput(add.request_id, 0, [7])
        client.receivers[add.request_id].fail(failure_of(error))

    client = FakeClient(script=script)
    live = make_server(client)
    with httpx.Client(base_url=live.url) as http:
        chunks = events(http.post(PATH, json={**body(), "stream": True}))
        whole = http.post(PATH, json=body())
    assert chunks[0]["choices"][0]["token_ids"] == [7]
    for found in (chunks[-1]["error"], whole.json()["error"]):
        assert found["param"] == "sampling_params.max_tokens"
        assert found["message"].startswith("sampling_params.max_tokens")
