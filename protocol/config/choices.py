"""The names that settings choose from."""

import enum


class Dtype(enum.StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @classmethod
    def _missing_(cls, value: object) -> "Dtype | None":
        return {"half": cls.FLOAT16, "float": cls.FLOAT32}.get(str(value))  # vLLM's names


class Quantization(enum.StrEnum):
    W8A16 = "w8a16"
    W4A16 = "w4a16"
    W8A8 = "w8a8"


class KVCacheDtype(enum.StrEnum):
    AUTO = "auto"
    INT8 = "int8"
    FP8 = "fp8"
    FP8_E4M3 = "fp8_e4m3"
    """Another name for FP8."""


class Device(enum.StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class CpuPinning(enum.StrEnum):
    AUTO = "auto"
    OFF = "off"


class NativeDecoder(enum.StrEnum):
    AUTO = "auto"
    OFF = "off"


class AttentionName(enum.StrEnum):
    AUTO = "auto"
    TRITON = "triton"
    TRITON_ATTN = "triton_attn"
    """Another name for TRITON."""
    FLASHINFER = "flashinfer"

    @classmethod
    def _missing_(cls, value: object) -> "AttentionName | None":
        return cls.__members__.get(str(value).upper())  # vLLM writes these names in capitals


class RoutingPolicy(enum.StrEnum):
    PREFIX_AWARE = "prefix_aware"
    LEAST_TOKENS = "least_tokens"
    ROUND_ROBIN = "round_robin"


class AccessLog(enum.StrEnum):
    OFF = "off"
    SAMPLED = "sampled"
    ALL = "all"


class LogFormat(enum.StrEnum):
    TEXT = "text"
    JSON = "json"


class LogLevel(enum.StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def shows_facts(self) -> bool:
        """Whether messages without a problem are printed."""
        return self in (LogLevel.DEBUG, LogLevel.INFO)
