"""What the bits of a result depend on besides the model: versions, kernels, device and ranks."""

import torch
import transformers

from protocol.config import EngineConfig
from protocol.version import version
from worker_proc.loading.prepared import PreparedModel


def kernels_of(prepared: PreparedModel) -> str:
    """Return the name of the kernel library, or nothing.

    It changes with the library's sources, and with the instructions of the CPU that it was compiled
    for.
    """
    return "" if prepared.kernels is None else prepared.kernels.path.stem


def describe_build(prepared: PreparedModel, config: EngineConfig) -> str:
    """Return a line: where it and the kernels are equal, equal requests get equal bits."""
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
    if config.parallel.tensor_parallel_size > 1:
        parts.append(f"{config.parallel.tensor_parallel_size} ranks")
    if config.parallel.pipeline_parallel_size > 1:
        parts.append(f"{config.parallel.pipeline_parallel_size} stages")
    return ", ".join(parts)
