"""The formats of quantized checkpoints by their names; formats.py has what reads them."""

from pathlib import Path

from worker_proc.errors import UnsupportedModel

KEY = "quantization_config"
"""Of config.json."""
GGUF = "gguf"
METHODS = ("awq", "bitsandbytes", "compressed-tensors", "fp8", GGUF, "gptq", "mxfp4")
"""Values of `quant_method`."""


def check_method(path: Path, method: object) -> None:
    """Raise UnsupportedModel unless a format is read; `path` is that of config.json."""
    if method not in METHODS:
        raise UnsupportedModel(
            f"{path}: {KEY}.quant_method is {method!r}; supported: {', '.join(METHODS)}"
        )
