"""Everything that reads bytes of another process: a function for each, and well-formed samples.

A function takes one message and goes on with it as the process does. It returns whether the message
was accepted. Exceptions that the process handles mean that it was not; all others are faults.
"""

import contextlib
import os
import socket
from array import array
from binascii import crc32
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

from api_proc.errors import ApiError
from api_proc.resumption import session_log
from api_proc.resumption.event_ids import parse_event_id
from api_proc.resumption.history import History
from api_proc.resumption.journal_segments import _END, _MAGIC, frame, read_segment
from core_proc.engine import EngineCore
from core_proc.options import SchedulerOptions
from core_proc.outputs.check import InvalidWorkerOutput, check_output
from core_proc.recovery.adapter_trials import AdapterTrials
from core_proc.recovery.quarantine import Quarantine, Stage
from core_proc.request import Request
from core_proc.scheduler import Scheduler
from protocol.api_core import (
    AddRequest,
    Connect,
    StepOutputs,
    decode_from_client,
    decode_from_core,
)
from protocol.client.errors import RequestFailed
from protocol.client.kv_feed import KVEventFeed
from protocol.client.ledger import Ledger, OpenLimits
from protocol.config import EngineConfig
from protocol.config.settings import configure
from protocol.core_worker import ModelRunnerOutput, decode_from_worker
from protocol.kv_events import KVEventBatch, KVEventsRefused
from protocol.lifecycle import DeathCause
from protocol.message import (
    HEADER_BYTES,
    Decoder,
    ProtocolError,
    encode,
    pack_header,
    unpack_header,
)
from protocol.model_facts import ModelFacts
from protocol.process.progress_page import (
    _LOADS,
    CoreLoads,
    Death,
    MarkEdits,
    Phase,
    ProgressPage,
)
from protocol.process.zygote_link import (
    MAX_PACKET_BYTES,
    LinkClosed,
    ZygoteLink,
    close_all,
    decode_from_zygote,
    socket_pair,
)
from protocol.salvage import readable_outputs, request_id_of_add
from protocol.sampling import Grammar, GrammarKind, Pooling, SamplingParams
from tests.fuzz.body_targets import body_targets
from tests.fuzz.mutation import harmed, harmed_bytes
from tests.protocol.wire_corpus import DIRECTIONS, Direction
from worker_proc.grammar.compiler import Definition
from worker_proc.grammar.prover import Proof, Task
from worker_proc.grammar.vocabulary import Vocabulary

FACTS = ModelFacts("null", 1000, 4096, 16, 512, [2, 3], embedding_size=16)
CLIENT = b"client"
REQUEST_ID = "request"

Feed = Callable[[bytes], bool]
Mutate = Callable[..., Iterator[bytes]]


class Target(NamedTuple):
    """One reader of bytes."""

    name: str
    samples: list[bytes]
    """Messages that it accepts."""
    open: Callable[[], contextlib.AbstractContextManager[Feed]]
    """Makes the function, with the state that it needs."""
    mutate: Mutate = harmed
    divisor: int = 1
    """Of the number of messages: JSON bodies take twenty times as long as frames."""


def _stateless(feed: Feed) -> Callable[[], contextlib.AbstractContextManager[Feed]]:
    return lambda: contextlib.nullcontext(feed)


def _decoding(decode: Callable[[bytes], object]) -> Feed:
    """Return a function that only decodes; the message must be the same if it is sent again."""

    def feed(body: bytes) -> bool:
        try:
            message = decode(body)
        except ProtocolError:
            return False
        if body[-1] & 7 == 0:  # a part of them: this costs more than all else
            again = decode(encode(message))
            assert again == message or repr(again) == repr(message)
        return True

    return feed


# Core -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _core() -> Iterator[Feed]:
    """Requests enter the engine and leave it; of an unreadable one the id is looked for."""
    engine = EngineCore(configure(model="null"))
    engine.adopt_workers(FACTS, 0.001)
    numbers = count()

    def feed(body: bytes) -> bool:
        try:
            message = decode_from_client(body)
        except ProtocolError:
            request_id = request_id_of_add(body)
            assert request_id is None or 0 <= request_id < 2**53
            return False
        if isinstance(message, AddRequest):
            engine.add(CLIENT, message)
            engine.abort(CLIENT, [message.request_id])
            if next(numbers) % 64 == 0:
                assert not engine.has_unfinished
                engine.take_grammars()
                engine.take_outgoing()
                engine.schedule()
        return True

    yield feed


def _results() -> Feed:
    """Results are compared with the step that they answer."""
    requests = [Request(n, [5] * 40, SamplingParams(max_tokens=9)) for n in (1, 2)]
    requests.append(Request(3, [5], SamplingParams(max_tokens=1, pooling=Pooling())))

    def feed(body: bytes) -> bool:
        try:
            message = decode_from_worker(body)
        except ProtocolError:
            return False
        if isinstance(message, ModelRunnerOutput):
            with contextlib.suppress(InvalidWorkerOutput):
                check_output(message, (message.step_id, requests), FACTS.vocab_size, 4)
        return True

    return feed


# Client -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _client() -> Iterator[Feed]:
    """Outputs enter the ledger, which repairs, cuts or fails; events enter a subscription."""
    ledger = Ledger(OpenLimits(1000))
    numbers = count(3)
    sent: list[object] = []
    feeds: list[KVEventFeed] = []

    def subscribe() -> None:
        feeds[:] = [KVEventFeed(7, numbers, sent.append, lambda: None)]

    def take_outputs(message: StepOutputs) -> None:
        for row in message.outputs:
            if row.request_id < 32 and row.request_id not in ledger:
                ledger.accept(AddRequest(row.request_id, [5, 6], SamplingParams()))
            try:
                ledger.take(row)
            except RequestFailed:
                assert row.request_id not in ledger
        ledger.allow_repairs()

    def take(body: bytes) -> bool:
        try:
            message = decode_from_core(body)
        except ProtocolError:
            found = readable_outputs(body)
            if found is not None:
                take_outputs(StepOutputs(found[0]))
            return False
        if isinstance(message, StepOutputs):
            take_outputs(message)
        elif isinstance(message, KVEventBatch):
            feeds[0].take(message)
        elif isinstance(message, KVEventsRefused):
            feeds[0].refuse(message)
        if len(sent) > 100 or feeds[0].num_unread > 1000:
            sent.clear()
            subscribe()
            for request_id in list(ledger):
                ledger.fail(request_id)
        return True

    subscribe()
    yield take


# Frames and packets -----------------------------------------------------------------------------


def _framed() -> list[bytes]:
    bodies = [b"", encode(Connect(1)), bytes(range(200))]
    return [pack_header(3, number, body, 1) + body for number, body in enumerate(bodies)]


def _frame(data: bytes) -> bool:
    header, body = data[:HEADER_BYTES], data[HEADER_BYTES:]
    if len(header) == HEADER_BYTES and header[8] & 1:  # as a sender with other bytes would send it
        header = header[:20] + crc32(body, crc32(header[:20])).to_bytes(4, "little")
    try:
        unpack_header(header, body)
    except ProtocolError:
        return False
    return True


@contextlib.contextmanager
def _packets() -> Iterator[Feed]:
    """Packets over a pair of sockets, now and then with descriptors."""
    near, far = socket_pair()
    link = ZygoteLink(far, decode_from_zygote)
    numbers = count()

    def feed(body: bytes) -> bool:
        fds = [0] * (next(numbers) % 64 == 0) * 2
        if fds:
            socket.send_fds(near, [body or b"\0"], fds)
        else:
            near.send(body[:MAX_PACKET_BYTES])
        try:
            received = link.receive()
        except ProtocolError:
            return False
        except LinkClosed:
            assert not body
            return False
        assert received is not None
        close_all(received[1])
        return True

    try:
        yield feed
    finally:
        near.close()
        link.close()


# The progress page ------------------------------------------------------------------------------

_PAGE_WORDS = 80
"""That the samples fill, from the first on: progress, death, and the beginning of the marks."""
_LOADS_WORDS = 8
"""That the samples fill of the loads, behind the others."""


def _pages() -> list[bytes]:
    page, fd = ProgressPage.create("samples")
    found = []
    try:
        for step_id in (None, 7):
            page.write(3, Phase.STEP, step_id, 10**9, 2 * 10**9)
            page.write_completed(2)
            page.write_marks(3, MarkEdits(4, dict(enumerate((Stage.GROUP, 5, 6, 7)))))
            page.write_loads(CoreLoads(2, [7 << 8 | 0x13, 9 << 8 | 4]))
            page.write_death(Death(2, DeathCause.DEADLINE, step_id))
            head = os.pread(fd, _PAGE_WORDS * 8, 0)
            found.append(head + os.pread(fd, _LOADS_WORDS * 8, _LOADS * 8))
    finally:
        page.close()
        os.close(fd)
    return found


@contextlib.contextmanager
def _page() -> Iterator[Feed]:
    """The supervisor reads the progress, and a new core the marks, the loads and the death."""
    page, fd = ProgressPage.create("fuzz")
    scheduler = Scheduler(SchedulerOptions.combine(configure(model="null"), FACTS, 0.0))

    def feed(data: bytes) -> bool:
        head, loads = data[: _PAGE_WORDS * 8], data[_PAGE_WORDS * 8 :]
        os.pwrite(fd, head[8:], 8)
        os.pwrite(fd, loads[: _LOADS_WORDS * 8], _LOADS * 8)
        progress, marks, death = page.read(), page.read_marks(), page.read_death()
        if (found := page.read_loads()) is not None:
            AdapterTrials().inherit(found.records)
        assert page.last_completing_epoch >= 0
        if progress is not None:
            assert isinstance(progress.limit_s, float)
        if marks is not None:
            Quarantine(scheduler, 1).inherit(marks.marks, 0.0)
        return death is not None

    try:
        yield feed
    finally:
        page.close()
        os.close(fd)


# The journal ------------------------------------------------------------------------------------


def _records() -> list[bytes]:
    outputs = next(d for d in DIRECTIONS if d.name == "core to client").messages
    adds = next(d for d in DIRECTIONS if d.name == "client to core").messages
    rows = [
        row for message in outputs if isinstance(message, StepOutputs) for row in message.outputs
    ]
    add = next(message for message in adds if isinstance(message, AddRequest))
    accepted = session_log.AcceptRecord(1, REQUEST_ID, "/v1/completions", b"{}", 7, [add, add])
    return [
        encode(session_log.packed(accepted)),
        encode(session_log.OutputRecord([session_log.Row(1, 0, row) for row in rows[:4]])),
        encode(session_log.OutputRecord([session_log.Row(1, 1, rows[-1])])),
        encode(session_log.StopRecord(1, 1)),
        encode(session_log.RemoveRecord(1)),
    ]


@contextlib.contextmanager
def _replay() -> Iterator[Feed]:
    """The API reads its journal after its start; every request must be one that can be sent."""
    numbers = count()
    replays = [session_log.Replay()]

    def feed(record: bytes) -> bool:
        if next(numbers) % 256 == 0:
            for request in replays[0].open_requests():
                for add, history in zip(request.accepted.adds, request.histories, strict=True):
                    _check_history(history)
                    encode(session_log.resumed(add, history))
            replays[0] = session_log.Replay()
        try:
            message = session_log._decode(record)
        except ProtocolError:
            return False
        replays[0]._apply(message)
        return True

    yield feed


def _check_history(history: History) -> None:
    parts = array("i")
    for part in history.parts():
        parts.extend(part.token_ids)
    assert parts == history.token_ids


def _segments() -> list[bytes]:
    records = _records()
    framed = [b"".join(frame(record)) for record in records]
    return [_MAGIC + b"".join(framed[:2]) + _END + b"".join(framed[2:]), _MAGIC + framed[0]]


@contextlib.contextmanager
def _segment() -> Iterator[Feed]:
    """A file of the journal after a crash, or on a disk that has harmed it."""
    path = Path(f"/proc/self/fd/{(fd := os.memfd_create('segment', os.MFD_CLOEXEC))}")

    def feed(data: bytes) -> bool:
        os.ftruncate(fd, 0)
        os.pwrite(fd, data, 0)
        records, is_complete = read_segment(path)
        assert sum(map(len, records)) <= len(data)
        return bool(records) or is_complete

    try:
        yield feed
    finally:
        os.close(fd)


# Others -----------------------------------------------------------------------------------------


def _event_id(data: bytes) -> bool:
    """The header Last-Event-ID of a client."""
    try:
        parse_event_id(data.decode("latin-1"), REQUEST_ID, [64, 64])
    except ApiError:
        return False
    return True


_TASKS = [
    encode(Task(Grammar(GrammarKind.REGEX, "[a-z]+"), 0.1, 1.2)),
    encode(Task(Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'), 5.0, 11.0)),
]
_PROOFS = [encode(Proof("no such rule")), encode(Proof("", Definition('{"grammars": []}', 70_000)))]
_SPECIAL: dict[str, Callable[[], contextlib.AbstractContextManager[Feed]]] = {
    "client to core": _core,
    "core to client": _client,
    "worker to core": _stateless(_results()),
}


def _of_direction(direction: Direction) -> Target:
    samples = [encode(message) for message in direction.messages]
    opened = _SPECIAL.get(direction.name) or _stateless(_decoding(direction.decode))
    return Target(direction.name, samples, opened)


def all_targets() -> list[Target]:
    """Return all targets; the names are those of the command line."""
    by_zygote = next(d for d in DIRECTIONS if d.name == "zygote to supervisor")
    others = {
        "vocabulary for the prover": (Vocabulary, [encode(Vocabulary([2, 3], "/m"))]),
        "grammar for the prover": (Task, _TASKS),
        "proof of a grammar": (Proof, _PROOFS),
        "settings of a child": (EngineConfig, [encode(configure(model="null"))]),
    }
    decoded = [
        Target(name, samples, _stateless(_decoding(Decoder(kind))))
        for name, (kind, samples) in others.items()
    ]
    return [
        *map(_of_direction, DIRECTIONS),
        Target("frame header", _framed(), _stateless(_frame), harmed_bytes),
        Target("zygote packets", [encode(m) for m in by_zygote.messages], _packets),
        Target("progress page", _pages(), _page, harmed_bytes),
        Target("journal record", _records(), _replay),
        Target("journal segment", _segments(), _segment, harmed_bytes),
        Target(
            "event id",
            [b"request.7-3", b"request.7-u", b"request.-"],
            _stateless(_event_id),
            harmed_bytes,
        ),
        *decoded,
        *(Target(*parts, divisor=20) for parts in body_targets()),
    ]
