"""Responses that are continued from stored ones, and their input items."""

from typing import Any

import pytest

from protocol.model_facts import ModelFacts
from tests.api.conftest import MakeServer
from tests.api.fake_engine import EOS_ID, FakeClient, LiveServer
from tests.api.responses.tool_model import BODY, HTTP, PATH, create, stream
from tests.api.tool_answers import prompt_of


@pytest.mark.parametrize("streamed", [False, True])
def test_a_response_is_continued(live: LiveServer, streamed: bool) -> None:
    """The prompt has all turns; instructions are those of the last request only."""
    first = create(live, instructions="be brief")
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "sun"}
        for item in first["output"]
        if item["type"] == "function_call"
    ]
    fields = {"previous_response_id": first["id"], "input": results, "instructions": "be kind"}
    second = stream(live, **fields)[-1]["response"] if streamed else create(live, **fields)
    assert second["previous_response_id"] == first["id"]
    empty: list[Any] = [None, "", []]
    for nothing in empty:
        create(live, previous_response_id=second["id"], input=nothing)
        assert prompt_of(live.client.requests[-1]).endswith("</tool_call>\nassistant: ")
    create(live, previous_response_id=second["id"], input="thanks")
    spread = [
        {"role": "user", "content": "hi"},
        *first["output"],
        *results,
        *second["output"],
        {"role": "user", "content": "thanks"},
    ]
    create(live, input=spread)
    continued, sent = live.client.requests[-2:]
    assert prompt_of(continued) == prompt_of(sent)
    prompt = prompt_of(continued)
    assert "be kind" not in prompt
    assert prompt.count("<tool_call>") == 4
    assert prompt.count("tool: sun") == 2
    assert prompt.rindex("user: thanks") > prompt.rindex("tool: sun")


def test_a_response_that_was_not_stored_cannot_be_continued(live: LiveServer) -> None:
    response = create(live, store=False)
    assert response["store"] is False
    for unknown in (response["id"], "resp_x", "x" * 200):
        found = HTTP.get(f"{live.url}{PATH}/{unknown}")
        assert (found.status_code, found.json()["error"]["code"]) == (404, "response_not_found")
        assert "restart of the server loses" in found.json()["error"]["message"]
        body = BODY | {"previous_response_id": unknown}
        error = HTTP.post(live.url + PATH, json=body)
        assert error.status_code == 404
        assert error.json()["error"]["param"] == "previous_response_id"
        assert error.json()["error"]["code"] == "previous_response_not_found"


def test_the_last_turns_are_kept_where_truncation_is_auto(make_server: MakeServer) -> None:
    live = make_server(FakeClient(ModelFacts("null", 1000, 200, 16, 200, [EOS_ID])))
    turns = [
        {"role": role, "content": f"{role[0]}{number} " + "x" * 20}
        for number in range(10)
        for role in ("user", "assistant")
    ]
    fields: dict[str, Any] = {
        "tools": None,
        "instructions": "brief",
        "input": [*turns, {"role": "user", "content": "end"}],
        "max_output_tokens": 20,
    }
    refused = HTTP.post(live.url + PATH, json=BODY | fields)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert refused.json()["error"]["param"] == "input"
    rendered = [f"{turn['role']}: {turn['content']}\n" for turn in turns]
    fixed = len("system: brief\nuser: end\nassistant: ")
    for num_output in range(1, 140, 9):
        create(live, **fields | {"truncation": "auto", "max_output_tokens": num_output})
        kept = next(
            rendered[first:]
            for first in range(2, len(turns) + 1, 2)
            if fixed + sum(map(len, rendered[first:])) <= 200 - num_output
        )
        prompt = prompt_of(live.client.requests[-1])
        assert prompt == f"system: brief\n{''.join(kept)}user: end\nassistant: "
    error = HTTP.post(
        live.url + PATH, json=BODY | fields | {"input": "x" * 300, "truncation": "auto"}
    )
    assert error.json()["error"]["code"] == "context_length_exceeded"


def test_input_items_are_listed_in_pages(live: LiveServer) -> None:
    items = [{"role": "user", "content": str(number)} for number in range(4)]
    items.append({"role": "assistant", "content": "4"})
    response = create(live, input=items)
    url = f"{live.url}{PATH}/{response['id']}/input_items"
    whole = HTTP.get(url, params={"order": "asc"}).json()
    kinds = [*["input_text"] * 4, "output_text"]
    assert [item["content"] for item in whole["data"]] == [
        [{"type": kind, "text": text}] for kind, text in zip(kinds, "01234", strict=True)
    ]
    assert {item["type"] for item in whole["data"]} == {"message"}
    assert whole["has_more"] is False
    ids = [item["id"] for item in whole["data"]]
    assert len(set(ids)) == 5
    page = HTTP.get(url, params={"limit": "2", "after": ids[3]}).json()
    assert [item["id"] for item in page["data"]] == [ids[2], ids[1]]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[2], ids[1], True)
    for name, value in (
        ("limit", "0"),
        ("limit", "9" * 5000),
        ("limit", "x"),
        ("order", "up"),
        ("after", "y"),
    ):
        bad = HTTP.get(url, params={name: value})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, name)
