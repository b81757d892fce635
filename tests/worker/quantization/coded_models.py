"""The codes of a quantized checkpoint, and of a model that is loaded from one."""

from pathlib import Path

import torch

from worker_proc.loading.inspection import inspect_config
from worker_proc.model_runner import ModelRunner
from worker_proc.modules.experts.grouped import GroupedExperts
from worker_proc.modules.experts.mixture import FusedExperts
from worker_proc.modules.mlp import FusedMLP
from worker_proc.modules.packed_linear import NativeLinear
from worker_proc.native.packed_weights import Format
from worker_proc.quantization.files import QuantizedFiles
from worker_proc.quantization.headers import read_headers

CPU = torch.device("cpu")
LAYER = "model.layers.1.mlp.up_proj"


def open_files(directory: Path) -> QuantizedFiles:
    format = inspect_config(str(directory), "auto", CPU).format
    assert format is not None
    return QuantizedFiles(str(directory), read_headers(str(directory)), format)


def coded_formats(runner: ModelRunner) -> set[Format]:
    """Return the formats of all weights but those of the output layer and of routers."""
    formats = set()
    for module in runner._model.modules():
        if isinstance(module, NativeLinear) and module is not runner._model.lm_head:
            formats.add(module.packed.format)
        if isinstance(module, FusedMLP):
            formats.add(module.gate_up.format)
        if isinstance(module, FusedExperts | GroupedExperts):
            formats |= {module.products.up.format, module.products.down.format}
    return formats
