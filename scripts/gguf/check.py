"""Checks a GGUF model by its headers alone, as a worker checks it before it reads weights."""

import tempfile
from pathlib import Path

import torch

from protocol.config import Quantization
from scripts.gguf.directory import write_directory
from worker_proc.loading.loader import check_model
from worker_proc.modules.rounding_refusals import check_rounded_dtype
from worker_proc.startup.refusals import rehearse_model


def check_headers(
    path: Path,
    dtype: str,
    device: torch.device,
    quantization: Quantization | None,
    *,
    needs_tokenizer: bool,
) -> None:
    """Raise ValueError if the model that has a file cannot run; the file needs no data."""
    with tempfile.TemporaryDirectory(prefix="troika-") as place:
        try:
            write_directory(Path(place), path, needs_tokenizer=needs_tokenizer)
            checked = check_model(place, dtype, device, lambda *_: None)
            if quantization is not None:
                check_rounded_dtype(checked.inspected.dtype, quantization)
            rehearse_model(checked, quantization, None)
        except ValueError as error:
            raise ValueError(str(error).replace(place, str(path))) from error
        except OSError as error:
            raise ValueError(f"{path} cannot be checked in {place}: {error}") from error
