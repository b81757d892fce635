"""`embed` of both clients: one vector for each request, and an abort when it is not wanted."""

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.api_core import AddRequest, RequestOutput
from protocol.client.errors import EngineFailed, InvalidRequest
from protocol.client.sync_client import EngineClient
from protocol.sampling import FinishReason, Pooling, PoolingType
from scripts.testing import eventually
from tests.protocol.fake_core import TIMEOUT_S, FakeCore, ServingThread

VECTOR = [0.5, -1.25, 3.0]
NEVER, WITHOUT = 7, 8
"""First tokens of prompts that get no output, and no vector."""


@pytest.fixture
def core(tmp_path: Path) -> Iterator[FakeCore]:
    def on_add(core: FakeCore, add: AddRequest) -> None:
        first = add.prompt_token_ids[0]
        if first == NEVER:
            return
        packed = None if first == WITHOUT else struct.pack("<3f", *VECTOR)
        core.emit(RequestOutput(add.request_id, 0, [], FinishReason.STOP, embedding=packed))

    with FakeCore(str(tmp_path)) as fake:
        fake.on_add = on_add
        with ServingThread(fake):
            yield fake


@pytest.fixture
def client(core: FakeCore) -> Iterator[EngineClient]:
    with EngineClient(core.address) as connected:
        connected.wait_ready(timeout_s=TIMEOUT_S)
        yield connected


def test_embed_returns_the_vector_of_a_prompt(core: FakeCore, client: EngineClient) -> None:
    pooling = Pooling(PoolingType.MEAN, 3, normalize=False)
    vector = client.embed([5, 6], pooling, tenant="gold", timeout_s=TIMEOUT_S)
    assert (vector.typecode, vector.tolist()) == ("f", VECTOR)
    [add] = core.adds
    assert (add.sampling_params.pooling, add.sampling_params.max_tokens) == (pooling, 1)
    assert (add.prompt_token_ids, add.tenant) == ([5, 6], "gold")
    assert client.embed([5]).tolist() == VECTOR
    assert core.adds[-1].sampling_params.pooling == Pooling()
    assert core.aborted == []


def test_vector_that_comes_too_late_is_aborted(core: FakeCore, client: EngineClient) -> None:
    with pytest.raises(TimeoutError):
        client.embed([NEVER], timeout_s=0.05)
    eventually(lambda: core.aborted == [core.adds[0].request_id], "the request is aborted")
    assert client._client.num_open_requests == 0


def test_end_without_a_vector_is_an_error(client: EngineClient) -> None:
    with pytest.raises(EngineFailed, match="without its vector"):
        client.embed([WITHOUT], timeout_s=TIMEOUT_S)


def test_bounds_are_checked_first(core: FakeCore, client: EngineClient) -> None:
    with pytest.raises(InvalidRequest, match="dimensions 4 is more than the 3"):
        client.embed([5], Pooling(dimensions=4))
    with pytest.raises(InvalidRequest, match="at least one token"):
        client.embed([])
    assert core.adds == []
