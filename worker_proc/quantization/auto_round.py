"""Checkpoints of AutoRound, which are in the layout of GPTQ or of AWQ.

Layers with settings of their own are refused, but for those that `extra_config` leaves plain, which
their tensors show.
"""

from worker_proc.quantization.awq import read_awq
from worker_proc.quantization.gptq import read_gptq
from worker_proc.quantization.scheme import CheckpointFormat, Settings

_PACKING = "packing_format"
_GPTQ = ("auto_round:auto_gptq", "auto_gptq")
_AWQ = ("auto_round:auto_awq", "auto_awq")
_PLAIN_BITS = 16
_DEFAULTS = {"bits": 4, "group_size": 128}
"""Of AutoRound, where settings are missing."""


def read_auto_round(settings: Settings) -> CheckpointFormat:
    """Return the format that the settings describe."""
    settings.one_of("data_type", ("int",), "int")
    settings = settings.with_defaults(_DEFAULTS)
    own = [(key, settings.get(key)) for key in _DEFAULTS]
    for layer in settings.sections("extra_config") if settings.get("extra_config") else ():
        bits = layer.get("bits")
        if type(bits) is int and bits >= _PLAIN_BITS:
            continue
        for key, value in own:
            layer.one_of(key, (value,), value)
    if settings.one_of(_PACKING, (*_GPTQ, *_AWQ)) in _GPTQ:
        return read_gptq(settings)._replace(method="auto-round")
    return read_awq(settings)._replace(method="auto-round")
