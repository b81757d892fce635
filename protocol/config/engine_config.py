"""The one configuration of the engine: every field with its bound, default and description.

Flags with their help, environment variables, YAML keys and embedding keywords are generated from
these structs and the docstrings of their fields (setting_fields.py). Values learned at run time
(number of KV blocks, context length of the checkpoint) are never written back here: they are sent
as `ModelFacts`.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, field

from protocol.config.addresses import LISTEN_ADDRESS, TCP_ADDRESS
from protocol.config.choices import (
    AccessLog,
    AttentionName,
    CpuPinning,
    Device,
    Dtype,
    KVCacheDtype,
    LogFormat,
    LogLevel,
    NativeDecoder,
    Quantization,
    RoutingPolicy,
)
from protocol.config.generation_overrides import GenerationOverrides

DEFAULT_MAMBA_BLOCK_SIZE = 512

TenantName = Annotated[str, Meta(min_length=1, max_length=256)]
Weight = Annotated[float, Meta(ge=1e-6, le=1e6)]
"""A token takes 1 / weight of virtual time, which is a float: after a billion tokens of the lowest
weight, single tokens of weight 1 still advance it."""
PathText = Annotated[str, Meta(min_length=1, max_length=4096, extra={"metavar": "PATH"})]
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]
LoraText = Annotated[str, Meta(min_length=1, max_length=8192, extra={"metavar": "NAME=PATH"})]
ListenAddress = Annotated[
    str, Meta(pattern=r"^[^\s:/]+:[0-9]{1,5}$", description="HOST:PORT, as 10.0.0.2:7000")
]
CoreAddress = Annotated[
    str, Meta(pattern=TCP_ADDRESS, description="tcp://HOST:PORT, as tcp://10.0.0.2:7000")
]
BlocksListenAddress = Annotated[
    str,
    Meta(
        pattern=LISTEN_ADDRESS,
        description="HOST:PORT, as 10.0.0.2:7001, with a port of 1 to 65535 and * for all hosts",
    ),
]
SessionKey = Annotated[
    str,
    Meta(
        pattern="^[A-Za-z0-9_-]{1,64}$",
        description="cache_salt or a header's name of 1 to 64 letters, digits, - or _",
    ),
]
Origin = Annotated[
    str,
    Meta(
        pattern=r"^(\*|null|[a-z][a-z0-9+.-]*://[^/\s]{1,256})$",
        description="an origin such as https://app.example.com, or *",
    ),
]
_JSON = {"metavar": "JSON", "is_json": True}
TemplateVariables = Annotated[dict[str, Any], Meta(max_length=64, extra=_JSON)]
Overrides = Annotated[GenerationOverrides, Meta(extra=_JSON)]
ApiKey = Annotated[str, Meta(min_length=1, max_length=256, extra={"is_secret": True})]
"""Never printed, and removed from the environment once it was read."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A group of settings; field names are unique over all sections."""


class ModelConfig(Section):
    """Which model is served, and how."""

    model: Annotated[str, Meta(min_length=1)] = "demo"
    """A model of the Hugging Face hub, such as Qwen/Qwen3-0.6B; a checkpoint directory in its
    format; a GGUF file; 'demo' or 'demo-chat' for the models that come with the engine; or 'null'
    for a worker that computes nothing."""
    revision: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """Branch, tag or commit of the model on the hub. Default: main."""
    served_model_name: Annotated[tuple[ModelName, ...], Meta(max_length=16)] = ()
    """Names of the model in the API; responses contain the first one. Default: the model's name on
    the hub, or the last part of its path."""
    tokenizer: str | None = None
    """Directory of the tokenizer, if it is not the model's directory."""
    chat_template: str | None = None
    """File with a Jinja chat template, used instead of the model's own."""
    default_chat_template_kwargs: TemplateVariables = {}
    """Variables of the chat template, as {"enable_thinking": false}, for requests that do not set
    them."""
    generation_config: Annotated[str, Meta(pattern="^(auto|vllm)$")] = "auto"
    """Sampling parameters of requests that have none. auto: those of the checkpoint's
    generation_config.json. vllm: vLLM's, such as the temperature 1."""
    override_generation_config: Overrides | None = None
    """Sampling parameters of requests that have none, before those of generation_config, as
    {"temperature": 0.6, "top_k": 20}: also top_p, min_p, repetition_penalty and max_new_tokens,
    which also bounds the output of requests that ask for more."""
    tool_call_parser: Annotated[str, Meta(min_length=1)] = "auto"
    """Format in which the model writes tool calls, by vLLM's names. auto: detected from the chat
    template. off: calls remain text, and requests with tools are refused."""
    reasoning_parser: Annotated[str, Meta(min_length=1)] = "auto"
    """Format in which the model writes its reasoning, by vLLM's names. auto: detected from the chat
    template. off: reasoning remains a part of the content."""
    dtype: Dtype = Dtype.AUTO
    """Data type of weights, activations and KV. auto: as in config.json, but bfloat16 instead of
    float32."""
    quantization: Quantization | None = None
    """Quantize the weights of linear layers and experts at load, on the CPU, in bfloat16. w8a16: 8
    bits. w4a16: 4 bits with a scale for every 128 inputs. w8a8: 8 bits, and activations of 8 bits
    with a scale for each token. In a quantized checkpoint only the output layer is quantized, to 8
    bits. Default: off."""
    device: Device = Device.AUTO
    """Device to compute on. auto: CUDA if there is a GPU."""
    max_model_len: Annotated[int, Meta(ge=2, lt=2**31)] | None = None
    """Maximum length of prompt and output together, in tokens. Default: as in config.json, or less
    if the KV cache cannot hold that."""
    speculative_model: PathText | None = None
    """A smaller model with the same tokenizer, of the hub or in a directory, that drafts tokens for
    this one: see num_speculative_tokens. Default: tokens are drafted from repetitions."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Base of the seeds that are drawn for requests without one; 0: unpredictable."""
    given_model: Annotated[str | None, Meta(extra={"is_setting": False})] = None
    """What `model` was before the supervisor replaced it by a directory."""

    @property
    def shown_model(self) -> str:
        """The model as its user names it."""
        return self.given_model or self.model


class CacheConfig(Section):
    """The KV cache."""

    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Tokens per KV block."""
    num_gpu_blocks_override: Annotated[int, Meta(ge=2, lt=2**31)] | None = None
    """Number of KV blocks. Default: as many as fit into the memory for the cache."""
    num_state_blocks_override: Annotated[int, Meta(ge=3, lt=2**31)] | None = None
    """Number of state blocks of a model with recurrent layers: one for each running request, the
    rest for the prefix cache, and one that is never used. Speculation takes further ones. Default:
    twice max_num_seqs, in at most half of the KV cache's memory."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.9
    """Fraction of the GPU's memory for weights and KV cache."""
    kv_cache_memory_bytes: Annotated[int, Meta(ge=1, lt=2**50)] | None = None
    """Bytes for the KV cache. Default on the CPU: 4 GiB, but at most half of the memory that is
    free in the host and in the cgroup."""
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO
    """Data type of keys and values in the cache. auto: the model's. int8 and fp8 (also fp8_e4m3): 8
    bits with a scale for each token and head, on the CPU."""
    enable_prefix_caching: bool = True
    """Share KV blocks between requests that begin with the same tokens."""
    mamba_block_size: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    """With recurrent layers: number of tokens between two states that are kept for the prefix
    cache; a multiple of block_size. The state at the end of each prompt is kept as well. Default:
    512, or the next multiple."""
    swap_space_bytes: Annotated[int, Meta(ge=0, lt=2**46)] = 0
    """Host memory for the KV and the recurrent states of preempted requests, used when copying is
    faster than recomputing; 0: always recompute."""
    kv_offload_bytes: Annotated[int, Meta(ge=0, lt=2**46)] = 0
    """Shared memory that keeps full KV blocks and recurrent states in addition to the cache, for
    all workers of this machine and their successors, used when reading is faster than recomputing;
    0: none."""
    kv_offload_dir: PathText | None = None
    """Directory on a disk that keeps full KV blocks, also for the next start. Prompts can be
    recovered from these files."""
    kv_offload_dir_bytes: Annotated[int, Meta(ge=2**20, lt=2**56)] = 2**35
    """Maximum size of these blocks in bytes; the least recently used ones are removed."""
    enable_hybrid_kv_cache: bool = True
    """Give back KV blocks that a layer's sliding window has passed."""
    enable_kv_events: bool = False
    """Let clients follow what the prefix cache holds, to route by it."""

    @property
    def keeps_blocks(self) -> bool:
        """Whether workers keep KV blocks in stores."""
        return self.kv_offload_bytes > 0 or self.kv_offload_dir is not None

    def snapshot_spacing(self, block_size: int) -> int:
        """Return `mamba_block_size`, or its default for KV blocks of a size."""
        default = -(-DEFAULT_MAMBA_BLOCK_SIZE // block_size) * block_size
        return self.mamba_block_size or default


class SchedulerConfig(Section):
    """How a step is filled."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=16384)] = 64
    """Maximum number of requests computed in one step; on a GPU the default is 256."""
    max_num_batched_tokens: Annotated[int, Meta(ge=1, le=2**20)] = 2048
    """Maximum number of tokens computed in one step; on a GPU the default is 8192."""
    max_num_scheduled_tokens: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    """Token budget of a step, if it is to be less than max_num_batched_tokens."""
    long_prefill_token_threshold: Annotated[int, Meta(ge=0, le=2**20)] = 0
    """Maximum number of prompt tokens of one request per step; 0: no limit."""
    enable_chunked_prefill: bool = True
    """Split prompts over several steps when the budget runs out."""
    long_prefill_token_threshold_adaptive: bool = False
    """Raise long_prefill_token_threshold to a fair share of the step, so that there is a threshold
    even if it is 0, and fewer requests get larger chunks."""
    max_num_partial_prefills: Annotated[int, Meta(ge=0, le=16384)] = 0
    """Maximum number of requests whose prompts are computed over several steps at the same time; 0:
    no limit."""
    max_long_partial_prefills: Annotated[int, Meta(ge=0, le=16384)] = 0
    """Maximum number of these prompts that are longer than long_prefill_token_threshold; shorter
    ones may overtake. 0: no limit."""
    elastic_token_budget: bool = False
    """While no request waits, let prompts use the rest of a step's tokens, up to
    max_num_batched_tokens."""
    target_itl_ms: Annotated[float, Meta(ge=0.0, le=60_000.0)] = 0.0
    """Target in milliseconds for the time between two tokens of a decoding request: prompts in the
    same step are cut to meet it, by measured step times. 0: no target."""
    scheduling_policy: Annotated[str, Meta(pattern="^(fcfs|priority|shortest|fair)$")] = "fcfs"
    """Order of admission: fcfs, priority (lower first), shortest (fewest tokens to compute, with
    ageing) or fair (tenants share by tenant_weights)."""
    tenant_weights: Annotated[dict[TenantName, Weight], Meta(max_length=1024)] = {}
    """Shares of tenants under the fair policy, like gold=4,free=1 (in YAML a mapping), 1e-6 to 1e6
    each; 1 for tenants that are not named."""
    preempt_for_priority: bool = False
    """Under the priority policy, preempt running requests for waiting ones that are more
    important."""
    victim_choice: Annotated[str, Meta(pattern="^(policy|cheapest)$")] = "policy"
    """Which request is preempted when KV blocks run out: policy (the last one under the scheduling
    policy) or cheapest (the one that costs least to compute again)."""
    scheduler_reserve_full_isl: bool = True
    """Admit a request only when the cache has room for all its tokens so far."""
    watermark: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    """Share of KV blocks kept free at admission."""
    max_steps_in_flight: Annotated[int, Meta(ge=1, le=8)] = 2
    """Steps sent to the worker before the first returns; at least pipeline_parallel_size."""
    num_speculative_tokens: Annotated[int, Meta(ge=0, le=16)] = 0
    """Maximum number of tokens drafted for a request, by speculative_model or from repetitions in
    its text, and verified together in one step; 0: none. The output does not change."""
    adaptive_speculation: bool = True
    """Draft as many tokens as pay off, by measured acceptance and step times, and none if none
    does; off: always num_speculative_tokens."""
    max_num_waiting: Annotated[int, Meta(ge=1, le=10**6)] = 10_000
    """Maximum number of requests in the queue; further ones are refused with 429. One client of the
    API gets at most 8 times what is free, which is 8/9 if it is the only one."""
    max_waiting_tokens: Annotated[int, Meta(ge=1, le=2**31)] = 2**22
    """Maximum number of prompt tokens in the queue; further requests are refused with 429. One
    client of the API gets at most 8 times what is free, which is 8/9 if it is the only one. A
    prompt that finds the queue empty is accepted, however long it is."""


class LoraConfig(Section):
    """LoRA adapters."""

    enable_lora: bool = False
    """Serve LoRA adapters in addition to the model, on the CPU."""
    lora_modules: Annotated[tuple[LoraText, ...], Meta(max_length=4096)] = ()
    """Adapters as name=path, or as JSON objects with name, path and base_model_name. A path is a
    directory in PEFT's format; a request selects an adapter by its name as the model."""
    max_loras: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Maximum number of adapters with requests in one step; requests for others wait for their
    turn."""
    max_lora_rank: Annotated[int, Meta(ge=1, le=512)] = 16
    """Maximum rank of an adapter."""
    max_cpu_loras: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    """Maximum number of adapters that a worker keeps in memory; others are loaded when they are
    needed. Default: max_loras."""

    @property
    def num_kept(self) -> int:
        """Adapters that a worker keeps in memory."""
        return self.max_cpu_loras or self.max_loras


class ParallelConfig(Section):
    """Ranks of a model, replicas of the engine."""

    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of ranks that each layer of the model is divided over: workers that each hold a part
    of every matrix."""
    pipeline_parallel_size: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of stages that the model's layers are divided into: workers that each hold consecutive
    layers, and compute different requests at the same time."""
    data_parallel_size: Annotated[int, Meta(ge=0, le=64)] = 1
    """Number of replicas of the engine, each with its own core and workers. If a replica is lost,
    its requests continue on another one. 0: all replicas are on other machines."""
    core_listen: ListenAddress | None = None
    """Address HOST:PORT at which the core also serves clients of other machines, encrypted, with
    curve_keys; with several replicas, each takes the next port. Default: none."""
    replica_addresses: Annotated[tuple[CoreAddress, ...], Meta(max_length=64)] = ()
    """Cores of other machines, as tcp://HOST:PORT, which serve requests in addition to those here:
    replicas that were started there with core_listen."""
    replica_file: PathText | None = None
    """File with addresses of further cores, one per line, as in replica_addresses. It is read again
    when it changes: new cores get requests, and requests of removed cores continue elsewhere."""
    agents_listen: ListenAddress | None = None
    """Address HOST:PORT at which host agents of other machines join: see `troika agent`. Each
    starts an engine there with these settings, in addition to those here. Default: none."""
    curve_keys: PathText | None = None
    """Directory with the keys of links between machines: see `troika keys`."""
    kv_listen: BlocksListenAddress | None = None
    """Address HOST:PORT at which other machines read the KV blocks that are stored here, for
    requests that move to them, encrypted, with curve_keys. Default: a free port at the host of
    core_listen or agents_listen, where blocks are stored, as with kv_offload_bytes."""
    routing_policy: RoutingPolicy = RoutingPolicy.PREFIX_AWARE
    """How a replica is chosen for a request. prefix_aware: the one with most of the prompt cached,
    unless it has much more work. least_tokens: the one with the fewest tokens to compute.
    round_robin: each in turn."""
    prefill_replicas: Annotated[int, Meta(ge=0, le=63)] = 0
    """Number of replicas that compute long prompts for the others, which decode. Requires that KV
    blocks are kept, as with kv_offload_bytes. 0: every replica does both."""
    session_key: SessionKey | None = None
    """Requests with equal values of this key go to the same replica while it serves: cache_salt, or
    the name of a header such as X-Session-Id. Other requests are routed by the policy."""

    @property
    def num_ranks(self) -> int:
        """Workers of one replica: those of all stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def answering_rank(self) -> int:
        """The rank that answers for all: the first one of the last stage, which samples."""
        return self.num_ranks - self.tensor_parallel_size

    @property
    def has_changing_replicas(self) -> bool:
        """Whether replicas join and leave while the engine runs."""
        return self.replica_file is not None or self.agents_listen is not None

    @property
    def has_other_machines(self) -> bool:
        """Whether there are replicas on other machines, or will be."""
        return bool(self.replica_addresses) or self.has_changing_replicas


class PlacementConfig(Section):
    """Engines in a Ray cluster."""

    ray: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """Address of a Ray cluster, HOST:PORT or auto, in which engines are started instead of here;
    they join this one at agents_listen. Needs the package ray. Default: none."""
    replicas: Annotated[int, Meta(ge=1, le=512)] = 1
    """Engines in the cluster; with min_replicas or max_replicas, those at the start."""
    min_replicas: Annotated[int, Meta(ge=1, le=512)] | None = None
    """Minimum number of engines, while there is little to do. Default: replicas."""
    max_replicas: Annotated[int, Meta(ge=1, le=512)] | None = None
    """Maximum number of engines, while requests wait. Default: replicas."""
    ray_cpus: Annotated[float, Meta(ge=0.0, le=1024.0)] = 1.0
    """CPUs of the cluster that each rank takes."""
    ray_gpus: Annotated[float, Meta(ge=0.0, le=16.0)] | None = None
    """GPUs of the cluster that each rank takes. Default: 1 with device cuda, else 0."""
    grow_after_s: Annotated[float, Meta(ge=0.0, le=86_400.0)] = 5.0
    """Seconds for which requests must wait before there are more engines."""
    shrink_after_s: Annotated[float, Meta(ge=0.0, le=86_400.0)] = 120.0
    """Seconds for which the other engines would have to be at most half full before one engine
    leaves."""

    @property
    def min_engines(self) -> int:
        """The minimum number of engines."""
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def max_engines(self) -> int:
        """The maximum number of engines."""
        return self.replicas if self.max_replicas is None else self.max_replicas


class WorkerConfig(Section):
    """The computing process."""

    num_threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """Number of CPU threads. Default: the cores that affinity and cgroup allow."""
    cpu_pinning: CpuPinning = CpuPinning.OFF
    """auto: with more than two CPUs, each worker computes on its own CPUs, and one CPU in sixteen,
    at least one, is left to API and core."""
    worker_cpus: Annotated[str, Meta(max_length=4096)] | None = None
    """CPUs of each worker, as 0-7,16:8-15 for two: one list for each rank, replica by replica;
    without replicas here, of each engine elsewhere. Default: all, or those of cpu_pinning."""
    native_decoder: NativeDecoder = NativeDecoder.AUTO
    """Compute the decoder's layers in one native call if it is proven to give the results of the
    model's own modules; off: compute them with these modules."""
    attention_backend: AttentionName = AttentionName.AUTO
    """On CUDA, what computes attention: the engine's own Triton kernels (triton, also triton_attn)
    or FlashInfer, which must be installed (flashinfer). auto: Triton where its kernels cover the
    model, else PyTorch."""
    batch_invariant: bool = False
    """On CUDA, compute attention and products with one tile shape for all batches, so that a
    request's tokens do not depend on the batch. Slower; refused if a check at start finds that they
    do."""
    enforce_eager: bool = False
    """On CUDA, launch the kernels of every decode step one by one instead of replaying graphs."""
    null_step_ms: Annotated[float, Meta(ge=0.0, le=60_000.0)] = 0.0
    """Time a step of the null worker takes."""
    null_token_ms: Annotated[float, Meta(ge=0.0, le=60_000.0)] = 0.0
    """Time that each token of a step adds to it."""
    null_state_blocks: Annotated[int, Meta(ge=0, lt=2**30)] = 0
    """State blocks of the null worker, as if its model had recurrent layers; 0: it has none."""


class ApiConfig(Section):
    """The HTTP server."""

    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """Port; 0: any free one."""
    api_server_count: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of processes that serve HTTP on the same address. Connections are spread over them as
    they arrive."""
    uds: PathText | None = None
    """Path of a Unix socket to listen on instead of host and port. Only this user can connect."""
    ssl_certfile: PathText | None = None
    """PEM file with the certificate and its chain: serve HTTPS. Read again when it changes."""
    ssl_keyfile: PathText | None = None
    """PEM file with the certificate's private key, without a passphrase. Default: ssl_certfile."""
    ssl_ca_certs: PathText | None = None
    """PEM file with authorities: clients must present a certificate that one of them signed."""
    allowed_origins: Annotated[tuple[Origin, ...], Meta(max_length=64)] = ()
    """Origins whose web pages may use the API from a browser, like https://app.example.com, or *.
    Default: none."""
    api_key: Annotated[tuple[ApiKey, ...], Meta(max_length=16)] = ()
    """Bearer token that every route except the health routes requires; repeat the flag for several.
    A command line is visible to all users of the machine: prefer api_key_file."""
    api_key_file: PathText | None = None
    """File with further keys, one per line; # begins a comment. Read again when it changes."""
    enable_admin_routes: bool = False
    """Serve the routes that pause the engine, put it to sleep or reset its cache."""
    enable_page: bool = True
    """Serve the page at / and the route that its live view reads."""
    max_body_bytes: Annotated[int, Meta(ge=1024, le=2**30)] = 4 * 2**20
    """Maximum size of a request body."""
    max_open_requests: Annotated[int, Meta(ge=1, le=10**6)] = 16384
    """Maximum number of requests, and of sequences of them, that an API process holds open; further
    ones are refused with 429. One client gets at most 8 times what is free, which is 8/9 if it is
    the only one."""
    max_open_requests_per_client: Annotated[int, Meta(ge=0, le=10**6)] = 0
    """Maximum number of requests, and of sequences of them, that an API process holds open for each
    API key, or without keys for each address; further ones are refused with 429. 0: no limit."""
    max_open_bytes: Annotated[int, Meta(ge=1024, le=2**40)] = 64 * 2**20
    """Maximum size of all bodies that an API process holds; further requests are refused with
    429. One client gets at most 8 times what is free, which is 8/9 if it is the only one."""
    max_stored_responses: Annotated[int, Meta(ge=0, le=10**6)] = 10_000
    """Maximum number of responses kept for GET /v1/responses and previous_response_id; further ones
    displace the least recently used. 0: none are kept."""
    max_stored_response_bytes: Annotated[int, Meta(ge=0, le=2**40)] = 64 * 2**20
    """Maximum size of stored responses and their inputs together."""
    tokenizer_pool_size: Annotated[int, Meta(ge=1, le=64)] = 1
    """Maximum number of processes for prompts of more than 16 KiB, which are rendered and tokenized
    apart from the server, with limits of time and memory. They start when they are needed."""
    unknown_fields: Annotated[str, Meta(pattern="^(ignore|warn|refuse)$")] = "warn"
    """Fields of a request that the server does not know: ignore, warn (a response header, and one
    log line per name) or refuse (400). Fields that constrain the output are always refused."""
    slow_reader_timeout_s: Annotated[float, Meta(gt=0.0, le=3600.0)] = 60.0
    """Seconds without reading after which a client's stream is closed."""
    journal_dir: Annotated[str, Meta(min_length=1)] | None = None
    """Directory for a journal of open requests, so that clients can resume them after a lost
    connection or a restart of the server. Default: no journal."""
    journal_sync: bool = False
    """Sync the journal to the disk with every write: requests also survive a power loss, and each
    answer begins only after the disk has written its request."""
    resume_window_s: Annotated[float, Meta(gt=0.0, le=3600.0)] = 30.0
    """With a journal: seconds for which a request continues, or its answer is kept, without a
    connected client."""


class RecoveryConfig(Section):
    """Starting, stopping and replacing processes."""

    startup_timeout_s: Annotated[float, Meta(gt=0.0, le=86_400.0)] = 600.0
    """Longest wait for a process without progress."""
    shutdown_timeout_s: Annotated[float, Meta(ge=0.0, le=86_400.0)] = 30.0
    """Maximum time for running requests to finish at shutdown."""
    restart_backoff_max_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 30.0
    """Maximum pause between two restarts."""
    hang_timeout_s: Annotated[float, Meta(ge=0.02, le=3600.0)] = 2.0
    """Seconds without progress after which a worker or core is suspected to hang; after twice that
    it is killed. Steps that usually take longer get more time."""
    hang_step_factor: Annotated[float, Meta(ge=1.0, le=1000.0)] = 20.0
    """A step is suspected to hang after this multiple of the time that steps of its size took
    lately, if that is more than hang_timeout_s."""
    api_hang_timeout_s: Annotated[float, Meta(ge=0.1, le=3600.0)] = 5.0
    """Seconds for which the API's event loop may be blocked before it is suspected to hang; after
    twice that it is killed."""
    first_step_timeout_s: Annotated[float, Meta(ge=0.02, le=3600.0)] = 60.0
    """Limit in seconds for steps of sizes that a worker has not computed yet."""
    stall_timeout_s: Annotated[float, Meta(gt=0.0, le=86_400.0)] = 120.0
    """Seconds without a serving engine after which open requests fail."""
    failover_s: Annotated[float, Meta(ge=0.1, le=3600.0)] = 0.75
    """Seconds without a serving core or worker after which a replica's requests continue on another
    one."""
    allow_inexact_resume: bool = False
    """Let requests whose engine is lost continue on an engine with other facts if there is no equal
    one; their answers show it. By default they wait stall_timeout_s for an equal one, and then
    fail."""
    give_up_after_s: Annotated[float, Meta(gt=0.0, le=86_400.0)] | None = None
    """Seconds of repeated deaths of a process after which the engine ends with a status other than
    0. Default: it is restarted without limit."""
    standby_workers: Annotated[int, Meta(ge=0, le=1)] | None = None
    """Workers kept loaded to take the place of one that dies: 0 or 1. Default: 1 for a model on the
    CPU in one rank, where they share its weights; else 0. For several ranks, 1 is a second group of
    as many, which shares the weights of the first."""
    standby_cores: Annotated[int, Meta(ge=0, le=1)] = 1
    """Cores kept started to take the place of one that dies: 0 or 1."""


class RunConfig(Section):
    """What surrounds the processes."""

    run_dir: str | None = None
    """Directory for the sockets (mode 0700). Default: a new temporary one."""
    log_level: LogLevel = LogLevel.INFO
    """Least severe messages to print; debug includes the links between the processes."""
    log_format: LogFormat = LogFormat.TEXT
    """Format of log lines; json: one object per line."""
    access_log: AccessLog = AccessLog.SAMPLED
    """A line per HTTP request, without its text. sampled: 50 lines a second, then every hundredth
    request, and of probes only changes of the status."""
    check_invariants: bool = False
    """Check the scheduler's invariants after every step; for debugging."""
    log_stats_interval_s: Annotated[float, Meta(gt=0.0, le=3600.0)] = 10.0
    """Seconds between statistics lines while busy."""
    replica: Annotated[int | None, Meta(extra={"is_setting": False})] = None
    """Number of this replica of the engine; None: there is one engine only."""
    num_replicas: Annotated[int, Meta(ge=1, extra={"is_setting": False})] = 1
    """Replicas that share this machine."""


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of one engine; the same value reaches every process."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    api: ApiConfig = field(default_factory=ApiConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def num_workers(self) -> int:
        """Workers of all replicas, which share a machine."""
        return self.parallel.num_ranks * self.run.num_replicas

    @property
    def ray_bundle(self) -> dict[str, float]:
        """What an engine takes of a Ray cluster, as CPU and GPU: all of its ranks together."""
        gpus = self.placement.ray_gpus
        if gpus is None:
            gpus = float(self.model.device is Device.CUDA)
        each = {"CPU": self.placement.ray_cpus, "GPU": gpus}
        return {name: self.parallel.num_ranks * number for name, number in each.items() if number}
