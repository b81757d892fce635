"""The progress page: memory that a process shares with its supervisor, and leaves when it dies.

There is one page per slot, whose descriptor each incarnation inherits. It has three parts:

- progress, written by the thread that works: what it does since when, and until when it should be
  done. It is guarded by a sequence number, odd while it is written; nobody ever waits for a lock;
- steps in flight, written by the core before it dispatches: a number for each request in a step, so
  that its successor knows who was being computed when both of them died;
- the death of the last incarnation, written by the supervisor before it starts the next.

Whoever dies in the middle of a write leaves that part unreadable, not wrong.

Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a host share.
"""

import enum
import fcntl
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

MAX_FINGERPRINTS = 4096
"""Of one step; those past it are counted, not kept."""
NUM_STEP_SLOTS = 8
"""Steps in flight that are kept; as many as `max_steps_in_flight` can be."""
NO_STEP = 2**64 - 1

_MAGIC = 0x3150_4B54
_WORD = 8
_PROGRESS = 8
"""Index of the sequence number; then epoch, phase, step, began, deadline."""
_DEATH = 16
"""Index of the epoch; then the cause and the step."""
_STEPS = 64
"""Index of the first step's sequence number; then step, epoch, number of requests, and theirs."""
_STEP_HEAD = 4
_STEP_WORDS = _STEP_HEAD + MAX_FINGERPRINTS
PAGE_BYTES = -(-(_STEPS + NUM_STEP_SLOTS * _STEP_WORDS) * _WORD // mmap.PAGESIZE) * mmap.PAGESIZE
_NUM_TRIES = 4
_PROGRESS_STRUCT = struct.Struct("=5Q")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Phase(enum.IntEnum):
    """What the thread that works is doing."""

    NONE = 0
    """The process has not reported yet."""
    STARTING = 1
    LOAD = 2
    """A long phase of the start; visible progress begins it anew."""
    IDLE = 3
    """Waiting in a poll, which it leaves for a moment every now and then."""
    TURN = 4
    """Handling what the poll has found."""
    STEP = 5
    """Computing a step."""


class ProgressRecord(NamedTuple):
    """What a process has last said of itself."""

    epoch: int
    phase: Phase
    step_id: int | None
    began_ns: int
    deadline_ns: int
    """When it is suspected to hang; 0: never."""

    @property
    def limit_s(self) -> float:
        """How long this may take."""
        return (self.deadline_ns - self.began_ns) / 1e9


class StepInFlight(NamedTuple):
    """A step that the core was about to dispatch, or had dispatched."""

    epoch: int
    """Of the core."""
    step_id: int
    fingerprints: list[int]
    num_requests: int
    """More than there are fingerprints, if some had no room."""


class MarkEdits(NamedTuple):
    """What has changed among the numbers of a step in flight."""

    total: int
    """How many numbers there are now; 0: the step is over."""
    numbers: Mapping[int, int]
    """By place: those that are new or different."""

    @classmethod
    def whole(cls, numbers: Sequence[int]) -> "MarkEdits":
        """Return the edits that replace all numbers."""
        return cls(len(numbers), dict(enumerate(numbers)))


class Death(NamedTuple):
    """How an incarnation ended."""

    epoch: int
    cause: int
    """Place in `protocol.lifecycle.DeathCause`, counted from 0."""
    step_id: int | None


class ProgressPage:
    """One page, seen from either side. One thread of one process writes each part."""

    def __init__(self, fd: int) -> None:
        """Map a page that `create` has made; the descriptor stays the caller's.

        Raises:
            OSError: it cannot be mapped.
            ValueError: it is too small, or no page.
        """
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._words = memoryview(self._map).cast("Q")
        if self._words[0] != _MAGIC:
            self.close()
            raise ValueError("the descriptor holds no progress page")

    @classmethod
    def create(cls, name: str) -> "tuple[ProgressPage, int]":
        """Make an empty page; returns it with the descriptor to hand on.

        Its size is sealed, so that nobody can take the memory from under another.

        Raises:
            OSError: there is no descriptor or memory left.
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
        """Unmap it."""
        self._words.release()
        self._map.close()

    # Progress -----------------------------------------------------------------------------------

    def write(
        self, epoch: int, phase: Phase, step_id: int | None, began_ns: int, deadline_ns: int
    ) -> None:
        """Say what goes on from now on."""
        words = self._words
        seq = words[_PROGRESS] | 1  # odd already if a predecessor died while it wrote
        words[_PROGRESS] = seq
        step = NO_STEP if step_id is None else step_id
        _PROGRESS_STRUCT.pack_into(
            self._map, (_PROGRESS + 1) * _WORD, epoch, phase, step, began_ns, deadline_ns
        )
        words[_PROGRESS] = seq + 1

    def read(self) -> Mark | None:
        """What was said last.

        None if it is being written, its writer died over it, or somebody wrote nonsense there.
        """
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

    # Steps in flight ----------------------------------------------------------------------------

    def write_in_flight(self, epoch: int, step_id: int, edits: MarkEdits) -> None:
        """Change the numbers of the requests in a step, each of 64 bits, before it is dispatched.

        Only what has changed is written, so that the cost does not grow with the step.
        """
        words, first = self._words, _step_index(step_id)
        words[first] |= 1
        words[first + 1], words[first + 2], words[first + 3] = step_id, epoch, edits.total
        for place, number in edits.numbers.items():
            if place < MAX_FINGERPRINTS:
                words[first + _STEP_HEAD + place] = number
        words[first] += 1

    def read_in_flight(self) -> list[StepInFlight]:
        """Steps that were written with numbers, in order.

        One that its writer died over is left out: it was not dispatched.
        """
        found = []
        for number in range(NUM_STEP_SLOTS):
            first = _step_index(number)
            seq, step_id, epoch, total = self._words[first : first + _STEP_HEAD]
            if seq % 2 == 0 and total > 0:
                rows = first + _STEP_HEAD
                kept = list(self._words[rows : rows + min(total, MAX_FINGERPRINTS)])
                found.append(StepInFlight(epoch, step_id, kept, total))
        return sorted(found, key=lambda step: (step.epoch, step.step_id))

    def inherit(self, other: "ProgressPage") -> None:
        """Take over from another slot's page what its last incarnation has left for the next.

        Only while nobody writes either of them.
        """
        first, end = _DEATH * _WORD, (_STEPS + NUM_STEP_SLOTS * _STEP_WORDS) * _WORD
        self._map[first:end] = other._map[first:end]

    # The last death -----------------------------------------------------------------------------

    def write_death(self, death: Death) -> None:
        """Tell the next incarnation how the last one ended."""
        step = NO_STEP if death.step_id is None else death.step_id
        for offset, word in enumerate((death.epoch, death.cause, step)):
            self._words[_DEATH + offset] = word

    def read_death(self) -> Death | None:
        """How the last incarnation ended; None if there was none."""
        epoch, cause, step = self._words[_DEATH : _DEATH + 3]
        return None if epoch == 0 else Death(epoch, cause, None if step == NO_STEP else step)


def _step_index(step_id: int) -> int:
    return _STEPS + step_id % NUM_STEP_SLOTS * _STEP_WORDS
