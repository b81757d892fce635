"""Weights that are several tensors in files: their matrices or rows are joined."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from worker_proc.errors import CheckpointError
from worker_proc.gguf.header import TensorEntry
from worker_proc.gguf.mapped import PLAIN, MappedFiles
from worker_proc.gguf.metadata import Metadata
from worker_proc.gguf.model_header import Header
from worker_proc.gguf.types import READ, type_name


class Join(NamedTuple):
    """The tensors of a layer that become one weight, and the function that joins them."""

    target: str
    """The name of the weight within its layer."""
    parts: tuple[str, ...]
    """The names of the tensors within their layer."""
    join: Callable[..., torch.Tensor]
    """Returns a part of the weight for one matrix, or row, of each tensor."""
    flat: bool = False
    """True if the parts of the weight are joined by rows, and not stacked."""
    of_experts: bool = True
    """True if the tensors have a matrix, or row, for each expert."""
    whole: str = ""
    """A tensor that is the weight itself in some files, whose parts are then copies of it."""


class JoinedTensor(NamedTuple):
    """A weight that is several tensors in files."""

    name: str
    entries: tuple[TensorEntry, ...]
    how: Join
    shape: tuple[int, ...]

    def read(self, file: MappedFiles, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in `dtype`."""
        count = self.entries[0].shape[0]
        weight = torch.empty(self.shape, dtype=dtype)
        places = weight.view(count, -1, *self.shape[1:]) if self.how.flat else weight
        for number in range(count):
            parts = (file.read_values(entry.name, number) for entry in self.entries)
            places[number] = self.how.join(*parts).to(dtype)
        return weight


class Rows(NamedTuple):
    """The tensors of a layer whose rows, one tensor after the other, become one weight.

    The codes of the rows are kept. Tensors of experts have the matrices of all experts.
    """

    target: str
    """The name of the weight within its layer."""
    parts: tuple[str, ...]
    """The names of the tensors within their layer."""
    whole: str = ""
    """A tensor that some files have instead of the parts, and that is the weight itself."""
    order: Callable[[Metadata], torch.Tensor] | None = None
    """Returns, for each row of the weight, the number of the row among those of all parts."""


class JoinedRows(NamedTuple):
    """A weight with the rows of several tensors."""

    name: str
    entries: tuple[TensorEntry, ...]
    order: torch.Tensor | None
    shape: tuple[int, ...]

    @property
    def has_codes(self) -> bool:
        """True if kernels can read the codes: rows in another order must be of one type."""
        types = {entry.type for entry in self.entries}
        return types <= READ - PLAIN.keys() and (self.order is None or len(types) == 1)

    def read(self, file: MappedFiles, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in `dtype`."""
        weight = torch.empty(self.shape, dtype=dtype)
        is_stack = len(self.shape) == 3
        for number, matrix in enumerate(weight if is_stack else weight[None]):
            place = number if is_stack else None
            rows = torch.cat([file.read_values(entry.name, place) for entry in self.entries])
            matrix.copy_(rows if self.order is None else rows[self.order])
        return weight


def join_rows(header: Header, layer: str, how: Rows) -> JoinedRows:
    """Return a weight of a layer; raises CheckpointError for tensors that cannot be joined.

    `layer` is the beginning of the names of its weights: `PREFIX.layers.NUMBER`.
    """
    number = layer.rpartition(".")[2]
    is_whole = f"blk.{number}.{how.whole}" in header.tensors
    entries = _entries(header, number, (how.whole,) if is_whole else how.parts)
    shapes = [entry.shape for entry in entries]
    if len({(len(shape), *shape[:-2], shape[-1]) for shape in shapes}) > 1 or len(shapes[0]) < 2:
        raise _misfit(header, entries)
    num_rows = sum(shape[-2] for shape in shapes)
    order = None if how.order is None else how.order(Metadata(header))
    if order is not None and len(order) != num_rows:
        raise _misfit(header, entries)
    shape = (*shapes[0][:-2], num_rows, shapes[0][-1])
    return JoinedRows(f"{layer}.{how.target}", entries, order, shape)


def _entries(header: Header, layer: str, parts: Sequence[str]) -> tuple[TensorEntry, ...]:
    names = [f"blk.{layer}.{part}" for part in parts]
    missing = next((name for name in names if name not in header.tensors), None)
    if missing is not None:
        raise CheckpointError(f"{header.path} misses {missing}")
    return tuple(header.tensors[name] for name in names)


def _misfit(header: Header, entries: Sequence[TensorEntry]) -> CheckpointError:
    return CheckpointError(
        f"{header.path}: {' and '.join(entry.name for entry in entries)} have the shapes"
        f" {' and '.join(str(list(entry.shape)) for entry in entries)}, which do not fit together"
    )


def join_tensors(header: Header, layer: str, how: Join) -> JoinedTensor:
    """Return a weight of a layer as `join_rows` does."""
    entries = _entries(header, layer.rpartition(".")[2], how.parts)
    for entry in entries:
        if len(entry.shape) < 3 and entry.type not in PLAIN:
            raise CheckpointError(
                f"{header.path}: {entry.name} is stored as {type_name(entry.type)}, and only"
                " matrices of weights can be"
            )
    shapes = [entry.shape for entry in entries]
    try:
        count = _equal([shape[0] for shape in shapes])
        of_one = how.join(*(torch.empty(shape[1:], device="meta") for shape in shapes)).shape
    except (RuntimeError, ValueError, IndexError) as error:
        raise _misfit(header, entries) from error
    shape = (count * of_one[0], *of_one[1:]) if how.flat else (count, *of_one)
    return JoinedTensor(f"{layer}.{how.target}", entries, how, shape)


def _equal(counts: Sequence[int]) -> int:
    if len(set(counts)) != 1:
        raise ValueError(counts)
    return counts[0]


def _alternate(gates: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return gates and factors of an expert in turn, as columns of its matrix, or as its bias."""
    rows = torch.stack((gates, factors), 1).flatten(0, 1)
    return rows if gates.ndim == 1 else rows.mT


def _as_columns(gates: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return gates and factors of an expert one after the other, as columns of its matrix."""
    return torch.cat((gates, factors)).mT


def _unchanged(matrix: torch.Tensor) -> torch.Tensor:
    return matrix


def _transpose(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.mT


def _keys_and_values(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a head's matrix for keys and values; files store the keys' part transposed."""
    return torch.cat((keys.mT, values))


GATES_AND_FACTORS = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
GPT_OSS = (
    Join("mlp.experts.gate_up_proj", GATES_AND_FACTORS, _alternate),
    Join("mlp.experts.gate_up_proj_bias", ("ffn_gate_exps.bias", "ffn_up_exps.bias"), _alternate),
    Join("mlp.experts.down_proj", ("ffn_down_exps.weight",), _transpose),
)
LLAMA4 = (
    Join("feed_forward.experts.gate_up_proj", GATES_AND_FACTORS, _as_columns),
    Join("feed_forward.experts.down_proj", ("ffn_down_exps.weight",), _transpose),
)
DBRX = (
    Join("ffn.experts.mlp.w1", ("ffn_gate_exps.weight",), _unchanged, flat=True),
    Join("ffn.experts.mlp.v1", ("ffn_up_exps.weight",), _unchanged, flat=True),
    Join("ffn.experts.mlp.w2", ("ffn_down_exps.weight",), _transpose, flat=True),
)
LATENT = (
    Join(
        "self_attn.kv_b_proj.weight",
        ("attn_k_b.weight", "attn_v_b.weight"),
        _keys_and_values,
        flat=True,
        of_experts=False,
        whole="attn_kv_b.weight",
    ),
)
"""Joins of models with multi-head latent attention."""
GRANITE = (
    Rows(
        "block_sparse_moe.input_linear.weight", GATES_AND_FACTORS, whole="ffn_gate_up_exps.weight"
    ),
    Rows("block_sparse_moe.output_linear.weight", ("ffn_down_exps.weight",)),
    Rows("shared_mlp.input_linear.weight", ("ffn_gate_shexp.weight", "ffn_up_shexp.weight")),
)
"""Joins of Granite's mixtures."""
GRANITE_DENSE = (Rows("shared_mlp.input_linear.weight", ("ffn_gate.weight", "ffn_up.weight")),)
"""Joins of Granite-4 without experts."""
