"""Responses end: by a stop string, a cancellation, a failure or a timeout."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from api_proc.responses.body import ResponseDecoder
from api_proc.responses.reply import ResponseReply
from api_proc.text.output_sequence import Delta
from protocol.api_core import AddRequest, RequestOutput
from protocol.model_facts import ModelFacts
from protocol.sampling import FinishReason
from tests.api.conftest import MakeServer
from tests.api.fake_engine import EOS_ID, FakeClient, LiveServer, ids_of, wait_until
from tests.api.responses.tool_model import HTTP, PATH, check_events, content_of, create, stream
from tests.api.test_streaming import failing_after


@pytest.mark.parametrize("streamed", [False, True])
def test_a_response_is_read_and_cancelled_while_it_runs(
    make_server: MakeServer, streamed: bool
) -> None:
    fake = FakeClient(ModelFacts("null", 1000, 1_000_000, 16, 70_000, [EOS_ID]), endless)
    live = make_server(fake)
    with httpx.Client(base_url=live.url) as http, httpx.Client(base_url=live.url) as other:
        body = {"input": "hi", "stream": True}
        with http.stream("POST", PATH, json=body) as response:
            lines = response.iter_lines()
            response_id = next(
                json.loads(line[6:])["response"]["id"]
                for line in lines
                if line.startswith("data: ")
            )
            next(line for line in lines if "output_text.delta" in line)
            url = f"{PATH}/{response_id}"
            running = other.get(url).json()
            assert running["status"] == "in_progress"
            assert running["output"][0]["status"] == "incomplete"
            assert other.delete(url).status_code == 409
            if streamed:
                cancelled = other.post(f"{url}/cancel").json()
                assert cancelled["status"] == "cancelled"
            else:
                ids = {"request_ids": [response_id]}
                found = other.post("/abort_requests", json=ids).json()
                assert found == {"aborted": [response_id]}
            last = [json.loads(line[6:]) for line in lines if line.startswith("data: ")][-1]
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "cancelled"
        wait_until(lambda: len(fake.cancelled) == 1)
        stored = other.get(url).json()
        assert stored == last["response"]
        assert stored["output"][0]["content"][0]["text"].startswith("xx")
        assert other.post(f"{url}/cancel").json() == stored, "it has already been cancelled"


def endless(add: AddRequest) -> Iterator[RequestOutput]:
    for index in range(1_000_000):
        yield RequestOutput(add.request_id, index, ids_of("x"))


def test_a_response_that_has_ended_cannot_be_cancelled(live: LiveServer) -> None:
    response = create(live)
    error = HTTP.post(f"{live.url}{PATH}/{response['id']}/cancel")
    assert error.status_code == 400
    assert "completed" in error.json()["error"]["message"]
    assert HTTP.post(f"{live.url}{PATH}/resp_x/cancel").status_code == 404


def test_a_response_that_is_being_kept_is_not_cancelled(live: LiveServer) -> None:
    """Its client will receive the end, while the record is written."""
    counts = {"num_prompt_tokens": 1, "num_output_tokens": 1, "num_cached_tokens": 0}
    sequence = SimpleNamespace(**counts, finish_reason="stop", reasoning=None)
    generation: Any = SimpleNamespace(
        **{"secret": None, "created": 1, "position": None, "is_resumable": False},
        sequences=[sequence],
        abort=lambda: True,
    )
    body = ResponseDecoder()(b'{"input": "x"}')
    reply = ResponseReply(live.state, SimpleNamespace(), body, generation)  # type: ignore[arg-type]
    assert reply.frames(sequence, Delta("x", [5], None, (), "stop"))  # type: ignore[arg-type]
    assert b"response.completed" in b"".join(reply.last_frames())
    assert json.loads(live.call(reply.cancel))["status"] == "completed"


def test_a_failure_within_the_stream_is_an_event(make_server: MakeServer) -> None:
    live = make_server(FakeClient(script=failing_after(2)))
    events = stream(live, tools=None)
    check_events(events)
    last = events[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert "engine ended the request" in last["response"]["error"]["message"]
    stored = HTTP.get(f"{live.url}{PATH}/{last['response']['id']}").json()
    assert stored == last["response"]


def test_a_failure_before_the_stream_is_a_status(make_server: MakeServer) -> None:
    live = make_server(FakeClient(script=failing_after(0)))
    response = HTTP.post(live.url + PATH, json={"input": "hi", "stream": True})
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")


@pytest.mark.parametrize("stream_it", [False, True])
def test_a_timeout_ends_the_response(make_server: MakeServer, stream_it: bool) -> None:
    fake = FakeClient()
    fake.is_paused = True
    live = make_server(fake, keep_alive_interval_s=0.05)
    body = {"input": "x", "timeout": 0.3, "stream": stream_it}
    response = HTTP.post(live.url + PATH, json=body, timeout=10)
    if stream_it:
        lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
        events = [json.loads(line[6:]) for line in lines]
        assert [event["type"] for event in events] == [
            "response.created",
            "response.in_progress",
            "response.failed",
        ]
        assert events[-1]["response"]["error"]["code"] == "deadline_exceeded"
    else:
        assert response.status_code == 504


def test_the_finish_reason_of_a_stop_string_is_completed(plain: LiveServer) -> None:
    response = create(plain, tools=None, stop=["brown"])
    assert response["status"] == "completed"
    assert content_of(response["output"]) == [("message", "The quick ")]
    assert FinishReason.LENGTH not in response["status"]
