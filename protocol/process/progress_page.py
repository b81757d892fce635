"""The progress page: memory shared by a process and its supervisor, which outlives the process.

There is one page per slot, whose descriptor each incarnation inherits. It has four parts:

- progress, written by the thread that works: its phase, since when, and until when it should end;
- the marks of a core, written before it dispatches a step: which requests are being computed, so
  that its successor knows them when both the core and its workers have died;
- the loads of adapters that a core has begun, for the same purpose;
- the death of the last incarnation, written by the supervisor before it starts the next.

The first three are guarded by a sequence number, which is odd during a write. No reader waits for a
lock: a part whose writer died during a write is unreadable, not wrong. Times are nanoseconds of
CLOCK_MONOTONIC, which all processes of a host share.
"""

import enum
import fcntl
import mmap
import os
import struct
from collections.abc import Mapping
from typing import NamedTuple

from protocol.lifecycle import DeathCause

MAX_MARKS = 4096
"""Further ones are counted, not kept."""
MAX_LOADS = 256
"""Further records of adapters are not kept."""
NO_STEP = 2**64 - 1

_MAGIC = 0x3350_4B54
"""The bytes `TKP3`, little-endian; the digit is the version of this layout."""
_WORD = 8
_COMPLETED = 1
"""Index of the epoch that last completed a step."""
_PROGRESS = 8
"""Index of the sequence number; then epoch, phase, step, began, deadline."""
_DEATH = 16
"""Index of the epoch; then the cause and the step."""
_MARKS = 64
"""Index of the sequence number; then the core's epoch, the number of marks, and the marks."""
_MARKS_HEAD = 3
_LOADS = _MARKS + _MARKS_HEAD + MAX_MARKS
"""Index of the sequence number; then the workers' epoch, the number of records, and the records."""
_LOADS_HEAD = 3
_END = _LOADS + _LOADS_HEAD + MAX_LOADS
PAGE_BYTES = -(-_END * _WORD // mmap.PAGESIZE) * mmap.PAGESIZE
_NUM_TRIES = 4
_PROGRESS_STRUCT = struct.Struct("=5Q")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Phase(enum.IntEnum):
    """The current activity of the thread that works."""

    NONE = 0
    STARTING = 1
    LOAD = 2
    """A long phase of the start; progress resets its deadline."""
    IDLE = 3
    """Waiting in a poll, which returns regularly even if nothing happens."""
    TURN = 4
    STEP = 5


class ProgressRecord(NamedTuple):
    """What a process last wrote about its progress."""

    epoch: int
    phase: Phase
    step_id: int | None
    began_ns: int
    deadline_ns: int
    """When it is suspected to hang; 0: never."""

    @property
    def limit_s(self) -> float:
        """Longest duration of the phase before the process counts as hanging."""
        return (self.deadline_ns - self.began_ns) / 1e9


class CoreMarks(NamedTuple):
    """What a core was computing; `core_proc.recovery.quarantine` defines the numbers."""

    epoch: int
    marks: list[int]
    """The first `MAX_MARKS` of them, of 64 bits each."""


class CoreLoads(NamedTuple):
    """The loads of adapters that a core has begun.

    `core_proc.recovery.adapter_trials` defines the numbers.
    """

    workers_epoch: int
    """Greatest epoch of the workers that it had last adopted."""
    records: list[int]
    """The first `MAX_LOADS` of them, of 64 bits each."""


class MarkEdits(NamedTuple):
    """The changes of a core's marks since they were last written."""

    total: int
    """Number of marks now; 0: no step is in flight."""
    marks: Mapping[int, int]
    """New and changed marks by place."""


class Death(NamedTuple):
    """How an incarnation ended."""

    epoch: int
    cause: DeathCause
    step_id: int | None


class ProgressPage:
    """One page, used by both sides. One thread of one process writes each part."""

    def __init__(self, fd: int) -> None:
        """Map a page; the descriptor stays the caller's. OSError; ValueError: not such a page."""
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._words = memoryview(self._map).cast("Q")
        if self._words[0] != _MAGIC:
            self.close()
            raise ValueError("the descriptor does not hold a progress page of this version")

    @classmethod
    def create(cls, name: str) -> "tuple[ProgressPage, int]":
        """Make an empty page; returns it with the descriptor to hand on.

        Its size is sealed: a process that shrank it would kill the readers with SIGBUS.
        """
        fd = os.memfd_create(f"troika-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, PAGE_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            os.pwrite(fd, struct.pack("=Q", _MAGIC), 0)
            page = cls(fd)
            page.write(0, Phase.NONE, None, 0, 0)
            return page, fd
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Unmap the page."""
        self._words.release()
        self._map.close()

    def write(
        self, epoch: int, phase: Phase, step_id: int | None, began_ns: int, deadline_ns: int
    ) -> None:
        """Write the phase that begins now."""
        words = self._words
        seq = words[_PROGRESS] | 1  # odd already if a predecessor died while it wrote
        words[_PROGRESS] = seq
        step = NO_STEP if step_id is None else step_id
        _PROGRESS_STRUCT.pack_into(
            self._map, (_PROGRESS + 1) * _WORD, epoch, phase, step, began_ns, deadline_ns
        )
        words[_PROGRESS] = seq + 1

    def read(self) -> ProgressRecord | None:
        """Return the last progress; None during a write, after a torn one, or if it is invalid."""
        words = self._words
        for _ in range(_NUM_TRIES):
            seq = words[_PROGRESS]
            fields = _PROGRESS_STRUCT.unpack_from(self._map, (_PROGRESS + 1) * _WORD)
            if seq % 2 == 0 and words[_PROGRESS] == seq:
                epoch, phase, step, began_ns, deadline_ns = fields
                if phase > Phase.STEP:
                    return None
                step_id = None if step == NO_STEP else step
                return ProgressRecord(epoch, Phase(phase), step_id, began_ns, deadline_ns)
        return None

    def write_completed(self, epoch: int) -> None:
        """Record that an incarnation has completed a step."""
        self._words[_COMPLETED] = epoch

    @property
    def last_completing_epoch(self) -> int:
        """The last incarnation that has completed a step; 0: none has."""
        return self._words[_COMPLETED]

    def write_marks(self, epoch: int, edits: MarkEdits) -> None:
        """Write what has changed of a core's marks, before it dispatches the step."""
        words = self._words
        words[_MARKS] |= 1
        words[_MARKS + 1], words[_MARKS + 2] = epoch, edits.total
        for place, mark in edits.marks.items():
            if place < MAX_MARKS:
                words[_MARKS + _MARKS_HEAD + place] = mark
        words[_MARKS] += 1

    def read_marks(self) -> CoreMarks | None:
        """Return the last marks; None: there are none, or a torn write of an undispatched step."""
        seq, epoch, total = self._words[_MARKS : _MARKS + _MARKS_HEAD]
        if seq % 2 or total == 0:
            return None
        first = _MARKS + _MARKS_HEAD
        return CoreMarks(epoch, list(self._words[first : first + min(total, MAX_MARKS)]))

    def write_loads(self, loads: CoreLoads) -> None:
        """Write the loads of adapters that a core has begun, before it begins another one."""
        words, records = self._words, loads.records[:MAX_LOADS]
        words[_LOADS] |= 1
        words[_LOADS + 1], words[_LOADS + 2] = loads.workers_epoch, len(records)
        for place, record in enumerate(records, _LOADS + _LOADS_HEAD):
            words[place] = record
        words[_LOADS] += 1

    def read_loads(self) -> CoreLoads | None:
        """Return the last records; None: there are none, or their writer died in between."""
        seq, epoch, total = self._words[_LOADS : _LOADS + _LOADS_HEAD]
        if seq % 2 or total == 0:
            return None
        first = _LOADS + _LOADS_HEAD
        return CoreLoads(epoch, list(self._words[first : first + min(total, MAX_LOADS)]))

    def inherit(self, other: "ProgressPage") -> None:
        """Copy all but the progress from another slot's page, while nothing writes to either."""
        first, end = _DEATH * _WORD, _END * _WORD
        self._map[first:end] = other._map[first:end]

    def write_death(self, death: Death) -> None:
        """Record for the next incarnation how the last one ended."""
        step = NO_STEP if death.step_id is None else death.step_id
        for offset, word in enumerate((death.epoch, death.cause, step)):
            self._words[_DEATH + offset] = word

    def read_death(self) -> Death | None:
        """Return how the last incarnation ended; None: there was none, or its record is invalid."""
        epoch, cause, step = self._words[_DEATH : _DEATH + 3]
        if epoch == 0 or cause > max(DeathCause):
            return None
        return Death(epoch, DeathCause(cause), None if step == NO_STEP else step)
