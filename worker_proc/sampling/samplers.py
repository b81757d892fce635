"""Which sampler serves a model."""

from typing import TYPE_CHECKING

from protocol.config import EngineConfig
from protocol.core_worker import ModelFacts
from worker_proc.attention.interface import AttentionBackend
from worker_proc.cuda.device import uses_triton
from worker_proc.loading.loader import LoadedModel
from worker_proc.native.kernels import NativeLibrary
from worker_proc.sampling.sampler import MakeChoice, Sampler

if TYPE_CHECKING:
    from worker_proc.cuda.device_sampler import DeviceSampler


def make_sampler(
    loaded: LoadedModel, library: NativeLibrary | None, like: ModelFacts | None = None
) -> Sampler:
    """Return what samples a model's logits on its device; `like` may have other tokens."""
    tokens = loaded if like is None else like
    make_choice: MakeChoice | None = None
    if uses_triton(loaded.device):
        from worker_proc.cuda.choice import TritonChoice

        make_choice = TritonChoice
    return Sampler(tokens.vocab_size, tokens.eos_token_ids, loaded.device, library, make_choice)


def make_device_sampler(
    loaded: LoadedModel, backend: AttentionBackend, config: EngineConfig
) -> "DeviceSampler | None":
    """Return what samples without the host, where Triton attends; None: the host takes part."""
    if not uses_triton(loaded.device):
        return None
    from worker_proc.cuda.backend import TritonBackend
    from worker_proc.cuda.device_sampler import DeviceSampler
    from worker_proc.cuda.graphs import MAX_SIZE

    if not isinstance(backend, TritonBackend):
        return None
    max_num_rows = max(config.scheduler.max_num_seqs, MAX_SIZE)
    return DeviceSampler(backend, loaded.vocab_size, max_num_rows)
