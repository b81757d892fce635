"""The engine's settings: their types, bounds and defaults, and their sources."""

from protocol.config.choices import AccessLog as AccessLog
from protocol.config.choices import AttentionName as AttentionName
from protocol.config.choices import CpuPinning as CpuPinning
from protocol.config.choices import Device as Device
from protocol.config.choices import Dtype as Dtype
from protocol.config.choices import KVCacheDtype as KVCacheDtype
from protocol.config.choices import LogFormat as LogFormat
from protocol.config.choices import LogLevel as LogLevel
from protocol.config.choices import NativeDecoder as NativeDecoder
from protocol.config.choices import Quantization as Quantization
from protocol.config.choices import RoutingPolicy as RoutingPolicy
from protocol.config.engine_config import DEFAULT_MAMBA_BLOCK_SIZE as DEFAULT_MAMBA_BLOCK_SIZE
from protocol.config.engine_config import ApiConfig as ApiConfig
from protocol.config.engine_config import CacheConfig as CacheConfig
from protocol.config.engine_config import EngineConfig as EngineConfig
from protocol.config.engine_config import LoraConfig as LoraConfig
from protocol.config.engine_config import ModelConfig as ModelConfig
from protocol.config.engine_config import ParallelConfig as ParallelConfig
from protocol.config.engine_config import PlacementConfig as PlacementConfig
from protocol.config.engine_config import RecoveryConfig as RecoveryConfig
from protocol.config.engine_config import RunConfig as RunConfig
from protocol.config.engine_config import SchedulerConfig as SchedulerConfig
from protocol.config.engine_config import WorkerConfig as WorkerConfig
from protocol.config.errors import ConfigError as ConfigError
from protocol.config.rules import validate as validate
from protocol.config.rules import validate_api_port as validate_api_port
