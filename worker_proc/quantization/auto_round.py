"""Checkpoints of AutoRound, in the layouts of other libraries.

`packing_format` names the layout: that of GPTQ, of AWQ, or of compressed-tensors for numbers in
floating point. The plain "auto_round" is the layout of GPTQ, but stores zero points unchanged.
`extra_config` has the settings of layers that differ, by their names or by regular expressions.
"""

import re
from collections.abc import Callable
from functools import partial
from operator import eq
from typing import NamedTuple

from worker_proc.quantization import awq, gptq
from worker_proc.quantization.fp4 import NVFP4_GROUP, Fp4Scheme, WholeScale
from worker_proc.quantization.fp8 import Fp8Scheme
from worker_proc.quantization.layer_rules import (
    LayerRule,
    compiled,
    read_dynamic,
    scheme_by_rules,
)
from worker_proc.quantization.mxfp4 import E2M1_GROUP
from worker_proc.quantization.scheme import UNUSED_PARTS, CheckpointFormat, Scheme, Settings

_METHOD = "auto-round"
_PACKING = "packing_format"
_ROTATION = "rotation_config"
_NAME = re.compile(r"[\w.]+")
"""Keys of `extra_config` that are names; others are regular expressions."""
_PLAIN_BITS = 16
_DEFAULTS = {"bits": 4, "group_size": 128}
"""AutoRound's values for missing settings."""
_MX, _NV = ("mx_fp", "mx_fp_rceil"), ("nv_fp", "nv_fp4", "nv_fp4_with_static_gs")
"""Values of `data_type` for numbers with powers of two as scales, and for NVFP4."""
_SCALE, _WHOLE_SCALE = "weight_scale", WholeScale("weight_global_scale", divides=True)


class _Packing(NamedTuple):
    """A layout of weights."""

    read: Callable[[Settings], Scheme]
    codes: tuple[str, ...]
    """The names that a layer's tensor of codes may have."""
    parts: frozenset[str]
    """The names of a layer's other tensors."""


def read_auto_round(settings: Settings) -> CheckpointFormat:
    """Return the format that the settings describe."""
    settings = settings.with_defaults(_DEFAULTS)
    packing = _PACKINGS[settings.one_of(_PACKING, tuple(_PACKINGS))]
    common = packing.read(settings)
    rules = [*_read_extra(settings, packing.read), *read_dynamic(settings, packing.read)]
    scheme_of = scheme_by_rules(rules, common)
    return CheckpointFormat(_METHOD, packing.codes, packing.parts, scheme_of)


def _read_extra(settings: Settings, read: Callable[[Settings], Scheme]) -> list[LayerRule]:
    """Return the rules of `extra_config`, those for a layer's whole name first."""
    if not settings.get("extra_config"):
        return []
    section = settings.section("extra_config")
    common = {key: value for key, value in settings.items() if key != "extra_config"}
    named, found = [], []
    for key, _ in section.items():
        layer = section.section(key)
        bits = layer.get("bits")
        if type(bits) is int and bits >= _PLAIN_BITS:
            continue
        if layer.get(_ROTATION):
            raise layer.unsupported(_ROTATION, "null")
        scheme = read(layer.with_defaults(common))
        if _NAME.fullmatch(key):
            named.append(LayerRule(partial(eq, key), scheme))
        else:
            found.append(LayerRule(compiled(section, key, key).search, scheme))
    return [*named, *found]


def _read_int(
    settings: Settings, read: Callable[[Settings], Scheme], zeros: str | None = None
) -> Scheme:
    """Return the scheme of whole numbers; `zeros` is the version of GPTQ, if it is not the first.

    Settings with rounded inputs are refused, since such layers have another layout.
    """
    settings.one_of("data_type", ("int",), "int")
    settings.one_of("act_bits", (16, 32), 16)
    return read(settings if zeros is None else settings.with_defaults({"checkpoint_format": zeros}))


def _read_float(settings: Settings) -> Scheme:
    """Return the scheme of numbers in the layouts of compressed-tensors."""
    bits = settings.one_of("bits", (4, 8))
    if settings.one_of("data_type", (*_MX, *_NV) if bits == 4 else _MX) in _NV:
        settings.one_of("group_size", (NVFP4_GROUP,))
        return Fp4Scheme("weight_packed", _SCALE, whole=_WHOLE_SCALE)
    settings.one_of("group_size", (E2M1_GROUP,))
    if bits == 4:
        return Fp4Scheme("weight_packed", _SCALE)
    return Fp8Scheme((1, E2M1_GROUP), _SCALE)


def _read_fp8(settings: Settings) -> Scheme:
    """Return the scheme of e4m3 with a scale of each output, or of the whole weight."""
    settings.one_of("bits", (8,))
    settings.one_of("data_type", ("fp", "fp8", "fp8_e4m3"))
    settings.one_of("group_size", (-1, 0))
    return Fp8Scheme(None, _SCALE)


_GPTQ = _Packing(partial(_read_int, read=gptq.read_gptq_scheme), ("qweight",), gptq.PARTS)
_GPTQ_V2 = _GPTQ._replace(read=partial(_read_int, read=gptq.read_gptq_scheme, zeros="gptq_v2"))
_AWQ = _Packing(partial(_read_int, read=awq.read_awq_scheme), ("qweight",), awq.PARTS)
_FLOAT_PARTS = UNUSED_PARTS | {_SCALE, _WHOLE_SCALE.name}
_PACKINGS = {
    **dict.fromkeys(("auto_round:auto_gptq", "auto_gptq", "auto_round:gptq"), _GPTQ),
    **dict.fromkeys(("auto_round", "auto_round:gptqmodel"), _GPTQ_V2),
    **dict.fromkeys(("auto_round:auto_awq", "auto_awq", "auto_round:awq"), _AWQ),
    "auto_round:llm_compressor": _Packing(_read_float, ("weight_packed", "weight"), _FLOAT_PARTS),
    "auto_round:fp8_static": _Packing(_read_fp8, ("weight",), _FLOAT_PARTS),
}
