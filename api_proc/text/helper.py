"""A process of the pool: `python -m api_proc.text.helper FD` does the jobs received from a socket.

It runs alongside the API, which kills it if a job takes too long. A job that needs too much memory
ends only the helper. Frames in both directions: 4 bytes of length, then the body. The first frame
is the configuration of the model, and the first answer is empty: the helper is ready.
"""

import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from api_proc.text.chat_template import ChatTemplateError
from api_proc.text.jobs import (
    LENGTH_BYTES,
    MAX_MEMORY_BYTES,
    Answer,
    Job,
    OutOfMemory,
    PackedTokenIds,
    Pieces,
    Rejected,
    TooLong,
)
from api_proc.text.processor import TextProcessor
from api_proc.text.tokenizer import TooManyTokens
from protocol.config import ConfigError, ModelConfig
from protocol.message import pack_token_ids
from protocol.process.failpoints import failpoint
from protocol.process.malloc import return_memory_early
from protocol.process.prctl import die_with_parent, set_name

_NICENESS = 5
_OOM_SCORE = "500"
"""Out-of-memory score, at most 1000: the kernel kills this process before those with requests."""


def main() -> None:
    """Do every received job until the API closes the socket."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's interrupt is for the supervisor
    set_name("troika-text")
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return_memory_early()
    logging.disable()  # the API has logged the same messages about the model's files
    connection = socket.socket(fileno=int(sys.argv[1]))
    source = connection.makefile("rb")
    model = msgspec.msgpack.decode(_read(source), type=ModelConfig)
    try:
        text = TextProcessor.load(model)
    except ConfigError as error:
        sys.exit(f"the text helper cannot start: {error}")
    decoder = msgspec.json.Decoder(Job)
    gc.freeze()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MAX_MEMORY_BYTES,) * 2)
    _write(connection, b"")
    while body := _read(source):
        failpoint("text.job")
        try:
            answer = msgspec.msgpack.encode(_answer(text, decoder.decode(body)))
        except MemoryError:
            answer = msgspec.msgpack.encode(OutOfMemory())
        _write(connection, answer)
        del body, answer


def _answer(text: TextProcessor, job: Job) -> Answer:
    try:
        result = text.perform(job)
    except TooManyTokens as error:
        return TooLong(error.num_tokens)
    except ChatTemplateError as error:
        return Rejected(str(error))
    if isinstance(result, Pieces):
        return result
    return PackedTokenIds([pack_token_ids(token_ids) for token_ids in result.lists])


def _write(target: socket.socket, body: bytes) -> None:
    target.sendall(len(body).to_bytes(LENGTH_BYTES, "little"))
    target.sendall(body)


def _read(source: BinaryIO) -> bytes:
    """Return the next frame; empty at the end."""
    length = source.read(LENGTH_BYTES)
    return source.read(int.from_bytes(length, "little")) if length else b""


if __name__ == "__main__":
    main()
