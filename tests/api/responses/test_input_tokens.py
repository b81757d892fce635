"""The number of input tokens of a body of /v1/responses."""

from typing import Any

import httpx
import pytest

from protocol.model_facts import ModelFacts
from tests.api.conftest import MakeServer
from tests.api.fake_engine import EOS_ID, FakeClient, LiveServer
from tests.api.responses.tool_model import BODY, HTTP, PATH, TOOLS, create


@pytest.mark.parametrize(
    "fields",
    [{}, {"instructions": "be kind", "tools": TOOLS}, {"previous": True, "max_output_tokens": 3}],
)
def test_the_count_of_input_tokens_is_that_of_the_response(
    live: LiveServer, fields: dict[str, Any]
) -> None:
    fields = dict(fields)
    if fields.pop("previous", False):
        fields["previous_response_id"] = create(live)["id"]
    counted = HTTP.post(live.url + PATH + "/input_tokens", json=BODY | fields)
    num_tokens = create(live, **fields)["usage"]["input_tokens"]
    expected = {"object": "response.input_tokens", "input_tokens": num_tokens}
    assert (counted.status_code, counted.json()) == (200, expected)


def test_prompts_beyond_the_context_are_counted_and_bad_ones_are_refused(
    make_server: MakeServer,
) -> None:
    live = make_server(FakeClient(ModelFacts("null", 1000, 200, 16, 70_000, [EOS_ID])))

    def count(**fields: Any) -> httpx.Response:
        return HTTP.post(live.url + PATH + "/input_tokens", json=fields)

    turns = [{"role": "user", "content": "a" * 150}] * 2
    assert count(input=turns).json()["input_tokens"] > 200
    assert count(input=turns, truncation="auto").json()["input_tokens"] < 200
    for fields, param in (
        ({}, "input"),
        ({"input": "a", "max_tokens": 1}, "max_tokens"),
        ({"input": "a", "model": "other"}, "model"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
    ):
        refused = count(**fields)
        assert refused.status_code in (400, 404)
        assert refused.json()["error"]["param"] == param
    assert live.client.requests == []
