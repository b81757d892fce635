"""Prepares a CUDA device before a model is loaded; imports no Triton."""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch

from worker_proc.errors import UnsupportedModel


def resolve_device(name: str) -> torch.device:
    """Return the device named by `name` ("auto", "cpu", "cuda").

    Raises UnsupportedModel if it is missing, or lacks a requirement for computing on it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModel(
            "device cuda: PyTorch finds no CUDA device; check nvidia-smi and that PyTorch was"
            " installed with CUDA, or use --device cpu"
        )
    if name == "cuda" and (missing := _missing_part()):
        raise UnsupportedModel(f"device cuda: {missing}, or use --device cpu")
    return torch.device(name)


def _missing_part() -> str:
    """Describe a missing requirement of Triton, and how to install it; empty: none is missing."""
    if importlib.util.find_spec("triton") is None:
        return (
            "its kernels need Triton, which PyTorch's builds for CUDA install, and it is missing;"
            " run pip install triton"
        )
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        found = " or ".join(compilers)
        return f"Triton needs a C compiler, and {found} is missing; install gcc, or set CC"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        return f"Triton needs {header}, which is missing; install Python's headers (python3-dev)"
    return ""


def prepare_device(device: torch.device, rank: int = 0) -> None:
    """Change settings that must precede the first kernel, and select a rank's GPU.

    Raises UnsupportedModel if there are fewer GPUs than ranks.
    """
    if device.type == "cuda":
        if rank > 0:  # rank 0 uses CUDA's default device
            _choose_device(rank)
        # cuDNN would make a plan for every new pair of batch size and length, which takes longer
        # than the attention.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Fuse products and sums, whatever the default of this version of Triton is.
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def _choose_device(rank: int) -> None:
    if rank >= (num_devices := torch.cuda.device_count()):
        raise UnsupportedModel(
            f"device cuda: rank {rank} of the model needs a GPU of its own, and PyTorch finds"
            f" {num_devices}; choose a smaller tensor_parallel_size"
        )
    torch.cuda.set_device(rank)


def uses_triton(device: torch.device) -> bool:
    """Return whether Triton kernels are used; otherwise nothing of Triton is imported."""
    return device.type == "cuda"
