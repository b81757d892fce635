"""The input and output files of a batch."""

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Raw

from protocol.config.field_errors import json_error_text

MAX_LINE_BYTES = 2**26
CustomId = Annotated[str, Meta(min_length=1, max_length=512)]


class BatchError(Exception):
    """The batch cannot run or cannot be completed; the text gives the reason."""


class Request(msgspec.Struct, frozen=True):
    """One line of the input."""

    custom_id: CustomId
    method: str = "POST"
    url: str = ""
    body: Raw = Raw(b"null")


class Response(msgspec.Struct, frozen=True):
    """The server's answer."""

    status_code: int
    request_id: str
    body: Raw


class LineError(msgspec.Struct, frozen=True):
    """The reason why a line was not sent, or why its answer is unusable."""

    code: str
    message: str


class Answer(msgspec.Struct, frozen=True):
    """One line of the output; either `response` or `error` is None."""

    id: str
    custom_id: CustomId
    response: Response | None
    error: LineError | None


class _Named(msgspec.Struct):
    """Identifies a line as output: input lines have no response."""

    custom_id: CustomId
    response: Raw


_BEGINNING = b'{"id":'
"""Prefix of each output line."""


class _Line(NamedTuple):
    number: int
    content: bytes


_decode_request = msgspec.json.Decoder(Request).decode
_decode_named = msgspec.json.Decoder(_Named).decode
_encode = msgspec.json.Encoder().encode


def _lines(path: Path) -> Iterator[_Line]:
    """Yield the lines that are not blank; raise BatchError if one is too long."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise BatchError(f"{path} line {number}: is longer than {MAX_LINE_BYTES} bytes")
            if line.strip():
                yield _Line(number, line)


def requests(path: Path) -> Iterator[Request]:
    """Yield the requests of an input; raise BatchError naming a line that is not a request."""
    for number, line in _lines(path):
        try:
            yield _decode_request(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BatchError(f"{path} line {number}: {json_error_text(error)}") from error


def custom_ids(path: Path) -> set[str]:
    """Return the ids of all input lines; raise BatchError for an invalid line or a repeated id.

    A broken file is thus rejected before any request is sent.
    """
    found: set[str] = set()
    for request in requests(path):
        if request.custom_id in found:
            raise BatchError(f"{path}: custom_id {request.custom_id!r} occurs twice")
        found.add(request.custom_id)
    return found


class Output:
    """The file of answers, locked against other runs. Any thread may write."""

    def __init__(self, path: Path, wanted: set[str]) -> None:
        """Open the file, remove an incomplete last line, and read the ids that it answers.

        Raises BatchError if another run has locked the file, or if an id is not in `wanted`.
        """
        self._path = path
        self._lock = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o644)
        self.answered: set[str] = set()
        try:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BatchError(f"{path} is in use by another run") from None
            for number, line in _lines(path):
                if line.endswith(b"\n"):
                    self.answered.add(self._id_of(number, line, wanted))
                elif not self.answered and not _begins_an_answer(line):
                    raise self._not_an_output(number, "it does not begin as one")
            self._cut()
        except BaseException:
            self.close()
            raise

    def write(self, answer: Answer) -> None:
        """Append one line; after an OSError (disk full) nothing is appended."""
        line = _encode(answer) + b"\n"
        with self._lock:
            if self._fd < 0:
                return
            start = os.fstat(self._fd).st_size
            num_written = 0
            try:
                while num_written < len(line):
                    num_written += os.write(self._fd, line[num_written:])
            except OSError:
                os.ftruncate(self._fd, start)
                raise

    def close(self) -> None:
        """Close the file; lines of threads that are still running are dropped. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _cut(self) -> None:
        """Remove a last line without a newline, which a killed run has left."""
        end = size = os.fstat(self._fd).st_size
        while end > 0:
            start = max(0, end - 65536)
            newline = os.pread(self._fd, end - start, start).rfind(b"\n")
            end = start if newline < 0 else start + newline + 1
            if newline >= 0:
                break
        if end < size:
            os.ftruncate(self._fd, end)

    def _id_of(self, number: int, line: bytes, wanted: set[str]) -> str:
        try:
            name = _decode_named(line).custom_id
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._not_an_output(number, json_error_text(error)) from error
        if name not in wanted:
            raise BatchError(
                f"{self._path} line {number} answers {name!r}, which the input does not contain; "
                "choose another output file"
            )
        return name

    def _not_an_output(self, number: int, reason: str) -> BatchError:
        return BatchError(
            f"{self._path} line {number} is not an answer of a batch ({reason}); "
            "choose another output file"
        )


def _begins_an_answer(torn: bytes) -> bool:
    return torn[: len(_BEGINNING)] == _BEGINNING[: len(torn)]
