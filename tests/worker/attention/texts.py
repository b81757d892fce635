"""Random texts, and the native backend that attends over them."""

import functools
import random
from array import array
from collections.abc import Sequence

import torch

from protocol.sampling import SamplingParams
from worker_proc.attention.interface import AttentionBackend, PagedLayer, Rows, Scoring
from worker_proc.attention.native import NativeBackend
from worker_proc.inputs import pack_step
from worker_proc.kv.kv_format import KVFormat
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.kv.kv_tensors import KVTensors
from worker_proc.native.build import build
from worker_proc.native.kernels import NativeLibrary, load_library
from worker_proc.request import MirroredRequest, ScheduledRequest

CPU = torch.device("cpu")
NUM_BLOCKS = 400
LENGTHS = (1, 2, 15, 16, 17, 29, 40, 64, 150)
SCALE = 0.3
SPECS = (
    LayerSpec(num_heads=6, num_kv_heads=2, head_dim=64, value_head_dim=64, window=None),
    LayerSpec(num_heads=4, num_kv_heads=4, head_dim=32, value_head_dim=32, window=9),
    LayerSpec(num_heads=9, num_kv_heads=1, head_dim=80, value_head_dim=80, window=None),
    LayerSpec(num_heads=2, num_kv_heads=2, head_dim=24, value_head_dim=12, window=20),
    LayerSpec(num_heads=8, num_kv_heads=4, head_dim=15, value_head_dim=16, window=None),
    LayerSpec(num_heads=16, num_kv_heads=1, head_dim=128, value_head_dim=64, window=70),
    LayerSpec(num_heads=71, num_kv_heads=1, head_dim=64, value_head_dim=64, window=None),
    LayerSpec(num_heads=70, num_kv_heads=2, head_dim=16, value_head_dim=24, window=20),
)
"""The last two have more heads for each KV head than a call of the kernel computes."""
DTYPES = (torch.float32, torch.bfloat16)


class Texts:
    """Random queries, keys and values of some requests, and tables of scattered blocks."""

    def __init__(
        self,
        spec: LayerSpec,
        block_size: int,
        dtype: torch.dtype,
        lengths: Sequence[int] = LENGTHS,
        format: KVFormat = KVFormat.PLAIN,
        *,
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        self.spec, self.block_size, self.dtype = spec, block_size, dtype
        self.num_blocks = num_blocks
        self.pool_dtype = format.pool_dtype(dtype)
        self.rows = [
            [
                torch.randn(length, heads, dim, generator=generator).to(dtype)
                for heads, dim in (
                    (spec.num_heads, spec.head_dim),
                    (spec.num_kv_heads, spec.head_dim),
                    (spec.num_kv_heads, spec.value_head_dim),
                )
            ]
            for length in lengths
        ]
        self.biases: list[torch.Tensor] | None = None
        """The biases of each text's queries by distance, `[length, num_heads, distances]`."""
        self.sinks: list[torch.Tensor] | None = None
        """The sinks of each text's queries, `[length, num_heads]`."""
        if spec.is_latent:
            for rows in self.rows:
                rows[2] = rows[1][..., : spec.value_head_dim]
        free = list(range(1, num_blocks))
        random.Random(5).shuffle(free)
        self.requests = []
        for req_id, length in enumerate(lengths):
            blocks = array("i", [free.pop() for _ in range(-(-length // block_size))])
            self.requests.append(
                MirroredRequest(req_id, [0] * length, length, SamplingParams(), [blocks], 0, 0)
            )

    def layer(
        self,
        backend: AttentionBackend,
        sinks: torch.Tensor | None = None,
        biases: torch.Tensor | None = None,
        bias_origin: int | None = None,
    ) -> PagedLayer:
        """Return a layer with an empty pool."""
        shapes = backend.pool_shapes(self.spec, self.num_blocks)
        pools = [torch.zeros(shape, dtype=self.pool_dtype) for shape in shapes if shape]
        tensors = KVTensors(pools[0], pools[-1])
        return PagedLayer(
            self.spec, tensors, backend, sinks=sinks, biases=biases, bias_origin=bias_origin
        )

    def attend(
        self,
        layer: PagedLayer,
        parts: Sequence[tuple[int, int, int]],
        softcap: float | None = None,
    ) -> list[torch.Tensor]:
        """Compute one step of (request, start, num_tokens) and return each part's rows."""
        scheduled = [
            ScheduledRequest(self.requests[i], start, count, True) for i, start, count in parts
        ]
        layer.backend.begin_step(pack_step(scheduled, CPU))

        def packed(texts: Sequence[torch.Tensor]) -> torch.Tensor:
            return torch.cat([texts[i][start : start + count] for i, start, count in parts])

        terms = [None if one is None else packed(one) for one in (self.biases, self.sinks)]
        kinds = [packed([rows[kind] for rows in self.rows]) for kind in range(3)]
        # The layout that models pass: heads first in memory.
        rows = Rows(*(t.transpose(0, 1).contiguous().transpose(0, 1) for t in kinds))
        out = layer.backend.attend(layer, rows, Scoring(SCALE, softcap, *terms))
        return list(out.split([count for _, _, count in parts]))


def native_backend(
    block_size: int,
    dtype: torch.dtype,
    windows: Sequence[int | None] = (None,),
    library: NativeLibrary | None = None,
    specs: Sequence[LayerSpec] = SPECS,
    *,
    format: KVFormat = KVFormat.PLAIN,
) -> NativeBackend:
    library = library or built_library()
    return NativeBackend(library, block_size, dtype, specs, windows, format=format)


@functools.cache
def built_library() -> NativeLibrary:
    build()
    library = load_library()
    assert library is not None
    return library


LATENT_SPECS = (
    LayerSpec(16, 1, head_dim=576, value_head_dim=512, window=None, is_latent=True),
    LayerSpec(5, 1, head_dim=24, value_head_dim=16, window=None, is_latent=True),
    LayerSpec(20, 1, head_dim=74, value_head_dim=44, window=20, is_latent=True),
    LayerSpec(130, 1, head_dim=64, value_head_dim=48, window=None, is_latent=True),
)
"""Of 16 heads, one, two and four have a tile of a long prompt's tokens; 130 are two tiles."""
CODES = (KVFormat.INT8, KVFormat.FP8)
