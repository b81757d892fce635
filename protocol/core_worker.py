"""The link between core and workers: full data once, then only what changed.

The worker mirrors the running set in admission order, so a steady decode step names no request:
every mirrored request computes one more token unless the message names it. Rules of the
mirror:

1. `preempted_req_ids` and `finished_req_ids` leave the mirror first. A preempted request is
   forgotten; if it comes back, it is new.
2. `scheduled_new_reqs` are appended to it, in order.
3. `scheduled_cached_reqs` appends blocks to the tables of the requests that it names.
4. Every mirrored request is scheduled for `num_scheduled_tokens.get(req_id, 1)` tokens (0: it sits
   this step out), from its number of computed tokens on, in mirror order.
5. A request samples in every step that reaches the end of its known tokens; the worker appends
   what it sampled itself and feeds it forward. That is one token, or more if the step continued
   past the known tokens over drafts, and some of these were accepted; the KV of rejected drafts
   does not count as computed.
6. After it has sampled, the worker makes up to `draft_limits` drafts for the request: the last
   number sent for it, or the configured one for a request that is new and not named.

Layers with a recurrent state (`KVGroup.is_state`) keep the state of a request, over all of these
layers, in one *state block*. State blocks have a separate pool and separate ids. The table of the
state group is as long as the other tables. A non-null entry i receives the state after the last
computed token of block i. With B = block_size, a step that computes positions [start, end) of a
request

* begins with zeros if start is 0, else with the state in table[(start - 1) // B], which is not
  null;
* for each non-null entry i from start // B to (end - 1) // B, writes the state after position
  min((i + 1) * B, end) - 1 to table[i]; table[(end - 1) // B] is never null.

So the core alone decides which states are kept for the prefix cache. One id may be in several
entries of a table if the core has moved the block along; only the last of these holds its state.
Entries before (start - 1) // B may be out of date at the worker, and are never read.

After a step over drafts some of which were rejected, the next step begins with the state after the
last accepted token, which the worker has kept, instead of the one in the table. What such a step
has written to entries after the first draft is not read. The core lets drafts add at most one
entry to the table, and end where an entry becomes a kept state.
"""

import enum
from typing import Annotated

from msgspec import Meta, field

from protocol.adapters import Adapter, AdapterId
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
)
from protocol.model_facts import ModelFacts
from protocol.sampling import MAX_EMBEDDING_SIZE, Grammar, SamplingParams

StepId = Annotated[int, Meta(ge=0, lt=2**53)]
GrammarId = Annotated[int, Meta(ge=0, lt=2**53)]
BlockIds = Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(max_length=2**21)]

MAX_DRAFTS = 16
"""Maximum number of drafts of a request in one step."""
NULL_BLOCK = 0
"""Never allocated; the entry of block tables at positions whose KV is no longer needed."""


class WorkerHello(Message):
    """Worker → core: the first message of a connection, under the worker's own epoch."""

    rank: Annotated[int, Meta(ge=0, lt=1024)]
    pid: Annotated[int, Meta(ge=1, lt=2**31)]
    facts: ModelFacts
    swap_cost_tokens: Annotated[float, Meta(ge=0.0)] = 0.0
    """Cost of copying one block to the host and back, in prompt tokens computed in that time."""
    last_link_epoch: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Epoch of the worker's last adoption, by this core or another one; 0: it had none."""


class Adopt(Message):
    """Core → worker: drop all requests; the next step is `first_step_id`.

    The header's epoch holds for the link from now on. It is at least the core's and every worker's,
    and greater than at any adoption of these workers before, by this core or another one.
    """

    first_step_id: StepId


class NewRequestData(Record):
    """A request that the worker does not know: new, or resumed after a preemption."""

    req_id: RequestId
    token_ids: PackedTokenIds
    """Prompt and outputs so far."""
    num_prompt_tokens: Annotated[int, Meta(ge=1)]
    sampling_params: SamplingParams
    block_ids: list[BlockIds]
    """One table per KV group, all equally long; NULL_BLOCK where the group's window has passed, or
    no state is kept."""
    num_computed_tokens: Annotated[int, Meta(ge=0)]
    """First position to compute: KV before it comes from the prefix cache or the host."""
    num_cached_tokens: Annotated[int, Meta(ge=0)]
    """Positions whose KV is in the blocks. One more than `num_computed_tokens` if the whole prompt
    was cached: its last token is computed for its logits, and no KV is written for it."""
    adapter_id: AdapterId = 0
    """An adapter that the worker has loaded; 0: none."""


class CachedRequestData(Record):
    """Columns over the known requests whose block tables grow in this step."""

    req_ids: list[RequestId] = []
    new_block_ids: list[list[BlockIds]] = []
    """For each request: blocks appended to the table of each KV group, equally many to all."""


class BlockCopies(Record):
    """Columns of blocks to copy, whole, in all layers."""

    device_block_ids: BlockIds = []
    host_block_ids: BlockIds = []


class SchedulerOutput(Message):
    """Core → worker: one step. The same bytes go to every rank."""

    step_id: StepId
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[RequestId, Annotated[int, Meta(ge=0)]]
    """Numbers other than one. Tokens past the known ones are drafts to verify: the first of those
    that the worker announced for the request."""
    total_num_scheduled_tokens: Annotated[int, Meta(ge=0)]
    """Over the whole mirror; the worker compares it with its own sum."""
    preempted_req_ids: list[RequestId]
    finished_req_ids: list[RequestId]
    swap_out: BlockCopies = field(default_factory=BlockCopies)
    """Copies from the pool to the host, before anything else in this step."""
    swap_in: BlockCopies = field(default_factory=BlockCopies)
    """Copies from the host to blocks of requests that are new in this step: after `swap_out`,
    before the step computes."""
    draft_limits: dict[RequestId, Annotated[int, Meta(ge=0, le=MAX_DRAFTS)]] = {}
    """Maximum number of drafts that the worker makes for a request from this step on. 0: nothing is
    computed for drafts."""
    state_swap_out: BlockCopies = field(default_factory=BlockCopies)
    """Like `swap_out`, for state blocks. Each one is the last in the table of a request that is
    preempted in this step, and holds the state after the request's computed tokens."""
    state_swap_in: BlockCopies = field(default_factory=BlockCopies)
    """Like `swap_in`, for state blocks."""


class Sleep(Message):
    """Core → worker: release the KV cache's memory until the next step; the mirror is empty."""


class CompileGrammar(Message):
    """Core → worker: compile a grammar alongside the steps. Each rank answers by `GrammarCompiled`.

    Its requests are introduced after that. An adoption cancels a compilation that was not answered.
    """

    grammar_id: GrammarId
    """Number that the sending core has given to the grammar."""
    grammar: Grammar
    is_proven: bool = False
    """Whether a worker has compiled the grammar before, within the limits."""
    origin: Origin = ""
    tenant: Tenant = ""
    """The account that waits for it. Grammars of several accounts are compiled in turns."""


class LoadAdapter(Message):
    """Core → worker: load an adapter alongside the steps, answered by one `AdapterLoaded`.

    Its requests are introduced after that. An adoption cancels a load that was not answered; after
    it the worker may drop any adapter that the new core has not requested.
    """

    adapter: Adapter
    keeps: bool = True
    """Whether it stays loaded; else it is only checked."""


class UnloadAdapter(Message):
    """Core → worker: drop an adapter that was loaded; no later step computes a request with it."""

    adapter_id: AdapterId


BlockKey = Annotated[bytes, Meta(min_length=32, max_length=33)]
"""The hash of a prefix (`protocol/kv_events.py`), and the number of a KV group after the first."""


_HOST = r"(\*|[A-Za-z0-9]([A-Za-z0-9._-]{0,253}[A-Za-z0-9])?)"
BlocksAddress = Annotated[str, Meta(pattern=f"^(tcp://{_HOST}:[1-9][0-9]{{0,4}})?$")]
"""Address of a machine's block server (`protocol/stores/block_link.py`); empty: none."""


class StoreBlocks(Message):
    """Core → worker: write these blocks to the stores, with what the steps before have computed.

    Later steps may overwrite the blocks. A block that cannot be written is left out.
    """

    block_ids: BlockIds
    keys: list[BlockKey]
    state_block_ids: BlockIds = []
    """Blocks with kept states of recurrent layers, of the pool of state blocks."""
    state_keys: list[BlockKey] = []


class LoadBlocks(Message):
    """Core → worker: fill these blocks from the stores, after the steps sent before.

    They are read alongside later steps. The message is answered by one `BlocksLoaded` of each rank,
    unless an adoption comes first.
    """

    req_id: RequestId
    """Id of the request that waits for the blocks."""
    block_ids: BlockIds
    keys: list[BlockKey]
    state_block_id: Annotated[int, Meta(ge=0, lt=2**31)] = NULL_BLOCK
    """A state block, which is filled before the KV blocks; NULL_BLOCK: none. Without its state the
    KV is of no use, and is not read."""
    state_key: Annotated[bytes, Meta(max_length=33)] = b""
    source: BlocksAddress = ""
    """Block server that blocks are read from if no store of this machine has them; empty: none."""
    limit_ms: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Maximum time in milliseconds for reading from `source`, from the arrival of the message:
    computing would take as long. 0: only the worker's own limits apply."""


class FindBlocks(Message):
    """Core → worker: ask the block server of another machine which of these blocks it has.

    Answered by one `BlocksFound` of each rank, unless an adoption comes first.
    """

    req_id: RequestId
    """Id of the request that waits for the answer."""
    source: BlocksAddress
    keys: list[BlockKey]


class TokenLogprobs(Record):
    """Log-probabilities at one position, of the raw logits (before penalties and temperature)."""

    token_id: int
    logprob: float
    rank: int
    """Rank of the token in the whole vocabulary by likelihood, from 1."""
    top_ids: list[int]
    top_logprobs: list[float]


class PromptLogprobs(Record):
    """Log-probabilities of prompt tokens computed in one step."""

    req_id: RequestId
    first_position: int
    """Position of the first entry's token; the token at position 0 has no logprob."""
    entries: list[TokenLogprobs]


PackedVector = Annotated[bytes, Meta(max_length=4 * MAX_EMBEDDING_SIZE)]
"""Numbers of 32 bits, little-endian."""


class ModelRunnerOutput(Message):
    """Worker → core: the results of a step, from the first rank of the last stage."""

    step_id: StepId
    sampled_token_ids: TokenIds
    """Tokens of each request that sampled, in mirror order."""
    num_sampled_tokens: list[Annotated[int, Meta(ge=1)]] = []
    """For each of them, one plus the number of its accepted drafts. Empty: one each."""
    num_draft_tokens: list[Annotated[int, Meta(ge=0)]] = []
    """For each of them, the number of drafts for the next step to verify. Empty: none."""
    logprobs: dict[RequestId, list[TokenLogprobs]] = {}
    prompt_logprobs: list[PromptLogprobs] = []
    forward_ns: Annotated[int, Meta(ge=0)] = 0
    """Nanoseconds from the step's arrival to its tokens."""
    request_errors: dict[RequestId, Text] = {}
    """Why requests that sampled have failed. Their tokens are computed but meaningless."""
    pooled: dict[RequestId, PackedVector] = {}
    """The vectors of requests with `pooling` that sampled. Their tokens are meaningless."""
    draft_ns: Annotated[int, Meta(ge=0)] = 0
    """Nanoseconds of `forward_ns` that the drafts for the next step took."""
    wait_ns: Annotated[int, Meta(ge=0)] = 0
    """Nanoseconds from the end of the previous step to this step's arrival; 0: the worker had no
    requests."""


class StepFailed(Message):
    """Worker → core: this step raised. The worker exits after it; the text is for the log."""

    step_id: StepId
    error: Text


class GrammarFault(enum.StrEnum):
    """Why a grammar cannot be used."""

    WRONG = "wrong"
    """The grammar is invalid, or exceeds a limit."""
    BUSY = "busy"
    """Too many other grammars that compile slowly are being compiled."""
    BROKEN = "broken"
    """The process that compiles grammars does not work."""


class GrammarCompiled(Message):
    """Worker → core: a grammar is ready for its requests on this rank, or cannot be used."""

    grammar_id: GrammarId
    error: Text = ""
    """What is wrong with it, or the limit that it exceeds; empty: it is ready."""
    fault: GrammarFault = GrammarFault.WRONG
    """What kind of error it is, if there is one."""


class AdapterLoaded(Message):
    """Worker → core: an adapter is loaded, or was checked, or cannot be used."""

    adapter_id: AdapterId
    error: Text = ""
    """Why its files are invalid or do not fit the model; empty: they can be used."""


class BlocksLoaded(Message):
    """Worker → core: the end of a `LoadBlocks`, with the blocks that were read. Each rank answers.

    It writes to none of the blocks after this.
    """

    req_id: RequestId
    num_blocks: Annotated[int, Meta(ge=0)]
    """Leading blocks of `LoadBlocks` that were filled."""
    load_ns: Annotated[int, Meta(ge=0)] = 0
    """Nanoseconds since the message arrived."""
    has_state: bool = False
    """Whether the state block was filled, if one was asked for."""
    num_remote_blocks: Annotated[int, Meta(ge=0)] = 0
    """The part of `num_blocks` that came from another machine."""
    remote_ns: Annotated[int, Meta(ge=0)] = 0
    """The part of `load_ns` that was spent on blocks from another machine."""
    has_remote_state: bool = False
    """Whether the state came from another machine."""


class BlocksFound(Message):
    """Worker → core: which blocks another machine has. Each rank answers."""

    req_id: RequestId
    are_there: bytes
    """One byte for each key of `FindBlocks`, 1 if the block is probably there. Empty: the server
    does not answer."""


RankAnswer = GrammarCompiled | AdapterLoaded | BlocksLoaded | BlocksFound
"""The answers of every rank to messages about work alongside the steps."""
WorkerToCore = WorkerHello | ModelRunnerOutput | StepFailed | RankAnswer
CoreToWorker = (
    Adopt
    | SchedulerOutput
    | Sleep
    | CompileGrammar
    | LoadAdapter
    | UnloadAdapter
    | StoreBlocks
    | LoadBlocks
    | FindBlocks
)

decode_from_worker: Decoder[WorkerToCore] = Decoder(WorkerToCore)
decode_from_core: Decoder[CoreToWorker] = Decoder(CoreToWorker)
