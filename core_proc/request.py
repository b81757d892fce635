"""A request as the core sees it: its tokens, how far they are computed, and its state."""

import enum
from array import array
from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import NamedTuple

from core_proc.scheduling.acceptance import Acceptance
from core_proc.scheduling.repetition import first_length
from protocol.kv_events import PrefixHash
from protocol.message import unpack_token_array
from protocol.sampling import FinishReason, SamplingParams


class RequestStatus(enum.Enum):
    """The state of a request; `TRANSITIONS` lists the moves between them."""

    WAITING = "waiting"
    WAITING_FOR_GRAMMAR = "waiting_for_grammar"
    WAITING_FOR_ADAPTER = "waiting_for_adapter"
    WAITING_FOR_REMOTE_KV = "waiting_for_remote_kv"
    """Keeps its place, and holds the blocks that its KV is loaded into."""
    WAITING_FOR_TRIAL = "waiting_for_trial"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "finished_stopped"
    FINISHED_LENGTH_CAPPED = "finished_length_capped"
    FINISHED_REPETITION = "finished_repetition"
    FINISHED_ABORTED = "finished_aborted"
    FINISHED_ERROR = "finished_error"


_S = RequestStatus
FINISHED_STATUS = {
    FinishReason.STOP: _S.FINISHED_STOPPED,
    FinishReason.LENGTH: _S.FINISHED_LENGTH_CAPPED,
    FinishReason.ABORT: _S.FINISHED_ABORTED,
    FinishReason.ERROR: _S.FINISHED_ERROR,
    FinishReason.REPETITION: _S.FINISHED_REPETITION,
}

_FINISHED = frozenset(FINISHED_STATUS.values())
_GIVEN_UP = frozenset({_S.FINISHED_ABORTED, _S.FINISHED_ERROR})
FOR_WORKER = frozenset({_S.WAITING_FOR_GRAMMAR, _S.WAITING_FOR_ADAPTER})
"""States of requests that wait for something that each new worker has to make again."""
BLOCKED = FOR_WORKER | {_S.WAITING_FOR_REMOTE_KV, _S.WAITING_FOR_TRIAL}
"""States of requests that are not admitted before `Scheduler.unblock`."""

TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    _S.WAITING: _GIVEN_UP
    | FOR_WORKER
    | {_S.RUNNING, _S.WAITING_FOR_REMOTE_KV, _S.WAITING_FOR_TRIAL},
    # On a new worker the grammar of a request that has run is compiled again.
    _S.WAITING_FOR_GRAMMAR: _GIVEN_UP | {_S.WAITING, _S.PREEMPTED},
    _S.WAITING_FOR_ADAPTER: _GIVEN_UP | {_S.WAITING, _S.PREEMPTED},
    _S.WAITING_FOR_REMOTE_KV: _GIVEN_UP | {_S.WAITING, _S.PREEMPTED},
    _S.RUNNING: _FINISHED | {_S.PREEMPTED},
    # A preempted request may still stop: a token of a step in flight arrives late.
    _S.PREEMPTED: _FINISHED
    | FOR_WORKER
    | {_S.RUNNING, _S.WAITING_FOR_REMOTE_KV, _S.WAITING_FOR_TRIAL},
    _S.WAITING_FOR_TRIAL: _FINISHED | FOR_WORKER | {_S.WAITING, _S.PREEMPTED},
    **dict.fromkeys(_FINISHED, frozenset()),
}


class SwappedOut(NamedTuple):
    """KV of a preempted request in host memory."""

    num_computed_tokens: int
    """Leading positions whose KV was copied, except where windows have passed it."""
    host_tables: list[list[int]]
    """One per KV group: the host's block, or NO_BLOCK, for each block of the table."""
    host_state: int | None = None
    """With recurrent layers: the host's block with the state after these positions."""


@dataclass(slots=True, eq=False)
class Request:
    """One request, from its arrival to its end; compared by identity."""

    req_id: int
    prompt: InitVar[Sequence[int] | bytes]
    sampling_params: SamplingParams
    _: KW_ONLY
    outputs: InitVar[Sequence[int]] = ()
    """Outputs of an earlier life, at its arrival."""
    priority: int = 0
    arrival_time: float = 0.0
    """When its client accepted it, in seconds on the core's clock."""
    cache_salt: str = ""
    adapter_id: int = 0
    """LoRA adapter that its KV depends on; 0: none."""
    adapter_digest: bytes = b""
    """Digest of everything in the adapter; the id has only 53 bits of it."""
    adapter_name: str = ""
    tenant: str = ""
    origin: str = ""
    """The client: an API key, an address, or a program that has named neither."""
    blocks_at: str = ""
    """Block server of the machine that it was moved from; empty: it was not moved."""
    owner: object = None
    """What the engine attaches to it; opaque to the scheduler."""

    token_ids: "array[int]" = field(init=False)
    """The prompt, and the outputs that have arrived from the worker."""
    num_prompt_tokens: int = field(init=False)
    num_arrived_tokens: int = field(init=False)
    """Tokens at its arrival: the prompt, and outputs of an earlier life."""
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when first admitted; None until then."""
    num_preemptions: int = 0
    fingerprint: int | None = None
    """Equal for equal requests; None until the quarantine needs it."""

    # Written by the scheduler.
    arrival_index: int = 0
    arrival_clock: int = 0
    """Total number of tokens that the scheduler had granted at its arrival."""
    virtual_start: float = 0.0
    admission_index: int = 0
    """Counts admissions: the running requests, and the worker's mirror, are in this order."""
    num_computed_tokens: int = 0
    """Positions whose KV exists once every step sent so far has run."""
    due_at: int = 0
    """The step in which `DueIndex` returns it; 0: none."""
    may_load: bool = True
    """Whether blocks may be loaded for it: once before each time that it is admitted."""
    num_late_tokens: int = 0
    """Outputs that steps in flight still owe to a preempted request."""
    num_draft_tokens: int = 0
    """Drafts that the worker has for the next step."""
    num_drafts_in_flight: int = 0
    """Drafts among the computed tokens, which a step in flight verifies."""
    draft_limit: int = 0
    """Maximum number of drafts that the worker makes for it, once the next step is sent."""
    acceptance: Acceptance | None = None
    """How many of its drafts were right; None until the first was verified."""
    num_draft_failures: int = 0
    """How often its drafts did not pay, since they last did."""
    drafts_from: int = 0
    """Number of tokens from which on a request without drafts gets some again."""
    max_num_tokens: int = 0
    """Prompt and outputs at which the request ends."""
    checked_from: int = 0
    """Prompt and outputs from which on any token may end it: `max_num_tokens`, or less where
    repetitions are detected."""
    stop_token_ids: frozenset[int] = frozenset()
    """EOS, unless ignored, and the request's own stop tokens."""

    # Written by the KV manager.
    block_tables: list[list[int]] = field(default_factory=list)
    """One per KV group, all equally long; none while it holds no blocks. Entry i holds the KV
    of positions from i x block_size on; NULL_BLOCK where the group's window has passed."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Entry i is the hash of all tokens up to the end of block i; extended when needed."""
    prefix_hash: PrefixHash | None = None
    num_hashed_blocks: int = 0
    """Leading blocks of the tables that are in the prefix cache."""
    swapped_out: SwappedOut | None = None

    def __post_init__(self, prompt: Sequence[int] | bytes, outputs: Sequence[int]) -> None:
        self.token_ids = (
            unpack_token_array(prompt) if isinstance(prompt, bytes) else array("I", prompt)
        )
        self.num_prompt_tokens = len(self.token_ids)
        self.token_ids.extend(outputs)
        self.num_arrived_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and outputs."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Outputs of a running request that steps in flight will bring (placeholders).

        A step samples exactly when it reaches the end of the tokens, pending ones included, so the
        count follows from how far the computed tokens are ahead.
        """
        return max(0, self.num_computed_tokens + 1 - len(self.token_ids))

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens].tolist()

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_fresh(self) -> bool:
        """Whether it arrived without outputs of an earlier life."""
        return self.num_arrived_tokens == self.num_prompt_tokens

    def has_begun(self) -> bool:
        """Return whether it has been admitted before, here or in an earlier life."""
        return self.num_cached_tokens is not None or self.num_output_tokens > 0

    def set_limits(self, max_model_len: int, eos_token_ids: frozenset[int]) -> None:
        """Set the conditions that end it.

        A ValueError, whose text begins with a field, if that field leaves no token to sample.
        """
        params = self.sampling_params
        if params.pooling is not None:  # its one token is dropped, and so needs no position
            max_model_len += 1
        self.max_num_tokens = min(self.num_prompt_tokens + params.max_tokens, max_model_len)
        self.checked_from = self.max_num_tokens
        if params.repetition_detection is not None:
            num_outputs = max(first_length(params.repetition_detection), params.min_tokens)
            self.checked_from = min(self.max_num_tokens, self.num_prompt_tokens + num_outputs)
        own = params.stop_token_ids
        if params.ignore_eos and params.grammar is None:  # a grammar's end is the only one
            self.stop_token_ids = frozenset(own)
        else:  # one set for all requests without stop tokens
            self.stop_token_ids = eos_token_ids.union(own) if own else eos_token_ids
        if self.num_prompt_tokens == 0:
            raise ValueError("prompt_token_ids must not be empty")
        if self.num_tokens >= self.max_num_tokens:
            raise ValueError(
                f"output_token_ids leave no token to sample: with the prompt there are"
                f" {self.num_tokens} tokens, and {self.max_num_tokens} end the request"
            )

    def become(self, status: RequestStatus) -> None:
        """Change the status along `TRANSITIONS`; anything else is a bug."""
        assert status in TRANSITIONS[self.status], (
            f"request {self.req_id} cannot go from {self.status.value} to {status.value}"
        )
        self.status = status

    def finish(self, reason: FinishReason, stop_token_id: int | None = None) -> None:
        self.become(FINISHED_STATUS[reason])
        self.finish_reason = reason
        self.stop_token_id = stop_token_id
