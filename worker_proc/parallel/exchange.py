"""Sums of the rows of all ranks in every layer, through shared memory.

The memory is a file of the adoption (adoption.py), which the first rank makes. In a model with
pipeline stages, the ranks of each stage have a separate file.

Ranks on GPUs add up rows on their devices (cuda/rank_group.py). They use the shared memory for
values of the host, and to agree on each step before any device begins it.
"""

import ctypes
import mmap
import os
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence

import torch

from worker_proc.native.exchange import ALL_PUBLISHED, NativeExchange, exchange_bytes
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.structures import ProgramArgs, RunArgs
from worker_proc.parallel.adoption import SLICE_NS, Adoption
from worker_proc.parallel.device_group import DeviceGroup
from worker_proc.parallel.share import Share
from worker_proc.runner import StepAbandoned

SLOT_BYTES = 1 << 20
"""The most bytes of one rank that are exchanged at once; more rows are exchanged in parts."""


class RanksDiffer(RuntimeError):
    """The ranks have sampled different tokens, so all later sums would be wrong."""


class RankExchange:
    """One rank's view of the exchange; every rank makes the same calls in the same order."""

    def __init__(
        self,
        library: NativeLibrary,
        adoption: Adoption,
        share: Share,
        *,
        slot_bytes: int = SLOT_BYTES,
        group: DeviceGroup | None = None,
    ) -> None:
        """`adoption` is that of the whole group; `share` is this rank's place in its stage.

        `group` adds up the rows if the ranks compute on GPUs.
        """
        self.rank, self.num_ranks = share
        self._library = library
        self._slot_bytes = slot_bytes
        self.group = group
        self._adoption = adoption
        self._first_rank = adoption.rank - self.rank
        self._label = f"sums-{self._first_rank}-"
        self._memory: mmap.mmap | None = None
        self._native: NativeExchange | None = None

    def on_wait(self, report: Callable[[], None]) -> None:
        """Set the function that is called several times a second while this rank waits."""
        self._adoption.report_wait = report

    def begin(self, epoch: int) -> None:
        """Begin a new adoption; the next exchange maps its memory."""
        self._native, self._memory = None, None
        self._adoption.begin(epoch)

    def leave(self) -> None:
        """Take no part in further steps of this adoption: waiting ranks abandon theirs."""
        self._adoption.leave()

    def begin_step(self) -> None:
        """Wait until all ranks have received the next step, if devices add up its rows.

        A device waits without limit for the rows of the other ranks, so either all ranks or none
        may begin a step. If another rank has left the adoption before it received this step, no
        rank begins it, and StepAbandoned is raised. If it has left afterwards, all ranks have
        received the step, and begin it. Raises the errors of `add`.
        """
        if self.group is None:
            return
        native = self._joined()
        try:
            self._exchange(native, torch.empty(0, 1))
        except StepAbandoned:
            if native.wait(native.args.sequence, 0) != ALL_PUBLISHED:
                raise

    def add(self, rows: torch.Tensor) -> None:
        """Replace rows, `[T, width]`, by the sums of all ranks' rows, in float32.

        All ranks get the same bits. Raises RankMissing if another rank does not take part in time,
        and StepAbandoned if one has left the adoption.
        """
        if self.group is not None:
            self.group.add(rows)
            return
        native = self._joined()
        for part in self._parts(rows):
            self._exchange(native, part)
            native.add(part, native.args.sequence)

    def check_row(self, row_bytes: int) -> None:
        """Raise ValueError if the ranks cannot exchange rows of this size."""
        if row_bytes > self._slot_bytes:
            raise ValueError(f"a row of {row_bytes} bytes exceeds a slot of {self._slot_bytes}")

    def execute(self, program: ProgramArgs, run: RunArgs) -> None:
        """Execute a program of the native decoder that adds up rows of all ranks.

        If another rank is missing, the program stops after a slice of time, and is resumed at the
        same instruction. Raises the errors of `add`.
        """
        native = self._joined()
        run.exchange = ctypes.addressof(native.args)
        stopped_at, deadline = -1, 0.0
        while (num_done := self._library.execute(program, run)) < program.num_instructions:
            if stopped_at != native.args.sequence:
                stopped_at, deadline = native.args.sequence, self._adoption.deadline
            self._check(native.args.missing, deadline)
            program = program.after(num_done)

    def gather(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the columns of all ranks, `[T, num_ranks * width]`, in the order of the ranks."""
        return self.gather_on_host(columns) if self.group is None else self.group.gather(columns)

    def gather_on_host(self, columns: torch.Tensor) -> torch.Tensor:
        """As `gather`, for columns in host memory, regardless of the ranks' devices."""
        native = self._joined()
        shape = len(columns), self.num_ranks * columns.shape[1]
        out = torch.empty(shape, dtype=columns.dtype)
        first = 0
        for part in self._parts(columns):
            self._exchange(native, part)
            native.gather(part, native.args.sequence, out[first:])
            first += len(part)
        return out

    def minimum(self, number: int) -> int:
        """Return the smallest of all ranks' numbers; raises the errors of `add`."""
        return int(self.gather_on_host(torch.tensor([[number]])).min())

    def agree(self, token_ids: Sequence[int]) -> None:
        """Raise RanksDiffer if another rank has sampled other tokens in this step."""
        checksum = zlib.crc32(array("q", token_ids).tobytes())
        found = self.gather_on_host(torch.tensor([[checksum]]))[0].tolist()
        if len(set(found)) > 1:
            raise RanksDiffer(f"the ranks have sampled different tokens (checksums {found})")

    def _parts(self, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield consecutive parts of the rows, each of which fits in a slot."""
        row_bytes = rows.shape[1] * rows.element_size()
        self.check_row(row_bytes)
        yield from rows.split(self._slot_bytes // row_bytes)

    def _exchange(self, native: NativeExchange, rows: torch.Tensor) -> None:
        native.args.sequence += 1
        native.publish(rows, native.args.sequence)
        self._await_all(native, self._adoption.deadline)

    def _await_all(self, native: NativeExchange, deadline: float) -> None:
        while (found := native.wait(native.args.sequence, SLICE_NS)) != ALL_PUBLISHED:
            self._check(found, deadline)

    def _check(self, missing: int, deadline: float) -> None:
        self._adoption.check(
            deadline, f"rank {self._first_rank + missing} has not computed its part"
        )

    def _joined(self) -> NativeExchange:
        if self._native is None:
            self._native = self._join()
            if self.group is not None:
                self._join_group(self.group)
        return self._native

    def _join_group(self, group: DeviceGroup) -> None:
        """Connect the devices of all ranks through a file of this adoption."""
        label = f"group-{self._first_rank}-"
        path = self._adoption.path(label)
        if self.rank == 0:  # no rank has made the file of this adoption yet
            self._adoption.remove_older(label)
        try:
            group.join(path, self.gather_on_host(torch.tensor([[os.getpid()]]))[0].tolist())
        finally:
            if self.rank == 0:
                path.unlink(missing_ok=True)

    def _join(self) -> NativeExchange:
        """Map the file of this adoption, and wait until all ranks have it."""
        deadline = self._adoption.deadline
        num_bytes = exchange_bytes(self.num_ranks, self._slot_bytes)
        is_first = self.rank == 0
        try:
            self._memory = self._adoption.map_file(
                self._label, num_bytes, makes=is_first, deadline=deadline
            )
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            native = self._library.exchange(address, self.rank, self.num_ranks, self._slot_bytes)
            native.args.wait_ns = SLICE_NS
            native.args.sequence = 1
            native.publish(torch.empty(0, 1), native.args.sequence)
            self._await_all(native, deadline)
        finally:
            if is_first:
                self._adoption.remove_file(self._label)
        return native
