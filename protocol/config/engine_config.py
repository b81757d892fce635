"""The one configuration of the engine: every field with its bound, default and description.

Flags, environment variables, YAML keys and embedding keywords are generated from these structs
(protocol/config/settings.py). Values learned at run time (number of KV blocks, context length of
the checkpoint) are never written back here: they are sent as `ModelFacts`.
"""

import enum
from typing import Annotated

import msgspec
from msgspec import Meta, field

from protocol.config.scheduler_config import SchedulerConfig, Section


class Dtype(enum.StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Device(enum.StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class LogLevel(enum.StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class ModelConfig(Section):
    """Which model is served, and how."""

    model: Annotated[
        str,
        Meta(
            min_length=1,
            description="Checkpoint directory in Hugging Face format, 'demo' for the model that "
            "comes with the engine, or 'null' for a worker that computes nothing.",
        ),
    ] = "demo"
    served_model_name: Annotated[
        str | None,
        Meta(description="Name in the API. Default: the last part of the model's path."),
    ] = None
    tokenizer: Annotated[
        str | None,
        Meta(description="Directory of the tokenizer, if it is not the model's."),
    ] = None
    chat_template: Annotated[
        str | None, Meta(description="File with a Jinja chat template, instead of the model's.")
    ] = None
    dtype: Annotated[
        Dtype, Meta(description="Type of weights, activations and KV; auto: as in config.json.")
    ] = Dtype.AUTO
    device: Annotated[Device, Meta(description="Where to compute; auto: CUDA if there is any.")] = (
        Device.AUTO
    )
    max_model_len: Annotated[
        Annotated[int, Meta(ge=2, lt=2**31)] | None,
        Meta(
            description="Longest prompt and output together, in tokens. Default: as in "
            "config.json, less if the KV cache cannot hold that.",
        ),
    ] = None
    seed: Annotated[
        int,
        Meta(
            ge=0,
            le=2**63 - 1,
            description="Base of the seeds drawn for requests that bring none; 0: unpredictable.",
        ),
    ] = 0


class CacheConfig(Section):
    """The KV cache."""

    block_size: Annotated[int, Meta(ge=1, le=1024, description="Tokens per KV block.")] = 16
    num_gpu_blocks_override: Annotated[
        Annotated[int, Meta(ge=2, lt=2**31)] | None,
        Meta(description="Number of KV blocks, instead of measuring memory."),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0.0, le=1.0, description="Share of the GPU's memory for weights and KV cache."),
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        Annotated[int, Meta(ge=1, lt=2**50)] | None,
        Meta(
            description="Bytes for the KV cache. Default on the CPU: 4 GiB, at most half of the "
            "memory that is free, in the host and in the cgroup.",
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool, Meta(description="Share KV blocks between requests that begin alike.")
    ] = True
    swap_space_bytes: Annotated[
        int,
        Meta(
            ge=0,
            lt=2**46,
            description="Host memory for the KV of preempted requests, where copying is quicker "
            "than computing again; 0: always compute again.",
        ),
    ] = 0
    enable_hybrid_kv_cache: Annotated[
        bool,
        Meta(description="Give back KV blocks that a layer's sliding window has passed."),
    ] = True
    enable_kv_events: Annotated[
        bool,
        Meta(description="Let clients follow what the prefix cache holds, to route by it."),
    ] = False


class ParallelConfig(Section):
    """How many workers share one model."""

    tensor_parallel_size: Annotated[
        int, Meta(ge=1, le=64, description="Ranks that the model is split over.")
    ] = 1


class WorkerConfig(Section):
    """The computing process."""

    num_threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="CPU threads. Default: the cores that affinity and cgroup allow."),
    ] = None
    null_step_ms: Annotated[
        float, Meta(ge=0.0, le=60_000.0, description="Time a step of the null worker takes.")
    ] = 0.0


class ApiConfig(Section):
    """The HTTP server."""

    host: Annotated[str, Meta(min_length=1, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port; 0: any free one.")] = 8000
    api_key: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="Bearer token that every route but the health ones asks for."),
    ] = None
    enable_admin_routes: Annotated[
        bool,
        Meta(
            description="Serve the routes that pause the engine, let it sleep or reset its cache."
        ),
    ] = False
    max_body_bytes: Annotated[
        int, Meta(ge=1024, le=2**30, description="Largest request body accepted.")
    ] = 4 * 2**20
    max_open_requests: Annotated[
        int,
        Meta(
            ge=1,
            le=10**6,
            description="Most requests, and most sequences of them, that the server holds open; "
            "past it: refused with 429.",
        ),
    ] = 16384
    max_open_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            le=2**40,
            description="Most bytes of their bodies together; past it: refused with 429.",
        ),
    ] = 256 * 2**20
    slow_reader_timeout_s: Annotated[
        float,
        Meta(
            gt=0.0,
            le=3600.0,
            description="Seconds without reading after which a client's stream is dropped.",
        ),
    ] = 60.0
    journal_dir: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Directory for a journal of open requests, so that clients can resume them "
            "after a lost connection or a restart of the server. Default: no journal.",
        ),
    ] = None
    journal_sync: Annotated[
        bool,
        Meta(
            description="Sync the journal to the disk with every write: requests survive a loss of "
            "power too, and each waits for the disk before its answer begins.",
        ),
    ] = False
    resume_window_s: Annotated[
        float,
        Meta(
            gt=0.0,
            le=3600.0,
            description="With a journal: seconds for which a request continues, or its answer is "
            "kept, without a connected client.",
        ),
    ] = 30.0


class RecoveryConfig(Section):
    """Starting, stopping and replacing processes."""

    startup_timeout_s: Annotated[
        float, Meta(gt=0.0, le=86_400.0, description="Longest wait for a process without progress.")
    ] = 600.0
    shutdown_timeout_s: Annotated[
        float,
        Meta(ge=0.0, le=86_400.0, description="Longest wait for running requests at shutdown."),
    ] = 30.0
    restart_backoff_max_s: Annotated[
        float, Meta(ge=0.0, le=3600.0, description="Longest pause between two restarts.")
    ] = 30.0
    hang_timeout_s: Annotated[
        float,
        Meta(
            ge=0.02,
            le=3600.0,
            description="Seconds without progress after which a worker or core is suspected to "
            "hang; after twice that it is killed. Steps that usually take longer get more time.",
        ),
    ] = 2.0
    hang_step_factor: Annotated[
        float,
        Meta(
            ge=1.0,
            le=1000.0,
            description="A step is suspected to hang after this multiple of the time that steps of "
            "its size took lately, if that is more than hang_timeout_s.",
        ),
    ] = 20.0
    api_hang_timeout_s: Annotated[
        float,
        Meta(
            ge=0.1,
            le=3600.0,
            description="Seconds for which the API's event loop may be blocked before it is "
            "suspected to hang; after twice that it is killed.",
        ),
    ] = 5.0
    first_step_timeout_s: Annotated[
        float,
        Meta(
            ge=0.02,
            le=3600.0,
            description="Limit in seconds for steps of sizes that a worker has not computed yet.",
        ),
    ] = 60.0
    stall_timeout_s: Annotated[
        float,
        Meta(
            gt=0.0,
            le=86_400.0,
            description="Seconds without a serving engine after which open requests fail.",
        ),
    ] = 120.0
    give_up_after_s: Annotated[
        Annotated[float, Meta(gt=0.0, le=86_400.0)] | None,
        Meta(
            description="Seconds of repeated deaths of a process after which the engine ends with "
            "a status other than 0. Default: it is restarted without limit.",
        ),
    ] = None
    standby_workers: Annotated[
        Annotated[int, Meta(ge=0, le=1)] | None,
        Meta(
            description="Workers kept loaded to take the place of one that dies: 0 or 1. "
            "Default: 1 for a model on the CPU, where they share its weights; else 0.",
        ),
    ] = None
    standby_cores: Annotated[
        int,
        Meta(
            ge=0,
            le=1,
            description="Cores kept started to take the place of one that dies: 0 or 1.",
        ),
    ] = 1


class RunConfig(Section):
    """What surrounds the processes."""

    run_dir: Annotated[
        str | None,
        Meta(description="Directory for the sockets (mode 0700). Default: a new temporary one."),
    ] = None
    log_level: Annotated[LogLevel, Meta(description="Least severe messages to print.")] = (
        LogLevel.INFO
    )
    check_invariants: Annotated[
        bool,
        Meta(description="Check the scheduler's books after every step: for debugging."),
    ] = False
    log_stats_interval_s: Annotated[
        float, Meta(gt=0.0, le=3600.0, description="Seconds between statistics lines while busy.")
    ] = 10.0


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of one engine; the same value reaches every process."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    api: ApiConfig = field(default_factory=ApiConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    run: RunConfig = field(default_factory=RunConfig)


class ConfigError(Exception):
    """A setting that cannot be used; the text names it and its bound."""


def validate(config: EngineConfig) -> EngineConfig:
    """Check bounds that a single field's type cannot express.

    Raises:
        ConfigError: naming the settings that contradict each other.
    """
    scheduler = config.scheduler
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens {scheduler.max_num_batched_tokens} must be at least "
            f"max_num_seqs {scheduler.max_num_seqs}"
        )
    if config.cache.enable_kv_events and not config.cache.enable_prefix_caching:
        raise ConfigError(
            "enable_kv_events needs enable_prefix_caching: events report what is cached"
        )
    _validate_scheduler(scheduler)
    if config.parallel.tensor_parallel_size > 1 and config.model.model != "null":
        raise ConfigError("tensor_parallel_size above 1 works with the null model only")
    _validate_recovery(config)
    max_model_len = config.model.max_model_len
    if max_model_len is None:
        return config
    if not scheduler.enable_chunked_prefill and scheduler.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens {scheduler.max_num_batched_tokens} must be at least "
            f"max_model_len {max_model_len} without enable_chunked_prefill"
        )
    if scheduler.long_prefill_token_threshold > max_model_len:
        raise ConfigError(
            f"long_prefill_token_threshold {scheduler.long_prefill_token_threshold} must be at "
            f"most max_model_len {max_model_len}"
        )
    return config


def _validate_recovery(config: EngineConfig) -> None:
    if not config.recovery.standby_workers:
        return
    if config.parallel.tensor_parallel_size > 1:
        raise ConfigError("standby_workers above 0 needs tensor_parallel_size 1")
    if config.model.device is Device.CUDA:
        raise ConfigError(
            "standby_workers above 0 needs device cpu: a second worker finds no memory on the GPU"
        )


def _validate_scheduler(scheduler: SchedulerConfig) -> None:
    """Refuse switches that would have no effect."""
    scheduled = scheduler.max_num_scheduled_tokens
    if scheduled is not None and scheduled > scheduler.max_num_batched_tokens:
        raise ConfigError(
            f"max_num_scheduled_tokens {scheduled} must be at most max_num_batched_tokens "
            f"{scheduler.max_num_batched_tokens}"
        )
    long_prefills, prefills = (
        scheduler.max_long_partial_prefills,
        scheduler.max_num_partial_prefills,
    )
    if long_prefills and not scheduler.long_prefill_token_threshold:
        raise ConfigError(
            "max_long_partial_prefills needs a long_prefill_token_threshold of at least 1"
        )
    if prefills and long_prefills > prefills:
        raise ConfigError(
            f"max_long_partial_prefills {long_prefills} must be at most "
            f"max_num_partial_prefills {prefills}"
        )
    if scheduler.preempt_for_priority and scheduler.scheduling_policy != "priority":
        raise ConfigError("preempt_for_priority needs scheduling_policy priority")
    if scheduler.tenant_weights and scheduler.scheduling_policy != "fair":
        raise ConfigError("tenant_weights needs scheduling_policy fair")
