"""Sums and gathers rows of ranks on their devices; NCCL transfers them between GPUs.

Every rank gathers the rows of all ranks and sums them in float32, in rank order, like ranks on the
CPU. A library's all-reduce chooses the order by the size of a message and the place of a value in
it: with more than two ranks, bits would depend on the batch.
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from worker_proc.cuda.pointwise import add_up
from worker_proc.parallel.device_group import DIFFERS
from worker_proc.parallel.share import Share

SLOT_BYTES = 16 << 20
"""Bytes of each rank's rows that are gathered at a time; longer ones are divided."""

# PyTorch 2.13 has renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class RankGroup:
    """A `DeviceGroup` over torch.distributed."""

    def __init__(
        self,
        share: Share,
        device: torch.device,
        *,
        timeout_s: float,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """`share` identifies this rank among the ranks of a model.

        The process ends if another rank does not take part within `timeout_s`.
        """
        self._share = share
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._slot_bytes = slot_bytes
        # Captured steps write to it, so it never moves.
        size = share.num_ranks, slot_bytes
        self._slots = torch.empty(size, dtype=torch.uint8, device=device)
        self._members: list[int] | None = None

    def join(self, path: Path, members: Sequence[int]) -> None:
        if self._members is not None:
            if self._members != list(members):
                raise RuntimeError("another rank was replaced, and this one was not")
            return
        is_cuda = self._device.type == "cuda"
        # By its path: PyTorch does not decode the quoted characters of a URL.
        num_ranks = self._share.num_ranks
        store = dist.FileStore(str(path), num_ranks)  # type: ignore[attr-defined]
        store.set_timeout(self._timeout)
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=store,
            rank=self._share.rank,
            world_size=num_ranks,
            timeout=self._timeout,
            # It needs an index, which a model's device does not have.
            device_id=torch.device("cuda", torch.cuda.current_device()) if is_cuda else None,
        )
        self._members = list(members)
        dist.barrier()  # all ranks have opened the file

    def add(self, rows: torch.Tensor) -> None:
        for part in self._parts(rows):
            add_up(self._gathered(part), part)

    def gather(self, columns: torch.Tensor) -> torch.Tensor:
        num_rows, width = columns.shape
        out = columns.new_empty(num_rows, self._share.num_ranks, width)
        first = 0
        for part in self._parts(columns.contiguous()):
            out[first : first + len(part)] = self._gathered(part).transpose(0, 1)
            first += len(part)
        return out.flatten(1)

    def mark_differences(self, token_ids: torch.Tensor) -> None:
        if len(token_ids):
            found = self._gathered(token_ids[None])[:, 0]
            token_ids.masked_fill_((found != found[0]).any(0), DIFFERS)

    def _parts(self, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield consecutive rows that fit in a slot."""
        row_bytes = rows.shape[1] * rows.element_size()
        yield from rows.split(self._slot_bytes // row_bytes)

    def _gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """Return all ranks' rows, `[num_ranks, T, width]`, valid until the next call."""
        shape = self._share.num_ranks, *rows.shape
        num_bytes = self._share.num_ranks * rows.numel() * rows.element_size()
        out = self._slots.view(-1)[:num_bytes].view(rows.dtype).view(shape)
        _all_gather(out.flatten(0, 1), rows)
        return out
