"""Linear layers over packed weights: the fast path of the CPU.

A row's bits do not depend on the other rows. The C++ kernels (products.h) compute these layers if
they are compiled. Otherwise oneDNN does, with two workarounds: a single row is computed as two, and
very wide outputs in bfloat16 are computed in slices of rows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from worker_proc.loading.heap import return_freed_memory
from worker_proc.loading.output_layer import output_layer
from worker_proc.modules.coded_weights import pack_coded, pack_weight
from worker_proc.modules.packed_table import PackedTable, can_look_up
from worker_proc.modules.weight_formats import PLAIN, Formats
from worker_proc.native.instructions import projection
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.packed_weights import PANEL_OUTPUTS, Format, PackedWeight
from worker_proc.quantization.coded_tensor import CodedTensor

PACKED_DTYPES = (torch.float32, torch.bfloat16)
WIDE_OUT_FEATURES = 16_384
SLICE_ROWS = 32
PACKING_ROWS = 64  # oneDNN chooses the layout for this number; it serves all others
MERGED = ("q_proj", "k_proj", "v_proj")
"""Children of a module that take the same rows: their weights are packed as one."""


class PackedLinear(nn.Module):
    """Replaces `nn.Linear` (or GPT-2's transposed `Conv1D`) for inference on the CPU."""

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        # Models read the dtype of their weights, and do not compute with them.
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device="meta")
        self.bias: torch.Tensor | None = None


class NativeLinear(PackedLinear):
    """A linear layer that the C++ kernels compute."""

    def __init__(
        self, library: NativeLibrary, packed: PackedWeight, shape: torch.Size, dtype: torch.dtype
    ) -> None:
        super().__init__(shape[0], shape[1], dtype)
        self.packed = packed
        self._library = library
        self._instruction = projection(packed)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `hidden @ weight.T + bias` for `[..., in_features]`."""
        width, order = self.packed.num_outputs, self.packed.order
        out = self._library.project(self._instruction, hidden, width, order)
        return out[:, : self.out_features].view(*hidden.shape[:-1], self.out_features)


class OneDnnLinear(PackedLinear):
    """A linear layer that oneDNN computes."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight.shape[0], weight.shape[1], weight.dtype)
        self.bias = None if bias is None else bias.detach()
        weight = weight.detach().contiguous()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKING_ROWS)
        is_wide = self.out_features >= WIDE_OUT_FEATURES
        self._slice_rows = SLICE_ROWS if is_wide and weight.dtype == torch.bfloat16 else 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `hidden @ weight.T + bias` for `[..., in_features]`."""
        rows = hidden.reshape(-1, self.in_features)
        if len(rows) == 1:
            out = self._linear(rows.expand(2, -1).contiguous())[:1]
        elif self._slice_rows and len(rows) > self._slice_rows:
            out = self._sliced(rows)
        else:
            out = self._linear(rows)
        return out.view(*hidden.shape[:-1], self.out_features)

    def _linear(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self.bias, "none", [], ""
        )
        return out

    def _sliced(self, rows: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty(len(rows), self.out_features)
        first = 0
        while first < len(rows):
            # A final slice of one row would be computed differently.
            first = min(first, len(rows) - 2)
            part = slice(first, first + self._slice_rows)
            out[part] = self._linear(rows[part])
            first += self._slice_rows
        return out


def make_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    library: NativeLibrary | None,
    format: Format = Format.UNITS,
) -> PackedLinear:
    """Pack `weight`, `[out_features, in_features]`; codes need a `library`."""
    if library is None:
        return OneDnnLinear(weight, bias)
    packed = pack_weight(library, weight, bias, format)
    return NativeLinear(library, packed, weight.shape, weight.dtype)


def can_pack(dtype: torch.dtype, device: torch.device, library: NativeLibrary | None) -> bool:
    """Return whether weights of `dtype` on `device` can be packed.

    Without `library`, this depends on oneDNN's support for the processor.
    """
    if device.type != "cpu" or dtype not in PACKED_DTYPES:
        return False
    if library is not None:
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    has_bf16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype != torch.bfloat16 or has_bf16


def pack_linears(
    model: nn.Module,
    library: NativeLibrary | None,
    on_packed: Callable[[int, int], None],
    formats: Formats = PLAIN,
) -> int:
    """Replace linear layers, freeing their weights; call `on_packed(done, total)` for each.

    Coded embedding tables are replaced, too.
    """
    head = output_layer(model)
    found = [
        (parent, name, cast(nn.Linear, child))
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if type(child) in (nn.Linear, Conv1D)
        and not child.weight.is_meta  # unused
        and cast(torch.Tensor, child.weight).numel()  # torch computes empty products
    ]
    # Tied layers share parameters, and are packed once.
    keys: dict[nn.Module, tuple[int, int]] = {
        child: (id(child.weight), id(child.bias)) for _, _, child in found
    }
    packed: dict[tuple[int, int], PackedLinear] = {}
    for done, (parent, name, child) in enumerate(found, start=1):
        key = keys[child]
        if key not in packed and library is not None:
            merged = _merged(parent, library, formats.layers)
            packed |= {keys[layer]: part for layer, part in merged.items()}
        if key not in packed:
            weight = child.weight.t() if type(child) is Conv1D else child.weight
            format = formats.head if child is head else formats.layers
            packed[key] = make_linear(weight, child.bias, library, format)
        child._parameters.pop("weight", None)  # freed now, unless another module shares it
        setattr(parent, name, packed[key])
        return_freed_memory()  # of joined or dequantized weights; packed ones do not reuse it
        on_packed(done, len(found))
    if library is not None:
        _pack_tables(model, library, packed)
    return len(packed)


def _pack_tables(
    model: nn.Module, library: NativeLibrary, packed: Mapping[tuple[int, int], PackedLinear]
) -> None:
    """Replace coded embedding weights; a tied one is already packed."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        if not isinstance(module, nn.Embedding) or not isinstance(weight, CodedTensor):
            continue
        tied = packed.get((id(weight), id(None)))
        codes = tied.packed if isinstance(tied, NativeLinear) else pack_coded(weight, None)
        if codes is not None and can_look_up(codes):
            table = PackedTable(library, codes, weight.shape, weight.dtype)
            module.weight = nn.Parameter(table, requires_grad=False)


def _merged(
    parent: nn.Module, library: NativeLibrary, format: Format
) -> dict[nn.Module, PackedLinear]:
    """Pack children that take the same rows as one weight; empty: they cannot be merged."""
    children = [getattr(parent, name, None) for name in MERGED]
    if not all(type(child) is nn.Linear for child in children):
        return {}
    linears = cast(Sequence[nn.Linear], children)
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    if (
        len({linear.in_features for linear in linears}) > 1
        or any(linear.out_features % PANEL_OUTPUTS for linear in linears)
        or len(biases) not in (0, len(linears))
    ):
        return {}
    weight = torch.cat([linear.weight.detach() for linear in linears])
    bias = torch.cat(biases) if biases else None
    if isinstance(weight, CodedTensor):
        whole = pack_coded(weight, bias)
        if whole is None:
            return {}
    else:
        whole = pack_weight(library, weight, bias, format)
    parts: dict[nn.Module, PackedLinear] = {}
    first = 0
    for linear in linears:
        part = whole.outputs(first, linear.out_features)
        parts[linear] = NativeLinear(library, part, linear.weight.shape, linear.weight.dtype)
        first += linear.out_features
        del linear.weight
    return parts
