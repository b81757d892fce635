"""Decode steps over static buffers, captured as CUDA graphs: forward and choice of the tokens.

A step in which every request computes one token and samples is padded to one of a few sizes, with
tokens of the null block. Everything that such a step reads is at fixed addresses: its buffers, the
tokens of the last step, block tables, parameters and the pool. A single launch replays it. Without
a CUDA device, the same buffers are computed directly, which is how tests check them.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from worker_proc.cuda.attention import DeviceStep
from worker_proc.cuda.backend import CudaBackend
from worker_proc.cuda.device_sampler import DeviceSampler
from worker_proc.inputs import StepInputs

SMALL_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
SIZE_STEP, MAX_SIZE = 32, 512
_WAITS = "synchronizing"
"""Part of PyTorch's error for a forward that waits for the device."""
_log = logging.getLogger("troika.worker")


def padded_sizes(max_num_seqs: int) -> list[int]:
    """Return the sizes for steps of up to `max_num_seqs` requests, at most MAX_SIZE."""
    max_size = min(max_num_seqs, MAX_SIZE)
    sizes = [*SMALL_SIZES, *range(SMALL_SIZES[-1] + SIZE_STEP, MAX_SIZE + 1, SIZE_STEP)]
    return sizes[: bisect_left(sizes, max_size) + 1]


class StaticDecode:
    """The buffers of steps of one size, and the forward over them."""

    def __init__(
        self,
        model: nn.Module,
        backend: CudaBackend,
        sampler: DeviceSampler,
        size: int,
        *,
        longest: int,
        vocab_size: int,
    ) -> None:
        device = backend.tables.tensor.device
        self._model = model
        self._backend = backend
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._input_ids = torch.zeros(1, size, dtype=torch.long, device=device)
        self._position_ids = torch.zeros(1, size, dtype=torch.long, device=device)
        self._columns = torch.zeros(3, size, dtype=torch.int32, device=device)
        self._columns[1] = backend.tables.null_row
        self._logits_indices = torch.arange(size, device=device)
        first_rows = torch.arange(size + 1, dtype=torch.int32, device=device)
        num_splits = backend.attention.num_splits(size, size, longest)
        starts, table_rows, kept_from = self._columns
        by_part = (first_rows, starts, table_rows, kept_from)
        self._step = DeviceStep(*by_part, size, size, num_splits)
        self._tables = backend.tables.tensor
        self._replay: Callable[[], torch.Tensor] = self._forward

    @property
    def size(self) -> int:
        return self._columns.shape[1]

    def compute(self, inputs: StepInputs) -> torch.Tensor:
        """Choose the tokens of a step; return its logits, which are valid until the next step."""
        num_rows = len(inputs.parts)
        columns = self._backend.begin_static_step(inputs.parts, self.size)
        self._sampler.update(self._backend.rows, inputs.parts)
        self._columns.copy_(columns)
        self._input_ids[:, :num_rows] = inputs.input_ids
        self._position_ids[:, :num_rows] = inputs.position_ids
        if self._backend.tables.tensor is not self._tables:  # a graph reads the old addresses
            self._tables, self._replay = self._backend.tables.tensor, self._forward
        return self._replay()[:num_rows]

    def _forward(self) -> torch.Tensor:
        self._backend.step = self._step
        self._sampler.feed(self._input_ids)
        output = self._model(
            input_ids=self._input_ids,
            position_ids=self._position_ids,
            use_cache=False,
            logits_to_keep=self._logits_indices,
        )
        logits: torch.Tensor = output.logits[0][:, : self._vocab_size]
        starts, rows, _ = self._columns
        self._sampler.choose(logits, rows, starts + 1)
        return logits

    @torch.inference_mode()
    def capture(self, pool: Any, out: torch.Tensor | None, max_rows: int) -> torch.Tensor:
        """Record the step in a graph whose memory belongs to `pool`.

        Its logits go to the first rows of `out`, which all sizes share; the first capture creates
        it, with room for `max_rows`. Raises RuntimeError if the forward waits for the device, so
        that it cannot be recorded.
        """
        self._backend.attention.begin_static_step((), self.size)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            logits = self._forward()  # compiles kernels; libraries allocate their workspaces
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                self._forward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        torch.cuda.current_stream().wait_stream(stream)
        kept = logits.new_empty(max_rows, self._vocab_size) if out is None else out
        graph = torch.cuda.CUDAGraph()
        # NCCL's own thread may query its events meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            kept[: self.size].copy_(self._forward())

        def replay() -> torch.Tensor:
            graph.replay()
            return kept

        self._replay = replay
        return kept


class DecodeGraphs:
    """Static decodes of several sizes; on a CUDA device they are captured."""

    def __init__(
        self,
        model: nn.Module,
        backend: CudaBackend,
        sampler: DeviceSampler,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        is_divided: bool = False,
    ) -> None:
        """The model's attention modules must be attached to the pool that it will use.

        `is_divided`: the model is a rank's part, and a forward exchanges sums with other ranks.
        """
        self._model = model
        self._backend = backend
        self._sampler = sampler
        self._longest = max_model_len
        self._vocab_size = vocab_size
        self._is_divided = is_divided
        self._sizes = padded_sizes(max_num_seqs)
        self._decodes: dict[int, StaticDecode] = {}
        self._is_captured = backend.tables.tensor.device.type == "cuda"
        self._pool: Any = None
        self._logits: torch.Tensor | None = None
        # From here on the tables and the parameters never move.
        backend.tables.reserve(max_num_seqs, -(-max_model_len // block_size))
        sampler.update((), ())

    def capture(self) -> None:
        """Capture all sizes, the largest first, since the others fit in its memory.

        Other sizes are captured when a step needs them.
        """
        if self._is_captured:
            for size in reversed(self._sizes[:]):
                self._prepare(size)

    def forget(self) -> None:
        """Drop the logits, and everything that refers to the pool, which moves when it sleeps."""
        self._decodes.clear()
        self._pool = None
        self._logits = None

    def compute(self, inputs: StepInputs) -> torch.Tensor | None:
        """Choose a step's tokens, and return its logits; None: no graph computes it.

        Graphs compute only decodes, of at most the largest size. A size that was dropped is
        captured here, which takes one step longer.
        """
        num_parts = len(inputs.parts)
        # Rows of prompts are not in the order of the parts, so each part must sample.
        is_decode = len(inputs.sampling) == inputs.input_ids.shape[1] == num_parts
        index = bisect_left(self._sizes, num_parts)
        if not is_decode or index == len(self._sizes):
            return None
        size = self._sizes[index]
        decode = self._decodes.get(size) or self._prepare(size)
        return None if decode is None else decode.compute(inputs)

    def _prepare(self, size: int) -> StaticDecode | None:
        """Create the decode of a size; None: it cannot be captured, and no further size will be."""
        if size not in self._sizes:
            return None
        decode = StaticDecode(
            self._model,
            self._backend,
            self._sampler,
            size,
            longest=self._longest,
            vocab_size=self._vocab_size,
        )
        if self._is_captured:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            # A capture computes a step, and the next one may need the tokens of the last.
            chosen = self._sampler.chosen.clone()
            try:
                self._logits = decode.capture(self._pool, self._logits, self._sizes[-1])
            except RuntimeError as error:
                # With several ranks, a forward that waits fails on all of them. Any other failure
                # concerns this rank only, which may have begun more sums than the others.
                if self._is_divided and _WAITS not in str(error):
                    raise
                _log.warning("decode steps run without CUDA graphs: %s", error)
                self._sizes.clear()
                self._decodes.clear()
                return None
            finally:
                self._sampler.chosen.copy_(chosen)
        self._decodes[size] = decode
        return decode
