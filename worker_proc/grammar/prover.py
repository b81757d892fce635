"""The prover: `python -m worker_proc.grammar.prover` compiles grammars that are not yet trusted.

It runs alongside a worker, which kills it when a grammar takes too long. A grammar that needs too
much memory ends only the prover. Frames on both pipes consist of 4 bytes of length, then msgpack.
"""

import os
import resource
import sys
from typing import BinaryIO

import msgspec

from protocol.process.failpoints import failpoint
from protocol.process.prctl import die_with_parent, set_name
from protocol.sampling import Grammar
from worker_proc.grammar.compiler import (
    Definition,
    GrammarCompiler,
    GrammarError,
    Vocabulary,
    define,
)

MAX_MEMORY_BYTES = 1 * 2**30
"""Memory for a grammar in addition to the tokens."""
LENGTH_BYTES = 4
_NICENESS = 10


class Proof(msgspec.Struct, frozen=True):
    """The result for a grammar: an error, or its definition."""

    error: str = ""
    definition: Definition = Definition("")


def main() -> None:
    """Answer every grammar that is read, until the worker closes the pipe."""
    die_with_parent()
    set_name("troika-grammar")
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    vocabulary = msgspec.msgpack.decode(_read(source), type=Vocabulary)
    compiler = GrammarCompiler(vocabulary)
    decoder = msgspec.msgpack.Decoder(Grammar)
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
        failpoint("grammar.compile")
        proof = Proof(problem) if problem else _prove(compiler, decoder.decode(body))
        _write(target, msgspec.msgpack.encode(proof))


def _prove(compiler: GrammarCompiler, grammar: Grammar) -> Proof:
    resident, _ = _memory()
    try:
        definition = Definition(define(grammar))
        compiler.compile(grammar, definition)
    except GrammarError as error:
        return Proof(str(error))
    except (MemoryError, RecursionError):
        return Proof(f"the grammar needs more than {MAX_MEMORY_BYTES >> 20} MiB")
    return Proof("", Definition(definition.text, max(0, _memory()[0] - resident)))


def _memory() -> tuple[int, int]:
    """Return the resident and the virtual size of this process in bytes."""
    with open("/proc/self/statm") as file:
        size, resident = file.read().split()[:2]
    page = os.sysconf("SC_PAGE_SIZE")
    return int(resident) * page, int(size) * page


def _write(target: BinaryIO, body: bytes) -> None:
    target.write(len(body).to_bytes(LENGTH_BYTES, "little") + body)
    target.flush()


def _read(source: BinaryIO) -> bytes:
    """Return the next frame; empty at the end."""
    length = source.read(LENGTH_BYTES)
    return source.read(int.from_bytes(length, "little")) if length else b""


if __name__ == "__main__":
    main()
