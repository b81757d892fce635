"""Stands in for FlashInfer: checks what its documentation asks of each call, and computes.

Its two wrappers attend in plain PyTorch. As in the library's kernels a masked value is multiplied
by zero, so that one which is not finite spoils the result; what is behind the last token of a
context is not read. With static buffers the pages are read from these when `run` is called, as a
graph that is replayed does.
"""

import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

HEAD_DIMS = {64, 128, 256}
MIN_WORKSPACE_BYTES = 128 * 2**20


class _Wrapper:
    """What both wrappers check and compute."""

    plans: list["_Wrapper"] = []
    """The wrapper of each plan since the stand-in was installed."""
    num_runs = 0

    def __init__(self, workspace: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert workspace.dtype == torch.uint8
        assert workspace.numel() >= MIN_WORKSPACE_BYTES
        assert workspace.data_ptr() % 16 == 0
        assert not workspace[:: 2**20].any(), "it must be zero at its first use"
        assert kv_layout == "NHD"
        self.device = workspace.device
        self.buffers: tuple[torch.Tensor, ...] | None = None
        self._pages: tuple[torch.Tensor, ...] | None = None

    def _check_array(self, array: torch.Tensor, length: int, *, on_host: bool) -> None:
        assert array.dtype == torch.int32
        assert array.shape == (length,)
        assert array.is_contiguous()
        assert array.device == (torch.device("cpu") if on_host else self.device)

    def _plan(
        self,
        rows: list[int],
        pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        sizes: tuple[int, int, int, int],
        *,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        indptr, indices, last_page_len = pages
        num_qo_heads, num_kv_heads, head_dim, page_size = sizes
        batch_size = len(rows) - 1
        assert batch_size >= 1
        # Planning on the device's copies would wait for all that it has still to compute.
        self._check_array(indptr, batch_size + 1, on_host=True)
        self._check_array(last_page_len, batch_size, on_host=True)
        self._check_array(indices, int(indptr[-1]), on_host=False)
        assert rows[0] == indptr[0] == 0
        num_pages = indptr.diff()
        assert (num_pages >= 1).all()
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        new = torch.tensor(rows).diff()
        assert (new >= 1).all()
        assert ((num_pages - 1) * page_size + last_page_len >= new).all()
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim in HEAD_DIMS
        assert window_left >= -1
        assert logits_soft_cap is None or logits_soft_cap > 0.0
        assert q_data_type == kv_data_type
        assert q_data_type in (torch.float16, torch.bfloat16)
        if self.buffers is None:
            self._pages = tuple(array.to(self.device) for array in pages)
        else:
            assert batch_size == len(self.buffers[2]), "the batch size of static buffers is fixed"
            for buffer, array in zip(self.buffers, pages, strict=True):
                assert len(array) <= len(buffer)
                buffer[: len(array)].copy_(array)
            self._pages = self.buffers
        self._rows = rows
        self._shape = (num_qo_heads, num_kv_heads, head_dim)
        self._page_size = page_size
        self._dtype = q_data_type
        self._scale = head_dim**-0.5 if sm_scale is None else sm_scale
        self._window = math.inf if window_left < 0 else window_left
        self._cap = logits_soft_cap
        _Wrapper.plans.append(self)

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: Any = None
    ) -> torch.Tensor:
        _Wrapper.num_runs += 1
        assert self._pages is not None, "plan comes before run"
        heads, kv_heads, head_dim = self._shape
        assert q.shape == (self._rows[-1], heads, head_dim)
        assert q.dtype == self._dtype
        assert q.stride(2) == 1
        keys, values = paged_kv_cache
        for cache in paged_kv_cache:
            assert cache.dtype == self._dtype
            assert cache.shape[1:] == (self._page_size, kv_heads, head_dim)
            assert cache.device == q.device == self.device
        assert keys.stride() == values.stride(), "else another variant is compiled"
        if out is None:
            out = torch.zeros_like(q)
        assert (out.shape, out.dtype, out.device) == (q.shape, q.dtype, q.device)
        indptr, indices, last_page_len = self._pages
        for part, (first, end) in enumerate(zip(self._rows, self._rows[1:], strict=False)):
            pages = indices[int(indptr[part]) : int(indptr[part + 1])].long()
            assert ((pages >= 0) & (pages < len(keys))).all()
            length = (len(pages) - 1) * self._page_size + int(last_page_len[part])
            own = [cache[pages].flatten(0, 1)[:length].float() for cache in paged_kv_cache]
            out[first:end] = self._attend(q[first:end].float(), *own)
        return torch.as_tensor(out)

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Any:
        num_rows, heads, _ = query.shape
        repeats = heads // keys.shape[1]
        keys, values = (x.repeat_interleave(repeats, dim=1) for x in (keys, values))
        scores = torch.einsum("thd,lhd->htl", query, keys) * self._scale
        if self._cap is not None:
            scores = torch.tanh(scores / self._cap) * self._cap
        seen = torch.arange(len(keys), device=query.device)
        position = torch.arange(len(keys) - num_rows, len(keys), device=query.device)[:, None]
        visible = (seen <= position) & (seen >= position - self._window)
        weights = scores.masked_fill(~visible, -math.inf).softmax(dim=2)
        return torch.einsum("htl,lhd->thd", weights, values)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        *sizes: int,
        causal: bool = False,
        **options: Any,
    ) -> None:
        assert causal
        self._check_array(qo_indptr, len(paged_kv_indptr), on_host=True)
        pages = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self._plan(qo_indptr.tolist(), pages, sizes, **options)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        workspace: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(workspace, kv_layout)
        assert backend == "fa2", "others may choose otherwise at the next plan of a graph"
        assert use_tensor_cores, "other kernels know some numbers of query heads only"
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self.buffers = (
                paged_kv_indptr_buffer,
                paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer,
            )
            for buffer in self.buffers:
                self._check_array(buffer, len(buffer), on_host=False)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        *sizes: int,
        **options: Any,
    ) -> None:
        self._plan(list(range(len(indptr))), (indptr, indices, last_page_len), sizes, **options)


def install_stand_in(patch: pytest.MonkeyPatch) -> type[_Wrapper]:
    """Let `import flashinfer` find the stand-in; returns what counts its plans and runs."""
    module: Any = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    for wrapper in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        setattr(module, wrapper.__name__, wrapper)
    patch.setitem(sys.modules, "flashinfer", module)
    _Wrapper.plans.clear()
    _Wrapper.num_runs = 0
    return _Wrapper
