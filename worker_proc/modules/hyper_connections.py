"""Computes hyper-connections, which mix several streams of rows, by a single-pass kernel.

DeepSeek-V4 and GLM-5.3-Flash normalize the columns and rows of a small matrix alternately, 20
times, which takes torch as long for one row as for many. A module qualifies by its parts, and the
kernel must reproduce its results on rows of three scales.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from worker_proc.loading.deferred_module import make_generator
from worker_proc.modules.packed_matrix import PackedMatrix
from worker_proc.modules.trial_errors import TRIAL_FAILURES, TRIAL_SCALES, greatest, greatest_error
from worker_proc.native.kernels import NATIVE_DTYPES, NativeLibrary
from worker_proc.native.structures import StreamMixingArgs

NUM_TRIAL_ROWS = 5
MAX_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Relative to the greatest value of each result."""
_MAX_STREAMS = 8  # limit in stream_mixing.h
_NUM_SCALES = 3
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Parts(NamedTuple):
    """The settings and parameters of a module."""

    num_streams: int
    num_iterations: int
    epsilon: float
    norm_epsilon: float
    matrix: PackedMatrix
    biases: torch.Tensor
    scales: torch.Tensor


class HyperConnection:
    """The forward of a module whose matrix is packed."""

    def __init__(self, library: NativeLibrary, parts: _Parts) -> None:
        self._library = library
        self._parts = parts
        self._matrix = parts.matrix.float()
        self._biases = parts.biases.detach().float().contiguous()
        self._scales = parts.scales.detach().float().contiguous()
        self._ones = torch.ones(self._matrix.shape[1])

    def __call__(self, hidden_streams: torch.Tensor) -> Results:
        """Return output gates, a mixing matrix in float32, and one row mixed from all streams."""
        *shape, count, size = hidden_streams.shape
        streams = hidden_streams.contiguous()
        rows = streams.view(-1, count * size).float()
        rows = self._library.rms_norm(rows, self._ones, self._parts.norm_epsilon, False)
        products = self._matrix.linear(rows)
        gates, matrix = torch.empty(*shape, count), torch.empty(*shape, count, count)
        out = streams.new_empty(*shape, size)
        tensors = (products, streams, self._biases, self._scales, gates, matrix, out)
        mixing = StreamMixingArgs(
            *(tensor.data_ptr() for tensor in tensors),
            products.stride(0),
            *(len(rows), count, size, self._parts.num_iterations),
            streams.dtype == torch.bfloat16,
            self._parts.epsilon,
        )
        self._library.mix_streams(mixing)
        return gates, matrix, out


@torch.inference_mode()
def install_hyper_connections(
    model: nn.Module,
    row_shapes: Mapping[str, Sequence[int]],
    library: NativeLibrary,
    dtype: torch.dtype,
    proven: Collection[str] | None = None,
) -> list[str]:
    """Replace the forwards of modules with packed matrices by the kernel; return their names.

    `row_shapes` has the row shape of each module, by name. `proven` is such a result of an earlier
    start; with it, nothing is tried.
    """
    installed = []
    modules = dict(model.named_modules())
    for name, shape in row_shapes.items():
        module = modules.get(name)
        parts = None if module is None else _parts_of(module)
        if module is None or parts is None or (proven is not None and name not in proven):
            continue
        forward = HyperConnection(library, parts)
        if proven is None and not _agrees(module, forward, shape, dtype):
            continue
        module.__dict__["forward"] = forward
        installed.append(name)
    return installed


def _parts_of(module: nn.Module) -> _Parts | None:
    """Return the parts of a module that may be a hyper-connection, or None."""
    count = getattr(module, "hc_mult", None)
    iterations = getattr(module, "hc_sinkhorn_iters", None)
    epsilon = getattr(module, "hc_eps", None)
    norm_epsilon = getattr(getattr(module, "input_norm", None), "eps", None)
    matrix = module.__dict__.get("fn")
    biases, scales = module._parameters.get("base"), module._parameters.get("scale")
    if not isinstance(count, int) or not isinstance(iterations, int) or iterations < 1:
        return None
    if not isinstance(epsilon, float) or not isinstance(norm_epsilon, float):
        return None
    if not isinstance(matrix, PackedMatrix) or biases is None or scales is None:
        return None
    num_products = count * (2 + count)
    is_of_shape = matrix.shape[0] == len(biases) == num_products and len(scales) == _NUM_SCALES
    if not is_of_shape or count > _MAX_STREAMS:
        return None
    return _Parts(count, iterations, epsilon, norm_epsilon, matrix, biases, scales)


def _agrees(
    module: nn.Module, forward: HyperConnection, shape: Sequence[int], dtype: torch.dtype
) -> bool:
    """Return whether `forward` reproduces the module's results, on rows of several scales."""
    if dtype not in NATIVE_DTYPES:
        return False
    rows = torch.randn(1, NUM_TRIAL_ROWS, *shape, generator=make_generator(1))
    errors = []
    try:
        for scale in TRIAL_SCALES:
            trial = (rows * scale).to(dtype)
            expected, found = module(trial), forward(trial)
            for one, other in zip(found, expected, strict=True):
                if one.shape != other.shape or one.dtype != other.dtype:
                    return False
                errors.append(greatest_error(one.float(), other.float()))
    except TRIAL_FAILURES:
        return False  # a module with another interface
    return greatest(errors) <= MAX_ERROR[dtype]
