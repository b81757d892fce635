"""Headers and bodies: valid frames are decoded as sent, others are refused with the reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import api_core, message
from protocol.api_core import AddRequest, Connect
from protocol.core_worker import CachedRequestData, SchedulerOutput
from protocol.message import DamagedFrame, ProtocolError, encode, pack_header, unpack_header
from protocol.sampling import SamplingParams


def test_header_round_trip() -> None:
    assert unpack_header(pack_header(7, 2**40, b"body", 3), b"body") == (7, 2**40, 3)


@given(st.binary(max_size=40), st.data())
def test_a_frame_with_any_bit_flipped_or_any_end_cut_off_is_known_to_be_damaged(
    body: bytes, data: st.DataObject
) -> None:
    header = pack_header(5, 9, body)
    frame = bytearray(header + body)
    place = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[place // 8] ^= 1 << place % 8
    with pytest.raises(DamagedFrame):
        unpack_header(bytes(frame[: len(header)]), bytes(frame[len(header) :]))
    length = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(DamagedFrame):
        unpack_header(header[:length], body[: max(0, length - len(header))])


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [("MAGIC", 0x5858, "instead of 0x4b54"), ("PROTOCOL_VERSION", 65535, "protocol 65535")],
)
def test_foreign_header_is_refused(
    name: str, value: int, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as foreign:
        foreign.setattr(message, name, value)
        frame = pack_header(1, 1, b"body")
    with pytest.raises(ProtocolError, match=complaint):
        unpack_header(frame, b"body")


def test_frame_of_an_older_version_is_refused() -> None:
    with pytest.raises(ProtocolError, match="header has 16 bytes"):
        unpack_header(bytes(16), b"")


def test_steady_step_is_tiny() -> None:
    """A decode step without changes names no request, however many run."""
    step = SchedulerOutput(10**6, [], CachedRequestData(), {}, 256, [], [])
    assert len(encode(step)) <= 66


def test_message_round_trip() -> None:
    add = AddRequest(3, [1, 2], SamplingParams(logit_bias={5: -1.5}, seed=9), [7], -2, 1.5, "salt")
    assert api_core.decode_from_client(encode(add)) == add


@pytest.mark.parametrize(
    ("params", "place"),
    [
        (SamplingParams(temperature=2.5), "2.0"),
        (SamplingParams(max_tokens=0), ">= 1"),
        (SamplingParams(top_p=0.0), "> 0.0"),
        (SamplingParams(logit_bias={1: 101.0}), "100.0"),
        (SamplingParams(stop_token_ids=[1] * 129), "128"),
    ],
)
def test_bounds_hold_on_the_wire(params: SamplingParams, place: str) -> None:
    """The core refuses bad values of clients that skip the API's checks."""
    with pytest.raises(ProtocolError, match=place):
        api_core.decode_from_client(encode(AddRequest(1, [1], params)))


def test_messages_of_the_other_direction_are_refused() -> None:
    with pytest.raises(ProtocolError, match="Connect"):
        api_core.decode_from_core(encode(Connect(1)))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ProtocolError):
        api_core.decode_from_client(b"\x91" * 200_000)
