"""The worker's connection to a prover process, with the limits of its start and of its answers."""

import os
import select
import subprocess
import sys
import time
from typing import NamedTuple

import msgspec

from protocol.message import Decoder, ProtocolError
from protocol.process.cpu_clock import cpu_seconds
from worker_proc.grammar.compiler import Definition
from worker_proc.grammar.errors import GrammarError
from worker_proc.grammar.prover import LENGTH_BYTES, Proof, Task
from worker_proc.grammar.vocabulary import Vocabulary

START_CPU_S = 30.0
"""Processor time for the start of a prover, with the tokens of a large vocabulary."""
STALL_S = 30.0
"""Time in which a starting prover must use some processor time."""
START_S = 600.0
"""Time in which a prover must start, however little processor time it gets."""
_ANSWER_S = 5.0
"""Time for a prover's answer after the time limit of its grammar."""
_CHECK_S = 0.1
_MAX_PROOF_BYTES = 16 * 2**20

_decode_proof: Decoder[Proof] = Decoder(Proof)


class ProverError(OSError):
    """The process that compiles grammars does not start, or does not answer."""


class ProverLink:
    """The worker's connection to a prover process; unusable after a ProverError."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Start a process for grammars over a vocabulary; raise ProverError if it fails."""
        self.is_broken = False
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "worker_proc.grammar.prover"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
            )
        except OSError as error:
            raise _not_started(error) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._write_fd = self._process.stdin.fileno()
        self._read_fd = self._process.stdout.fileno()
        os.set_blocking(self._write_fd, False)
        os.set_blocking(self._read_fd, False)
        limit = _StartLimit(self._process.pid)
        try:
            self._send(msgspec.msgpack.encode(vocabulary), limit)
            self._receive(limit)
        except OSError as error:
            self.close()
            raise _not_started(error) from error

    def prove(self, task: Task) -> Definition:
        """Return the definition that the prover has compiled.

        Raises GrammarError if the grammar cannot be compiled, TimeoutError if it takes too long,
        and ProverError if the process fails.
        """
        limit = _Limit(time.monotonic() + task.wall_s + _ANSWER_S)
        try:
            self._send(msgspec.msgpack.encode(task), limit)
            proof = _decode_proof(self._receive(limit))
        except (OSError, ProtocolError) as error:
            self.is_broken = True
            reason = "it does not answer" if isinstance(error, TimeoutError) else error
            raise ProverError(f"the process that compiles grammars has failed: {reason}") from error
        if proof.is_late:
            raise TimeoutError
        if proof.error:
            raise GrammarError(proof.error)
        return proof.definition

    def close(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()

    def _send(self, body: bytes, limit: "_Limit | _StartLimit") -> None:
        rest = memoryview(len(body).to_bytes(LENGTH_BYTES, "little") + body)
        while rest:
            _wait(self._write_fd, select.POLLOUT, limit)
            try:
                rest = rest[os.write(self._write_fd, rest) :]
            except BlockingIOError:
                continue

    def _receive(self, limit: "_Limit | _StartLimit") -> bytes:
        length = int.from_bytes(self._read(LENGTH_BYTES, limit), "little")
        if length > _MAX_PROOF_BYTES:
            raise OSError(f"its answer has {length} bytes, more than {_MAX_PROOF_BYTES}")
        return self._read(length, limit)

    def _read(self, length: int, limit: "_Limit | _StartLimit") -> bytes:
        body = bytearray()
        while len(body) < length:
            _wait(self._read_fd, select.POLLIN, limit)
            piece = os.read(self._read_fd, length - len(body))
            if not piece:
                raise OSError("it has ended")
            body += piece
        return bytes(body)


class _Limit(NamedTuple):
    """The time in which a prover must answer."""

    deadline: float

    def check(self) -> None:
        """Raise TimeoutError if the time is over."""
        if time.monotonic() >= self.deadline:
            raise TimeoutError


class _StartLimit:
    """The time in which a prover must start, which is much longer for one that advances slowly."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._used_s = 0.0
        now = time.monotonic()
        self._last, self._deadline = now + START_S, now + STALL_S

    def check(self) -> None:
        """Raise TimeoutError if the time is over."""
        used_s, now = cpu_seconds(self._pid), time.monotonic()
        if used_s >= START_CPU_S:
            raise TimeoutError(f"it needs more than {START_CPU_S:g} s of processor time")
        if now >= self._last:
            raise TimeoutError(f"it has not been ready within {START_S:g} s")
        if used_s > self._used_s:
            self._used_s = used_s
            self._deadline = now + STALL_S
        elif now >= self._deadline:
            raise TimeoutError(f"it has not advanced for {STALL_S:g} s")


def _not_started(error: OSError) -> ProverError:
    return ProverError(f"the process that compiles grammars does not start: {error}")


def _wait(fd: int, event: int, limit: _Limit | _StartLimit) -> None:
    """Wait until a pipe is ready; raise TimeoutError past the limit."""
    poller = select.poll()
    poller.register(fd, event)
    while not poller.poll(_CHECK_S * 1000):
        limit.check()
