"""What a CUDA device needs before a model is loaded; imports no Triton."""

import importlib.util
import os

import torch

from worker_proc.errors import UnsupportedModel


def resolve_device(name: str) -> torch.device:
    """Return the device that `name` ("auto", "cpu", "cuda") stands for.

    UnsupportedModel: it is not there, or lacks what is needed to compute on it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModel(
            "device cuda: PyTorch finds no CUDA device; check nvidia-smi and that PyTorch was"
            " installed with CUDA, or use --device cpu"
        )
    if name == "cuda" and importlib.util.find_spec("triton") is None:
        raise UnsupportedModel(
            "device cuda: its kernels need Triton, which PyTorch's builds for CUDA install, and it"
            " is missing; run pip install triton, or use --device cpu"
        )
    return torch.device(name)


def prepare_device(device: torch.device) -> None:
    """Set what must be set before the first kernel runs."""
    if device.type == "cuda":
        # It would make a plan for every new pair of batch size and length, which takes longer than
        # the attention.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Products and sums are fused, whatever the default of this version of Triton is.
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def uses_triton(device: torch.device) -> bool:
    """Return whether Triton kernels compute; else nothing of Triton is imported."""
    return device.type == "cuda"
