"""Defaults that differ where a GPU computes."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from protocol.config.choices import Device

GPU_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/nvmap")
"""Device files of drivers that torch can use."""
GPU_DEFAULTS = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
"""Settings of the scheduler; a GPU needs larger steps to be busy."""


def gpu_defaults(scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """Add the defaults to a section; that of max_num_seqs is at most max_num_batched_tokens."""
    section: dict[str, Any] = {**GPU_DEFAULTS, **scheduler}
    if "max_num_seqs" not in scheduler:
        section["max_num_seqs"] = min(section["max_num_seqs"], section["max_num_batched_tokens"])
    return section


def computes_on_gpu(device: Device, gpu_nodes: Sequence[str] = GPU_NODES) -> bool:
    """Return whether a model is computed on a GPU, as far as that is known without torch."""
    if device is Device.AUTO:
        return any(map(os.path.exists, gpu_nodes))
    return device is not Device.CPU
