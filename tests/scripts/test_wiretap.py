"""What crosses the wire is printed as it is, and a steady step is as small as the docs state."""

import re

import pytest

from protocol.core_worker import CachedRequestData, SchedulerOutput, decode_from_core
from protocol.message import HEADER_BYTES, encode, pack_header
from protocol.transport.frame_sequence import Flag
from scripts.wiretap import MessageSplitter, describe, main
from tests.paths import ROOT


def steady_step(step_id: int, num_requests: int) -> bytes:
    return encode(SchedulerOutput(step_id, [], CachedRequestData(), {}, num_requests, [], []))


def test_a_run_prints_every_kind_of_frame(capfd: pytest.CaptureFixture[str]) -> None:
    main(["--streams", "2", "--tokens", "12"])
    printed = capfd.readouterr().out
    lines = [
        re.fullmatch(r"(\w+ → \w+) +(\d+) B  (\w+)(.*)", line) for line in printed.splitlines()
    ]
    assert None not in lines, printed
    found = [match.groups() for match in lines if match is not None]
    assert {(direction, kind) for direction, _, kind, _ in found} >= {
        ("client → core", "Connect"),
        ("client → core", "AddRequest"),
        ("core → worker", "Adopt"),
        ("core → worker", "SchedulerOutput"),
        ("worker → core", "WorkerHello"),
        ("worker → core", "ModelRunnerOutput"),
        ("core → client", "Status"),
        ("core → client", "StepOutputs"),
    }
    assert "unreadable" not in printed
    steady = [
        int(size)
        for _, size, kind, fields in found
        if kind == "SchedulerOutput"
        and re.fullmatch(r"\(step_id=\d+, total_num_scheduled_tokens=2\)", fields)
    ]
    assert len(steady) >= 5
    assert set(steady) == {HEADER_BYTES + len(steady_step(1, 2))}


def test_a_steady_step_has_the_size_that_the_docs_state() -> None:
    sizes = [HEADER_BYTES + len(steady_step(*step)) for step in ((1, 2), (2**32 - 1, 2**16 - 1))]
    page = " ".join((ROOT / "docs" / "architecture.md").read_text().split())
    assert f"takes {sizes[0]} to {sizes[1]} bytes, {HEADER_BYTES} of them the header" in page


def test_messages_are_cut_wherever_the_bytes_break() -> None:
    long = bytes(300)
    wire = bytes(64)  # the greeting
    wire += b"\x04\x02hi"  # a command
    wire += b"\x01\x03abc" + b"\x02" + len(long).to_bytes(8) + long
    wire += b"\x00\x00"
    for size in (1, 2, 7, len(wire)):
        splitter = MessageSplitter()
        pieces = [wire[start : start + size] for start in range(0, len(wire), size)]
        assert [m for piece in pieces for m in splitter.feed(piece)] == [[b"abc", long], [b""]]


def test_frames_without_a_message_and_unreadable_ones_are_named() -> None:
    body = steady_step(3, 1)
    fields = "step_id=3, total_num_scheduled_tokens=1"
    assert (
        describe([pack_header(1, 2, body), body], decode_from_core) == f"SchedulerOutput({fields})"
    )
    assert describe([pack_header(0, 2, b"", Flag.BEAT), b""], decode_from_core) == "BEAT"
    for parts in ([b"x", b"y"], [b"x"], [pack_header(1, 2, b"z"), b"z"]):
        assert describe(parts, decode_from_core).startswith("unreadable: ")
