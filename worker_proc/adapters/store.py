"""The adapters of a loaded model: its sites, the adapters in memory, and a step's rows."""

import torch

from worker_proc.adapters.kept import KeptAdapters
from worker_proc.adapters.matrices import LoadedAdapter
from worker_proc.adapters.reader import AdapterReader
from worker_proc.adapters.rows import StepRows
from worker_proc.adapters.sites import Sites
from worker_proc.inputs import StepInputs
from worker_proc.native.kernels import NativeLibrary


class AdapterStore:
    """Adapters for one model."""

    def __init__(
        self,
        library: NativeLibrary,
        dtype: torch.dtype,
        sites: Sites,
        *,
        max_rank: int,
        num_kept: int,
    ) -> None:
        """`num_kept` is the maximum number of adapters in memory."""
        self.library = library
        self.dtype = dtype
        self.sites = sites
        self.rows = StepRows(library)
        self._reader = AdapterReader(library, dtype, sites, max_rank)
        self.kept: KeptAdapters[LoadedAdapter] = KeptAdapters(self._reader.read, num_kept)

    @property
    def max_bytes(self) -> int:
        """Maximum memory for all adapters, including one that is being loaded."""
        num_adapters = self.kept.num_kept + 1
        return num_adapters * self._reader.max_bytes + self._reader.max_bytes_of_load

    def begin_step(self, inputs: StepInputs) -> None:
        """Record which rows of a step have which adapter."""
        rows: dict[int, list[int]] = {}
        for part, first in zip(inputs.parts, inputs.first_rows, strict=True):
            if adapter_id := part.request.adapter_id:
                rows.setdefault(adapter_id, []).extend(range(first, first + part.num_tokens))
        if rows:
            parts = [(self.kept[adapter_id], numbers) for adapter_id, numbers in rows.items()]
            self.rows.begin(parts, inputs.input_ids.shape[1])
        else:
            self.rows.clear()
