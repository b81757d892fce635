"""The client's ledger: the source of truth about every request that it has accepted.

Theory of operation. A request enters by `accept` and leaves by `fail`, or by the output of `take`
that has a finish reason. Until then the ledger holds everything that cannot be computed again: the
prompt, the resolved parameters, the delivered tokens, and the time of acceptance. Core and workers
are caches of it, so every repair is the same message: `Entry.resumed`, the request with its known
tokens, which replaces the core's copy.

Exactly once, by index: with n tokens known, an output that starts at n is new; one that starts
lower is a repetition, which is compared with the known tokens and cut; one that starts higher shows
a gap. Prompt logprobs are compared by position in the same way.

Invariants: known tokens only grow, and a caller gets each of them once, in order; a contradiction
(other tokens at a known index) fails the request and changes no token. A gap causes one repair:
further outputs after the same gap are ignored until `allow_repairs`, which runs about once a
second; after `REPAIR_MESSAGES_MAX` repairs without an output that fits, the request fails. Entries
are in order of acceptance, and a resend follows this order. Ages are differences of this process's
clock, so that the core can order requests of all its clients without comparing clocks.
"""

import contextlib
import itertools
import time
from array import array
from collections.abc import Callable, Iterator
from typing import TypedDict

import msgspec

from protocol.adapters import Adapter
from protocol.api_core import (
    PACKED_FROM_TOKENS,
    AddRequest,
    ErrorCode,
    RequestError,
    RequestOutput,
    decode_from_client,
)
from protocol.client.errors import failure_of
from protocol.client.packed_prompt import PackedPrompt, PromptIds
from protocol.config.request_errors import request_error
from protocol.core_worker import PromptLogprobs
from protocol.message import MAX_TEXT, MAX_TOKEN_IDS, ProtocolError, encode, pack_token_ids
from protocol.model_facts import ModelFacts
from protocol.request_validation import validate_request
from protocol.sampling import SamplingParams
from protocol.transport.channel import MAX_FRAME_BYTES

REPAIR_MESSAGES_MAX = 3
MOVES_MAX = 3
"""Maximum number of moves to other replicas without an output in between."""


class RequestOptions(TypedDict, total=False):
    """Options of `submit` besides the prompt and its sampling parameters."""

    priority: int
    """Lower values run sooner under the priority policy; 0 by default."""
    cache_salt: str
    """Requests share cached prefixes only with requests that have the same salt."""
    tenant: str
    """The request's account; the fair policy shares the engine among tenants."""
    origin: str
    """The API key or the address that the request came from; empty by default: the client itself.
    Origins get equal shares of the compilation of grammars, and, for requests without a tenant,
    of the engine under the fair policy."""
    adapter: Adapter | None
    """The LoRA adapter to apply; none by default."""
    resent: bool
    """True for part of an accepted request, which is not refused because of a full queue or
    draining."""


class RoutedOptions(RequestOptions, total=False):
    """Further options of a client with several replicas."""

    affinity: str
    """Requests with the same value go to the same replica while it serves; empty: to any
    replica."""


def check_request(
    add: AddRequest, facts: ModelFacts, prompt: PromptIds | None = None
) -> tuple[AddRequest, bytes]:
    """Check a request as the core will, before it is accepted; RequestFailed states the limit.

    Structs check no bounds when they are built, so the encoded request is decoded again. Returns
    the request, which shares no objects with the caller's, and its encoded body; a long prompt is
    packed in both. `prompt` is the prompt of a request that has none.
    """
    if not isinstance(add.sampling_params, SamplingParams):
        problem = (
            f"sampling_params: must be SamplingParams, got {type(add.sampling_params).__name__}"
        )
        raise failure_of(RequestError(ErrorCode.INVALID, problem, "sampling_params"))
    prompt = add.prompt_token_ids if prompt is None else prompt
    packed, id_bound = _packed(prompt)
    token_ids = [] if packed or isinstance(prompt, PackedPrompt) else prompt
    add = msgspec.structs.replace(add, prompt_token_ids=token_ids, packed_prompt=packed)
    try:
        body = encode(add)
    except (TypeError, ValueError, OverflowError, RecursionError) as problem:
        message = f"request cannot be encoded: {problem}"[:MAX_TEXT]
        raise failure_of(RequestError(ErrorCode.INVALID, message)) from problem
    try:
        checked = decode_from_client(body)
    except ProtocolError as problem:
        raise failure_of(request_error(str(problem))) from problem
    assert isinstance(checked, AddRequest)
    error = validate_request(checked, facts, id_bound)
    if error is None and len(body) > MAX_FRAME_BYTES:
        message = f"prompt and output_token_ids: the request has {len(body)} bytes"
        message = f"{message}, more than the {MAX_FRAME_BYTES} of a frame"
        error = RequestError(ErrorCode.TOO_LONG, message, "output_token_ids")
    if error is not None:
        raise failure_of(error)
    return checked, body


def _packed(prompt: PromptIds) -> tuple[bytes, int | None]:
    """Return the packed ids and their known bound; empty if the ids are not packed."""
    if isinstance(prompt, PackedPrompt):
        return prompt
    if PACKED_FROM_TOKENS <= len(prompt) <= MAX_TOKEN_IDS:
        # Ids that can be packed stay packed, so that no object is needed for each of them.
        with contextlib.suppress(TypeError, OverflowError):
            return pack_token_ids(prompt), None
    return b"", None


class OpenLimits:
    """Limits on what is open at once, shared by several ledgers."""

    def __init__(self, max_open: int, max_open_tokens: int | None = None) -> None:
        """Limit the number of open requests, and the total tokens of their prompts."""
        self._max_open = max_open
        self._max_open_tokens = max_open_tokens
        self.num_open = 0
        self.num_prompt_tokens = 0

    def require(self, num_tokens: int) -> None:
        """Raise Overloaded if one more request does not fit."""
        limit = self._max_open_tokens
        full = None
        if self.num_open >= self._max_open:
            full = f"{self._max_open} requests"
        elif limit is not None and self.num_prompt_tokens + num_tokens > limit and self.num_open:
            full = f"prompts of {limit} tokens"
        if full is not None:
            message = f"{full} are open, the most this client takes"
            raise failure_of(RequestError(ErrorCode.OVERLOADED, message))


class Entry:
    """An open request and its known outputs."""

    __slots__ = (
        *("accepted_at", "add", "next_prompt_position", "num_expected_cached", "num_moves"),
        *("num_repairs", "output_token_ids"),
    )

    def __init__(self, add: AddRequest, accepted_at: float) -> None:
        self.add = add
        self.accepted_at = accepted_at
        self.output_token_ids = array("i", add.output_token_ids)
        self.num_repairs = 0
        """Repairs since the last output without a gap."""
        self.num_moves = 0
        """Moves to other replicas since the last output."""
        self.next_prompt_position = 0
        self.num_expected_cached = 0
        """Prompt tokens that the core is expected to have cached."""

    @property
    def has_begun(self) -> bool:
        """True if any computed output has been delivered."""
        return bool(self.output_token_ids) or self.next_prompt_position > 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt and the known outputs."""
        return self.add.num_prompt_tokens + len(self.output_token_ids)

    @property
    def max_num_tokens(self) -> int:
        """Number of prompt tokens plus the maximum number of outputs."""
        return self.add.num_prompt_tokens + self.add.sampling_params.max_tokens

    @property
    def num_unstarted_tokens(self) -> int:
        """Prompt tokens still to be computed, if the request has no output token yet."""
        if self.output_token_ids:
            return 0
        return self.add.num_prompt_tokens - self.num_expected_cached

    def resumed(self, now: float) -> AddRequest:
        """Return the request, with its age at `now`, to send to a core that does not know it."""
        return msgspec.structs.replace(
            self.add,
            output_token_ids=list(self.output_token_ids),
            resent=True,
            age_s=max(0.0, now - self.accepted_at),
        )

    def new_prompt_logprobs(self, parts: list[PromptLogprobs]) -> list[PromptLogprobs] | None:
        """Remove repetitions: a recomputed prompt returns its logprobs once more."""
        news = []
        for part in parts:
            num_again = max(0, self.next_prompt_position - part.first_position)
            if num_again < len(part.entries):
                first = part.first_position + num_again
                news.append(PromptLogprobs(part.req_id, first, part.entries[num_again:]))
                self.next_prompt_position = part.first_position + len(part.entries)
        return news or None


class Ledger:
    """All open requests of one client, in the order in which they were accepted."""

    def __init__(
        self,
        limits: OpenLimits,
        clock: Callable[[], float] = time.monotonic,
        numbers: Iterator[int] | None = None,
    ) -> None:
        """`clock` is in monotonic seconds, and `numbers` yields unused request numbers.

        Several ledgers may share `limits` and `numbers`.
        """
        self.limits = limits
        self.clock = clock
        self.num_unstarted_tokens = 0
        """Tokens left to compute of the prompts that have no output token yet."""
        self._entries: dict[int, Entry] = {}
        self._repairing: set[int] = set()
        """Requests repaired since the last `allow_repairs`."""
        self._numbers = itertools.count(1) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self._entries)

    def next_request_id(self) -> int:
        """Return an unused number."""
        return next(self._numbers)

    def accept(self, add: AddRequest, age_s: float = 0.0) -> None:
        """Add a request accepted `age_s` ago; Overloaded if it exceeds a limit."""
        assert add.request_id not in self._entries
        self.limits.require(add.num_prompt_tokens)
        self.enter(Entry(add, self.clock() - age_s))

    def enter(self, entry: Entry) -> None:
        """Add an accepted request without checking limits."""
        self.limits.num_open += 1
        self.limits.num_prompt_tokens += entry.add.num_prompt_tokens
        self.num_unstarted_tokens += entry.num_unstarted_tokens
        self._entries[entry.add.request_id] = entry

    def expect_cached(self, request_id: int, num_tokens: int) -> None:
        """Expect part of a new request's prompt to be cached.

        A request that was too large to be resumed has ended already.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            return
        before = entry.num_unstarted_tokens
        entry.num_expected_cached = min(num_tokens, entry.add.num_prompt_tokens)
        self.num_unstarted_tokens += entry.num_unstarted_tokens - before

    def get(self, request_id: int) -> Entry | None:
        """Return an open request, or None if it has ended."""
        return self._entries.get(request_id)

    def fail(self, request_id: int) -> bool:
        """Remove a request; return whether it was open."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return False
        self.limits.num_open -= 1
        self.limits.num_prompt_tokens -= entry.add.num_prompt_tokens
        self.num_unstarted_tokens -= entry.num_unstarted_tokens
        return True

    def __iter__(self) -> Iterator[int]:
        """Iterate over the ids of all open requests, oldest first."""
        return iter(self._entries)

    def allow_repairs(self) -> None:
        """Allow gaps that are still open to be repaired again; called about once a second."""
        self._repairing.clear()

    def take(self, output: RequestOutput) -> RequestOutput | AddRequest | None:
        """Record an output of the core; return its new part, or None if nothing in it is new.

        If tokens before it are missing, the request is returned, to be sent again. RequestFailed:
        the output contradicts the ledger, or there were too many repairs; the request is removed.
        """
        entry = self._entries.get(output.request_id)
        if entry is None:
            return None
        known = entry.output_token_ids
        num_again = len(known) - output.first_index
        if num_again < 0:
            # One repair at a time: outputs that were already in flight are not further gaps.
            return None if output.request_id in self._repairing else self.repair(output.request_id)
        if num_again:
            return self._take_overlapping(output, entry, num_again)
        if output.prompt_logprobs is not None:
            parts = entry.new_prompt_logprobs(output.prompt_logprobs)
            if parts is None and not output.token_ids and output.finish_reason is None:
                return None
            output = msgspec.structs.replace(output, prompt_logprobs=parts)
        if entry.num_repairs:
            entry.num_repairs = 0
            self._repairing.discard(output.request_id)
        if not known and output.token_ids:
            self.num_unstarted_tokens -= entry.num_unstarted_tokens
        entry.num_moves = 0
        known.extend(output.token_ids)
        if output.finish_reason is not None:
            self.fail(output.request_id)
        return output

    def _take_overlapping(
        self, output: RequestOutput, entry: Entry, num_again: int
    ) -> RequestOutput | AddRequest | None:
        again, news = output.token_ids[:num_again], output.token_ids[num_again:]
        first = output.first_index
        if entry.output_token_ids[first : first + len(again)].tolist() != again:
            self.fail(output.request_id)
            message = f"output {first} was repeated with other tokens"
            raise failure_of(RequestError(ErrorCode.INTERNAL, message))
        if len(again) < num_again or (not news and output.finish_reason is None):
            return None
        logprobs = None if output.logprobs is None else output.logprobs[num_again:]
        first += num_again
        return self.take(
            msgspec.structs.replace(output, first_index=first, token_ids=news, logprobs=logprobs)
        )

    def repair(self, request_id: int) -> AddRequest | None:
        """Return an open request to be resent; RequestFailed: too many repairs; it is removed."""
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        if entry.num_repairs == REPAIR_MESSAGES_MAX:
            self.fail(request_id)
            message = f"outputs were missing after {REPAIR_MESSAGES_MAX} repairs"
            raise failure_of(RequestError(ErrorCode.INTERNAL, message))
        entry.num_repairs += 1
        self._repairing.add(request_id)
        return entry.resumed(self.clock())
