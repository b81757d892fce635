"""The native kernels that a setting, or the format of a checkpoint, requires."""

import torch

from worker_proc.errors import UnsupportedModel
from worker_proc.native.build import build
from worker_proc.native.kernels import NativeLibrary, load_library


def check_kernel_device(setting: str, device: torch.device) -> None:
    """Raise UnsupportedModel for a device without native kernels; the error names `setting`."""
    if device.type != "cpu":
        raise UnsupportedModel(
            f"{setting} needs device cpu: there are no kernels for it on {device.type}"
        )


def load_required_kernels(setting: str) -> NativeLibrary:
    """Return the kernels, compiling them if necessary.

    Raises UnsupportedModel with the reason if there are none; the error names `setting`, which
    needs them.
    """
    try:
        build()
        reason = "the compiled library cannot be loaded"
    except (OSError, RuntimeError) as error:
        reason = str(error)
    library = load_library()
    if library is None:
        raise UnsupportedModel(f"{setting} needs the native kernels: {reason}")
    return library
