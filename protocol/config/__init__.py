"""The engine's settings: their types, bounds and defaults, and their sources."""

from protocol.config.engine_config import (
    ApiConfig,
    CacheConfig,
    ConfigError,
    Device,
    Dtype,
    EngineConfig,
    LogLevel,
    ModelConfig,
    ParallelConfig,
    RecoveryConfig,
    RunConfig,
    SchedulerConfig,
    WorkerConfig,
    validate,
)

__all__ = [
    "ApiConfig",
    "CacheConfig",
    "ConfigError",
    "Device",
    "Dtype",
    "EngineConfig",
    "LogLevel",
    "ModelConfig",
    "ParallelConfig",
    "RecoveryConfig",
    "RunConfig",
    "SchedulerConfig",
    "WorkerConfig",
    "validate",
]
