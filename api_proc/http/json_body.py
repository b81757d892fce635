"""Decodes JSON bodies strictly: without duplicate names, NaN or lone surrogates.

A body is scanned before it is decoded, and long arrays of token ids are decoded in pieces, so that
no step takes more than a few milliseconds. A large body pauses after each step, and only one large
body is worked on at a time (`Turn`).
"""

import asyncio
import re
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, Protocol, TypeVar

import msgspec

from api_proc.errors import ApiError
from api_proc.fairness.fair_gate import FairGate
from api_proc.http.decoding_errors import code_of_id, from_decoding
from api_proc.http.json_scan import IdRun, JsonScan
from api_proc.http.nested_names import NestedNames
from api_proc.text.shared_ids import shared_ids
from protocol.message import TokenId

_ID_FIELDS = ("prompt", "tokens", "token_ids", "input")
"""Fields that hold token ids, in the structs that have them."""
_PIECE_BYTES = 2**15
_INLINE_IDS = 2**13
"""Up to this number of ids a body is decoded at once."""
_INDEX = re.compile(r"\[(\d+)\]")
_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Body = TypeVar("Body", bound=msgspec.Struct)
_decode_ids = msgspec.json.Decoder(list[TokenId]).decode


class LargeRequests:
    """All requests with much work for the event loop: one works, and a few are in memory."""

    def __init__(self, max_in_memory: int) -> None:
        self.working = FairGate()
        self.in_memory = FairGate(max_in_memory)


class Turn:
    """One request's place among the large ones."""

    def __init__(self, requests: LargeRequests) -> None:
        self.num_values = 0
        """Names and values in the body that was decoded in this turn."""
        self._requests = requests
        self._is_in_memory = False
        self._is_working = False

    async def pause(self) -> None:
        """Let other tasks run between two slices of work; waits for the turn at first."""
        if self._is_working:
            await asyncio.sleep(0)
            return
        if not self._is_in_memory:
            await self._requests.in_memory.enter()
            self._is_in_memory = True
        await self._requests.working.enter()
        self._is_working = True

    async def rest(self) -> None:
        """Let another large request work while this one waits for a process."""
        if self._is_working:
            self._stop()
            await asyncio.sleep(0)

    def __enter__(self) -> "Turn":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Let the next one begin. Idempotent."""
        self._stop()
        if self._is_in_memory:
            self._is_in_memory = False
            self._requests.in_memory.leave()

    def _stop(self) -> None:
        if self._is_working:
            self._is_working = False
            self._requests.working.leave()


Decoded_co = TypeVar("Decoded_co", covariant=True)


class BodyDecoding(Protocol[Decoded_co]):
    """What a route decodes its bodies with: a `BodyDecoder`, or one that translates the result."""

    def __call__(self, raw: bytes) -> Decoded_co:
        """Decode a body that this server has accepted before, or a small one, without a pause."""

    async def in_slices(self, raw: bytes, turn: Turn) -> tuple[Decoded_co, list[str]]:
        """Decode a body of any size; returns it with names that its structs lack."""


class BodyDecoder(Generic[Body]):
    """Decodes the bodies of one route; errors are 400s that name the field."""

    def __init__(self, kind: type[Body]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self.fields = frozenset(field.encode_name for field in msgspec.structs.fields(kind))
        self._id_fields = frozenset(name.encode() for name in _ID_FIELDS if name in self.fields)
        self._nested = NestedNames(kind)

    def __call__(self, raw: bytes) -> Body:
        """Decode a body that this server has accepted before, or a small one, without a pause."""
        decoding = self._begin(raw)
        for _ in decoding.steps():
            pass
        return decoding.body

    async def in_slices(self, raw: bytes, turn: Turn) -> tuple[Body, list[str]]:
        """Decode a body of any size; returns it with names that its structs lack."""
        decoding = self._begin(raw)
        for _ in decoding.steps():
            await turn.pause()
        turn.num_values = decoding.scan.num_values
        names = [name.decode("utf-8", "replace") for name in decoding.scan.names]
        unknown = [name for name in names if name not in self.fields]
        if not self._nested.fields.isdisjoint(names):
            nested = self._nested.first_unknown(decoding.decoded)
            unknown += [] if nested is None else [nested]
        return decoding.body, unknown

    def _begin(self, raw: bytes) -> "_Decoding[Body]":
        return _Decoding(raw, self._decoder, JsonScan(raw, self._id_fields))


class _Decoding(Generic[Body]):
    """The work on one body."""

    body: Body
    decoded: bytes
    """What it was decoded from: the body, with a single id in each long array of ids."""

    def __init__(self, raw: bytes, decoder: msgspec.json.Decoder[Body], scan: JsonScan) -> None:
        self._raw = raw
        self._decoder = decoder
        self.scan = scan

    def steps(self) -> Iterator[None]:
        """Scan and decode; yields after each slice of work. Then `body` and `decoded` are set."""
        try:
            yield from self.scan.steps()
            if len(self._raw) > _PIECE_BYTES:
                yield
            has_few_ids = self.scan.num_ids <= _INLINE_IDS
            self.decoded = self._raw if has_few_ids else self._without_ids()
            self.body = self._decoder.decode(self.decoded)
            if has_few_ids:
                return
            yield
            yield from self._decode_ids()
        except _ERRORS as error:
            raise from_decoding(error, self._decoder.type, self._raw) from error

    def _without_ids(self) -> bytes:
        """Return the body with a single id in each array of ids."""
        parts: list[bytes] = []
        position = 0
        for run in self.scan.id_runs:
            parts += (self._raw[position : run.start], b"0")
            position = run.end
        return b"".join([*parts, self._raw[position:]])

    def _decode_ids(self) -> Iterator[None]:
        field = self.scan.id_field
        value = getattr(self.body, field)
        if self.scan.id_runs[0].place is not None and not all(type(i) is list for i in value):
            return  # the route rejects the mixture
        for run in self.scan.id_runs:
            token_ids: list[int] = []
            for piece in self._pieces(run):
                try:
                    token_ids += shared_ids(_decode_ids(b"[%b]" % piece))
                except msgspec.ValidationError as error:
                    raise _located(error, field, run.place, len(token_ids)) from error
                yield
            if run.place is None:
                setattr(self.body, field, token_ids)
            else:
                value[run.place] = token_ids

    def _pieces(self, run: IdRun) -> Iterator[bytes]:
        """Cut an array at commas."""
        position = run.start
        while position <= run.end:
            comma = self._raw.find(b",", min(position + _PIECE_BYTES, run.end), run.end)
            end = run.end if comma < 0 else comma
            piece = self._raw[position:end]
            if not piece.strip():
                message = "the body is not valid JSON: a comma ends an array"
                raise ApiError(400, message, code="invalid_json")
            yield piece
            position = end + 1


def _located(error: Exception, field: str, index: int | None, num_before: int) -> ApiError:
    """Return the error of a piece with the place in the whole body."""
    inner = from_decoding(error)
    found = _INDEX.match(inner.param or "")
    place = num_before + (int(found[1]) if found else 0)
    param = f"{field}[{place}]" if index is None else f"{field}[{index}][{place}]"
    reason = inner.message.partition(": ")[2]
    return ApiError(400, f"{param}: {reason}", param=param, code=code_of_id(str(error)))
