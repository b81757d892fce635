"""The rules between several settings: those that contradict each other, or have no effect.

Names of settings are in backticks: `ConfigError.spelled` writes them as the user has.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from protocol.config.choices import (
    AttentionName,
    CpuPinning,
    Device,
    Dtype,
    KVCacheDtype,
)
from protocol.config.cpu_lists import parse_cpu_lists
from protocol.config.engine_config import EngineConfig
from protocol.config.errors import ConfigError
from protocol.config.lora_modules import parse_lora_module

RESERVED_TEMPLATE_NAMES = frozenset(
    {"messages", "tools", "documents", "tokenize", "chat_template", "add_generation_prompt"}
)
"""Variables of chat templates that the server sets."""
_NULL = "null"
_ANY_HOST = ("*", "0.0.0.0")
Rule = tuple[bool, str]
"""Whether a rule is broken, and its text."""


def validate(config: EngineConfig) -> EngineConfig:
    """Raise ConfigError for settings that contradict each other, or that have no effect."""
    for rules in _CONCEPTS:
        for is_broken, message in rules(config):
            if is_broken:
                raise ConfigError(message)
    return config


def validate_api_port(config: EngineConfig) -> None:
    """Raise ConfigError if the API would listen where another process of its engine does."""
    if config.api.uds:
        return
    api = _Ports("port", config.api.host, config.api.port)
    for is_broken, message in _overlaps(config, [api]):
        if is_broken:
            raise ConfigError(message)


def _step_rules(config: EngineConfig) -> Iterator[Rule]:
    """Yield the rules of the size of a step."""
    scheduler = config.scheduler
    batched, scheduled = scheduler.max_num_batched_tokens, scheduler.max_num_scheduled_tokens
    yield (
        batched < scheduler.max_num_seqs,
        f"`max_num_batched_tokens` {batched} must be at least `max_num_seqs` "
        f"{scheduler.max_num_seqs}",
    )
    yield (
        scheduled is not None and scheduled > batched,
        f"`max_num_scheduled_tokens` {scheduled} must be at most `max_num_batched_tokens` "
        f"{batched}",
    )
    yield (
        scheduler.target_itl_ms > 0 and not scheduler.enable_chunked_prefill,
        "`target_itl_ms` needs `enable_chunked_prefill`: it cuts prompts",
    )
    yield (
        scheduler.target_itl_ms > 0 and scheduler.elastic_token_budget,
        "`target_itl_ms` works without `elastic_token_budget` only: it would lift the limit",
    )


def _prefill_rules(config: EngineConfig) -> Iterator[Rule]:
    """Yield the rules of cutting prompts into chunks."""
    scheduler, max_model_len = config.scheduler, config.model.max_model_len
    batched, threshold = scheduler.max_num_batched_tokens, scheduler.long_prefill_token_threshold
    prefills = scheduler.max_num_partial_prefills
    long_prefills = scheduler.max_long_partial_prefills
    yield (
        long_prefills > 0 and threshold == 0,
        "`max_long_partial_prefills` needs a `long_prefill_token_threshold` of at least 1",
    )
    yield (
        0 < prefills < long_prefills,
        f"`max_long_partial_prefills` {long_prefills} must be at most `max_num_partial_prefills` "
        f"{prefills}",
    )
    if max_model_len is None:
        return
    yield (
        not scheduler.enable_chunked_prefill and batched < max_model_len,
        f"`max_num_batched_tokens` {batched} must be at least `max_model_len` {max_model_len} "
        "without `enable_chunked_prefill`",
    )
    yield (
        threshold > max_model_len,
        f"`long_prefill_token_threshold` {threshold} must be at most `max_model_len` "
        f"{max_model_len}",
    )


def _policy_rules(config: EngineConfig) -> Iterator[Rule]:
    """Yield the rules of the order of requests."""
    scheduler = config.scheduler
    yield (
        scheduler.preempt_for_priority and scheduler.scheduling_policy != "priority",
        "`preempt_for_priority` needs `scheduling_policy` priority",
    )
    yield (
        bool(scheduler.tenant_weights) and scheduler.scheduling_policy != "fair",
        "`tenant_weights` needs `scheduling_policy` fair",
    )


def _template_rules(config: EngineConfig) -> Iterator[Rule]:
    """Yield the rules of the variables of chat templates."""
    for name in RESERVED_TEMPLATE_NAMES.intersection(config.model.default_chat_template_kwargs):
        yield True, f"`default_chat_template_kwargs`: {name} is set by the server"


def _cache_rules(config: EngineConfig) -> Iterator[Rule]:
    """Yield the rules of the prefix cache, and of the states that it keeps."""
    cache = config.cache
    yield (
        cache.enable_kv_events and not cache.enable_prefix_caching,
        "`enable_kv_events` needs `enable_prefix_caching`: events report what is cached",
    )
    yield (
        cache.keeps_blocks and not cache.enable_prefix_caching,
        "`kv_offload_bytes` and `kv_offload_dir` need `enable_prefix_caching`: they keep its "
        "blocks",
    )
    spacing = cache.mamba_block_size
    yield (
        spacing is not None and spacing % cache.block_size != 0,
        f"`mamba_block_size` {spacing} must be a multiple of `block_size` {cache.block_size}",
    )
    yield (
        spacing is not None and not cache.enable_prefix_caching,
        "`mamba_block_size` needs `enable_prefix_caching`: it places what is kept for that",
    )
    has_states = config.worker.null_state_blocks > 0
    yield (
        has_states and config.scheduler.num_speculative_tokens > 0,
        "`null_state_blocks` works without `num_speculative_tokens` only",
    )
    yield (
        has_states and cache.swap_space_bytes > 0,
        "`null_state_blocks` works without `swap_space_bytes` only",
    )


def _replica_rules(config: EngineConfig) -> Iterator[Rule]:
    """Yield the rules of work that replicas do for each other."""
    num_prefill = config.parallel.prefill_replicas
    num_replicas = max(config.parallel.data_parallel_size, config.run.num_replicas)
    yield (
        0 < num_replicas <= num_prefill,
        f"`prefill_replicas` {num_prefill} must be less than `data_parallel_size` {num_replicas}",
    )
    yield (
        num_prefill > 0 and not config.cache.keeps_blocks,
        "`prefill_replicas` needs `kv_offload_bytes` or `kv_offload_dir`: others read the blocks "
        "there",
    )


def _machine_rules(config: EngineConfig) -> Iterator[Rule]:
    """Yield the rules of links between machines."""
    parallel = config.parallel
    linked = ("core_listen", "replica_addresses", "replica_file", "agents_listen", "kv_listen")
    for name in linked:
        is_set = getattr(parallel, name) not in (None, ())
        yield (
            is_set and parallel.curve_keys is None,
            f"`{name}` needs `curve_keys`: a tcp address is never used without keys",
        )
    yield (
        parallel.kv_listen is not None and not config.cache.keeps_blocks,
        "`kv_listen` needs `kv_offload_bytes` or `kv_offload_dir`: it serves what is stored there",
    )
    yield (
        parallel.data_parallel_size == 0 and not parallel.has_other_machines,
        "`data_parallel_size` 0 needs `agents_listen`, `replica_file` or `replica_addresses`",
    )
    addresses = [("replica_addresses", one) for one in parallel.replica_addresses]
    for name, address in (*addresses, *_listening(config).items()):
        port = int(address.rpartition(":")[2])
        yield not 0 < port < 2**16, f"`{name}`: the port of {address} must be 1 to 65535"
    last = int((parallel.core_listen or ":0").rpartition(":")[2]) + parallel.data_parallel_size - 1
    yield (
        last >= 2**16,
        f"`core_listen` {parallel.core_listen} leaves no ports for all of `data_parallel_size` "
        f"{parallel.data_parallel_size}: each replica takes the next one",
    )
    yield from _overlaps(config)


def _listening(config: EngineConfig) -> dict[str, str]:
    """Return the addresses at which processes listen, that of the API apart, by setting."""
    names = ("core_listen", "agents_listen", "kv_listen")
    addresses = {name: getattr(config.parallel, name) for name in names}
    return {name: address for name, address in addresses.items() if address is not None}


class _Ports(NamedTuple):
    """What a setting takes of a host's ports."""

    setting: str
    host: str
    first: int
    num_ports: int = 1

    def overlap(self, other: "_Ports") -> bool:
        is_one_host = self.host == other.host or not {self.host, other.host}.isdisjoint(_ANY_HOST)
        ends = self.first + self.num_ports, other.first + other.num_ports
        is_apart = ends[0] <= other.first or ends[1] <= self.first
        return is_one_host and not is_apart


def _overlaps(config: EngineConfig, taken: Sequence[_Ports] = ()) -> Iterator[Rule]:
    """Yield the rules that ports of links overlap neither each other nor taken ones."""
    ports = list(taken)
    for setting, address in _listening(config).items():
        host, _, port = address.rpartition(":")
        num_replicas = max(config.parallel.data_parallel_size, 1)
        num_ports = num_replicas if setting == "core_listen" else 1
        ports.append(_Ports(setting, host, int(port), num_ports))
    for one, other in itertools.combinations(ports, 2):
        yield (
            one.overlap(other),
            f"`{one.setting}` and `{other.setting}` must differ: both would listen at port "
            f"{max(one.first, other.first)} of {other.host}",
        )


def _placement_rules(config: EngineConfig) -> Iterator[Rule]:
    """Yield the rules of engines in a Ray cluster."""
    placement, parallel = config.placement, config.parallel
    smallest, first, largest = placement.min_engines, placement.replicas, placement.max_engines
    yield (
        not smallest <= first <= largest,
        f"`replicas` {first} must be `min_replicas` {smallest} to `max_replicas` {largest}",
    )
    yield (
        placement.ray is not None and parallel.agents_listen is None,
        "`ray` needs `agents_listen`: engines in the cluster join there",
    )
    yield (
        placement.ray is not None and parallel.data_parallel_size > 1,
        f"`data_parallel_size` {parallel.data_parallel_size} has no effect with `ray`: `replicas` "
        "is the number of engines",
    )
    yield placement.ray is None and largest > 1, "`replicas` and `max_replicas` need `ray`"
    yield (
        placement.ray is not None and not config.ray_bundle,
        "`ray_cpus` 0 needs `ray_gpus`: an engine must take something of the cluster",
    )
    host = (parallel.agents_listen or "").partition(":")[0]
    yield (
        placement.ray is not None and host in _ANY_HOST,
        f"`agents_listen` {parallel.agents_listen} needs the address of this machine with `ray`: "
        "engines in the cluster join there",
    )


def _lora_rules(config: EngineConfig) -> Iterator[Rule]:
    """Yield the rules of adapters."""
    lora, names = config.lora, set(config.model.served_model_name)
    kept = lora.num_kept
    text = f"`max_cpu_loras` {kept} must be at least `max_loras` {lora.max_loras}"
    yield kept < lora.max_loras, text
    is_on = lora.enable_lora
    yield bool(lora.lora_modules) and not is_on, "`lora_modules` needs `enable_lora`"
    yield (
        is_on and config.model.device is Device.CUDA,
        "`enable_lora` needs `device` cpu: there are no kernels for adapters on the GPU",
    )
    yield (
        is_on and config.model.dtype is Dtype.FLOAT16,
        "`enable_lora` needs `dtype` float32 or bfloat16: there are no kernels for float16",
    )
    for text in lora.lora_modules:
        try:
            name = parse_lora_module(text).name
        except ValueError as error:
            yield True, f"`lora_modules`: {error}"
            return
        yield name in names, f"`lora_modules`: the name {name!r} is taken"
        names.add(name)


def _tls_rules(config: EngineConfig) -> Iterator[Rule]:
    """Yield the rules of certificates."""
    api = config.api
    for name, path in (("ssl_keyfile", api.ssl_keyfile), ("ssl_ca_certs", api.ssl_ca_certs)):
        yield path is not None and api.ssl_certfile is None, f"`{name}` needs `ssl_certfile`"


def _process_rules(config: EngineConfig) -> Iterator[Rule]:
    """Yield the rules of the number of workers."""
    standby_workers = config.recovery.standby_workers
    yield (
        bool(standby_workers) and config.model.device is Device.CUDA,
        "`standby_workers` above 0 needs `device` cpu: a second worker finds no memory on the GPU",
    )


def _stage_rules(config: EngineConfig) -> Iterator[Rule]:
    """Yield the rules of a model in several stages."""
    if config.parallel.pipeline_parallel_size == 1:
        return
    model, scheduler = config.model, config.scheduler
    above = "`pipeline_parallel_size` above 1"
    yield model.device is Device.CUDA, f"{above} needs `device` cpu"
    yield (
        scheduler.target_itl_ms > 0,
        f"{above} needs `target_itl_ms` 0: a step's time is measured at the last stage only",
    )


def _cpu_rules(config: EngineConfig) -> Iterator[Rule]:
    """Yield the rules of the CPUs on which workers compute."""
    worker, parallel = config.worker, config.parallel
    if worker.worker_cpus is None:
        return
    yield (
        worker.cpu_pinning is not CpuPinning.OFF,
        "`worker_cpus` works without `cpu_pinning` only: both choose the CPUs of a worker",
    )
    try:
        lists = parse_cpu_lists(worker.worker_cpus)
    except ValueError as error:
        yield True, f"`worker_cpus`: {error}"
        return
    # Without replicas here, they are the CPUs of each engine on other machines.
    num_workers = parallel.num_ranks * max(1, parallel.data_parallel_size)
    yield (
        len(lists) != num_workers,
        f"`worker_cpus` must have a list of CPUs for each worker: {num_workers}, not {len(lists)}",
    )
    fewest = min(map(len, lists))
    yield (
        worker.num_threads is not None and worker.num_threads > fewest,
        f"`num_threads` {worker.num_threads} must be at most {fewest}: `worker_cpus` has no more",
    )


def _draft_rules(config: EngineConfig) -> Iterator[Rule]:
    """Yield the rules of the draft model."""
    has_draft_model = config.model.speculative_model is not None
    yield (
        has_draft_model and config.scheduler.num_speculative_tokens == 0,
        "`speculative_model` needs `num_speculative_tokens` of at least 1",
    )
    yield (
        has_draft_model and config.model.model == _NULL,
        "`speculative_model` works with a model only, not with the null model",
    )


def _code_rules(config: EngineConfig) -> Iterator[Rule]:
    """Yield the rules of weights, keys and values in codes."""
    model, on_gpu = config.model, config.model.device is Device.CUDA
    is_quantized = model.quantization is not None
    yield (
        is_quantized and model.model == _NULL,
        "`quantization` needs a model: the null model has no weights",
    )
    yield (
        is_quantized and on_gpu,
        "`quantization` needs `device` cpu: there are no kernels for codes on the GPU",
    )
    yield (
        is_quantized and model.dtype not in (Dtype.AUTO, Dtype.BFLOAT16),
        "`quantization` needs `dtype` bfloat16: codes stand for weights in bfloat16",
    )
    has_codes = config.cache.kv_cache_dtype is not KVCacheDtype.AUTO
    yield (
        has_codes and model.model == _NULL,
        "`kv_cache_dtype` needs a model: the null model has no KV cache",
    )
    yield (
        has_codes and on_gpu,
        "`kv_cache_dtype` needs `device` cpu: there are no kernels for codes on the GPU",
    )
    yield (
        has_codes and model.dtype is Dtype.FLOAT16,
        "`kv_cache_dtype` needs `dtype` float32 or bfloat16: there are no kernels for float16",
    )


def _attention_rules(config: EngineConfig) -> Iterator[Rule]:
    """Yield the rules of attention on the GPU."""
    wanted = config.worker.attention_backend
    yield (
        wanted is not AttentionName.AUTO and config.model.model == _NULL,
        "`attention_backend` needs a model: the null model has no attention",
    )
    yield (
        wanted is not AttentionName.AUTO and config.model.device is Device.CPU,
        f"`attention_backend` {wanted} needs `device` cuda",
    )
    is_invariant = config.worker.batch_invariant
    yield (
        is_invariant and config.model.model == _NULL,
        "`batch_invariant` needs a model: the null model computes nothing",
    )
    yield (
        is_invariant and config.model.device is Device.CPU,
        "`batch_invariant` needs `device` cuda: on the CPU the kernels do not depend on the batch",
    )
    yield (
        is_invariant and wanted is AttentionName.FLASHINFER,
        "`batch_invariant` needs `attention_backend` triton: FlashInfer divides work by the batch",
    )


_CONCEPTS: tuple[Callable[[EngineConfig], Iterator[Rule]], ...] = (
    _step_rules,
    _prefill_rules,
    _policy_rules,
    _template_rules,
    _cache_rules,
    _replica_rules,
    _machine_rules,
    _placement_rules,
    _lora_rules,
    _tls_rules,
    _process_rules,
    _stage_rules,
    _cpu_rules,
    _draft_rules,
    _code_rules,
    _attention_rules,
)
