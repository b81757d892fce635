"""Streams: the frames that SDKs check, coalescing, silence, failures in the middle."""

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from api_proc.generation import serving
from api_proc.http.protocol import MAX_UNREAD_TOKENS
from api_proc.openai import completions
from api_proc.openai.completions import CompletionFormat
from api_proc.openai.logprobs import completion_logprobs
from api_proc.openai.objects import CompletionChoice, CompletionLogprobs
from api_proc.text.tokenizer import HfTokenizer
from protocol.api_core import AddRequest, ErrorCode, RequestError, RequestOutput
from protocol.client.errors import RequestFailed, failure_of, refusal_of
from protocol.sampling import FinishReason
from tests.api.conftest import MakeServer
from tests.api.fake_engine import (
    FACTS,
    FakeClient,
    LiveServer,
    emitting,
    ids_of,
    wait_until,
)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The decoded events; checks the framing and the end."""
    assert response.status_code == 200, response.text
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    assert frames.pop() == "data: [DONE]"
    frames = [frame for frame in frames if frame != ": keep-alive"]
    assert all(frame.startswith("data: ") for frame in frames)
    # Some clients read all after "data: " as JSON, so there is no line with an id.
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def completion(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    body = {"prompt": "hi", "stream": True, "max_tokens": 9} | fields
    return events(http.post(COMPLETIONS, json=body))


def chat(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": MESSAGES, "stream": True, "max_tokens": 9} | fields
    return events(http.post(CHAT, json=body))


def test_headers_disable_buffering_in_proxies(http: httpx.Client) -> None:
    response = http.post(COMPLETIONS, json={"prompt": "hi", "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"]


def test_completion_stream_has_one_id_and_ends_once(http: httpx.Client) -> None:
    chunks = completion(http)
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "The quick"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert all("usage" not in chunk for chunk in chunks)


def test_chat_stream_has_the_role_once(http: httpx.Client) -> None:
    chunks = chat(http)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == "The quick"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("ask", [completion, chat])
def test_usage_comes_last_with_empty_choices(http: httpx.Client, ask: Any) -> None:
    chunks = ask(http, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 9
    assert "prompt_tokens_details" in chunks[-1]["usage"]


@pytest.mark.parametrize("ask", [completion, chat])
def test_continuous_usage_grows_with_every_chunk(http: httpx.Client, ask: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk["usage"]["completion_tokens"] for chunk in ask(http, stream_options=options)]
    assert counts == sorted(counts)
    assert counts[-1] == 9


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2},
        {"stop": "brown", "max_tokens": 60},
        {"logprobs": 2},
        {"echo": True},
        {"echo": True, "logprobs": 1},
        {"return_token_ids": True},
        {"prompt": ["a", "b"], "n": 2, "echo": True},
    ],
)
def test_completion_stream_adds_up_to_the_whole_answer(
    http: httpx.Client, fields: dict[str, Any]
) -> None:
    whole = http.post(COMPLETIONS, json={"prompt": "hi", "max_tokens": 9} | fields).json()
    merged: dict[int, dict[str, Any]] = {}
    for chunk in completion(http, **fields):
        [choice] = chunk["choices"]
        add(merged.setdefault(choice["index"], {}), choice)
    assert [merged[i] for i in range(len(merged))] == whole["choices"]


@pytest.mark.parametrize(
    "fields", [{}, {"n": 3}, {"stop": ["k b"], "max_tokens": 60}, {"logprobs": True}]
)
def test_chat_stream_adds_up_to_the_whole_answer(
    http: httpx.Client, fields: dict[str, Any]
) -> None:
    whole = http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 9} | fields).json()
    merged: dict[int, dict[str, Any]] = {}
    for chunk in chat(http, **fields):
        [choice] = chunk["choices"]
        delta = choice.pop("delta")
        add(merged.setdefault(choice["index"], {}), choice | {"text": delta.get("content", "")})
    for choice in whole["choices"]:
        choice["text"] = choice.pop("message")["content"]
        assert merged[choice["index"]] == choice


def add(total: dict[str, Any], piece: dict[str, Any]) -> None:
    """Concatenate texts and lists, and keep other values."""
    for name, value in piece.items():
        if isinstance(value, dict):
            if not isinstance(total.get(name), dict):
                total[name] = {}
            add(total[name], value)
        elif isinstance(value, str | list) and total.get(name) is not None:
            total[name] = total[name] + value
        elif value is not None or name not in total:
            total[name] = value


@pytest.mark.parametrize("send", [completion, chat])
def test_stream_interval_merges_tokens_after_the_first(
    http: httpx.Client, send: Callable[..., list[dict[str, Any]]]
) -> None:
    received = send(http, max_tokens=10, stream_interval=4, return_token_ids=True)
    choices = [event["choices"][0] for event in received if event["choices"]]
    assert [len(c["token_ids"]) for c in choices if "token_ids" in c] == [1, 4, 4, 1]
    plain = send(http, max_tokens=10, return_token_ids=True)
    text = ["".join(text_of(event) for event in events) for events in (received, plain)]
    assert text[0] == text[1]


def text_of(event: dict[str, Any]) -> str:
    [choice] = event["choices"]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content") or "")


@pytest.mark.parametrize("ask", [completion, chat])
@pytest.mark.parametrize("is_exact", [True, False])
def test_answer_shows_whether_another_engine_has_continued_it(
    make_server: MakeServer, ask: Any, is_exact: bool
) -> None:
    def script(add: AddRequest) -> Iterator[RequestOutput]:
        for output in emitting(ids_of("abcd"))(add):
            yield output
            client.receivers[add.request_id].rebind("other", is_exact=is_exact)

    client = FakeClient(script=script)
    with httpx.Client(base_url=make_server(client).url) as http:
        choices = [chunk["choices"][0] for chunk in ask(http, max_tokens=4)]
        expected = {} if is_exact else {"resumed_inexactly": True}
        assert {
            key: choices[-1][key] for key in choices[-1] if key == "resumed_inexactly"
        } == expected
        assert all("resumed_inexactly" not in choice for choice in choices[:-1])


def test_text_within_a_character_waits_for_the_rest(make_server: MakeServer) -> None:
    live = make_server(FakeClient(script=emitting(ids_of("é🙂"))))
    with httpx.Client(base_url=live.url) as http:
        texts = [chunk["choices"][0]["text"] for chunk in completion(http, max_tokens=6)]
        assert texts == ["é", "🙂"]
        cut = [chunk["choices"][0]["text"] for chunk in completion(http, max_tokens=5)]
    assert cut == ["é", "\ufffd"]


def test_slow_reader_gets_many_tokens_per_event(make_server: MakeServer) -> None:
    """Unread tokens are merged, not queued as events."""
    num_tokens = MAX_UNREAD_TOKENS  # a client with more is dropped
    facts = msgspec.structs.replace(FACTS, max_model_len=2**20, num_gpu_blocks=2**17)
    script = emitting(ids_of("x" * num_tokens))
    live = make_server(FakeClient(facts, script))
    live.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    body = json.dumps({"prompt": "hi", "stream": True, "max_tokens": num_tokens}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", live.port))
        connection.settimeout(30)
        connection.sendall(head.encode() + body)
        wait_until(lambda: bool(live.client.receivers) and not live.client._scripts)
        received = b""
        while b"[DONE]" not in received:
            piece = connection.recv(2**16)
            assert piece, "the connection was closed"
            received += piece
    assert received.count(b"x") >= num_tokens
    assert received.count(b"data: ") < num_tokens / 2


def test_silent_stream_is_kept_alive(make_server: MakeServer) -> None:
    client = FakeClient()
    client.is_paused = True
    live = make_server(client, keep_alive_interval_s=0.02)
    body = {"prompt": "hi", "stream": True, "max_tokens": 3}
    with httpx.stream("POST", live.url + COMPLETIONS, json=body, timeout=5) as response:
        lines = response.iter_lines()
        assert next(lines) == ": keep-alive"
        client.is_paused = False
        rest = [line for line in lines if line.startswith("data: ")]
    assert len(rest) == 4


def failing_after(num_outputs: int) -> Any:
    def script(add: AddRequest) -> Any:
        for i in range(num_outputs):
            yield RequestOutput(add.request_id, i, ids_of("x"))
        yield RequestOutput(add.request_id, num_outputs, [], FinishReason.ERROR)

    return script


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_failure_in_the_middle_is_an_event(make_server: MakeServer, path: str) -> None:
    live = make_server(FakeClient(script=failing_after(2)))
    body = {"prompt": "hi", "messages": MESSAGES, "stream": True}
    response = httpx.post(live.url + path, json=body)
    error = events(response)[-1]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("server_error", "internal_error")


@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_token_has_a_status(make_server: MakeServer, stream: bool) -> None:
    live = make_server(FakeClient(script=failing_after(0)))
    response = httpx.post(live.url + COMPLETIONS, json={"prompt": "hi", "stream": stream})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"


@pytest.mark.parametrize("stream", [False, True])
def test_late_rejection_has_its_status(make_server: MakeServer, stream: bool) -> None:
    client = FakeClient()
    client.is_paused = True
    live = make_server(client)
    body = {"prompt": "hi", "stream": stream, "n": 2}
    error = RequestFailed(RequestError(ErrorCode.OVERLOADED, "the queue is full"))
    with httpx.Client(base_url=live.url) as http, refuse_when_submitted(live, 2, error):
        response = http.post(COMPLETIONS, json=body)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert live.client.cancelled == [1]


@pytest.mark.parametrize("journal", [False, True])
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (ErrorCode.ENGINE_FAILED, "error"),
        (ErrorCode.QUARANTINED, "error"),
        (ErrorCode.INVALID, None),
        (ErrorCode.OVERLOADED, None),
        (ErrorCode.DRAINING, None),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings"])
def test_metrics_count_failures_of_the_engine_and_no_refusals(
    make_server: MakeServer,
    tmp_path: Path,
    *,
    path: str,
    code: ErrorCode,
    reason: str | None,
    journal: bool,
) -> None:
    client = FakeClient()
    client.is_paused = True
    live = make_server(client, **({"journal_dir": str(tmp_path)} if journal else {}))
    error = refusal_of(RequestError(code, "it failed"))
    with refuse_when_submitted(live, 1, error):
        response = httpx.post(live.url + path, json={"prompt": "hi", "input": "hi"})
    assert response.status_code >= 400
    assert counted_ends(live) == ({} if reason is None else {reason: 1.0})


@pytest.mark.parametrize("journal", [False, True])
@pytest.mark.parametrize("code", [ErrorCode.ABORTED, ErrorCode.DRAINING, ErrorCode.TOO_LONG])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings"])
def test_metrics_count_each_accepted_request_that_fails(
    make_server: MakeServer, tmp_path: Path, *, path: str, code: ErrorCode, journal: bool
) -> None:
    """One has outgrown a frame, for example, or is open when the process leaves."""
    client = FakeClient()
    client.is_paused = True
    live = make_server(client, **({"journal_dir": str(tmp_path)} if journal else {}))
    error = failure_of(RequestError(code, "it failed"))
    with refuse_when_submitted(live, 1, error):
        response = httpx.post(live.url + path, json={"prompt": "hi", "input": "hi"})
    assert response.status_code >= 400
    assert counted_ends(live) == {"abort": 1.0}


def counted_ends(live: LiveServer) -> dict[str, float]:
    """Return the counts of request_success_total that are not 0, by their reasons."""
    text = httpx.get(live.url + "/metrics").text
    found = re.findall(r'request_success_total\{finished_reason="(\w+)".*\} (.*)', text)
    return {reason: float(count) for reason, count in found if float(count)}


class refuse_when_submitted:
    """Fails the last of `num_requests` as soon as it is submitted."""

    def __init__(self, live: LiveServer, num_requests: int, error: RequestFailed) -> None:
        self._live = live
        self._num_requests = num_requests
        self._error = error

    def __enter__(self) -> None:
        self._live.loop.call_soon_threadsafe(self._poll)

    def __exit__(self, *_: object) -> None: ...

    def _poll(self) -> None:
        client = self._live.client
        if len(client.requests) < self._num_requests:
            self._live.loop.call_later(0.001, self._poll)
            return
        del client._scripts[self._num_requests]
        client.receivers[self._num_requests].fail(self._error)


@pytest.mark.parametrize(
    ("key", "headers", "fields", "expected"),
    [
        (None, {"x-session-id": "a"}, {"cache_salt": "s"}, ""),
        ("X-Session-Id", {"x-session-id": "a"}, {}, "a"),
        ("X-Session-Id", {}, {}, ""),
        ("cache_salt", {}, {"cache_salt": "s"}, "s"),
    ],
)
def test_session_of_a_request_is_named_as_configured(
    make_server: MakeServer,
    key: str | None,
    headers: dict[str, str],
    fields: dict[str, str],
    expected: str,
) -> None:
    live = make_server(session_key=key)
    httpx.post(live.url + COMPLETIONS, json={"prompt": "hi"} | fields, headers=headers)
    assert live.client.affinities == [expected]


@pytest.mark.parametrize(
    ("fields", "in_threads"),
    [
        ({"prompt": [5, 6], "max_tokens": 9}, 0),
        ({"prompt": [5] * 450, "max_tokens": 9}, 2),
        ({"prompt": [5, 6], "max_tokens": 480, "stream_interval": 1000}, 2),
    ],
)
def test_long_prompts_and_events_are_rendered_by_a_thread(
    server: LiveServer,
    http: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    in_threads: int,
) -> None:
    """Their log-probabilities would occupy the event loop, and with it every other stream."""
    loop_thread = server.call(threading.get_ident)
    sizes: list[tuple[bool, int]] = []

    def observed(*args: Any, **more: Any) -> CompletionLogprobs:
        sizes.append((threading.get_ident() == loop_thread, len(args[1])))
        return completion_logprobs(*args, **more)

    monkeypatch.setattr(completions, "completion_logprobs", observed)
    fields = fields | {"echo": True, "n": 2, "logprobs": 20}
    chunks = completion(http, **fields)
    assert sum(not in_loop for in_loop, _ in sizes) == in_threads
    assert all(in_loop == (size < 400) for in_loop, size in sizes)
    whole = http.post(COMPLETIONS, json={**fields, "stream_interval": None}).json()
    for choice in whole["choices"]:
        index = choice["index"]
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, column in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][name]] == column


@pytest.mark.parametrize("stream", [True, False])
def test_a_long_echoed_prompt_is_decoded_in_slices_by_a_thread(
    make_server: MakeServer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    """The tokenizer's library lets no other thread run while it decodes."""
    live = make_server(model=str(checkpoint))
    loop_thread = live.call(threading.get_ident)
    in_loop: list[bool] = []
    lengths: list[int] = []
    choice, decode = CompletionFormat.choice, HfTokenizer.decode

    def observed_choice(*args: Any, **named: Any) -> CompletionChoice:
        in_loop.append(threading.get_ident() == loop_thread)
        return choice(*args, **named)

    def observed_decode(tokenizer: HfTokenizer, ids: list[int], **named: Any) -> str:
        lengths.append(len(ids))
        return decode(tokenizer, ids, **named)

    monkeypatch.setattr(serving, "_MANY_PARTS", 100)
    monkeypatch.setattr(completions, "_SLICE_TOKENS", 64)
    monkeypatch.setattr(CompletionFormat, "choice", observed_choice)
    monkeypatch.setattr(HfTokenizer, "decode", observed_decode)
    text = "The fox jumps \N{SMILING FACE WITH SUNGLASSES}. " * 20
    fields = {"max_tokens": 2, "echo": True}
    with httpx.Client(base_url=live.url) as http:
        ids = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
        assert len(ids) > 100
        if stream:
            chunks = completion(http, prompt=ids, **fields)
        else:
            chunks = [http.post(COMPLETIONS, json={"prompt": ids, **fields}).json()]
    assert "".join(each["choices"][0]["text"] for each in chunks).startswith(text)
    assert in_loop[0] is False
    assert all(length <= 64 for length in lengths)
