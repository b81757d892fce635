"""Channels between pipeline stages, in shared memory: rows and sampled tokens.

Each stage passes the rows after its last layer to the next stage. The last stage passes the sampled
tokens to the first one and, with speculation, to all others. If several ranks divide the layers of
a stage, all of them have the same rows and tokens, and each passes them to the rank with the same
number in the other stage.

Both sides know the number of rows from the step. A channel has two slots. A writer of rows waits
until the reader has read the slot that it will overwrite, so a stage is at most two steps ahead of
the next one.

A writer of tokens does not wait, since stages that wait for each other in a circle would never
continue. Instead there are more slots than steps in flight. A stage takes the tokens of a step
before it computes the step whose tokens will overwrite them.
"""

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from worker_proc.native.exchange import ALL_PUBLISHED, NativeExchange, exchange_bytes
from worker_proc.native.kernels import NativeLibrary
from worker_proc.parallel.adoption import SLICE_NS, Adoption
from worker_proc.parallel.share import Share
from worker_proc.parallel.stage import Stage

MAX_SLOT_BYTES = 32 << 20
"""The most bytes of rows that are passed at once; more rows are passed in parts."""
_LABEL = "stages-"
_LINE = 128
"""The number of bytes of which the size of a slot is a multiple."""
_SLOTS = 2
"""The number of slots of a channel."""


class PipeSize(NamedTuple):
    """The sizes of the largest step, and the number of steps in flight."""

    num_rows: int
    row_bytes: int
    num_words: int
    """The most words that the last stage publishes for one step."""
    num_steps: int
    """The most steps in flight."""

    @property
    def row_slot_bytes(self) -> int:
        rows_at_once = max(1, MAX_SLOT_BYTES // self.row_bytes)
        return _rounded(self.row_bytes * min(self.num_rows, rows_at_once))

    @property
    def token_slot_bytes(self) -> int:
        return _rounded((1 + self.num_words) * torch.long.itemsize)

    @property
    def num_token_channels(self) -> int:
        return -(-self.num_steps // _SLOTS) + 1


class _Channel:
    """Slots that one rank writes and another one reads; each write has a number, from 1 on."""

    def __init__(self, native: NativeExchange, slot_bytes: int) -> None:
        self._native = native
        self.slot_bytes = slot_bytes

    def write(self, rows: torch.Tensor, number: int) -> None:
        self._native.publish(rows, number)

    def has(self, number: int, timeout_ns: int = 0) -> bool:
        """Wait until a number has been written, and return whether it has."""
        return self._native.wait(number, timeout_ns) == ALL_PUBLISHED

    def read(self, out: torch.Tensor, number: int) -> None:
        """Read the rows of a number that has been written according to `has`."""
        self._native.gather(out, number, out)


class _Rows:
    """The channels for rows from one stage to the next."""

    def __init__(self, data: _Channel, read: _Channel) -> None:
        """`data` has the rows; in `read` the reader publishes the numbers that it has read."""
        self._data = data
        self._read = read
        self._number = 0

    def send(self, rows: torch.Tensor, wait: Callable[[_Channel, int, str], None]) -> None:
        for part in self._parts(rows):
            self._number += 1
            if self._number > _SLOTS:
                wait(self._read, self._number - _SLOTS, "the next stage has not read its rows")
            self._data.write(part, self._number)

    def receive(self, out: torch.Tensor, wait: Callable[[_Channel, int, str], None]) -> None:
        for part in self._parts(out):
            self._number += 1
            wait(self._data, self._number, "the previous stage has not computed its rows")
            self._data.read(part, self._number)
            self._read.write(_NO_ROWS, self._number)

    def _parts(self, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        row_bytes = rows.shape[1] * rows.element_size()
        yield from rows.split(self._data.slot_bytes // row_bytes)


_NO_ROWS = torch.empty(0, 1)


class _Memory(NamedTuple):
    """The channels of an adoption that a rank uses."""

    file: mmap.mmap
    """The mapping, which lasts as long as the channels over it are used."""
    from_previous: _Rows | None
    to_next: _Rows | None
    tokens: list[_Channel]
    min_draft_states: int


class StagePipe:
    """One rank's view of the channels; every rank counts the same steps."""

    def __init__(
        self,
        library: NativeLibrary,
        adoption: Adoption,
        stage: Stage,
        share: Share,
        size: PipeSize,
        *,
        num_draft_states: int = 0,
    ) -> None:
        """`adoption` is that of the whole group; `stage` and `share` are this rank's place in it.

        `num_draft_states` is the number of this rank's blocks for the states before drafts.
        """
        self.stage = stage
        self._share = share
        self._library = library
        self._size = size
        self._adoption = adoption
        self._memory: _Memory | None = None
        self._num_published = 0
        self._num_draft_states = num_draft_states

    @property
    def min_draft_states(self) -> int:
        """The least number of blocks for states before drafts of any rank.

        Waits for all ranks, and raises the errors of `receive`.
        """
        return self._joined().min_draft_states

    @property
    def max_steps_behind(self) -> int:
        """The most steps whose tokens a stage has not taken when it begins another step."""
        return _SLOTS * self._size.num_token_channels - 1

    def on_wait(self, report: Callable[[], None]) -> None:
        """Set the function that is called several times a second while this rank waits."""
        self._adoption.report_wait = report

    def begin(self, epoch: int) -> None:
        """Begin a new adoption; the next use of a channel maps its memory."""
        self._memory = None
        self._num_published = 0
        self._adoption.begin(epoch)

    def leave(self) -> None:
        """Take no part in further steps of this adoption: waiting ranks abandon theirs."""
        self._adoption.leave()

    def receive(self, rows: torch.Tensor) -> None:
        """Fill `[T, width]` with the rows of the previous stage.

        Raises RankMissing if they do not arrive in time, and StepAbandoned if another rank has left
        the adoption.
        """
        channels = self._joined().from_previous
        assert channels is not None
        channels.receive(rows, self._wait)

    def send(self, rows: torch.Tensor) -> None:
        """Pass `[T, width]` to the next stage; raises the errors of `receive`."""
        channels = self._joined().to_next
        assert channels is not None
        channels.send(rows, self._wait)

    def publish(self, words: Sequence[int]) -> None:
        """Pass the results of the step after the last published one to the other stages."""
        self._num_published += 1
        channel, number = self._token_slot(self._num_published)
        if (1 + len(words)) * torch.long.itemsize > channel.slot_bytes:
            raise ValueError(f"{len(words)} words exceed {channel.slot_bytes} bytes")
        channel.write(torch.tensor([len(words), *words]).unsqueeze(1), number)

    def has_tokens(self, step: int) -> bool:
        """Return whether the results of a step, counted from 1, have been published."""
        channel, number = self._token_slot(step)
        return channel.has(number)

    def tokens(self, step: int) -> list[int]:
        """Wait for the published words of a step, counted from 1, and return them.

        Raises the errors of `receive`.
        """
        channel, number = self._token_slot(step)
        self._wait(channel, number, "the last stage has not sampled its tokens")
        length = torch.empty(1, 1, dtype=torch.long)
        channel.read(length, number)
        out = torch.empty(1 + int(length), 1, dtype=torch.long)
        channel.read(out, number)
        found: list[int] = out[1:, 0].tolist()
        return found

    def _token_slot(self, step: int) -> tuple[_Channel, int]:
        channels = self._joined().tokens
        return channels[step % len(channels)], step // len(channels) + 1

    def _wait(self, channel: _Channel, number: int, problem: str) -> None:
        deadline = self._adoption.deadline
        while not channel.has(number, SLICE_NS):
            self._adoption.check(deadline, problem)

    def _joined(self) -> _Memory:
        if self._memory is None:
            self._memory = self._join()
        return self._memory

    def _join(self) -> _Memory:
        """Map the file of this adoption, and wait until all ranks have mapped it.

        Each rank publishes its number of blocks for the states before drafts, and its `PipeSize`.
        Raises ValueError if the sizes of two ranks differ.
        """
        adoption, size = self._adoption, self._size
        deadline, num_hops = adoption.deadline, self.stage.num_stages - 1
        meeting_bytes = exchange_bytes(adoption.num_ranks, _LINE)
        slots = [size.row_slot_bytes] * num_hops + [0] * num_hops
        slots += [size.token_slot_bytes] * size.num_token_channels
        own_bytes = sum(exchange_bytes(1, slot) for slot in slots)
        num_bytes = meeting_bytes + self._share.num_ranks * own_bytes
        is_first = adoption.rank == 0
        try:
            file = adoption.map_file(_LABEL, num_bytes, makes=is_first, deadline=deadline)
            address = ctypes.addressof(ctypes.c_char.from_buffer(file))
            meeting = self._library.exchange(address, adoption.rank, adoption.num_ranks, _LINE)
            own = torch.tensor([[self._num_draft_states], *([value] for value in size)])
            meeting.publish(own, 1)
            while (found := meeting.wait(1, SLICE_NS)) != ALL_PUBLISHED:
                adoption.check(deadline, f"rank {found} has not joined the others")
            published = torch.empty(len(own), adoption.num_ranks, dtype=own.dtype)
            meeting.gather(own, 1, published)
        finally:
            if is_first:
                adoption.remove_file(_LABEL)
        all_sizes = {PipeSize(*each) for each in published[1:].T.tolist()}
        if len(all_sizes) > 1:
            raise ValueError(f"ranks expect steps of different sizes: {all_sizes}")
        address += meeting_bytes + self._share.rank * own_bytes
        channels = []
        for slot in slots:
            channels.append(_Channel(self._library.exchange(address, 0, 1, slot), slot))
            address += exchange_bytes(1, slot)
        hops = list(zip(channels[:num_hops], channels[num_hops : 2 * num_hops], strict=True))
        index = self.stage.place
        from_previous = None if self.stage.is_first else _Rows(*hops[index - 1])
        to_next = None if self.stage.is_last else _Rows(*hops[index])
        tokens, min_draft_states = channels[2 * num_hops :], int(published[0].min())
        return _Memory(file, from_previous, to_next, tokens, min_draft_states)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE
