"""Checkpoints of NVIDIA's Model Optimizer.

A layer has `weight`. In NVFP4 it is uint8 `[outputs, inputs / 2]`, with `weight_scale`, e4m3
`[outputs, inputs / 16]`, and the number `weight_scale_2`, which multiplies all scales (fp4.py).
In FP8 it is in e4m3, and `weight_scale` has one value, or one for each output; in MXFP8 it has
powers of two, uint8 `[outputs, inputs / 32]`. Scales of activations and of the KV cache are not
used.

Older checkpoints state this in hf_quant_config.json instead of config.json.
"""

from pathlib import Path

from worker_proc.quantization.fp4 import Fp4Scheme, WholeScale
from worker_proc.quantization.fp8 import Fp8Scheme
from worker_proc.quantization.headers import read_object
from worker_proc.quantization.methods import MODELOPT, OWN_FILE
from worker_proc.quantization.mxfp4 import E2M1_GROUP
from worker_proc.quantization.scheme import UNUSED_PARTS, CheckpointFormat, Settings

_ALGORITHM = "quant_algo"
_MIXED, _MXFP8 = "MIXED_PRECISION", "MXFP8"
_PLAIN = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8")
_CACHE_KEYS = ("kv_cache_quant_algo", "kv_cache_scheme")
_SECTION = "quantization"
"""The key of the settings in hf_quant_config.json, and in a `quantization_config` of this form."""


def read_modelopt(settings: Settings) -> CheckpointFormat | None:
    """Return the format that the settings describe; None: only the KV cache is to be rounded."""
    if settings.get(_SECTION) is not None:
        settings = settings.section(_SECTION)
    if settings.get(_ALGORITHM) is None and any(settings.get(key) for key in _CACHE_KEYS):
        return None
    algorithm = settings.one_of(_ALGORITHM, (*_PLAIN, _MXFP8, _MIXED))
    if algorithm == _MIXED:
        for layer in settings.sections("quantized_layers"):
            layer.one_of(_ALGORITHM, _PLAIN)
    block = (1, E2M1_GROUP) if algorithm == _MXFP8 else None
    scheme = Fp8Scheme(block, "weight_scale")
    nvfp4 = Fp4Scheme("weight", "weight_scale", whole=WholeScale("weight_scale_2", divides=False))
    return CheckpointFormat(
        MODELOPT,
        ("weight",),
        UNUSED_PARTS | {"weight_scale", "weight_scale_2"},
        lambda _: scheme,
        schemes_of_dtypes={"U8": nvfp4},
    )


def settings_beside(path: Path) -> Settings | None:
    """Return the settings of the hf_quant_config.json next to a config.json; None: it is missing.

    `path` is that of config.json.
    """
    own = path.with_name(OWN_FILE)
    if not own.is_file():
        return None
    return Settings(own, _SECTION, read_object(own).get(_SECTION))
