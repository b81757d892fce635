"""Which backend computes the attention of a model."""

from worker_proc.attention.interface import AttentionBackend
from worker_proc.attention.native import NativeBackend, can_attend
from worker_proc.attention.sdpa import Rule, SdpaBackend
from worker_proc.cuda.device import uses_triton
from worker_proc.kv.kv_groups import KVLayout
from worker_proc.loading.loader import LoadedModel
from worker_proc.native.kernels import NativeLibrary


def make_backend(
    loaded: LoadedModel, layout: KVLayout, library: NativeLibrary | None
) -> AttentionBackend:
    """Return the backend whose kernels cover the layers, else the portable one."""
    specs = [layer.spec for layer in loaded.layers]
    if library is not None and can_attend(specs, loaded.dtype, loaded.device):
        windows = [group.window for group in layout.groups]
        return NativeBackend(library, layout.block_size, loaded.dtype, specs, windows)
    if uses_triton(loaded.device):
        from worker_proc.cuda.backend import TritonBackend, can_attend_by_triton

        if can_attend_by_triton(specs):
            return TritonBackend(specs, len(layout.groups), layout.block_size, loaded.device)
    rules = {
        Rule(number, specs[index].window)
        for number, group in enumerate(layout.groups)
        for index in group.layers
    }
    return SdpaBackend(rules, layout.block_size, loaded.dtype, loaded.device)
