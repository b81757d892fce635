"""The link between clients and core: requests in, tokens out, exactly once by index.

A client (the API process or an embedding host) keeps every open request in its ledger. The core is
a cache of it: after a restart the client adds its open requests again, outputs included.
"""

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.adapters import Adapter
from protocol.core_worker import BlocksAddress, PackedVector, PromptLogprobs, TokenLogprobs
from protocol.kv_events import KVEventBatch, KVEventsRefused, SubscribeKVEvents, UnsubscribeKVEvents
from protocol.message import (
    Decoder,
    Message,
    Origin,
    PackedTokenIds,
    Record,
    RequestId,
    Tenant,
    Text,
    TokenIds,
    encode,
    pack_token_ids,
    unpack_token_ids,
)
from protocol.model_facts import ModelFacts
from protocol.sampling import (
    CacheSalt,
    FinishReason,
    Priority,
    SamplingParams,
)

RequestIds = Annotated[list[RequestId], Meta(max_length=2**20)]
Count = Annotated[int, Meta(ge=0)]
PACKED_FROM_TOKENS = 4096
"""Prompts of at least this length are sent packed: the core handles hundreds of thousands of ids in
one turn."""


class EngineState(enum.StrEnum):
    """The state of the core, as its clients see it."""

    STARTING = "starting"
    """No worker has been adopted yet."""
    READY = "ready"
    RECOVERING = "recovering"
    """A worker was lost; requests wait for its successor."""
    DRAINING = "draining"


class PauseMode(enum.StrEnum):
    """How much of the scheduling is paused."""

    RUNNING = "running"
    PAUSED_NEW = "paused_new"
    """Only requests that have run before, or have outputs, are admitted: they continue even after
    a preemption, a lost worker or a new core."""
    PAUSED_ALL = "paused_all"


class ErrorCode(enum.StrEnum):
    """Why one request failed; the API maps it to an HTTP status."""

    INVALID = "invalid_value"
    TOO_LONG = "context_length_exceeded"
    UNSERVABLE = "exceeds_kv_cache"
    UNSUPPORTED = "unsupported_model"
    """The model cannot serve this kind of request."""
    OVERLOADED = "overloaded"
    STARTING = "starting"
    """No engine has served yet, or all have left."""
    DRAINING = "draining"
    INTERNAL = "internal_error"
    COMPUTATION_FAILED = "computation_failed"
    """The model's logits for this request are not finite."""
    QUARANTINED = "request_quarantined"
    ENGINE_FAILED = "engine_failed"
    DEADLINE = "deadline_exceeded"
    """The time that the client allowed for the request is over."""
    ABORTED = "request_aborted"
    """The client was closed, or the request was cancelled by its program or by an operator."""


class RequestError(Record):
    """Why one request was refused or failed; `param` names the field, `message` the bound."""

    code: ErrorCode
    message: Text
    param: str | None = None


class Connect(Message):
    """Client → core: the first message, sent again whenever the core's epoch is unknown."""

    pid: Annotated[int, Meta(ge=0, lt=2**31)]
    """The client's process, watched for its death; 0 for a client on another host."""


class AddRequest(Message):
    """Client → core: a request, new or sent again from the ledger; options as `RequestOptions`.

    It replaces an open request with the same id: in this way a client repairs missed outputs.
    """

    request_id: RequestId
    """Chosen by the client, never reused within one incarnation of it."""
    prompt_token_ids: TokenIds
    sampling_params: SamplingParams
    output_token_ids: TokenIds = []
    """Tokens that the client already has; the next output starts after them."""
    priority: Priority = 0
    arrival_time: Annotated[float, Meta(ge=0.0)] = 0.0
    """Seconds since the Unix epoch, for the client's own journal; the core does not read it."""
    cache_salt: CacheSalt = ""
    resent: bool = False
    """Whether the request, or the one that it is a part of, was accepted before. It is then not
    refused for a full queue or draining."""
    tenant: Tenant = ""
    age_s: Annotated[float, Meta(ge=0.0, le=2.0**32)] = 0.0
    """Seconds from the request's acceptance to this message, from which a new core restores the
    order of arrival."""
    packed_prompt: PackedTokenIds = b""
    """The prompt as packed ids; `prompt_token_ids` is empty then."""
    adapter: Adapter | None = None
    """The adapter that computes it together with the model."""
    fingerprint: Annotated[str, Meta(max_length=64)] = ""
    """Fingerprint of the engine that computes the request, for the client's ledger and journal; the
    core does not read it. Empty: not known."""
    blocks_at: BlocksAddress = ""
    """Block server of the machine that the request was moved from. Empty: it was not moved, or only
    to another replica of this machine."""
    origin: Origin = ""
    """The API key or the address that the request came from; clients of the API cannot choose it.
    Empty: the client itself. Under the fair policy, requests without a tenant have an account for
    each origin and adapter. Grammars of several origins, and of their tenants, are compiled in
    turns."""

    @property
    def prompt(self) -> list[int] | bytes:
        """The prompt in the form in which it was sent."""
        return self.packed_prompt or self.prompt_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.packed_prompt) // 4 or len(self.prompt_token_ids)

    @property
    def unpacked_prompt(self) -> list[int]:
        """The prompt's ids as a list; unpacking a long prompt takes milliseconds."""
        return unpack_token_ids(self.packed_prompt) or self.prompt_token_ids


def encode_add(add: AddRequest) -> bytes:
    """Encode a request for the wire, a long prompt as packed ids."""
    if len(add.prompt_token_ids) >= PACKED_FROM_TOKENS:
        packed = pack_token_ids(add.prompt_token_ids)
        add = msgspec.structs.replace(add, prompt_token_ids=[], packed_prompt=packed)
    return encode(add)


class AbortRequests(Message):
    """Client → core: end these requests. Unknown ids are ignored."""

    request_ids: RequestIds


class ControlAction(enum.StrEnum):
    """A request that concerns the whole engine."""

    PAUSE = "pause"
    """Enter `Control.pause_mode`. Requests are accepted and wait."""
    RESUME = "resume"
    SLEEP = "sleep"
    """Pause everything, drop the prefix cache, and request the workers to release its memory."""
    RESET_PREFIX_CACHE = "reset_prefix_cache"
    """Drop the prefix cache; refused while any of its blocks is in use."""
    LOAD_ADAPTER = "load_adapter"
    """Have the workers load `Control.adapter`, or only check it if they have no room."""
    UNLOAD_ADAPTER = "unload_adapter"
    """Drop `Control.adapter` once no request has it; requests may load it again."""


class Control(Message):
    """Client → core: a control of the whole engine, answered by one `ControlDone`.

    A control without effect is not an error.
    """

    number: RequestId
    action: ControlAction
    pause_mode: PauseMode = PauseMode.PAUSED_ALL
    reset_running_requests: bool = False
    """For RESET_PREFIX_CACHE: preempt the running requests, so that no block is in use."""
    restores: bool = False
    """Whether the control was in force in an earlier core. A core that has received another pause,
    sleep or resume since, or is already paused more strictly, ignores it."""
    adapter: Adapter | None = None
    """The adapter to load or unload, for LOAD_ADAPTER and UNLOAD_ADAPTER."""


class ControlDone(Message):
    """Core → client: the answer to a `Control`."""

    number: RequestId
    ok: bool
    """False: the engine is starting or draining, blocks are in use, the sleep was ended before it
    began, or the state to restore is out of date."""
    pause_mode: PauseMode
    error: Text = ""
    """The reason why an adapter cannot be used."""
    code: ErrorCode = ErrorCode.INVALID
    """Code of the error in `error`."""


class KVEventsTaken(Message):
    """Client → core: a `KVEventBatch` was read or dropped; there is room for another one."""


class RequestOutput(Record):
    """New tokens of one request, and its end if it has ended."""

    request_id: RequestId
    first_index: Count
    """Index of `token_ids[0]` among the request's outputs."""
    token_ids: TokenIds
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended it, of `stop_token_ids` or an EOS token other than the model's first."""
    num_cached_tokens: Count | None = None
    """Prompt tokens found in the prefix cache; sent with the first output only."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[PromptLogprobs] | None = None
    """Log-probabilities of the prompt tokens computed since the last output."""
    embedding: PackedVector | None = None
    """The vector of a request with `pooling`; its only output, which has no tokens."""
    num_computed_tokens: Count | None = None
    """With `return_progress`: how many prompt tokens have KV. Only outputs without tokens have
    it."""
    queue_time_s: Annotated[float, Meta(ge=0.0)] | None = None
    """Seconds from the request's acceptance to its first admission; sent with the first token, but
    not if the request had outputs when it came to this core."""


class StepOutputs(Message):
    """Core → client: the outputs of one step for this client's requests."""

    outputs: list[RequestOutput]


class Refused(Message):
    """Core → client: this request is refused, or has failed. It gets no further outputs."""

    request_id: RequestId | None
    """None if the frame could not be decoded; `seq` is then the number of that frame."""
    error: RequestError
    seq: Count = 0


class EngineStats(Record):
    """Gauges as of now and counters since the core started."""

    num_running_reqs: Count = 0
    num_waiting_reqs: Count = 0
    kv_cache_usage: float = 0.0
    """0 to 1."""
    num_steps: Count = 0
    num_preemptions: Count = 0
    prompt_tokens: Count = 0
    generation_tokens: Count = 0
    prefix_cache_queries: Count = 0
    """Tokens looked up."""
    prefix_cache_hits: Count = 0
    kv_blocks_stored: Count = 0
    """KV blocks that workers were to write to stores."""
    kv_tokens_loaded: Count = 0
    """Tokens whose KV was read from stores instead of computed."""
    fenced_frames: Count = 0
    worker_restarts: Count = 0
    loop_seconds_buckets: list[int] = []
    """Iterations of the core's loop by duration, not cumulative; bounds: `LOOP_BUCKETS_S`."""
    loop_seconds_sum: float = 0.0
    spec_decode_num_drafts: Count = 0
    """Verifications, each of one request in one step."""
    spec_decode_num_draft_tokens: Count = 0
    spec_decode_num_accepted_tokens: Count = 0
    spec_decode_num_accepted_tokens_per_pos: list[int] = []
    """How often the first, second, ... draft token was accepted."""
    num_quarantined: Count = 0
    num_speculating_reqs: Count = 0
    """Running requests with drafts to verify."""
    state_cache_usage: float | None = None
    """Share of the state blocks that running requests hold, 0 to 1; None: there are none."""
    states_stored: Count = 0
    """Recurrent states that workers were to write to stores."""
    states_loaded: Count = 0
    """Recurrent states that were read from stores."""
    kv_remote_tokens_loaded: Count = 0
    """The part of `kv_tokens_loaded` that came from other machines."""
    step_tokens_buckets: list[int] = []
    """Steps by the number of their tokens, not cumulative; bounds: `STEP_TOKENS_BUCKETS`. Steps
    without tokens are not counted."""
    step_tokens_sum: Count = 0
    running_lora_adapters: list[str] = []
    """Names of the adapters of running requests."""
    waiting_lora_adapters: list[str] = []
    """Names of the adapters of requests that wait."""


LOOP_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1)
"""Upper bounds of `EngineStats.loop_seconds_buckets`; one more bucket is open-ended."""
STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of `EngineStats.step_tokens_buckets`, those of vLLM; one more is open-ended."""


class Status(Message):
    """Core → client: answer to Connect, on every change of state, and about once a second.

    The header's epoch is the core's. At a new epoch the client sends everything open.
    """

    state: EngineState
    facts: ModelFacts | None
    """None until a worker was adopted."""
    stats: EngineStats
    pause_mode: PauseMode = PauseMode.RUNNING
    is_sleeping: bool = False
    """Whether the engine sleeps: from a SLEEP until the next RESUME. Memory is released once the
    steps sent before it are done."""
    blocks_at: BlocksAddress = ""
    """Where other machines read the KV blocks stored on this one; the host may be `*`."""
    is_loading_anew: bool = False
    """While RECOVERING: the lost workers were killed from outside, and their successors must load
    the model first. The requests are not suspected of causing the loss, and it takes long until
    they continue here."""


ClientToCore = (
    Connect
    | AddRequest
    | AbortRequests
    | Control
    | SubscribeKVEvents
    | UnsubscribeKVEvents
    | KVEventsTaken
)
CoreToClient = StepOutputs | Refused | Status | ControlDone | KVEventBatch | KVEventsRefused

decode_from_client: Decoder[ClientToCore] = Decoder(ClientToCore)
decode_from_core: Decoder[CoreToClient] = Decoder(CoreToClient)
