"""Open requests are counted, rejected past the bound, and released."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator

import httpx
import pytest
from starlette.types import Message, Scope

from api_proc.errors import ApiError
from api_proc.fairness.budget import Budget, Freed
from api_proc.fairness.client_budget import ClientBudget
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


def fill(take: Callable[[], object]) -> tuple[int, str]:
    """Take until that is refused; return how often it was possible, and the refusal."""
    count = 0
    while True:
        try:
            take()
        except ApiError as error:
            return count, error.message
        count += 1


def test_a_client_leaves_a_ninth_of_each_bound_to_others() -> None:
    """Two that take all they can leave room for a third one."""
    budget = Budget(90, 900, ClientBudget(0, 90))
    count, problem = fill(lambda: budget.open(client="a"))
    assert count == 80
    assert problem.startswith("max_open_requests: this client holds 80 of 90 requests")
    assert fill(lambda: budget.open(client="b"))[0] == 9
    third = budget.open(client="c")
    assert fill(lambda: budget.open(client="d"))[0] == 0
    assert fill(lambda: third.grow(10))[0] == 90, "alone it may have any size"
    third.close()

    budget = Budget(90, 900, ClientBudget(0, 90))
    lease, second = budget.open(client="a"), budget.open(1, client="a")
    other, further = budget.open(client="b"), budget.open(1, client="b")
    count, problem = fill(lambda: lease.grow(1))
    assert count == 799
    assert problem.startswith("max_open_bytes: this client holds 800 of 900 bytes")
    assert fill(lambda: other.grow(1))[0] == 88
    for each in (other, further, second):
        each.close()

    with pytest.raises(ApiError, match=r"^max_open_requests: 81 sequences are more than 80") as no:
        lease.count_sequences(81)  # also as the only request
    assert no.value.status == 400
    lease.count_sequences(80)
    lease.count_sequences(1)
    with contextlib.closing(budget.open(client="a")) as another:
        problem = r"^max_open_requests: this client holds 2 of 90 sequences, .* request adds 79;"
        with pytest.raises(ApiError, match=problem) as later:
            another.count_sequences(80)
        assert later.value.status == 429
    lease.count_sequences(80)
    budget.open(client="b").count_sequences(8)
    lease.close()
    assert (budget.num_bytes, budget.num_requests) == (0, 1)


def test_a_share_is_computed_as_after_the_ends_of_requests() -> None:
    """These may be the client's own or those of others; the bound of all is another question."""
    budget = Budget(9, 990)
    own = [budget.open(100, client="a") for _ in range(3)]
    others = [budget.open(100, client="b") for _ in range(6)]
    freed = Freed("a")
    assert not budget.has_room(100, freed)
    freed.add(others.pop())
    assert budget.has_room(190, freed)
    assert not budget.has_room(191, freed)
    assert budget.has_share(100, freed)
    assert not budget.has_share(150, freed), "it holds 300 bytes, and 40 would be left"
    freed.add(own.pop())
    assert budget.has_share(150, freed)
    assert not budget.has_share(280, freed)
    assert (budget.num_requests, budget.num_bytes) == (9, 900)


def test_requests_of_no_client_have_no_shares() -> None:
    budget = Budget(9, 9)
    for _ in range(9):
        budget.open(1)
    assert (budget.num_requests, budget.num_bytes) == (9, 9)


@pytest.mark.parametrize("setting", ["max_open_requests", "max_num_waiting"])
def test_one_key_cannot_fill_a_server(make_server: MakeServer, setting: str) -> None:
    """Nor can it fill the queue while the engine is away."""
    client = FakeClient()
    client.is_paused = True
    client.connected = setting == "max_open_requests"
    live = make_server(client, api_key=("one", "two"), **{setting: 9})
    address = ("127.0.0.1", live.port)
    body = json.dumps(BODY).encode()

    def send(key: str) -> socket.socket:
        connection = socket.create_connection(address)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return connection

    with contextlib.ExitStack() as stack:
        for i in range(8):
            stack.enter_context(send("one"))
            wait_until(lambda: len(client.requests) == i + 1)  # noqa: B023 - called at once
        with send("one") as refused:
            assert refused.recv(4096).startswith(b"HTTP/1.1 429 ")
        stack.enter_context(send("two"))
        wait_until(lambda: len(client.requests) == 9)
    wait_until(lambda: live.state.budget.num_requests == 0)


def test_a_client_may_read_here_what_it_has_begun_at_all_other_processes() -> None:
    """It may read as much as its bound at each of them, besides its own requests."""
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
    """A pause whose requests fill the bound can therefore be ended, too."""

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
