"""The client's ledger: the source of truth about every request that it has accepted.

Theory of operation. A request enters by `accept` and leaves by `fail`, or by the output of `take`
that has a finish reason. In between the ledger holds what cannot be computed again: the prompt, the
resolved parameters, the tokens that were delivered, and when it was accepted. Core and workers
are caches of this, so every repair is the same message: `resumed`, the request with the tokens that
are known, under which the core replaces what it has.

Exactly once, by index: with n tokens known, an output that starts at n is new; one that starts
lower is a repetition, compared with the known tokens and cut; one that starts higher shows a gap.
Prompt logprobs are compared by position in the same way.

Invariants: known tokens only grow, and a caller gets each of them once, in order; a contradiction
(other tokens at a known index) fails the request and changes no token. A gap asks for one repair:
further outputs after the same gap are ignored until `allow_repairs`, which runs about once a
second, and after `REPAIR_MESSAGES_MAX` repairs without an output that fits the request fails.
Entries are in order of acceptance, and a resend goes through them in this order. Ages are
differences of this process's clock, so that the core can order requests of all its clients
without comparing clocks.
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
    validate_request,
)
from protocol.client.errors import failure_of
from protocol.client.packed_prompt import PackedPrompt, PromptIds
from protocol.config.request_complaints import request_complaint
from protocol.core_worker import ModelFacts, PromptLogprobs
from protocol.message import MAX_TEXT, MAX_TOKEN_IDS, ProtocolError, encode, pack_token_ids
from protocol.sampling import SamplingParams

REPAIR_MESSAGES_MAX = 3
MOVES_MAX = 3
"""How often a request may move to another replica without an output in between."""


class RequestOptions(TypedDict, total=False):
    """What `submit` takes besides the prompt and its sampling parameters."""

    priority: int
    """Lower is sooner, under the priority policy; 0 by default."""
    cache_salt: str
    """Requests share cached prefixes only with requests of the same salt."""
    tenant: str
    """The account of the request: the fair policy shares the engine among tenants."""
    adapter: Adapter | None
    """The LoRA adapter that computes it together with the model; none by default."""
    resent: bool
    """Whether the request is part of one that was accepted: it is then not refused for a full queue
    or draining."""


class RoutedOptions(RequestOptions, total=False):
    """Further options of a client with several replicas."""

    affinity: str
    """Requests with an equal value go to one replica while it serves; empty: to any."""


def check_request(
    add: AddRequest, facts: ModelFacts, prompt: PromptIds | None = None
) -> tuple[AddRequest, bytes]:
    """Check a request as the core will, before it is accepted; RequestFailed names the bound.

    Structs check no bounds when they are built, so the encoded request is decoded again. Returns
    the request, which shares no objects with the caller's, and its body for the wire; a long prompt
    is packed in both. `prompt` is that of a request without one.
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
        raise failure_of(request_complaint(str(problem))) from problem
    assert isinstance(checked, AddRequest)
    error = validate_request(checked, facts, id_bound)
    if error is not None:
        raise failure_of(error)
    return checked, body


def _packed(prompt: PromptIds) -> tuple[bytes, int | None]:
    """Return the packed ids and their known bound; empty: the ids are not packed."""
    if isinstance(prompt, PackedPrompt):
        return prompt
    if PACKED_FROM_TOKENS <= len(prompt) <= MAX_TOKEN_IDS:
        # Ids that can be packed are kept in that form, without an object for each of them.
        with contextlib.suppress(TypeError, OverflowError):
            return pack_token_ids(prompt), None
    return b"", None


class Room:
    """Bounds on what is open at once, shared by several ledgers."""

    def __init__(self, max_open: int, max_open_tokens: int | None = None) -> None:
        """Bound the open requests, and the tokens of their prompts."""
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
    """One open request, and what is known of its outputs."""

    __slots__ = (
        *("accepted_at", "add", "next_prompt_position", "num_expected_cached", "num_moves"),
        *("num_repairs", "output_token_ids"),
    )

    def __init__(self, add: AddRequest, accepted_at: float) -> None:
        self.add = add
        self.accepted_at = accepted_at
        self.output_token_ids = array("i", add.output_token_ids)
        self.num_repairs = 0
        """Since the last output without a gap."""
        self.num_moves = 0
        """To other replicas, since the last output."""
        self.next_prompt_position = 0
        self.num_expected_cached = 0
        """Tokens of the prompt that the core is expected to have cached."""

    @property
    def has_begun(self) -> bool:
        """Whether anything that was computed has been delivered."""
        return bool(self.output_token_ids) or self.next_prompt_position > 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the known outputs."""
        return self.add.num_prompt_tokens + len(self.output_token_ids)

    @property
    def most_tokens(self) -> int:
        """Tokens of the prompt plus the largest possible number of outputs."""
        return self.add.num_prompt_tokens + self.add.sampling_params.max_tokens

    @property
    def num_unstarted_tokens(self) -> int:
        """Prompt tokens still to be computed, if the request has no output token yet."""
        if self.output_token_ids:
            return 0
        return self.add.num_prompt_tokens - self.num_expected_cached

    def resumed(self, now: float) -> AddRequest:
        """The request as it is sent to a core that does not know it."""
        return msgspec.structs.replace(
            self.add,
            output_token_ids=list(self.output_token_ids),
            resent=True,
            age_s=max(0.0, now - self.accepted_at),
        )

    def new_prompt_logprobs(self, parts: list[PromptLogprobs]) -> list[PromptLogprobs] | None:
        """Remove repetitions: a prompt that is computed again returns its logprobs once more."""
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
        max_open: int,
        max_open_tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        numbers: Iterator[int] | None = None,
        room: Room | None = None,
    ) -> None:
        """Bound open requests and the tokens of their prompts; `clock` is in monotonic seconds.

        `numbers`, unused numbers of requests, and `room` are those that several ledgers share.
        """
        self.room = Room(max_open, max_open_tokens) if room is None else room
        self.clock = clock
        self.num_unstarted_tokens = 0
        """To be computed, of the prompts that have no output token yet."""
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
        """Enter a request accepted `age_s` ago; Overloaded past one of the bounds."""
        assert add.request_id not in self._entries
        self.room.require(add.num_prompt_tokens)
        self.enter(Entry(add, self.clock() - age_s))

    def enter(self, entry: Entry) -> None:
        """Enter a request that was accepted, without a bound."""
        self.room.num_open += 1
        self.room.num_prompt_tokens += entry.add.num_prompt_tokens
        self.num_unstarted_tokens += entry.num_unstarted_tokens
        self._entries[entry.add.request_id] = entry

    def expect_cached(self, request_id: int, num_tokens: int) -> None:
        """Expect that a part of a new request's prompt need not be computed.

        A request that was too large to be resumed has ended already.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            return
        before = entry.num_unstarted_tokens
        entry.num_expected_cached = min(num_tokens, entry.add.num_prompt_tokens)
        self.num_unstarted_tokens += entry.num_unstarted_tokens - before

    def get(self, request_id: int) -> Entry | None:
        """Return an open request; None: it has ended."""
        return self._entries.get(request_id)

    def fail(self, request_id: int) -> bool:
        """Remove a request; returns whether it was open."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return False
        self.room.num_open -= 1
        self.room.num_prompt_tokens -= entry.add.num_prompt_tokens
        self.num_unstarted_tokens -= entry.num_unstarted_tokens
        return True

    def __iter__(self) -> Iterator[int]:
        """Ids of everything open, oldest first."""
        return iter(self._entries)

    def resumed(self, request_id: int, now: float) -> AddRequest | None:
        """An open request for a core that does not know it, with its age at `now`."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.resumed(now)

    def allow_repairs(self) -> None:
        """Let gaps that are still open be repaired again; called about once a second."""
        self._repairing.clear()

    def take(self, output: RequestOutput) -> RequestOutput | AddRequest | None:
        """Enter one output of the core; return its new part, or None if nothing in it is new.

        If tokens are missing before it, the request is returned, to be sent again. RequestFailed:
        the output contradicts the ledger, or there were too many repairs; the request is removed.
        """
        entry = self._entries.get(output.request_id)
        if entry is None:
            return None
        known = entry.output_token_ids
        num_again = len(known) - output.first_index
        if num_again < 0:
            # One repair at a time: outputs that were under way already are not further gaps.
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
        """Return an open request to be resent; RequestFailed: too many repairs, it is removed."""
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
