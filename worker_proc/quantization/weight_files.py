"""The interface of checkpoints with codes: their weights, and the files that have them.

quantization/files.py implements it for safetensors files, and gguf/files.py for GGUF files. Nothing
is read before it is needed: a weight is dequantized when the loader requests it, or never, if its
codes stay in memory.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from worker_proc.quantization.headers import StoredTensor
from worker_proc.quantization.report import CodesReport
from worker_proc.quantization.weight import CodeKind, QuantizedWeight


class CodedWeight(Protocol):
    """The weight of one layer in codes, which are in a file."""

    name: str
    shape: torch.Size
    report: CodesReport

    @property
    def kind(self) -> CodeKind: ...

    @property
    def codes_rows(self) -> bool:
        """Whether the layer's inputs are rounded to 8 bits, too."""

    def read(self) -> QuantizedWeight:
        """Read the codes and their scales; raises CheckpointError."""


Parts = tuple[CodedWeight, ...]
"""Weights whose outputs lie one after another."""


class WholeWeight(Protocol):
    """A weight of any number of dimensions that is dequantized when it is read."""

    shape: torch.Size
    experts: tuple[Parts, ...]
    """The weights in codes of each expert, or of the one matrix; empty: its codes do not stay."""

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in `dtype`; raises CheckpointError."""


class WeightFiles(Protocol):
    """The files of a checkpoint: weights of layers in codes, whole weights, and plain tensors."""

    report: CodesReport
    plain: dict[str, StoredTensor]

    @property
    def whole(self) -> Mapping[str, WholeWeight]:
        """Weights that are not one stored matrix, such as those of all experts of a mixture."""

    @property
    def weights(self) -> Mapping[str, CodedWeight]:
        """The weights of layers, by the names that plain weights would have."""

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of all tensors if codes stay codes; other tensors are of `dtype`."""

    def plain_slices(self) -> dict[str, Any]:
        """Return slices of the tensors that are not quantized."""


class DenseWeight:
    """A weight in the form of a file's slice, which is dequantized when it is read."""

    def __init__(self, stored: CodedWeight, dtype: torch.dtype) -> None:
        self._stored, self._dtype = stored, dtype

    def __getitem__(self, _: object) -> torch.Tensor:
        return self._stored.read().dequantize(self._dtype)


class DenseWhole:
    """A whole weight in the form of a file's slice, which is dequantized when it is read."""

    def __init__(self, stored: WholeWeight, dtype: torch.dtype) -> None:
        self._stored, self._dtype = stored, dtype

    def __getitem__(self, _: object) -> torch.Tensor:
        return self._stored.read(self._dtype)
