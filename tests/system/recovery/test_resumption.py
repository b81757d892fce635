"""Clients reconnect with the id of their request and of the last event, and read on exactly."""

import itertools
import json
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from protocol.lifecycle import Role
from scripts.testing import Engine, EngineFactory, eventually
from tests.system.resumed_streams import TOKENS, body, content
from tests.system.shared_engines import EnginePool
from tests.system.streams import Event, Stream, metric


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    """An engine with a journal; each test uses different request ids."""
    with EngineFactory() as factory:
        flags = ("--null-step-ms", "5")
        # No session ends while another test counts its own.
        flags += ("--resume-window-s", "600")
        engine = factory("--journal-dir", f"{factory.base}/journal", *flags)
        engine.ready()
        yield engine


def read_in_pieces(
    engine: Engine, fields: dict[str, Any], name: str, cuts: list[int], path: str, **interrupt: Any
) -> list[Event]:
    """Read a stream and reconnect after each of these numbers of events."""
    events: list[Event] = []
    last_id = None
    for cut in [*cuts, 10**9]:
        headers = {"X-Request-Id": name} | ({"Last-Event-ID": last_id} if last_id else {})
        stream = Stream(engine.url(), fields, path=path, headers=headers)
        assert stream.read_head() == 200, stream.body()
        assert stream.headers["x-request-id"] == name
        for _ in range(cut):
            event = stream.next()
            if event is None:
                break
            events.append(event)
            last_id = event.id or last_id
        stream.reset()
        if cut != 10**9 and "kill" in interrupt:
            engine.kill(Role(interrupt["kill"]))
    return events


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("/v1/completions", {}),
    "usage": ("/v1/completions", {"stream_options": {"include_usage": True}}),
    "sampled": ("/v1/completions", {"temperature": 1.0, "seed": 11, "logprobs": 2}),
    "two": ("/v1/completions", {"n": 2, "seed": 5}),
    "echo": ("/v1/completions", {"prompt": "repeat this", "echo": True}),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 1},
    ),
}
TOKENS_ROUTE = "/inference/v1/generate"


@pytest.mark.parametrize(
    ("kill", "case"),
    [
        *itertools.product(["", "api"], CASES),
        *itertools.product(["core", "worker"], ["sampled", "chat"]),
        *itertools.product(["api", "worker"], ["tokens"]),
    ],
)
def test_stream_in_pieces_is_the_stream_in_one(shared: Engine, case: str, kill: str) -> None:
    """Connections are lost, with or without the death of a process."""
    path, extra = CASES.get(case, (TOKENS_ROUTE, {}))
    fields = body(**extra)
    if "messages" in fields:
        del fields["prompt"]
    if path == TOKENS_ROUTE:
        params = {"max_tokens": TOKENS, "n": 2, "logprobs": 1, "temperature": 1.0, "seed": 11}
        options = {"include_usage": True}
        fields = {"token_ids": [5, 6, 7], "sampling_params": {**params, "ignore_eos": True}}
        fields |= {"stream": True, "stream_options": options}
    whole = Stream(shared.url(), fields, path=path).events()
    assert whole[-1].data == "[DONE]"
    interrupt = {"kill": kill} if kill else {}
    name = f"{case}-{kill}.1"
    pieces = read_in_pieces(shared, fields, name, [1, 7, 20], path, **interrupt)
    assert pieces[-1].data == "[DONE]"
    assert content(pieces) == content(whole)


def test_a_completely_delivered_stream_ends_at_once(shared: Engine) -> None:
    """A client that has the last event gets the end; one that has none gets everything."""
    engine = shared
    fields = body(max_tokens=10, stream_options={"include_usage": True})
    headers = {"X-Request-Id": "r.1"}
    events = Stream(engine.url(), fields, headers=headers).events()
    usage = events[-2]
    assert usage.id is not None
    assert usage.id.endswith(".10u")
    again = Stream(engine.url(), fields, headers=headers).events()
    assert content(again) == content(events)
    for seen, rest in ((events[-3], 2), (usage, 1)):
        assert seen.id is not None
        back = Stream(engine.url(), fields, headers=headers | {"Last-Event-ID": seen.id}).events()
        assert len(back) == rest


def test_complete_answers_are_sent_again(shared: Engine) -> None:
    """A request that is repeated because its answer was lost runs once."""
    engine = shared
    fields = body(stream=False, n=2, temperature=1.0)
    del fields["seed"]  # each run would draw another seed seed
    num_before = metric(engine, "sessions")
    lost = Stream(engine.url(), fields, headers={"X-Request-Id": "w"})
    eventually(lambda: metric(engine, "sessions") == num_before + 1, "it is accepted")
    lost.reset()
    engine.kill(Role.API)
    answers = []
    for _ in range(2):
        stream = Stream(engine.url(), fields, headers={"X-Request-Id": "w"})
        assert stream.read_head() == 200
        answers.append(stream.body())
    assert answers[0] == answers[1]
    assert len(json.loads(answers[0])["choices"]) == 2


def error_of(stream: Stream) -> tuple[int, str]:
    status = stream.read_head()
    return status, json.loads(stream.body())["error"]["code"]


def test_ids_are_checked(shared: Engine) -> None:
    """A different body, an unknown request and a wrong event id are errors without side effects."""
    engine = shared
    url = engine.url()
    named = {"X-Request-Id": "mine"}
    stream = Stream(url, body(), headers=named)
    first = stream.next()
    assert first is not None
    assert error_of(Stream(url, body(seed=4), headers=named)) == (409, "request_id_conflict")
    unknown = {"X-Request-Id": "other", "Last-Event-ID": "other.3"}
    assert error_of(Stream(url, body(), headers=unknown)) == (404, "request_not_found")
    for wrong in ("mine.3-4", "mine.x", "other.3", "mine", "3"):
        headers = named | {"Last-Event-ID": wrong}
        assert error_of(Stream(url, body(), headers=headers)) == (400, "invalid_last_event_id")
    assert stream.events()[-1].data == "[DONE]"


def test_a_stop_string_is_found_after_a_break_anywhere(shared: Engine) -> None:
    """Text may be held back that can become a stop string."""
    text = "".join(event.text for event in Stream(shared.url(), body()).events())
    fields = body(stop=text[50:57])
    headers = {"X-Request-Id": "stops"}
    whole = Stream(shared.url(), fields, headers=headers).events()
    assert "".join(event.text for event in whole) == text[: text.index(text[50:57])]
    assert json.loads(whole[-2].data)["choices"][0]["stop_reason"] == text[50:57]
    for number, event in enumerate(whole[:-1], start=1):
        assert event.id is not None
        rest = Stream(shared.url(), fields, headers=headers | {"Last-Event-ID": event.id}).events()
        assert content(whole[:number] + rest) == content(whole), event.id


def test_many_read_one_request_at_once(shared: Engine) -> None:
    """Readers from the start, from the middle, and the first reader: each gets all of it."""
    fields = body(n=2, seed=5, stream_options={"include_usage": True}, max_tokens=600)
    whole = content(Stream(shared.url(), fields).events())
    headers = {"X-Request-Id": "shared"}
    first = Stream(shared.url(), fields, headers=headers)
    begun = [event for event in (first.next() for _ in range(9)) if event is not None]
    last = begun[-1].id
    assert last is not None
    num_before = metric(shared, "http_requests_open")
    others = [
        Stream(shared.url(), fields, headers=headers | rest)
        for rest in ({}, {"Last-Event-ID": last}, {"Last-Event-ID": last}, {})
    ]
    eventually(lambda: metric(shared, "http_requests_open") == num_before + 4, "all are there")
    others.pop().reset()
    with ThreadPoolExecutor(4) as pool:
        received = list(pool.map(Stream.events, [first, *others]))
    assert content(begun + received[0]) == whole
    assert content(received[1]) == whole
    assert all(content(begun + events) == whole for events in received[2:])


@pytest.fixture(scope="module")
def synced() -> Iterator[Engine]:
    """An engine whose journal is synced, and which keeps requests without a client for 3 s."""
    with EngineFactory() as factory:
        flags = ("--journal-sync", "--resume-window-s", "3", "--null-step-ms", "5")
        yield factory("--journal-dir", f"{factory.base}/journal", *flags)


def test_a_synced_journal_gives_the_same_stream(synced: Engine) -> None:
    fields = body(temperature=1.0)
    whole = Stream(synced.url(), fields).events()
    pieces = read_in_pieces(synced, fields, "synced", [10], "/v1/completions", kill="api")
    assert content(pieces) == content(whole)


def test_a_request_without_a_client_ends_in_bounded_time(synced: Engine) -> None:
    """The request runs on for a bounded time; afterwards its id is free, also after a restart."""
    engine = synced
    eventually(lambda: metric(engine, "sessions") == 0, "no other request is kept")
    fields = body(max_tokens=8000)
    stream = Stream(engine.url(), fields, headers={"X-Request-Id": "gone"})
    assert stream.next() is not None
    stream.reset()
    eventually(lambda: metric(engine, "http_requests_open") == 0, "it is noticed")
    assert metric(engine, "sessions") == 1
    eventually(lambda: metric(engine, "sessions") == 0, "the window closes")
    eventually(lambda: metric(engine, "num_requests_running") == 0, "it is aborted")
    engine.kill(Role.API)
    assert metric(engine, "sessions") == 0
    lost = {"X-Request-Id": "gone", "Last-Event-ID": "gone.1"}
    assert error_of(Stream(engine.url(), fields, headers=lost)) == (404, "request_not_found")


def test_many_clients_come_back_after_each_death_of_the_api(shared: Engine) -> None:
    """The API is killed twice under load: every client that reconnects reads all, exactly."""
    engine = shared
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 8, "logprobs": 1},
        {"n": 2, "seed": 9},
        {"presence_penalty": 1.0, "stream_options": {"include_usage": True}},
    ]
    fields = [body(max_tokens=600, **kind) for kind in kinds]
    url = engine.url()
    with ThreadPoolExecutor(len(fields)) as pool:
        whole = list(pool.map(lambda item: content(Stream(url, item).events()), fields))
    num_reconnects = 0

    def read(number: int) -> list[tuple[Any, ...]]:
        nonlocal num_reconnects
        events: list[Event] = []
        headers = {"X-Request-Id": f"client-{number}"}
        while not events or events[-1].data != "[DONE]":
            try:
                stream = Stream(url, fields[number % len(fields)], headers=headers)
            except OSError:  # it died before the first byte: nothing was promised
                continue
            try:
                status = stream.read_head()
            except OSError:
                stream.close()
                continue
            assert status == 200, stream.body()
            for event in stream.events():
                events.append(event)
                if event.id is not None:
                    headers["Last-Event-ID"] = event.id
            num_reconnects += 1
        return content(events)

    with ThreadPoolExecutor(32) as pool:
        reading = [pool.submit(read, number) for number in range(32)]
        for _ in range(2):
            eventually(lambda: metric(engine, "num_requests_running") >= 32, "all run")
            engine.kill(Role.API)
        found = [item.result() for item in reading]
    assert num_reconnects >= 64
    assert all(item == whole[number % len(whole)] for number, item in enumerate(found))


def test_without_a_journal_nothing_outlives_its_connection(shared_engine: EnginePool) -> None:
    """Events have no ids; a repeated id is a new request, unless it asks for the rest."""
    engine = shared_engine()
    headers = {"X-Request-Id": "x"}
    first = Stream(engine.url(), body(max_tokens=4), headers=headers).events()
    assert {event.id for event in first} == {None}
    again = Stream(engine.url(), body(max_tokens=4), headers=headers).events()
    assert content(again) == content(first)
    rest = Stream(engine.url(), body(), headers=headers | {"Last-Event-ID": "x.2"})
    assert error_of(rest) == (404, "request_not_found")
    assert engine.readiness()["journal"] == "off"


def test_a_full_disk_costs_the_journal_and_nothing_else(shared: Engine) -> None:
    """Requests go on in memory, and return to the journal when there is space again."""
    engine = shared
    eventually(lambda: engine.readiness()["journal"] == "writing", "the journal is written")
    fields = body(max_tokens=600)
    stream = Stream(engine.url(), fields, headers={"X-Request-Id": "full"})
    events = [stream.next() for _ in range(5)]
    api = engine.pid(Role.API)
    unlimited = resource.prlimit(api, resource.RLIMIT_FSIZE)
    resource.prlimit(api, resource.RLIMIT_FSIZE, (10, unlimited[1]))
    eventually(lambda: metric(engine, "journal_failed") == 1, "the alarm is given")
    readiness = engine.readiness()
    assert (readiness["journal"], readiness["ready"]) == ("failed", True)
    assert engine.post("/v1/completions", prompt=[5], max_tokens=2)["choices"]
    resource.prlimit(api, resource.RLIMIT_FSIZE, unlimited)
    eventually(lambda: metric(engine, "journal_failed") == 0, "it is written again")
    assert "is written again" in engine.log
    stream.reset()
    engine.kill(Role.API)
    last = events[-1]
    assert last is not None
    assert last.id is not None
    headers = {"X-Request-Id": "full", "Last-Event-ID": last.id}
    rest = Stream(engine.url(), fields, headers=headers).events()
    whole = Stream(engine.url(), fields).events()
    assert content([event for event in events if event] + rest) == content(whole)


def test_a_deadline_outlives_the_api(shared: Engine) -> None:
    """The time that a client allows counts from its request on, whatever happens meanwhile."""
    for timeout_s in (1.5, 5.0, 20.0):
        began = time.monotonic()
        error = deadline_after_a_kill(shared, timeout_s)
        if error is not None:
            break
    assert time.monotonic() - began >= timeout_s
    assert error is not None
    assert (error["code"], error["param"]) == ("deadline_exceeded", "timeout")


def deadline_after_a_kill(engine: Engine, timeout_s: float) -> dict[str, Any] | None:
    """Return the error of a client that comes back after the API's death; None: it was too late."""
    fields = body(max_tokens=4000, timeout=timeout_s)
    named = {"X-Request-Id": f"within {timeout_s:g}".replace(" ", "-")}
    stream = Stream(engine.url(), fields, headers=named)
    first = stream.next()
    assert first is not None
    if first.id is None or '"error"' in first.data:
        return None
    engine.kill(Role.API)
    stream.close()
    again = Stream(engine.url(), fields, headers=named | {"Last-Event-ID": first.id})
    status = again.read_head()
    if status != 200:  # it was over before the kill, or before the API served again
        assert status in (404, 504)
        return json.loads(again.body())["error"] if status == 504 else None
    [*_, last, done] = again.events()
    assert done.data == "[DONE]"
    return dict(json.loads(last.data)["error"])


@pytest.mark.slow
def test_requests_without_a_connection_count_for_their_client_after_a_death() -> None:
    """Their client may read them nevertheless, and then begin others."""
    with EngineFactory() as factory:
        flags = ("--journal-dir", f"{factory.base}/journal", "--null-step-ms", "5")
        engine = factory("--max-open-requests-per-client", "4", *flags)
        engine.ready()
        fields = body(n=2, max_tokens=1500)
        whole = content(Stream(engine.url(), fields).events())
        seen: dict[str, list[Event]] = {}
        for name in ("a", "b"):
            stream = Stream(engine.url(), fields, headers={"X-Request-Id": name})
            event = stream.next()
            assert event is not None
            seen[name] = [event]
            stream.reset()
        eventually(lambda: metric(engine, "http_requests_open") == 0, "it is noticed")
        for kill in (Role.CORE, Role.API):
            assert error_of(Stream(engine.url(), body())) == (429, "overloaded")
            engine.kill(kill)
        assert error_of(Stream(engine.url(), body())) == (429, "overloaded")
        for name, events in seen.items():
            headers = {"X-Request-Id": name, "Last-Event-ID": str(events[-1].id)}
            assert content(events + Stream(engine.url(), fields, headers=headers).events()) == whole
        assert content(Stream(engine.url(), fields).events()) == whole
