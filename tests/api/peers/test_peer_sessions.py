"""Requests in journals of several API processes: any process continues the requests of all."""

import json
import socket
from pathlib import Path

import pytest

from api_proc.http.request_ids import RequestIds
from scripts.testing import eventually
from tests.api.peers.servers import (
    COUNT,
    Actor,
    Background,
    MakePair,
    Pair,
    PeerServer,
    body,
    id_owned_by,
    text_of,
    value,
)

HALF = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b"6\r\ndata: \r\n"
)


def test_a_rejection_before_the_body_was_read_is_passed_on(journaled: Pair) -> None:
    """The owner closes its connection with the rest of the body unread."""
    budget = journaled.servers[1].state.budget
    leases = [budget.open(2**40)]  # more than it may hold
    headers = {"X-Request-Id": f"job-{id_owned_by(1)}"}
    large = body(prompt="x" * 2**21)
    try:
        answers = [
            journaled.http[0].post("/v1/completions", json=large, headers=headers) for _ in range(3)
        ]
    finally:
        for lease in leases:
            lease.close()
    assert [answer.status_code for answer in answers] == [429] * 3


def test_a_request_is_resumed_at_any_of_them(journaled: Pair) -> None:
    """It runs once, and both read the same text."""
    whole = journaled.http[0].post("/v1/completions", json=body()).text
    with journaled.http[0].stream("POST", "/v1/completions", json=body()) as response:
        name = response.headers["x-request-id"]
        assert name.endswith("-0")
        lines = response.iter_lines()
        events = []
        while not (events and events[-1].startswith("id: ")):  # under load it may be the only one
            events.append(next(lines))
    last_id = events[-1].removeprefix("id: ")
    num_before = journaled.num_submitted()
    rests = []
    for http in journaled.http:
        headers = {"x-request-id": name, "last-event-id": last_id}
        answer = http.post("/v1/completions", json=body(), headers=headers)
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == name
        assert len(answer.headers.get_list("date")) == 1
        rests.append(text_of(answer.text))
    assert rests[0] == rests[1]
    assert text_of("\n".join(events)) + rests[1] == text_of(whole)
    assert journaled.num_submitted() == num_before
    wrong = {"x-request-id": name, "last-event-id": "other.3"}
    assert journaled.http[1].post("/v1/completions", json=body(), headers=wrong).status_code == 400
    gone = {"x-request-id": RequestIds(0, COUNT).draw(), "last-event-id": "x.3"}
    assert journaled.http[1].post("/v1/completions", json=body(), headers=gone).status_code == 404


def test_a_client_at_its_bound_can_read_what_another_process_owns(
    make_pair: MakePair, tmp_path: Path
) -> None:
    """The sequences count at the owner, and its connections elsewhere count apart."""
    limit = 3
    pair = make_pair(
        journal_dir=str(tmp_path / "journal"),
        max_open_requests_per_client=limit,
        keep_alive_interval_s=0.05,  # streams begin before they have a token
    )
    pair.pause(is_paused=True)
    names = [f"job-{id_owned_by(index)}" for index in range(COUNT)]
    budgets = [live.state.budget for live in pair.servers]

    def num_open() -> list[int]:
        counted = (budgets[0].clients, budgets[1].clients, budgets[0].foreign)
        return [clients._sequences.total for clients in counted]

    assert budgets[0].foreign.max_per_client == (COUNT - 1) * limit

    for http, name in zip(pair.http, names, strict=True):
        headers = {"x-request-id": name}
        with http.stream("POST", "/v1/completions", json=body(n=limit), headers=headers) as answer:
            assert answer.status_code == 200
    eventually(lambda: not sum(each.num_requests for each in budgets), "both clients have left")
    assert num_open() == [limit, limit, 0]
    resumed = Background(pair.http[0], body(n=limit), x_request_id=names[1])
    eventually(lambda: num_open() == [limit, limit, 1], "a connection counts apart")
    names = [f"new-{number}" for number in range(99)]
    new = {"x-request-id": next(n for n in names if RequestIds(0, COUNT).owner_of(n) == 1)}
    for path, fields in (("completions", body()), ("embeddings", {"input": "x"})):
        for headers in ({}, new):
            answer = pair.http[0].post(f"/v1/{path}", json=fields, headers=headers)
            assert answer.status_code == 429, "further requests count"
    pair.pause(is_paused=False)
    assert resumed.end().endswith("data: [DONE]\n\n")
    assert resumed.status == 200
    eventually(lambda: num_open() == [limit, 0, 0], "the connection has ended")


@pytest.mark.parametrize("owner", [0, 1])
def test_a_request_that_its_client_has_named_runs_once(journaled: Pair, owner: int) -> None:
    """Several connections to both processes get the same answer."""
    name = f"job-{id_owned_by(owner)}"
    journaled.pause(is_paused=True)
    readers = [Background(http, body(), x_request_id=name) for http in journaled.http]
    owner_client = journaled.servers[owner].client
    eventually(lambda: owner_client.requests, "the request was accepted")
    journaled.pause(is_paused=False)
    texts = {text_of(reader.end()) for reader in readers}
    assert len(texts) == 1
    assert texts != {""}
    assert journaled.num_submitted() == [int(owner == 0), int(owner == 1)]
    assert {reader.headers["x-request-id"] for reader in readers} == {name}
    other = journaled.http[1 - owner].post(
        "/v1/completions", json=body(prompt="other"), headers={"x-request-id": name}
    )
    assert other.status_code == 200, "the first is over, so its id can be used again"


def test_a_stream_breaks_with_its_owner_and_is_taken_up_by_its_successor(
    make_pair: MakePair, tmp_path: Path
) -> None:
    """The client waits until then; if no successor comes, the answer is a 503."""
    pair = make_pair(journal_dir=str(tmp_path / "journal"))
    pair.servers[1].__exit__()
    name = f"job-{id_owned_by(1)}"
    actor = Actor(pair.run_dir, 1, 99, HALF)
    broken = Background(pair.http[0], body(), x_request_id=name)
    assert broken.end() in ("", "data: ")
    assert broken.error is not None
    actor.close()
    waiting = Background(pair.http[0], body(), x_request_id=name)
    with PeerServer(pair.run_dir, 1, epoch=100, journal_dir=str(tmp_path / "journal")) as successor:
        assert text_of(waiting.end())
        assert len(successor.client.requests) == 1
    late = pair.http[0].post("/v1/completions", json=body(), headers={"x-request-id": name})
    assert late.status_code == 503
    assert late.json()["error"]["code"] == "recovering"


def test_metrics_of_journals_are_sums(journaled: Pair) -> None:
    for http in journaled.http:
        http.post("/v1/completions", json=body()).raise_for_status()
    for http in journaled.http:
        assert value(http, "sessions") == 2
        assert value(http, "journal_failed") == 0
        assert value(http, "journal_bytes") > 0


def test_a_client_that_leaves_ends_the_forwarded_request(journaled: Pair) -> None:
    """The owner sees the disconnect: the request has no reader left."""
    journaled.pause(is_paused=True)
    name = f"job-{id_owned_by(1)}"
    data = json.dumps(body(stream=False)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: {name}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", journaled.servers[0].port)) as client:
        client.sendall(head.encode() + data)
        sessions = journaled.servers[1].state.sessions
        assert sessions is not None
        session = eventually(lambda: sessions._by_id.get(name), "the owner has accepted it")
        eventually(lambda: session.num_attached == 1, "it is read")
    eventually(lambda: session.num_attached == 0, "the reader has left")
    journaled.pause(is_paused=False)
