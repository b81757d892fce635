"""Every wait in the API has a deadline, past which a request is refused, but no answer is lost."""

import asyncio
import json

import httpx
import msgspec
import pytest

from api_proc.errors import ApiError
from api_proc.fairness import waiting
from api_proc.fairness.fair_gate import FairGate
from api_proc.fairness.waiting import WaitingRequests
from tests.api.conftest import MakeServer
from tests.api.fake_engine import FACTS, FakeClient, LiveServer

MAX_WAIT_S = 0.05


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_WAIT_S", MAX_WAIT_S)


def test_a_request_that_has_waited_too_long_is_refused_and_takes_no_place() -> None:
    async def run() -> None:
        gate = FairGate()
        await gate.enter()
        with pytest.raises(ApiError, match=r"has waited .* 0\.05 s") as caught:
            await gate.enter()
        assert (caught.value.status, caught.value.code) == (503, "overloaded")
        assert (b"retry-after", b"1") in caught.value.headers
        gate.leave()
        assert gate._num_free == 1
        await gate.enter()  # and later ones find it

    asyncio.run(run())


def test_one_that_is_cancelled_at_the_deadline_takes_no_place() -> None:
    async def run() -> None:
        gate = FairGate()
        await gate.enter()
        task = asyncio.create_task(gate.enter())
        await asyncio.sleep(0)
        [[admitted]] = gate._waiting._turns._origins[""].values()
        waiting._expire(admitted)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert gate.is_full()
        gate.leave()
        assert gate._num_free == 1

    asyncio.run(run())


def test_the_queue_does_not_grow_with_requests_that_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This holds even while none is admitted."""
    monkeypatch.setattr(waiting, "MAX_WAIT_S", 60.0)

    async def run() -> int:
        requests = WaitingRequests()
        last = asyncio.create_task(requests.wait())
        for i in range(1000):
            task = asyncio.create_task(requests.wait())
            await asyncio.sleep(0)
            if i % 2:
                task.cancel()
            else:
                [items] = requests._turns._origins[""].values()
                waiting._expire(items[-1])
            await asyncio.gather(task, return_exceptions=True)
        [items] = requests._turns._origins[""].values()
        size = len(items)
        assert requests._num_queued == size
        assert requests.admit()
        await last
        assert not requests.admit()
        assert (requests._num_queued, requests._num_gone) == (0, 0)
        return size

    assert asyncio.run(run()) <= 2 * waiting._FEW


async def _fill(gate: FairGate) -> None:
    while not gate.is_full():
        await gate.enter()


def _large_server(make_server: MakeServer) -> LiveServer:
    facts = msgspec.structs.replace(FACTS, max_model_len=2**15, num_gpu_blocks=2**13)
    return make_server(FakeClient(facts))


def test_a_large_body_that_waits_too_long_gets_a_503_and_a_small_one_is_served(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = _large_server(make_server)
    live.call(_fill, live.state.large_requests.in_memory)
    url = live.url + "/v1/completions"
    refused = httpx.post(url, json={"prompt": [5] * 20_000, "max_tokens": 1})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert json.loads(refused.text)["error"]["code"] == "overloaded"
    # On a busy machine an event loop may be late by more than the short wait.
    monkeypatch.setattr(waiting, "MAX_WAIT_S", 60.0)
    assert httpx.post(url, json={"prompt": "x", "max_tokens": 1}).status_code == 200
    live.call(live.state.large_requests.in_memory.leave)
    assert httpx.post(url, json={"prompt": [5] * 20_000, "max_tokens": 1}).status_code == 200
    assert len(live.client.requests) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_large_answer_that_waits_too_long_is_sent(make_server: MakeServer, stream: bool) -> None:
    """It was accepted and computed, so it is rendered out of turn."""
    live = _large_server(make_server)
    live.call(_fill, live.state.large_answers)
    body = {"prompt": [5] * 500, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": stream}
    answer = httpx.post(live.url + "/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.text.count('"top_logprobs"') == 1
    assert live.call(live.state.large_answers.is_full)
