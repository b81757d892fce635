"""Scheduling policies: two keys decide which request is first and which is preempted.

To add one, subclass `Policy`, and name it in `POLICIES`.
"""

import heapq

from core_proc.options import SchedulerOptions
from core_proc.request import Request
from protocol.fairness.account import Account

Key = tuple[float, ...]


class Policy:
    """The interface between the scheduler and a policy: keys, and hooks for what happens."""

    def __init__(self, options: SchedulerOptions) -> None:
        """Read the policy's settings from the options."""

    def order(self, request: Request) -> Key:
        """Return a request's key in the waiting queue, smallest first; constant while it waits."""
        raise NotImplementedError

    def victim(self, request: Request) -> Key:
        """Return a running request's key; the request with the greatest key is preempted first."""
        raise NotImplementedError

    def rank(self, request: Request) -> int:
        """Return a rank; a lower rank is more important, whatever a preemption costs."""
        return 0

    def arrived(self, request: Request) -> None:
        """Note that a request is new; `order` is called next."""

    def admitted(self, request: Request) -> None:
        """Note that a request begins to run, or runs again."""

    def left(self, request: Request) -> None:
        """Note that a request has finished, for any reason."""


class Fcfs(Policy):
    """First come, first served: earlier arrival at the client, then at the scheduler, is first.

    A running request usually arrived before all waiting ones, so a preempted one returns to the
    front. Only requests that a client sends again can have arrived earlier.
    """

    def order(self, request: Request) -> Key:
        return (request.arrival_time, request.arrival_index)

    def victim(self, request: Request) -> Key:
        return (request.admission_index,)


class Priority(Policy):
    """Lower `priority` first, then earlier arrival.

    Among equal victims, the first one in `running` is preempted. A resumed request runs last, so
    two requests could preempt each other forever; after some rounds their ids decide.
    """

    MAX_EVEN_PREEMPTIONS = 64

    def order(self, request: Request) -> Key:
        return (request.priority, request.arrival_time, request.req_id)

    def victim(self, request: Request) -> Key:
        tie_breaker = request.req_id if request.num_preemptions > self.MAX_EVEN_PREEMPTIONS else -1
        return (request.priority, request.arrival_time, tie_breaker)

    def rank(self, request: Request) -> int:
        return request.priority


class ShortestPrefill(Policy):
    """Fewest tokens left to compute first; waiting requests age, so that long prompts get through.

    A waiting request counts as shorter by `AGEING` for every token that the scheduler grants. All
    age alike, so the order of any two does not change, and the key is constant. No request
    overtakes another once other requests were granted 1 / AGEING times the other's length.
    """

    AGEING = 1 / 8

    def order(self, request: Request) -> Key:
        swapped_out = request.swapped_out
        num_computed = swapped_out.num_computed_tokens if swapped_out else 0
        num_left = request.num_tokens - num_computed
        key = num_left + self.AGEING * request.arrival_clock
        return (key, request.arrival_time, request.arrival_index)

    def victim(self, request: Request) -> Key:
        return (request.num_tokens - request.num_computed_tokens, request.admission_index)


class Fair(Policy):
    """Each tenant gets tokens in proportion to its weight, however much it asks for.

    Start-time fair queueing (Goyal, Vin, Cheng 1996): a tenant's requests follow each other on its
    own line of virtual time, each as long as its tokens divided by the weight, and the request that
    starts earliest is next. Outputs are charged at the end, when they are known, and a request that
    never ran is not charged. A tenant that was idle begins at the present: it has no credit.
    Requests without a tenant have one for each client, and for each adapter that it names.
    """

    MIN_PRUNED = 1024
    MAX_TENANTS = 65_536
    """Beyond it the accounts that are least ahead are removed, and begin at the present."""

    def __init__(self, options: SchedulerOptions) -> None:
        self._weights = options.tenant_weights
        self._line_ends: dict[Account, float] = {}
        self._now = 0.0
        self._prune_at = self.MIN_PRUNED

    def _charge(self, account: Account, start: float, num_tokens: int) -> None:
        self._line_ends[account] = start + num_tokens / self._weights.get(account.tenant, 1.0)
        if len(self._line_ends) > self._prune_at:
            ahead = ((end, account) for account, end in self._line_ends.items() if end > self._now)
            kept = heapq.nlargest(self.MAX_TENANTS // 2, ahead)
            self._line_ends = {account: end for end, account in kept}
            self._prune_at = max(self.MIN_PRUNED, 2 * len(self._line_ends))

    def arrived(self, request: Request) -> None:
        account = _account(request)
        request.virtual_start = max(self._now, self._line_ends.get(account, 0.0))
        self._charge(account, request.virtual_start, request.num_arrived_tokens)

    def admitted(self, request: Request) -> None:
        self._now = max(self._now, request.virtual_start)

    def left(self, request: Request) -> None:
        account = _account(request)
        end = self._line_ends.get(account, self._now)
        has_run = request.num_cached_tokens is not None
        num_charged = request.num_arrived_tokens
        num_due = request.num_tokens - num_charged if has_run else -num_charged
        self._charge(account, end, num_due)

    def order(self, request: Request) -> Key:
        return (request.virtual_start, request.arrival_time, request.arrival_index)

    def victim(self, request: Request) -> Key:
        return (request.virtual_start, request.admission_index)


def _account(request: Request) -> Account:
    """Return the account that a request is charged to: its tenant's, or else its client's.

    A client has an account for each adapter that it names, with the weight of the adapter's name.
    """
    if request.tenant:
        return Account("", request.tenant)
    return Account(request.origin, request.adapter_name)


POLICIES: dict[str, type[Policy]] = {
    "fcfs": Fcfs,
    "priority": Priority,
    "shortest": ShortestPrefill,
    "fair": Fair,
}


def make_policy(options: SchedulerOptions) -> Policy:
    if options.policy not in POLICIES:
        raise ValueError(f"policy {options.policy!r} must be one of {', '.join(POLICIES)}")
    return POLICIES[options.policy](options)
