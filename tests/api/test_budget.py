"""Open requests are counted, rejected past the bound, and released."""

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest
from starlette.types import Message, Scope

from api_proc.budget import Budget, ClientBudget
from api_proc.errors import ApiError
from api_proc.http.connection import Connection
from protocol.api_core import AddRequest, RequestOutput
from tests.api.conftest import MakeServer
from tests.api.fake_engine import FakeClient, repeating, wait_until

BODY = {"prompt": "hi", "max_tokens": 3}


def test_requests_and_bytes_are_bounded() -> None:
    budget = Budget(2, 100)
    first = budget.open(60)
    with pytest.raises(ApiError) as caught:
        budget.open(41)
    assert (caught.value.status, budget.num_requests, budget.num_bytes) == (429, 1, 60)
    second = budget.open()
    second.grow(40)
    with pytest.raises(ApiError):
        second.grow(1)
    with pytest.raises(ApiError):
        budget.open()
    first.close()
    first.close()
    assert (budget.num_requests, budget.num_bytes) == (1, 40)
    second.close()
    assert (budget.num_requests, budget.num_bytes) == (0, 0)


def test_requests_and_sequences_of_a_client_are_bounded() -> None:
    budget = Budget(100, 100, ClientBudget(3))
    lease = budget.open(client="a")
    lease.count_sequences(2)
    other = budget.open(client="a")
    for problem in (lambda: budget.open(client="a"), lambda: other.count_sequences(2)):
        with pytest.raises(ApiError, match=r"^max_open_requests_per_client: 3 of") as caught:
            problem()
        assert caught.value.status == 429
    budget.open(client="b").close()
    budget.open().close()
    with pytest.raises(ApiError, match="max_open_requests_per_client: 4 sequences") as caught:
        budget.open(client="b").count_sequences(4)
    assert caught.value.status == 400
    lease.close()
    other.count_sequences(3)
    other.close()
    with pytest.raises(ApiError, match="max_open_bytes"):
        budget.open(1).grow(100)
    for _ in range(3):
        budget.open(client="a")


def test_a_client_may_read_here_what_it_has_begun_at_all_other_processes() -> None:
    """As much as its bound at each of them, besides its own requests."""
    budget = Budget(100, 100, ClientBudget(3), num_others=2)
    foreign = [budget.open(client="a", is_foreign=True) for _ in range(2 * 3)]
    with pytest.raises(ApiError, match=r"^max_open_requests_per_client: 6 of"):
        budget.open(client="a", is_foreign=True)
    for _ in range(3):
        budget.open(client="a")
    foreign.pop().close()
    budget.open(client="a", is_foreign=True)


def test_one_request_is_accepted_whatever_its_size() -> None:
    """Otherwise a bound that is too small would reject every request."""
    budget = Budget(1, 10)
    budget.open(11).close()
    assert budget.num_bytes == 0


@pytest.mark.parametrize("setting", ["max_open_requests", "max_open_requests_per_client"])
def test_open_requests_past_a_bound_can_still_be_ended(
    setting: str, make_server: MakeServer
) -> None:
    """So a pause can be ended, too, whose requests fill the bound."""

    def script(add: AddRequest) -> Iterator[RequestOutput]:
        for i, output in enumerate(repeating()(add)):
            client.is_paused = i >= 1
            yield output

    client = FakeClient(script=script)
    live = make_server(client, **{setting: 1}, enable_admin_routes=True)
    body = {**BODY, "stream": True, "max_tokens": 50}
    with httpx.stream("POST", live.url + "/v1/completions", json=body) as stream:
        ids = {"request_ids": [stream.headers["x-request-id"]]}
        statuses = [
            httpx.post(live.url + path, json={}).status_code
            for path in ("/pause", "/resume", "/v1/responses/x/cancel", "/v1/load_lora_adapter")
        ]
        assert statuses == [200, 200, 404, 400]
        answer = httpx.post(live.url + "/abort_requests", json=ids)
        assert answer.json() == {"aborted": ids["request_ids"]}


def test_requests_that_control_others_are_bounded_separately() -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Message) -> None:
        raise AssertionError

    async def act() -> None:
        scope: Scope = {"type": "http", "headers": []}
        budget, control = Budget(0, 1), Budget(1, 10)
        first, second = (
            Connection(scope, receive, send, budget=budget, control_budget=control)
            for _ in range(2)
        )
        assert await first.read_body(10, is_control=True) == b"{}"
        assert (control.num_requests, control.num_bytes) == (1, 2)
        with pytest.raises(ApiError, match=r"^max_open_requests: 1 requests are open"):
            await second.read_body(10, is_control=True)
        first.close()
        assert (control.num_requests, control.num_bytes) == (0, 0)
        assert (budget.num_requests, budget.num_bytes) == (0, 0)

    asyncio.run(act())


@pytest.mark.parametrize("setting", ["max_open_requests", "max_open_requests_per_client"])
def test_requests_past_the_bound_are_rejected(setting: str, make_server: MakeServer) -> None:
    def script(add: AddRequest) -> Iterator[RequestOutput]:
        for i, output in enumerate(repeating()(add)):
            client.is_paused = i >= 1
            yield output

    client = FakeClient(script=script)
    live = make_server(client, **{setting: 1})
    body = {**BODY, "stream": True, "max_tokens": 50}
    with httpx.stream("POST", live.url + "/v1/completions", json=body) as stream:
        assert stream.status_code == 200
        refused = httpx.post(live.url + "/v1/completions", json=BODY)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert json.loads(refused.text)["error"]["message"].startswith(f"{setting}: ")
        assert json.loads(refused.text)["error"]["code"] == "overloaded"
        assert httpx.get(live.url + "/readyz").status_code == 200
    wait_until(lambda: live.state.budget.num_requests == 0)
    client.is_paused = False
    client.script = repeating()
    assert httpx.post(live.url + "/v1/completions", json=BODY).status_code == 200
    if setting == "max_open_requests_per_client":
        for path, more in (
            ("/v1/completions", {"n": 2}),
            ("/v1/completions", {"prompt": ["a", "b"]}),
            ("/v1/embeddings", {"input": ["a", "b"]}),
        ):
            refused = httpx.post(live.url + path, json={**BODY, **more})
            assert refused.status_code == 400
            assert setting in refused.text
