"""The build: everything besides the model that the bits of a result depend on.

These are versions, kernels, the device and the number of ranks.
"""

import torch
import transformers

from protocol.config import EngineConfig
from protocol.process.version import version
from worker_proc.loading.prepared import PreparedModel


def kernels_of(prepared: PreparedModel) -> str:
    """Return the name of the kernel library; empty: there is none.

    The name changes with the library's sources, and with the CPU instructions that it was compiled
    for.
    """
    return "" if prepared.kernels is None else prepared.kernels.path.stem


def describe_build(prepared: PreparedModel, config: EngineConfig) -> str:
    """Describe the build in a line; equal lines and kernels give equal bits for equal requests."""
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
