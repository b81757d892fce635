"""Link 2, core and workers: full data once, then only what changed.

The worker mirrors the running set in admission order, so a steady decode step names nobody: every
mirrored request computes one more token unless the message says otherwise. Rules of the mirror:

1. `preempted_req_ids` and `finished_req_ids` leave the mirror first. A preempted request is
   forgotten; it comes back, if at all, as a new one.
2. `scheduled_new_reqs` are appended to it, in order.
3. `scheduled_cached_reqs` appends blocks to the tables of the requests that it names.
4. Every mirrored request is scheduled for `num_scheduled_tokens.get(req_id, 1)` tokens (0: it sits
   this step out), from its number of computed tokens on, in mirror order.
5. A request samples in every step that reaches the end of its known tokens; the worker appends
   what it sampled itself and feeds it forward. That is one token, or more where the step went on
   past the known tokens over drafts, and some of these were right; the KV of wrong ones does not
   count as computed.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, field

from protocol.message import (
    Decoder,
    Message,
    PackedTokenIds,
    Record,
    RequestId,
    Text,
    TokenIds,
)
from protocol.sampling import SamplingParams

NULL_BLOCK = 0
"""Stands in block tables where a window has passed; no request ever holds it."""
StepId = Annotated[int, Meta(ge=0, lt=2**53)]
BlockIds = Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(max_length=2**21)]


class KVGroup(Record):
    """Layers that share their block tables: all see equally far."""

    window: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    """A token sees so many positions, itself included; None: all before it."""
    max_blocks: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    """Blocks that one request holds at most, whatever its length; None: no such bound."""


class ModelFacts(Record):
    """What only a worker can know: the loaded model and the memory it found."""

    model: Text
    """Name or directory as configured."""
    vocab_size: Annotated[int, Meta(ge=1, lt=2**31)]
    max_model_len: Annotated[int, Meta(ge=2, lt=2**31)]
    """Tokens, prompt and output together."""
    block_size: Annotated[int, Meta(ge=1, le=1024)]
    num_gpu_blocks: Annotated[int, Meta(ge=2, lt=2**31)]
    """Blocks in the pool, with block 0, the null block, which is never handed out."""
    eos_token_ids: Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(max_length=64)]
    dtype: Text = ""
    device: Text = ""
    kv_groups: Annotated[list[KVGroup], Meta(min_length=1, max_length=64)] = field(
        default_factory=lambda: [KVGroup()]
    )
    """A request has one block table for each; all take their blocks from one pool."""
    num_host_blocks: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Blocks in host memory, numbered from 0, for the KV of requests that are swapped out."""
    exact_resume: bool = False
    """A request that is computed again from its tokens, whatever beside and in whatever chunks,
    gets the same logits bit for bit, and so the same tokens."""
    exact_resume_reason: Text = ""
    """Why not; empty if it is so."""

    def can_replace(self, before: "ModelFacts") -> bool:
        """Whether all that clients were promised still holds; how exact it is may have changed."""
        return self == msgspec.structs.replace(
            before,
            exact_resume=self.exact_resume,
            exact_resume_reason=self.exact_resume_reason,
        )

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks of the pool that a request of so many tokens holds at once, at most."""
        num_blocks = -(-num_tokens // self.block_size)
        return sum(
            num_blocks if group.max_blocks is None else min(num_blocks, group.max_blocks)
            for group in self.kv_groups
        )


class WorkerHello(Message):
    """Worker → core, the first message of a connection: who I am and what I have loaded.

    The header's epoch is the worker's own, as its supervisor issued it.
    """

    rank: Annotated[int, Meta(ge=0, lt=1024)]
    pid: Annotated[int, Meta(ge=1, lt=2**31)]
    facts: ModelFacts
    swap_cost_tokens: Annotated[float, Meta(ge=0.0)] = 0.0
    """Copying one block to the host and back takes as long as computing so many prompt tokens."""


class Adopt(Message):
    """Core → worker: forget every request; the next step is `first_step_id`.

    The header's epoch holds for the link from now on. It is at least the core's and every worker's,
    and greater than at any adoption before.
    """

    first_step_id: StepId


class NewRequestData(Record):
    """A request the worker does not know: new, or resumed after a preemption."""

    req_id: RequestId
    token_ids: PackedTokenIds
    """Prompt and outputs so far."""
    num_prompt_tokens: Annotated[int, Meta(ge=1)]
    """The first so many of `token_ids` are the prompt; outputs stay outputs."""
    sampling_params: SamplingParams
    block_ids: list[BlockIds]
    """One table per KV group, all equally long. Block 0, the null block, stands where the group's
    window has passed and nothing will ever be read."""
    num_computed_tokens: Annotated[int, Meta(ge=0)]
    """Computing starts here: KV of the positions before comes from the prefix cache or the host."""
    num_cached_tokens: Annotated[int, Meta(ge=0)]
    """KV of so many positions is in the blocks. One more than `num_computed_tokens` where the whole
    prompt was found: its last token is computed for its logits, and no KV is written for it."""


class CachedRequestData(Record):
    """Columns over the known requests whose block tables grow in this step."""

    req_ids: list[RequestId] = []
    new_block_ids: list[list[BlockIds]] = []
    """For each request: what is appended to the table of each KV group, equally much to all."""


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
    """Only what differs from one token. What reaches past the known tokens are drafts to verify:
    the first ones of those that the worker has announced for the request."""
    total_num_scheduled_tokens: Annotated[int, Meta(ge=0)]
    """Over the whole mirror; both ends add up and compare."""
    preempted_req_ids: list[RequestId]
    finished_req_ids: list[RequestId]
    swap_out: BlockCopies = field(default_factory=BlockCopies)
    """From the pool to the host, before anything else happens in this step."""
    swap_in: BlockCopies = field(default_factory=BlockCopies)
    """From the host to the pool, to blocks of requests that are new in this step: after
    `swap_out`, before the step computes."""


class Sleep(Message):
    """Core → worker: give the memory of the KV cache back until the next step; its content is lost.

    Every request has left the mirror before.
    """


class TokenLogprobs(Record):
    """Log-probabilities at one position, of the raw logits (before penalties and temperature)."""

    token_id: int
    logprob: float
    rank: int
    """Position of the token in the whole vocabulary by likelihood, from 1."""
    top_ids: list[int]
    top_logprobs: list[float]


class PromptLogprobs(Record):
    """Log-probabilities of prompt tokens computed in one step."""

    req_id: RequestId
    first_position: int
    """Position of the first entry's token; the token at position 0 has no logprob."""
    entries: list[TokenLogprobs]


class ModelRunnerOutput(Message):
    """Worker rank 0 → core: what a step sampled."""

    step_id: StepId
    sampled_token_ids: TokenIds
    """Tokens of each request that sampled, in mirror order."""
    num_sampled_tokens: list[Annotated[int, Meta(ge=1)]] = []
    """For each of them, how many of these tokens are its own: one, and one more for every draft
    that was right. Empty: one each."""
    num_draft_tokens: list[Annotated[int, Meta(ge=0)]] = []
    """For each of them, how many tokens the worker guesses to come next, for the next step to
    verify. Empty: none."""
    logprobs: dict[RequestId, list[TokenLogprobs]] = {}
    """Of the requests that asked for them, one for each token."""
    prompt_logprobs: list[PromptLogprobs] = []
    forward_ns: Annotated[int, Meta(ge=0)] = 0
    """From the step's arrival to its tokens."""


class StepFailed(Message):
    """Worker → core: this step raised. The worker exits after it; the text is for the log."""

    step_id: StepId
    error: Text


WorkerToCore = WorkerHello | ModelRunnerOutput | StepFailed
CoreToWorker = Adopt | SchedulerOutput | Sleep

decode_from_worker: Decoder[WorkerToCore] = Decoder(WorkerToCore)
decode_from_core: Decoder[CoreToWorker] = Decoder(CoreToWorker)
