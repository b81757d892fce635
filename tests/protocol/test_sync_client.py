"""EngineClient in threads: above all, no thread is left waiting."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import zmq

from protocol.api_core import AddRequest, RequestOutput
from protocol.client.errors import Overloaded, RequestCancelled
from protocol.client.sync_client import EngineClient
from protocol.sampling import FinishReason, SamplingParams
from tests.protocol.fake_core import FACTS, RECOVERING, TIMEOUT_S, FakeCore, ServingThread

PARAMS = SamplingParams(max_tokens=1000)


@pytest.fixture
def core(tmp_path: Path) -> Iterator[FakeCore]:
    """A core that answers an odd first prompt token with [10, 11], an even one with all tokens."""

    def on_add(core: FakeCore, add: AddRequest) -> None:
        core.emit(RequestOutput(add.request_id, 0, [10, 11]))
        if add.prompt_token_ids[0] % 2 == 0:
            core.emit(RequestOutput(add.request_id, 2, [12], FinishReason.STOP))

    with FakeCore(str(tmp_path)) as fake:
        fake.on_add = on_add
        with ServingThread(fake):
            yield fake


@pytest.fixture
def client(core: FakeCore) -> Iterator[EngineClient]:
    with EngineClient(core.address) as connected:
        assert connected.wait_ready(timeout_s=TIMEOUT_S) == FACTS
        yield connected


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Call a function in a daemon thread, which does not delay the end of the tests."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def test_result_has_all_tokens_however_often_and_after_iterating(client: EngineClient) -> None:
    stream = client.submit([2], PARAMS)
    first = next(stream).token_ids
    assert first[:2] == [10, 11]
    for _ in range(2):
        whole = stream.result(timeout_s=TIMEOUT_S)
        assert (whole.token_ids, whole.first_index) == ([10, 11, 12], 0)
        assert whole.finish_reason is FinishReason.STOP


def test_result_after_a_timeout_has_lost_nothing(core: FakeCore, client: EngineClient) -> None:
    stream = client.submit([1], PARAMS)
    with pytest.raises(TimeoutError, match=r"no result within 0\.1 s"):
        stream.result(timeout_s=0.1)
    core.on_add = lambda core, add: core.emit(
        RequestOutput(stream._stream.request_id, 2, [12], FinishReason.STOP)
    )
    client.submit([1], PARAMS)
    assert stream.result(timeout_s=TIMEOUT_S).token_ids == [10, 11, 12]


def test_result_of_a_cancelled_request_fails(client: EngineClient) -> None:
    stream = client.submit([1], PARAMS)
    assert next(stream).token_ids == [10, 11]
    stream.cancel()
    with pytest.raises(RequestCancelled, match="cancelled"):
        stream.result(timeout_s=TIMEOUT_S)


def test_the_end_of_a_block_aborts_a_request(client: EngineClient) -> None:
    with client.submit([1], PARAMS) as stream:
        assert next(stream).token_ids == [10, 11]
    with pytest.raises(RequestCancelled, match="cancelled"):
        stream.result(timeout_s=TIMEOUT_S)
    with client.submit([2], PARAMS) as stream:
        assert stream.result(timeout_s=TIMEOUT_S).token_ids == [10, 11, 12]
    with client.submit([1], PARAMS):
        client.close()


def test_options_are_those_of_the_asynchronous_client(core: FakeCore) -> None:
    before = threading.active_count()
    with pytest.raises(TypeError, match="stall_timeout"):
        EngineClient(core.address, stall_timeout=30)
    assert threading.active_count() == before
    with EngineClient(core.address, max_open_requests=1) as client:
        client.wait_ready(timeout_s=TIMEOUT_S)
        stream = client.submit([1], PARAMS)
        with pytest.raises(Overloaded):
            client.submit([1], PARAMS)
        assert not stream.resumed_inexactly


def test_close_ends_what_other_threads_wait_for(core: FakeCore) -> None:
    client = EngineClient(core.address)
    client.wait_ready(timeout_s=TIMEOUT_S)
    stream = client.submit([1], PARAMS)
    assert next(stream).token_ids == [10, 11]
    core.status = RECOVERING
    other = EngineClient(core.address)
    reading = in_thread(lambda: next(stream))
    ready = in_thread(lambda: other.wait_ready(timeout_s=60))
    for waiting, waited_for in ((reading, client), (ready, other)):
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.05)
        waited_for.close()
        with pytest.raises(RequestCancelled, match="closed"):
            waiting.result(timeout=TIMEOUT_S)


def test_closed_client_fails_every_call_and_waits_for_nothing(client: EngineClient) -> None:
    stream = client.submit([1], PARAMS)
    assert next(stream).token_ids == [10, 11]
    client.close()
    client.close()
    stream.cancel()
    for call in (
        lambda: next(stream),
        lambda: stream.result(timeout_s=TIMEOUT_S),
        lambda: client.submit([1], PARAMS),
        lambda: client.wait_ready(timeout_s=TIMEOUT_S),
    ):
        with pytest.raises(RequestCancelled, match="closed"):
            call()


def test_client_that_cannot_start_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(zmq.ZMQError):
        EngineClient("ipc:///" + "x" * 200)
    assert threading.active_count() == before


def test_client_whose_thread_cannot_start_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        EngineClient("ipc:///nonexistent/core.sock")
    assert len(os.listdir("/proc/self/fd")) == before
