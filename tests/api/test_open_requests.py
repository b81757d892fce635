"""Open requests with a journal: an abort by id ends the session too."""

from pathlib import Path

import pytest

from api_proc.http.open_requests import MAX_SLOTS, OpenRequests, Slot
from api_proc.resumption.event_ids import StreamPosition
from protocol.api_core import ErrorCode
from protocol.client.errors import RequestFailed
from tests.api.session_server import Server, play, read


@play
async def test_abort_by_id_ends_a_session(tmp_path: Path) -> None:
    """Its client gets the error, and does not find the request again."""
    server = await Server(tmp_path).written()
    server.client.is_paused = True
    session = await server.accept("r")
    other = await server.accept("s")
    with server.generation("r", session) as generation:
        generation.resume(StreamPosition([None]))
        assert server.state.open_requests.abort(["cmpl-r"]) == ["cmpl-r"]
        with pytest.raises(RequestFailed) as failure:
            await read(generation, 1)
        assert failure.value.error.code is ErrorCode.ABORTED
    assert server.find("r") is None
    assert server.find("s") is other
    assert len(server.client.cancelled) == 1
    assert len(server.state.open_requests) == 0
    server.sessions.close()


class Request:
    """A request that can only be listed."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.response = None

    def abort(self) -> bool:
        return False

    def fail(self, error: RequestFailed) -> None:
        raise error

    def slot(self) -> Slot:
        return Slot(
            path="/p",
            state="waiting",
            age_s=0.0,
            num_sequences=1,
            num_prompt_tokens=1,
            num_output_tokens=0,
        )


def test_the_list_is_bounded_and_begins_with_the_oldest() -> None:
    requests = OpenRequests()
    many = [Request(f"r{number % 100}") for number in range(MAX_SLOTS + 50)]
    for request in many:
        requests.add(request)
    requests.remove(many[0])
    slots = requests.slots(with_ids=True)
    assert [slot.id for slot in slots] == list(range(2, MAX_SLOTS + 2))
    assert slots[0].request_id == "r1"
    assert requests.abort(["r1", "x-r2"]) == []
