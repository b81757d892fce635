"""A short run of each fuzzer, and what they must find."""

import contextlib
import mmap
from collections.abc import Iterator

import pytest

from protocol.lifecycle import Ready, decode_to_supervisor
from protocol.message import ProtocolError, encode
from tests.fuzz import frames, http
from tests.fuzz.__main__ import main
from tests.fuzz.faults import Fault
from tests.fuzz.targets import Feed, Target, all_targets
from tests.protocol.wire_corpus import DIRECTIONS
from tests.timing import within

TARGETS = {target.name: target for target in all_targets()}
NAMES = list(TARGETS)
MAX_REJECT_NS = 50_000
"""99 of 100 refusals of a frame take less processor time."""


@pytest.mark.parametrize("name", NAMES)
def test_damaged_messages_are_accepted_or_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same ones in every run; docs/fuzz.md has a command for more."""
    size = max(50, 300 // TARGETS[name].divisor)
    monkeypatch.setattr(frames, "BLOCK", size)
    assert frames.fuzz(name, 0, [0, 1]).num_messages == 2 * size


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_a_million_damaged_messages_are_accepted_or_refused_at_little_cost(name: str) -> None:
    blocks = range(1_000_000 // frames.BLOCK // TARGETS[name].divisor)
    if name not in {direction.name for direction in DIRECTIONS}:
        frames.fuzz(name, 0, blocks)
        return
    within(
        3, lambda: {"reject_ns": frames.fuzz(name, 0, blocks).reject_ns}, reject_ns=MAX_REJECT_NS
    )


def test_every_target_accepts_its_samples() -> None:
    for target in all_targets():
        with target.open() as feed:
            accepted = [feed(sample) for sample in target.samples]
        assert all(accepted), target.name


def faulty(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [encode(Ready("all is well", facts=["a", "b"])), encode(Ready())]
    target = Target("faulty", samples, lambda: contextlib.nullcontext(feed))
    monkeypatch.setattr(frames, "all_targets", lambda: [target])


def accepts(body: bytes) -> bool:
    try:
        decode_to_supervisor(body)
    except ProtocolError:
        return False
    return True


def test_a_fault_is_reported_with_its_bytes_and_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def feed(body: bytes) -> bool:
        assert b"all is we" not in body or b"ll is well" in body
        return accepts(body)

    faulty(feed, monkeypatch)
    with pytest.raises(Fault) as found:
        frames.fuzz("faulty", 0, range(4))
    text = str(found.value)
    digits = text.partition("--bytes ")[2].split()[0]
    assert b"all is we" in bytes.fromhex(digits)
    with pytest.raises(AssertionError):
        frames.feed_one("faulty", bytes.fromhex(digits))
    with pytest.raises(Fault) as again:
        frames.fuzz("faulty", 0, range(4))
    assert str(again.value) == text, "the same seed gives the same messages"


def test_a_leak_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bytes] = []

    def feed(body: bytes) -> bool:
        kept.append(body + bytes(5000))
        return accepts(body)

    monkeypatch.setattr(frames, "BLOCK", 200)
    faulty(feed, monkeypatch)
    with pytest.raises(Fault, match="objects of"):
        frames.fuzz("faulty", 0, [0])


def test_a_message_that_is_blown_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def feed(body: bytes) -> bool:
        # Mapped, and not taken from memory that an earlier test has used.
        with mmap.mmap(-1, frames.MAX_PEAK_BYTES + 2**26) as memory:
            for place in range(0, len(memory), mmap.PAGESIZE):
                memory[place] = 1
        return accepts(body)

    monkeypatch.setattr(frames, "BLOCK", 6)
    faulty(feed, monkeypatch)
    with pytest.raises(Fault, match="memory was larger"):
        frames.fuzz("faulty", 0, [0, 1])


def test_the_command_feeds_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frames", "--only", "child to supervisor", "--bytes", "91a744"]) == 0
    assert "refuses it" in capsys.readouterr().out


# HTTP -------------------------------------------------------------------------------------------


def test_raw_requests_harm_no_process(capsys: pytest.CaptureFixture[str]) -> None:
    fuzz = http.run(0, 0, 150)
    assert fuzz.num_requests == 150
    assert fuzz.statuses[200] > 15
    assert fuzz.statuses[400] > 15
    assert "no process has died" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_raw_requests_harm_no_process() -> None:
    http.run(0, 0, 100_000)


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", [(200, b"hi", False)]),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nhi", [(200, b"hi", True)]),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 400 Bad\r\nContent-Length: 0\r\n\r\n",
            [(100, b"", False), (400, b"", False)],
        ),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
            [(200, b"hi", False)],
        ),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n",
            [(200, b"hi", True)],
        ),
    ],
)
def test_responses_are_parsed(received: bytes, expected: list[tuple[int, bytes, bool]]) -> None:
    found = [(one.status, one.body, one.is_cut) for one in http.responses(received)]
    assert found == expected


def cases() -> Iterator[http.Case]:
    from api_proc.openapi.document import document
    from api_proc.openapi.operations import OPERATIONS

    made = http.Cases(document(OPERATIONS), 1)
    yield from (made.case(number) for number in range(300))


def test_cases_are_the_same_in_every_run_and_reach_every_route() -> None:
    assert list(cases()) == list(cases())
    text = b"".join(b"".join(case.pieces) for case in cases())
    for path in (b"/v1/chat/completions", b"/v1/embeddings", b"/slots", b"/tokenize"):
        assert path in text
    assert sum(case.is_whole for case in cases()) > 150
