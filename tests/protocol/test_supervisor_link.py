"""A child's messages to its supervisor over a fake channel: which of them are repeated."""

import logging
from collections.abc import Iterator
from typing import cast

import pytest

from protocol.lifecycle import (
    REPEAT_S,
    Drained,
    Promote,
    Ready,
    Remarks,
    RestartQuery,
    RestartReply,
    Role,
    StatusQuery,
    StatusReply,
    Stop,
    decode_to_supervisor,
)
from protocol.message import Header, Message, encode
from protocol.process.supervisor_link import SupervisorLink
from protocol.transport.channel import DealerChannel, Received

EPOCH = 7


class FakeChannel:
    """Records sent messages with their epochs, and delivers what the test puts into it."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, object]] = []
        self.inbox: list[Received] = []

    def send(self, epoch: int, body: bytes) -> bool:
        self.sent.append((epoch, decode_to_supervisor(body)))
        return True

    def drain(self, limit: int) -> Iterator[Received]:
        arrived, self.inbox = self.inbox[:limit], self.inbox[limit:]
        yield from arrived

    def deliver(self, message: Message, epoch: int = EPOCH) -> None:
        self.inbox.append(Received(b"", Header(epoch, 0), encode(message)))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def channel() -> FakeChannel:
    return FakeChannel()


@pytest.fixture
def link(channel: FakeChannel, clock: Clock) -> SupervisorLink:
    return SupervisorLink(cast(DealerChannel, channel), EPOCH, clock)


def test_only_the_current_state_is_repeated(
    link: SupervisorLink, channel: FakeChannel, clock: Clock
) -> None:
    """It is repeated at its time only, however often the link is read; the latest report counts."""
    link.read()
    assert channel.sent == []
    link.hold(Ready("cpu"))
    for _ in range(30):
        clock.now += REPEAT_S / 10
        link.read()
    assert channel.sent == [(EPOCH, Ready("cpu"))] * 4
    channel.sent.clear()
    link.hold(Drained())
    clock.now += REPEAT_S
    link.read()
    assert channel.sent == [(EPOCH, Drained())] * 2


def test_remarks_are_repeated_after_the_last_was_withdrawn_too(
    link: SupervisorLink, channel: FakeChannel, clock: Clock
) -> None:
    for remarks in (Remarks(["replica 1 gets no requests"]), Remarks([])):
        channel.sent.clear()
        link.remark(remarks)
        clock.now += REPEAT_S
        link.read()
        assert channel.sent == [(EPOCH, remarks)] * 2


def test_a_promotion_revokes_earlier_reports(
    link: SupervisorLink, channel: FakeChannel, clock: Clock
) -> None:
    """Under the new epoch it is not ready yet."""
    link.hold(Ready())
    channel.deliver(Promote(9))
    assert link.read() == [Promote(9)]
    link.promoted(9)
    channel.sent.clear()
    clock.now += REPEAT_S
    channel.deliver(Stop(), EPOCH)
    assert link.read() == []
    assert channel.sent == []
    assert link.num_fenced_frames == 1
    link.hold(Ready())
    assert channel.sent == [(9, Ready())]


def test_a_restart_is_asked_for_until_there_is_an_answer(
    link: SupervisorLink,
    channel: FakeChannel,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The supervisor's answer has no epoch; a refusal is logged with its reason."""
    link.ask_for_restart(RestartQuery(Role.WORKER))
    clock.now += REPEAT_S
    link.read()
    assert channel.sent == [(EPOCH, RestartQuery(Role.WORKER))] * 2
    channel.deliver(RestartReply(False, "the engine is stopping"), 0)
    with caplog.at_level(logging.INFO, "troika"):
        assert link.read() == []
    assert "the engine is stopping" in caplog.text
    clock.now += REPEAT_S
    link.read()
    assert len(channel.sent) == 2
    assert link.num_fenced_frames == 0


def test_a_status_is_asked_for_once(
    link: SupervisorLink, channel: FakeChannel, clock: Clock
) -> None:
    """The reply has no epoch, as any program may ask."""
    assert link.ask_for_status()
    clock.now += 2 * REPEAT_S
    reply = StatusReply([], True, None)
    channel.deliver(reply, 0)
    assert link.read() == [reply]
    assert channel.sent == [(EPOCH, StatusQuery())]
    assert link.num_fenced_frames == 0
