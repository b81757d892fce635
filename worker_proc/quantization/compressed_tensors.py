"""Checkpoints of compressed-tensors, as llm-compressor writes them.

A layer of `pack-quantized` has `weight_packed`, int32 `[outputs, inputs * bits / 32]`, whose words
hold consecutive inputs from the lowest bits on, `weight_shape`, `weight_scale`,
`[outputs, groups]`, and, if it is not symmetric, `weight_zero_point`, int32
`[outputs * bits / 32, groups]`, packed along the outputs. Half of a code's range is added before
packing. A layer of `int-quantized` has `weight`, int8 `[outputs, inputs]`, and one of
`float-quantized` or `mxfp8-quantized` has it in e4m3; `weight_scale` and `weight_zero_point` are
not packed. Numbers of 4 bits are `weight_packed` (fp4.py).

Groups of layers may have different settings, which name their layers by `targets`; with
`mixed-precision` each group names its format.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch

from worker_proc.errors import CheckpointError
from worker_proc.quantization.fp4 import NVFP4_GROUP, Fp4Scheme, WholeScale
from worker_proc.quantization.fp8 import Fp8Scheme, read_block
from worker_proc.quantization.headers import StoredTensor
from worker_proc.quantization.layer_rules import LayerRule
from worker_proc.quantization.mxfp4 import E2M1_GROUP
from worker_proc.quantization.scheme import (
    UNUSED_PARTS,
    CheckpointFormat,
    ReadTensor,
    Scheme,
    Settings,
    checked,
    num_groups,
    require,
    require_matrix,
    require_type,
)
from worker_proc.quantization.weight import CodeKind, QuantizedWeight, unpack_int32

_MIXED, _PACKED, _MXFP8 = "mixed-precision", "pack-quantized", "mxfp8-quantized"
_MXFP4, _NVFP4 = "mxfp4-pack-quantized", "nvfp4-pack-quantized"
_FORMATS = (
    *(_PACKED, "int-quantized", "float-quantized", "naive-quantized"),
    *(_MXFP4, _MXFP8, _NVFP4),
)
_WHOLE_SCALE = WholeScale("weight_global_scale", divides=True)
GROUP_SIZES = (32, 64, 128)
_ALL_LAYERS, _REGEX = "Linear", "re:"
_IN_WEIGHTS = ("weight_input", "weight_output")
"""Locations of rotations that the stored weights contain; at other locations rows are rotated."""


class IntScheme:
    """Whole numbers of 4 or 8 bits, packed or not."""

    def __init__(
        self,
        num_bits: int,
        group_size: int,
        *,
        is_packed: bool,
        is_symmetric: bool,
        codes_rows: bool,
    ) -> None:
        self.kind = CodeKind.INT4 if num_bits == 4 else CodeKind.INT8
        self.codes_rows = codes_rows
        self._num_bits = num_bits
        self._group_size = group_size
        self._is_packed = is_packed
        self._is_symmetric = is_symmetric

    def shape(self, stored: Mapping[str, StoredTensor], read: ReadTensor) -> tuple[int, int]:
        if self._is_packed:
            per_word = 32 // self._num_bits
            num_outputs, num_words = require_matrix(stored, "weight_packed", "I32")
            num_inputs = num_words * per_word
            require(stored, "weight_shape", (2,))
        else:
            num_outputs, num_inputs = require_matrix(stored, "weight", "I8")
        groups = num_groups(num_inputs, self._group_size)
        scales: list[tuple[int, ...]] = [(num_outputs, groups)]
        if groups == 1:
            scales += [(), (1,), (1, 1), (num_outputs,)]
        require(stored, "weight_scale", *scales)
        if not self._is_symmetric and self._is_packed:
            zeros = require(stored, "weight_zero_point", (-(-num_outputs // per_word), groups))
            require_type(zeros, "weight_zero_point", "I32")
        elif not self._is_symmetric:
            zeros = require(stored, "weight_zero_point", *scales)
            require_type(zeros, "weight_zero_point", "I8", "I32")
        return num_outputs, num_inputs

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        half = 2 ** (self._num_bits - 1)
        if self._is_packed:
            codes = unpack_int32(tensors["weight_packed"], self._num_bits)
            shape = tensors["weight_shape"].tolist()
            if list(codes.shape) != shape:
                raise ValueError(f"has a weight_shape of {shape} instead of {list(codes.shape)}")
        else:
            codes = tensors["weight"].contiguous().view(torch.uint8) ^ half
        num_outputs, num_inputs = codes.shape
        group_size = num_inputs if self._group_size == -1 else self._group_size
        by_group = partial(_by_group, num_outputs=num_outputs)
        scales = by_group(tensors["weight_scale"])
        if self._is_symmetric:
            zeros = torch.full_like(scales, half)
        elif self._is_packed:
            packed = unpack_int32(tensors["weight_zero_point"].t(), self._num_bits)
            zeros = packed.t()[:num_outputs].float().contiguous()
        else:
            zeros = by_group(tensors["weight_zero_point"]) + half
            if not bool(((zeros >= 0) & (zeros < 2 * half)).all()):
                raise ValueError(f"has zero points that are not from {-half} to {half - 1}")
        return checked(QuantizedWeight(self.kind, codes, scales, zeros, group_size))


def _by_group(values: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """Return `[num_outputs, num_groups]` in float32, from as many values, or from fewer."""
    values = values.float().reshape(len(values) if values.dim() == 2 else values.numel(), -1)
    return values.expand(num_outputs, -1).contiguous()


def _is_target(value: object) -> bool:
    """Return whether a value is a name, or a regular expression behind `re:`."""
    if not isinstance(value, str):
        return False
    try:
        re.compile(value.removeprefix(_REGEX) if value.startswith(_REGEX) else "")
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _schemes_by_layer(groups: Iterable[Mapping[str, Scheme]]) -> Callable[[str], Scheme]:
    """Return a function from a layer's name to its scheme, given each group's scheme by target.

    As in the library, a target that several groups have belongs to the last of them.
    """
    schemes = {target: scheme for group in groups for target, scheme in group.items()}
    rules = [
        LayerRule(re.compile(target.removeprefix(_REGEX)).match, schemes[target])
        for target in sorted(schemes)
        if target.startswith(_REGEX)
    ]
    return partial(_scheme_of, schemes, rules)


def _scheme_of(schemes: Mapping[str, Scheme], rules: Sequence[LayerRule], layer: str) -> Scheme:
    """Return the scheme of a layer's name, of the first rule for it, or of the type of all layers.

    The library has the same order when it rounds weights, with regular expressions sorted.
    """
    if layer in schemes:
        return schemes[layer]
    for rule in rules:
        if rule.finds(layer):
            return rule.scheme
    if _ALL_LAYERS in schemes:
        return schemes[_ALL_LAYERS]
    raise CheckpointError(f"{layer} is stored as codes, and no target of config_groups names it")


def read_compressed_tensors(settings: Settings) -> CheckpointFormat | None:
    """Return the format that the settings describe; None: only the KV cache is to be rounded."""
    has_cache = settings.get("kv_cache_scheme") is not None
    if has_cache and not (settings.get("config_groups") or settings.get("sparsity_config")):
        _check_transforms(settings)
        return None
    name = settings.one_of("format", (*_FORMATS, _MIXED))
    _check_transforms(settings)
    if settings.get("sparsity_config"):
        settings.section("sparsity_config").one_of("format", ("dense",), "dense")
    groups = [_read_group(group, name) for group in settings.sections("config_groups")]
    if not groups:
        raise settings.unsupported("config_groups", "at least one group")
    parts = {"weight_scale", "weight_zero_point", "weight_shape", _WHOLE_SCALE.name}
    return CheckpointFormat(
        "compressed-tensors",
        ("weight_packed", "weight"),
        UNUSED_PARTS | parts,
        _schemes_by_layer(groups),
    )


def _check_transforms(settings: Settings) -> None:
    """Raise UnsupportedModel if rows are rotated before or behind layers (QuIP, SpinQuant)."""
    if not settings.get("transform_config"):
        return
    for scheme in settings.section("transform_config").sections("config_groups"):
        applied = scheme.get("apply", [])
        is_list = isinstance(applied, list) and all(isinstance(one, dict) for one in applied)
        if not is_list or any(one.get("location") not in _IN_WEIGHTS for one in applied):
            supported = " and ".join(f'"{location}"' for location in _IN_WEIGHTS)
            raise scheme.unsupported("apply", f"the locations {supported}")


def _read_group(group: Settings, name: str) -> dict[str, Scheme]:
    """Return the scheme of a group of layers by each of its targets."""
    name = group.one_of("format", _FORMATS if name == _MIXED else (name,), name)
    group.one_of("output_activations", (None,))
    targets = group.get("targets", [])
    if not isinstance(targets, list) or not all(map(_is_target, targets)):
        raise group.unsupported(
            "targets", 'a list of names, and of regular expressions behind "re:"'
        )
    weights = group.section("weights")
    weights.one_of("dynamic", (False,), False)
    if weights.one_of("type", ("int", "float"), "int") == "float":
        return dict.fromkeys(targets, _float_scheme(weights, name))
    if name in (_MXFP4, _MXFP8, _NVFP4):
        raise weights.unsupported("type", f'"float" with format "{name}"')
    rows = group.section("input_activations") if group.get("input_activations") else None
    return dict.fromkeys(targets, _int_scheme(weights, rows, is_packed=name == _PACKED))


def _float_scheme(weights: Settings, name: str) -> Scheme:
    if name == _PACKED:
        raise weights.unsupported("type", f'"int" with format "{name}"')
    weights.one_of("symmetric", (True,), True)
    weights.one_of("num_bits", (4,) if name in (_MXFP4, _NVFP4) else (8,))
    if name == _NVFP4:
        weights.one_of("group_size", (NVFP4_GROUP,))
        return Fp4Scheme("weight_packed", "weight_scale", whole=_WHOLE_SCALE)
    if name in (_MXFP4, _MXFP8):
        weights.one_of("group_size", (E2M1_GROUP,))
        if name == _MXFP4:
            return Fp4Scheme("weight_packed", "weight_scale")
        return Fp8Scheme((1, E2M1_GROUP), "weight_scale")
    if weights.one_of("strategy", ("tensor", "channel", "block")) != "block":
        return Fp8Scheme(None, "weight_scale")
    return Fp8Scheme(read_block(weights, "block_structure"), "weight_scale")


def _int_scheme(weights: Settings, rows: Settings | None, *, is_packed: bool) -> IntScheme:
    num_bits = weights.one_of("num_bits", (4, 8) if is_packed else (8,))
    is_symmetric = weights.one_of("symmetric", (True, False), True)
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise weights.unsupported("actorder", '"weight", "static" or null')
    group_size = -1
    if weights.one_of("strategy", ("tensor", "channel", "group")) == "group":
        group_size = weights.one_of("group_size", GROUP_SIZES)
    return IntScheme(
        num_bits,
        group_size,
        is_packed=is_packed,
        is_symmetric=is_symmetric,
        codes_rows=(
            rows is not None
            and (not is_packed and group_size == -1 and is_symmetric)
            and (rows.get("type", "int"), rows.get("num_bits")) == ("int", 8)
            and (rows.get("dynamic"), rows.get("strategy")) == (True, "token")
            and rows.get("symmetric", True) is True
        ),
    )
