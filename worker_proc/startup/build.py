"""What the bits of a result depend on besides the model: versions, kernels, device and ranks."""

import torch
import transformers

from protocol.config import EngineConfig
from protocol.version import version
from worker_proc.loading.prepared import PreparedModel


def describe_build(prepared: PreparedModel, config: EngineConfig, *, is_exact: bool) -> str:
    """Return a line that is equal where equal requests get equal bits.

    The name of a kernel library changes with its sources, and with the instructions of the CPU that
    it was compiled for. Where results are not exact, a successor may have the library and its
    predecessor not.
    """
    parts = [
        f"troika {version()}",
        f"torch {torch.__version__}",
        f"transformers {transformers.__version__}",
        f"context {prepared.loaded.model_len}",
    ]
    device = prepared.loaded.device
    if device.type == "cuda":
        parts += [
            torch.cuda.get_device_name(device),
            f"attention {config.worker.attention_backend}",
        ]
        if config.worker.batch_invariant:
            parts.append("batch invariant")
    else:
        parts.append(torch.backends.cpu.get_cpu_capability())
    if is_exact and prepared.kernels is not None:
        parts.append(prepared.kernels.path.stem)
    if config.parallel.tensor_parallel_size > 1:
        parts.append(f"{config.parallel.tensor_parallel_size} ranks")
    return ", ".join(parts)
