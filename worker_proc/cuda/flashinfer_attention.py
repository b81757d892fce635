"""Attention by FlashInfer over the engine's own blocks, which are its pages.

FlashInfer divides a step's work on the host: it makes a plan, once for all layers that see the same
pages in the same way. A step of single tokens uses a decode wrapper, any other step a prefill
wrapper, which takes single tokens, too. A step over static buffers uses wrappers whose arrays stay
at their addresses, so that a graph can be replayed after a new plan.
"""

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from worker_proc.attention.interface import PagedLayer, Scoring
from worker_proc.cuda.attention import PagedStep
from worker_proc.cuda.page_table import PageTable, page_table
from worker_proc.errors import UnsupportedModel, describe
from worker_proc.request import ScheduledRequest

WORKSPACE_BYTES = 384 * 2**20
"""The memory for partial results.

The planner requires up to about 2 · multiprocessors · query heads of a KV head · 128 rows of
float32: 264 MiB for 8 heads of 256 dimensions on an H100.
"""
LAYOUT = "NHD"  # [page, slot, head, dim]


class _View(NamedTuple):
    """The common properties of layers that share a plan."""

    group: int
    window: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scoring: Scoring


class FlashInferAttention:
    """Plans a step, and attends with the plans."""

    name = "FlashInfer"
    depends_on_batch = True

    def __init__(
        self, block_size: int, max_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Import the library; `max_blocks` is a request's most blocks, `dtype` that of its rows."""
        try:
            self._library: Any = importlib.import_module("flashinfer")
        except Exception as error:  # the library may raise anything
            reason = f"its import fails ({describe(error)})"
            raise UnsupportedModel(f"attention_backend flashinfer: {reason}") from error
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._dtype = dtype
        self._device = device
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._views: list[_View] = []
        """All views that layers have requested; each step plans for them before its forward."""
        self._wrappers: dict[tuple[_View, int, bool], Any] = {}
        self._static_indices: dict[_View, torch.Tensor] = {}
        self._planned: dict[_View, Any] = {}
        """The wrappers of the current step."""
        self._parts: Sequence[ScheduledRequest] = ()
        self._first_rows: list[int] = []
        self._static_size = 0
        """Rows of the current step if it uses static buffers; otherwise 0."""
        # Planning writes to pinned memory that copies of the last plans may still read.
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def num_splits(self, num_parts: int, num_decodes: int, longest: int) -> int:
        """Return 1: the library divides contexts itself."""
        return 1

    def begin_step(self, parts: Sequence[ScheduledRequest], first_rows: list[int]) -> None:
        """Plan a step; `first_rows` ends with the number of its rows."""
        self._begin(parts, first_rows, 0)

    def begin_static_step(self, parts: Sequence[ScheduledRequest], size: int) -> None:
        """Plan a step of single tokens over static buffers, padded to `size` rows."""
        self._begin(parts, [], size)

    def attend(
        self, paged: PagedStep, query: torch.Tensor, layer: PagedLayer, scoring: Scoring
    ) -> torch.Tensor:
        """Attend for `[T, num_heads, head_dim]` over stored KV; return the same shape."""
        spec = layer.spec
        heads = spec.num_heads, spec.num_kv_heads, spec.head_dim
        view = _View(layer.group, spec.window, *heads, scoring)
        wrapper = self._planned.get(view)
        if wrapper is None:
            self._views.append(view)
            wrapper = self._plan(view)
        out = query.new_empty(query.shape)  # the library would zero it first
        attended: torch.Tensor = wrapper.run(query, (paged.kv.keys, paged.kv.values), out=out)
        return attended

    def _begin(
        self, parts: Sequence[ScheduledRequest], first_rows: list[int], static_size: int
    ) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        self._parts, self._first_rows, self._static_size = parts, first_rows, static_size
        self._planned = {}
        for view in self._views:
            self._plan(view)

    def _plan(self, view: _View) -> Any:
        """Plan the current step for the layers of a view; return the wrapper that attends."""
        size = self._static_size
        pages = page_table(self._parts, view.group, view.window, self._block_size, size)
        is_decode = size > 0 or all(part.num_tokens == 1 for part in self._parts)
        wrapper = self._wrapper(view, size, is_decode=is_decode)
        # The planner reads these on the host, and copies them to the device.
        arrays = self._pinned(pages.indptr), self._indices(pages), self._pinned(pages.last_page_len)
        sizes = view.num_heads, view.num_kv_heads, view.head_dim, self._block_size
        options = {
            "sm_scale": view.scoring.scale,
            "logits_soft_cap": view.scoring.softcap,
            "window_left": -1 if view.window is None else view.window - 1,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }
        if is_decode:
            wrapper.plan(*arrays, *sizes, **options)
        else:
            wrapper.plan(self._pinned(self._first_rows), *arrays, *sizes, causal=True, **options)
        if self._copied is not None:
            self._copied.record()
        self._planned[view] = wrapper
        return wrapper

    def _wrapper(self, view: _View, size: int, *, is_decode: bool) -> Any:
        """Return the wrapper for a kind of step; each wrapper has a separate workspace."""
        kind = (view, size, is_decode)
        wrapper = self._wrappers.get(kind)
        if wrapper is None:
            wrapper = self._wrappers[kind] = self._make_wrapper(view, size, is_decode=is_decode)
        return wrapper

    def _make_wrapper(self, view: _View, size: int, *, is_decode: bool) -> Any:
        if not is_decode:
            return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, LAYOUT)
        buffers = {}
        if size:
            indptr, last_page_len = (
                torch.zeros(length, dtype=torch.int32, device=self._device)
                for length in (size + 1, size)
            )
            buffers = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": indptr,
                "paged_kv_indices_buffer": self._static_indices_of(view, size),
                "paged_kv_last_page_len_buffer": last_page_len,
            }
        # With tensor cores, decodes use the prefill kernels, for any number of query heads. Those
        # of FlashAttention 2 divide contexts in a way that is constant for a graph.
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, LAYOUT, use_tensor_cores=True, backend="fa2", **buffers
        )

    def _static_indices_of(self, view: _View, size: int) -> torch.Tensor:
        """Return a buffer for the pages of a static step; one step at a time uses it."""
        length = size * self._max_blocks
        buffer = self._static_indices.get(view)
        if buffer is None or len(buffer) < length:
            buffer = torch.zeros(length, dtype=torch.int32, device=self._device)
            self._static_indices[view] = buffer
        return buffer

    def _pinned(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, pin_memory=self._device.type == "cuda")

    def _indices(self, pages: PageTable) -> torch.Tensor:
        """Return the pages on the device: a copy from the host to a static buffer would wait."""
        host = torch.frombuffer(pages.indices, dtype=torch.int32)
        if self._device.type == "cuda":
            host = host.pin_memory()
        return host.to(self._device, non_blocking=True)
