"""A running request as the worker mirrors it, and its part of a step."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from protocol.core_worker import NULL_BLOCK
from protocol.sampling import SamplingParams
from worker_proc.drafting.draft_progress import DraftProgress
from worker_proc.drafting.ngram_index import NgramIndex
from worker_proc.grammar.state import GrammarState
from worker_proc.sampling.row_edits import RowEdits


@dataclass(slots=True, eq=False)
class MirroredRequest:
    """One running request."""

    req_id: int
    token_ids: list[int]  # prompt and outputs so far; grows with every sampled token
    num_prompt_tokens: int
    sampling_params: SamplingParams
    block_tables: "list[array[int]]"  # one per group, of type "i"; that of the states is the last
    num_computed_tokens: int
    num_cached_tokens: int  # no KV is written for positions before this one
    adapter_id: int = 0
    draft_token_ids: list[int] = field(default_factory=list)
    """Drafts for the tokens after `token_ids`, made when the last of these was sampled."""
    draft_limit: int = 0
    """Maximum number of drafts to make for the request."""
    ngram_index: NgramIndex | None = None
    draft_progress: DraftProgress | None = None
    """Number of tokens that the draft model has computed."""
    draft_states: list[int] = field(default_factory=list)
    """State blocks for the states before the request's drafts, one for each."""
    state_block: int = NULL_BLOCK
    """The draft state with the state of the computed tokens; NULL_BLOCK: the table has it."""
    grammar_state: GrammarState | None = None
    """State of the request's grammar, which the runner sets before the request's first step."""
    edits_scores: bool = field(init=False)
    """`sampling_params.edits_scores`, computed once."""
    edits: RowEdits | None = field(init=False)
    """The edits of the request's scores; None: there are none."""
    is_greedy: bool = field(init=False)
    """`sampling_params.greedy`, computed once."""
    needs_host: bool = field(init=False)
    """Whether the next token, or what is returned with it, needs the previous ids on the host."""
    is_confined: bool = field(init=False)
    """Whether a grammar or a thinking budget decides which tokens may follow."""
    pooled_so_far: object = None
    """The runner's data on the computed tokens, for a request that pools all of them."""

    def __post_init__(self) -> None:
        params = self.sampling_params
        self.edits_scores, self.is_greedy = params.edits_scores, params.greedy
        self.needs_host = (
            self.edits_scores
            or params.grammar is not None
            or params.logprobs is not None
            or params.prompt_logprobs is not None
            or params.pooling is not None
        )
        self.is_confined = params.grammar is not None or params.thinking_budget is not None
        self.edits = None
        if self.edits_scores:
            self.edits = RowEdits(params, self.token_ids, self.num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def token_ids_after(self, num_tokens: int) -> list[int]:
        """Return the ids after the first `num_tokens`."""
        return self.token_ids[num_tokens:]

    def append(self, outputs: Sequence[int]) -> None:
        """Add sampled tokens, or a placeholder for one that only the device knows."""
        self.token_ids += outputs
        if self.edits is not None:
            self.edits.add(outputs)


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """One request's part of a step."""

    request: MirroredRequest
    start: int  # position of the first token to compute
    num_tokens: int
    samples: bool
    """Whether the step reaches the end of the known tokens, with or without drafts after it."""

    @property
    def end(self) -> int:
        """Position after the last token to compute, which is the length of its context."""
        return self.start + self.num_tokens

    @property
    def num_drafts(self) -> int:
        """Drafts at the end of the tokens to compute; valid until the mirror advances."""
        return max(self.start + self.num_tokens - len(self.request.token_ids), 0)
