"""Several API processes: each answers for all of them, and finds the owner of a request."""

import asyncio
import re
import time
from pathlib import Path
from typing import Any

from api_proc.http.connection import Connection
from api_proc.http.listener import listen_unix
from api_proc.http.request_ids import RequestIds
from api_proc.http.scope import REQUEST_ID_KEY
from api_proc.peers.directory import Directory
from api_proc.peers.peers import ASK_TIMEOUT_S
from protocol.api_core import EngineState
from scripts.testing import eventually
from tests.api.peers.servers import COUNT, Actor, Background, MakePair, Pair, body, value


def test_ids_name_their_owner() -> None:
    """A single process draws plain ids; a client's own id has one owner, too."""
    assert re.fullmatch("[0-9a-f]{32}", RequestIds().draw())
    assert re.fullmatch("[0-9a-f]{32}-2", RequestIds(2, 3).draw())
    for count in (1, 2, 5):
        for index in range(count):
            found = {
                RequestIds(asked, count).owner_of(RequestIds(index, count).draw())
                for asked in range(count)
            }
            assert found == {index}
    owners = [RequestIds(0, 4).owner_of(f"job-{number}") for number in range(400)]
    assert min(owners.count(index) for index in range(4)) > 50
    assert owners == [RequestIds(3, 4).owner_of(f"job-{number}") for number in range(400)]


def test_a_response_is_read_continued_and_deleted_at_any_of_them(pair: Pair) -> None:
    ours, theirs = pair.http
    first = ours.post("/v1/responses", json={"input": "hello", "max_output_tokens": 4}).json()
    path = f"/v1/responses/{first['id']}"
    assert first["id"].endswith("-0")
    assert theirs.get(path).json() == ours.get(path).json() == first
    assert len(theirs.get(path + "/input_items").json()["data"]) == 1
    further = {"input": "more", "max_output_tokens": 4}
    second = theirs.post("/v1/responses", json=further | {"previous_response_id": first["id"]})
    assert second.json()["id"].endswith("-1")
    third = ours.post("/v1/responses", json=further | {"previous_response_id": second.json()["id"]})
    lengths = [each["usage"]["input_tokens"] for each in (first, second.json(), third.json())]
    assert lengths == sorted(set(lengths))
    assert theirs.post(path + "/cancel").status_code == 400  # it has ended
    assert theirs.delete(path).json()["deleted"]
    lost = theirs.post("/v1/responses", json=further | {"previous_response_id": first["id"]})
    assert [http.get(path).status_code for http in pair.http] == [404, 404]
    assert lost.status_code == 404
    assert lost.json()["error"]["param"] == "previous_response_id"


def test_any_of_them_aborts_and_lists_the_requests_of_all(pair: Pair) -> None:
    pair.pause(is_paused=True)
    try:
        streams = [Background(http, body()) for http in pair.http]
        eventually(lambda: len(pair.http[0].get("/slots").json()) == 2, "both requests have begun")
        for http in pair.http:
            slots = http.get("/slots").json()
            assert sorted(slot["api_server"] for slot in slots) == [0, 1]
            assert [slot["request_id"][-2:] for slot in slots] == [
                f"-{slot['api_server']}" for slot in slots
            ]
            assert http.get("/load").json()["server_load"] == 2
        ids = ["cmpl-" + slot["request_id"] for slot in slots]
        asked = {"request_ids": [*ids, "unknown"]}
        assert sorted(pair.http[0].post("/abort_requests", json=asked).json()["aborted"]) == sorted(
            ids
        )
    finally:
        pair.pause(is_paused=False)
    for stream in streams:
        stream.end()
        assert stream.status == 409
    assert pair.http[1].get("/slots").json() == []


def test_metrics_are_sums_from_whichever_is_asked(pair: Pair) -> None:
    before = value(pair.http[0], "request_generation_tokens_count")
    for number in range(6):
        pair.http[number % 2].post("/v1/completions", json=body(stream=False)).raise_for_status()
    pair.pause(is_paused=True)
    streams = [Background(pair.http[1], body()) for _ in range(3)]
    try:
        for http in pair.http:
            eventually(lambda http=http: value(http, "http_requests_open") == 3, "all are open")
            assert value(http, "request_generation_tokens_count") == before + 6
            assert value(http, "api_servers") == value(http, "api_servers_answering") == 2
            assert http.get("/debug/engine").json()["num_open_requests"] == 3
    finally:
        pair.pause(is_paused=False)
    for stream in streams:
        stream.end()


def test_ready_means_all_that_answer(make_pair: MakePair) -> None:
    """One that hangs or is dead takes no connections, so it does not count."""
    pair = make_pair()
    second = pair.servers[1]
    ready = pair.http[0].get("/readyz")
    assert ready.status_code == 200
    assert (ready.json()["api_servers"], ready.json()["api_servers_ready"]) == (2, 2)
    second.client.report(EngineState.STARTING)
    ready = pair.http[0].get("/readyz")
    assert (ready.status_code, ready.json()["api_servers_ready"]) == (503, 1)
    hanging = listen_unix(f"{pair.run_dir}/api1.ff")
    try:
        second.client.report(EngineState.READY)
        began = time.monotonic()
        assert pair.http[0].get("/readyz").json()["api_servers_ready"] == 2
        assert value(pair.http[0], "api_servers_answering") == 2
        assert time.monotonic() - began < 2 * ASK_TIMEOUT_S + 1.0
    finally:
        hanging.close()
    second.__exit__()
    assert pair.http[0].get("/readyz").json()["api_servers_ready"] == 1
    assert value(pair.http[0], "api_servers_answering") == 1


def test_only_the_public_socket_asks_for_a_key(make_pair: MakePair) -> None:
    pair = make_pair(api_key="secret")
    assert pair.http[0].get("/slots").status_code == 401
    assert pair.http[0].get("/peer/gauges").status_code == 401
    headers = {"authorization": "Bearer secret"}
    assert pair.http[0].get("/slots", headers=headers).json() == []
    assert pair.http[0].get("/peer/gauges", headers=headers).status_code == 404


def test_a_forwarded_request_keeps_its_client(make_pair: MakePair, tmp_path: Path) -> None:
    pair = make_pair(journal_dir=str(tmp_path / "journal"), api_key=("one", "two"))
    ids = RequestIds(0, COUNT)
    for key in ("one", "two"):
        names = {ids.owner_of(f"{key}-{number}"): f"{key}-{number}" for number in range(99)}
        for name in names.values():
            headers = {"authorization": f"Bearer {key}", "x-request-id": name}
            headers["x-troika-origin"] = "another"
            answer = pair.http[0].post("/v1/completions", json=body(), headers=headers)
            assert answer.text.endswith("data: [DONE]\n\n")
    expected = [pair.servers[0].state.api_keys.name_of(key) for key in (b"one", b"two")]
    for live in pair.servers:
        assert [add.origin for add in live.client.requests] == expected


def test_a_successor_and_its_predecessor_are_both_asked(make_pair: MakePair) -> None:
    """During a planned restart one of them may know what the other does not."""
    pair = make_pair()
    actor = Actor(
        pair.run_dir, 1, 99, b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{"aborted":[]}\n'
    )
    try:
        pair.pause(is_paused=True)
        stream = Background(pair.http[1], body())
        eventually(lambda: pair.servers[1].client.requests, "the request was accepted")
        name = pair.servers[1].state.open_requests.slots(with_ids=True)[0].request_id
        asked = {"request_ids": [name]}
        assert pair.http[0].post("/abort_requests", json=asked).json() == {"aborted": [name]}
    finally:
        pair.pause(is_paused=False)
        actor.close()
    stream.end()


def test_what_another_process_has_sent_is_not_sent_on(make_pair: MakePair) -> None:
    """A successor and its predecessor would send it to each other without end."""
    pair = make_pair()

    def connection(*, is_forwarded: bool) -> Connection:
        async def receive() -> Any:
            await asyncio.sleep(60)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"method": "GET", "raw_path": b"/livez", "query_string": b"", "headers": []}
        made = Connection(scope | {REQUEST_ID_KEY: "x"}, receive, send)
        made.is_forwarded = is_forwarded
        return made

    sent: list[Any] = []
    peers = pair.servers[0].state.peers
    assert peers is not None
    forward = pair.servers[0].call
    name = RequestIds(1, COUNT).draw()
    assert forward(peers.forward, connection(is_forwarded=True), name) is False
    assert sent == []
    assert forward(peers.forward, connection(is_forwarded=False), name) is True
    assert sent[0]["status"] == 200
    own = RequestIds(0, COUNT).draw()
    assert forward(peers.forward, connection(is_forwarded=False), own) is False


def test_sockets_of_the_dead_are_removed_by_their_successor(tmp_path: Path) -> None:
    stale = listen_unix(str(tmp_path / "api1.1"))
    stale.close()
    living = listen_unix(str(tmp_path / "api1.2"))
    other = listen_unix(str(tmp_path / "api0.3"))
    other.close()
    directory = Directory(str(tmp_path), 1, 4)
    own = directory.listen()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["api0.3", "api1.2", "api1.4"]
    assert [(peer.index, peer.epoch) for peer in directory.others()] == [(0, 3), (1, 2)]
    directory.leave()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["api0.3", "api1.2"]
    living.close()
    own.close()
