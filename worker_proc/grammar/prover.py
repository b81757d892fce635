"""The prover: `python -m worker_proc.grammar.prover` compiles grammars that are not yet trusted.

Each lane of a worker has one. It loads the vocabulary once and forks for each grammar. A fork that
takes too long is killed, and a fork that runs out of memory dies alone, so the prover continues
with the next grammar. The prover has a single thread. Frames on both pipes: 4 bytes of length, then
msgpack.
"""

import contextlib
import os
import resource
import select
import signal
import sys
import time
import traceback
from typing import BinaryIO, NoReturn

import msgspec

from protocol.process.cpu_clock import cpu_seconds
from protocol.process.failpoints import failpoint
from protocol.process.prctl import die_with_parent, set_name
from protocol.sampling import Grammar
from worker_proc.grammar.compiler import Definition, GrammarCompiler, content_of, define
from worker_proc.grammar.errors import GrammarError
from worker_proc.grammar.vocabulary import Vocabulary

MAX_MEMORY_BYTES = 1 * 2**30
"""Memory for a grammar in addition to the tokens."""
LENGTH_BYTES = 4
_CHECK_MS = 10


class Task(msgspec.Struct, frozen=True):
    """A grammar and its time limits."""

    grammar: Grammar
    cpu_s: float
    wall_s: float


class Proof(msgspec.Struct, frozen=True):
    """The result for a grammar: an error, or its definition."""

    error: str = ""
    definition: Definition = Definition("")
    is_late: bool = False
    """True if the time ended before a result."""


def main() -> None:
    """Answer every grammar that is read, until the worker closes the pipe."""
    die_with_parent()
    set_name("troika-grammar")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    if not (packed := _read(source)):
        return
    vocabulary = msgspec.msgpack.decode(packed, type=Vocabulary)
    compiler = GrammarCompiler(vocabulary)
    decoder = msgspec.msgpack.Decoder(Task)
    try:
        compiler.load()
    except GrammarError as error:
        problem = str(error)
    else:
        problem = ""
    _, size = _memory()
    resource.setrlimit(resource.RLIMIT_AS, (size + MAX_MEMORY_BYTES,) * 2)
    _write(target, b"")  # ready
    while body := _read(source):
        if problem:
            _write(target, msgspec.msgpack.encode(Proof(problem)))
        else:
            _write(target, _proof_of_fork(compiler, decoder.decode(body)))


def _proof_of_fork(compiler: GrammarCompiler, task: Task) -> bytes:
    """Return the encoded proof that a fork of this process has made."""
    read_fd, write_fd = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        _prove_and_exit(compiler, task.grammar, write_fd, parent)
    os.close(write_fd)
    try:
        proof = _read_within(read_fd, pid, task)
    except TimeoutError:
        return msgspec.msgpack.encode(Proof(is_late=True))
    finally:
        os.close(read_fd)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if not proof:
        mib = MAX_MEMORY_BYTES >> 20
        text = f"compiling it has failed, probably beyond its {mib} MiB of memory"
        return msgspec.msgpack.encode(Proof(text))
    return proof


def _prove_and_exit(
    compiler: GrammarCompiler, grammar: Grammar, write_fd: int, parent: int
) -> NoReturn:
    status = 1
    try:
        die_with_parent()
        if os.getppid() == parent:
            failpoint("grammar.compile")
            body = memoryview(msgspec.msgpack.encode(_prove(compiler, grammar)))
            while body:
                body = body[os.write(write_fd, body) :]
            status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


def _read_within(read_fd: int, pid: int, task: Task) -> bytes:
    """Return what a fork writes until its end; TimeoutError: the time of the task is over."""
    deadline = time.monotonic() + task.wall_s
    body = bytearray()
    poller = select.poll()
    poller.register(read_fd, select.POLLIN)
    while True:
        if not poller.poll(_CHECK_MS):
            if time.monotonic() >= deadline or cpu_seconds(pid) >= task.cpu_s:
                raise TimeoutError
        elif piece := os.read(read_fd, 2**16):
            body += piece
        else:
            return bytes(body)


def _prove(compiler: GrammarCompiler, grammar: Grammar) -> Proof:
    own, _ = _memory()
    try:
        definition = Definition(define(grammar))
        compiler.compile(grammar, definition)
        compiler.follow(grammar)
        num_bytes = max(0, _memory()[0] - own)
        content = content_of(grammar)
        if content is not None:
            compiler.follow(content)
    except GrammarError as error:
        return Proof(str(error))
    except (MemoryError, RecursionError):
        return Proof(f"the grammar needs more than {MAX_MEMORY_BYTES >> 20} MiB")
    return Proof("", Definition(definition.text, num_bytes))


def _memory() -> tuple[int, int]:
    """Return the memory that this process has written, and its virtual size, in bytes.

    Pages of files do not count: a fork has none of its parent's in its resident size, and reads
    those of the libraries again.
    """
    with open("/proc/self/statm") as file:
        size, resident, shared = map(int, file.read().split()[:3])
    page = os.sysconf("SC_PAGE_SIZE")
    return (resident - shared) * page, size * page


def _write(target: BinaryIO, body: bytes) -> None:
    target.write(len(body).to_bytes(LENGTH_BYTES, "little") + body)
    target.flush()


def _read(source: BinaryIO) -> bytes:
    """Return the next frame; empty at the end, also where a frame is incomplete."""
    length = int.from_bytes(source.read(LENGTH_BYTES), "little")
    body = source.read(length)
    return body if len(body) == length else b""


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the worker has died before `die_with_parent`
        os._exit(0)  # without the flush of the output, which would fail again
