"""The common parts of the formats of quantized checkpoints: schemes of layers, and settings.

A format is read from `quantization_config` of config.json, before any weight. Its schemes state
which tensors make up a weight, and turn them into a `QuantizedWeight`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from worker_proc.errors import CheckpointError, UnsupportedModel
from worker_proc.quantization.headers import StoredTensor
from worker_proc.quantization.weight import CodeKind, QuantizedWeight

ReadTensor = Callable[[str], torch.Tensor]
"""Reads a tensor of a layer, by its name within the layer."""


class Scheme(Protocol):
    """How the weight of a linear layer is stored."""

    kind: CodeKind
    codes_rows: bool
    """Whether the layer's inputs are also rounded to 8 bits, with a scale for each row."""

    def shape(self, stored: Mapping[str, StoredTensor], read: ReadTensor) -> tuple[int, int]:
        """Return the outputs and inputs of a layer, from the headers of its tensors.

        `read` is for small tensors that describe others.
        Raises ValueError if a tensor is missing, or has another shape or type than the scheme's.
        """

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        """Return the weight of a layer from its tensors."""


class StackedScheme(Protocol):
    """How one weight of all experts of a mixture is stored."""

    ends: tuple[str, ...]
    """The ends of its tensors' names, after the name of the weight; that of the codes is first."""

    def shape(self, stored: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        """Return the shape of a weight, from the headers of its tensors by their ends.

        Raises ValueError if a tensor is missing, or has another shape or type than the scheme's.
        """

    def read(
        self, slices: Mapping[str, Any], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a weight from slices of its tensors; raises ValueError for values out of range."""


class SourceFile(NamedTuple):
    """A file that a directory stands for, and its state when the directory was made."""

    path: Path
    num_bytes: int
    mtime_ns: int


class CheckpointFormat(NamedTuple):
    """The format of a quantized checkpoint."""

    method: str
    """`quant_method`, its name."""
    codes: tuple[str, ...]
    """The names of the tensor of a quantized layer that holds the codes, such as qweight."""
    parts: frozenset[str]
    """The names of the other tensors of a quantized layer, including optional ones."""
    scheme_of: Callable[[str], Scheme]
    """Returns the scheme of a layer by its name."""
    experts: StackedScheme | None = None
    """The scheme of weights that hold all experts of a mixture; None: there are none."""
    sources: tuple[SourceFile, ...] = ()
    """The GGUF files with all tensors; empty: the checkpoint is not GGUF, and has schemes."""
    schemes_of_dtypes: Mapping[str, Scheme] = {}
    """The schemes of layers whose codes have another type, by the type's name in safetensors."""
    name_of_expert: Callable[[str, int], str] | None = None
    """Returns the name of one expert's layer, if tensors have the matrices of all experts.

    Raises ValueError for another layer.
    """


CODE_DTYPES = frozenset({"F8_E4M3", "I8", "U8", "U32"})
"""Types of tensors that hold codes under the name of plain weights, as in safetensors."""
UNUSED_PARTS = frozenset(
    {
        *("input_scale", "input_zero_point", "k_scale", "v_scale", "q_scale"),
        *("activation_scale", "input_global_scale", "input_scale_ub", "qscale_act"),
    }
)
"""Scales of activations and of the KV cache, which are not rounded as the checkpoint suggests."""


class Settings:
    """The keys of a `quantization_config`, or of a section of it; errors name key and file."""

    def __init__(self, path: Path, name: str, section: Any) -> None:
        if not isinstance(section, dict):
            raise CheckpointError(f"{path}: {name} is {_shown(section)}, and must be an object")
        self._path, self._name, self._section = path, name, section

    @property
    def directory(self) -> Path:
        """The directory of the checkpoint."""
        return self._path.parent

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key; null counts as missing."""
        value = self._section.get(key)
        return default if value is None else value

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Settings":
        """Return settings that have values for keys which are missing here."""
        stated = {key: value for key, value in self._section.items() if value is not None}
        return Settings(self._path, self._name, {**defaults, **stated})

    def section(self, key: str) -> "Settings":
        """Return the object below a key."""
        return Settings(self._path, f"{self._name}.{key}", self._section.get(key))

    def sections(self, key: str) -> list["Settings"]:
        """Return the objects of an object of objects."""
        inner = self.section(key)
        return [inner.section(name) for name in inner._section]

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield all keys with their values."""
        yield from self._section.items()

    def one_of(self, key: str, supported: tuple[Any, ...], default: Any = None) -> Any:
        """Return a value that must be among the supported ones."""
        value = self.get(key, default)
        if not any(value == one and type(value) is type(one) for one in supported):
            raise self.unsupported(key, " or ".join(_shown(one) for one in supported))
        return value

    def unsupported(self, key: str, supported: str) -> UnsupportedModel:
        """Return the error for a value that is not supported."""
        value = _shown(self._section.get(key))
        return UnsupportedModel(
            f"{self._path}: {self._name}.{key} is {value}; supported: {supported}"
        )


def _shown(value: object) -> str:
    return json.dumps(value)[:100]


def require(
    stored: Mapping[str, StoredTensor], name: str, *shapes: tuple[int, ...]
) -> StoredTensor:
    """Return a tensor of a layer, which must have one of the shapes; none: it may have any."""
    tensor = stored.get(name)
    if tensor is None:
        raise ValueError(f"misses {name}")
    if shapes and tensor.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"has a {name} of shape {list(tensor.shape)} instead of {wanted}")
    return tensor


def require_matrix(stored: Mapping[str, StoredTensor], name: str, *dtypes: str) -> tuple[int, int]:
    """Return the shape of a tensor of a layer that must be a matrix of one of the types."""
    tensor = require(stored, name)
    require_type(tensor, name, *dtypes)
    if len(tensor.shape) != 2:
        raise ValueError(f"has a {name} of {len(tensor.shape)} dimensions, and must have 2")
    return tensor.shape[0], tensor.shape[1]


def require_type(tensor: StoredTensor, name: str, *dtypes: str) -> None:
    """Raise ValueError unless a tensor of a layer is stored as one of the types."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"has {name} stored as {tensor.dtype} instead of {' or '.join(dtypes)}")


def require_scales(
    stored: Mapping[str, StoredTensor], names: Sequence[str], *shapes: tuple[int, ...]
) -> None:
    """Raise ValueError unless a layer has scales of one of the names and shapes."""
    name = next((name for name in names if name in stored), " or ".join(names))
    require_type(require(stored, name, *shapes), name, "F32", "BF16", "F16", "F8_E8M0", "U8")


def num_groups(num_inputs: int, group_size: int) -> int:
    """Return how many groups the inputs make; `group_size` -1 stands for all inputs."""
    return 1 if group_size == -1 else -(-num_inputs // group_size)


def checked(weight: QuantizedWeight) -> QuantizedWeight:
    """Return a weight whose values are finite, or raise ValueError."""
    if not bool(weight.scales.isfinite().all()):
        raise ValueError("has scales that are not finite")
    if weight.minimums is not None and not bool(weight.minimums.isfinite().all()):
        raise ValueError("has biases that are not finite")
    if weight.table is not None and not bool(weight.table.isfinite().all()):
        raise ValueError("has a table of values that are not finite")
    if weight.kind is CodeKind.FP8:
        # The two codes of NaN are 0x7F, the greatest signed byte, and 0xFF.
        signed = weight.codes.view(torch.int8)
        if int(signed.max()) == 0x7F or bool((weight.codes == 0xFF).any()):
            raise ValueError("has codes that are not numbers")
    return weight
