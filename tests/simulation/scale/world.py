"""The events of many replicas and their clients, in the order of virtual time."""

import heapq
import time
from array import array
from collections.abc import Callable
from itertools import count
from random import Random
from typing import NamedTuple

from protocol.client.packed_prompt import PackedPrompt
from protocol.client.prefix_index import piece_names, piece_tokens
from protocol.client.routing import Router
from protocol.config import RoutingPolicy
from tests.simulation.scale.costs import MEASURED, StepCosts
from tests.simulation.scale.replica import BLOCK_TOKENS, Answered, Asked, SimulatedReplica
from tests.simulation.scale.tally import Tally
from tests.simulation.scale.workload import NUM_TURNS, Turn, Workload

FAILOVER_S = 0.75
PIECE_TOKENS = piece_tokens(BLOCK_TOKENS)
CAPACITY = 6.5
"""Requests a second that a replica answers at most, with most of their prompts cached."""
_NO_OUTPUTS = array("I")
_Arguments = tuple[object, ...]


class Plan(NamedTuple):
    """What is simulated."""

    num_replicas: int
    num_requests: int
    policy: RoutingPolicy = RoutingPolicy.PREFIX_AWARE
    seed: int = 0
    load: float = 0.7
    """Share of the capacity of all replicas that is asked for."""
    num_blocks: int = 1024
    """The number of blocks of a replica's cache."""
    lost_share: float = 0.1
    """The share of replicas that die when 45 % of the time has passed; 0: none."""
    away_s: float = 20.0
    """The time until they are back, with empty caches."""
    costs: StepCosts = MEASURED

    @property
    def duration_s(self) -> float:
        """The time in which conversations begin."""
        return self.num_requests / (self.num_replicas * CAPACITY * self.load)


class World:
    """One simulation."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.now = 0.0
        self._computed_ns = 0
        """Time in which replicas simulated steps since the router was last called."""
        self._replicas = [
            SimulatedReplica(
                number, plan.costs, plan.num_blocks, lambda: self.now, self._count_computed
            )
            for number in range(plan.num_replicas)
        ]
        self._router = Router(plan.policy, self._replicas, Random(plan.seed))
        num_conversations = -(-plan.num_requests // NUM_TURNS)
        self._workload = Workload(plan.seed, num_conversations)
        self._beginnings = self._workload.beginnings(num_conversations, plan.duration_s)
        self._ids = count(1)
        self._events: list[tuple[float, int, Callable[..., None], _Arguments]] = []
        self._order = count()
        self._waiting: list[tuple[int, Asked, array[int]]] = []
        """Requests of replicas that are gone, while none serves."""
        self.tally = Tally(plan.num_replicas, plan.duration_s)

    def run(self) -> Tally:
        """Simulate until all requests have ended."""
        plan = self._plan
        self._begin_next()
        if plan.lost_share:
            self._at(0.45 * plan.duration_s, self._lose_some)
        events = self._events
        pop = heapq.heappop
        while events:
            self.now, _, event, arguments = pop(events)
            event(*arguments)
        self.tally.end(self._replicas, self.now)
        return self.tally

    def _at(self, when: float, event: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (when, next(self._order), event, arguments))

    # Clients ------------------------------------------------------------------------------------

    def _begin_next(self) -> None:
        """Let conversations begin one after the other."""
        when = next(self._beginnings, None)
        if when is not None:
            self._at(when, self._begin)

    def _begin(self) -> None:
        self._ask(self._workload.first_turn())
        self._begin_next()

    def _ask(self, turn: Turn) -> None:
        self.tally.num_asked += 1
        self._send(next(self._ids), Asked(turn, self.now, 0), _NO_OUTPUTS)

    def _send(self, req_id: int, asked: Asked, outputs: "array[int]") -> None:
        """Route a request as the client of all replicas does, whose time is measured."""
        began = time.perf_counter_ns()
        names: list[bytes] = []
        if self._plan.policy is RoutingPolicy.PREFIX_AWARE:
            names = piece_names(PackedPrompt(asked.turn.prompt.tobytes(), 0), PIECE_TOKENS)
        hashed = time.perf_counter_ns()
        self._computed_ns = 0
        chosen = self._router.choose(names, PIECE_TOKENS)
        if chosen is None:
            self._waiting.append((req_id, asked, outputs))
            return
        self._router.index.add(chosen.number, names, self._plan.num_blocks)
        self.tally.routed(hashed - began, time.perf_counter_ns() - hashed - self._computed_ns)
        replica = self._replicas[chosen.number]
        replica.add(req_id, Asked(asked.turn, asked.sent_at, chosen.num_cached_tokens), outputs)
        self._wake_later(replica)

    def _count_computed(self, nanoseconds: int) -> None:
        self._computed_ns += nanoseconds

    # Replicas -----------------------------------------------------------------------------------

    def _wake_later(self, replica: SimulatedReplica) -> None:
        """Wake a replica before or at the next end of a request, and at no other time."""
        when = replica.next_end
        if when != replica.wakes_at:
            replica.wakes_at = when
            if when is not None:
                self._at(when, self._wake, replica, when)

    def _wake(self, replica: SimulatedReplica, when: float) -> None:
        if replica.wakes_at == when:  # else another event wakes it, or it has died
            replica.wakes_at = None
            self._take_answers(replica)
            self._wake_later(replica)

    def _take_answers(self, replica: SimulatedReplica) -> None:
        for answered in replica.take_answers():
            self._on_answer(answered)

    def _on_answer(self, answered: Answered) -> None:
        time_s, asked, request, is_first, is_finished = answered
        if is_first:
            self.tally.started(time_s, asked, request)
        if not is_finished:
            return
        self.tally.num_answered += 1
        answer = request.token_ids[request.num_prompt_tokens :]
        following = self._workload.next_turn(asked.turn, answer)
        if following is not None:
            self._at(self.now + self._workload.pause_s(), self._ask, following)

    # A loss -------------------------------------------------------------------------------------

    def _lose_some(self) -> None:
        """A share of the replicas dies: their requests go on elsewhere after a while."""
        number = max(1, int(self._plan.lost_share * len(self._replicas)))
        for replica in self._replicas[:number]:
            self._take_answers(replica)
            self._at(self.now + FAILOVER_S, self._move, replica.number, replica.die())
            self._at(self.now + self._plan.away_s, self._return, replica)
        self.tally.num_lost_replicas = number

    def _move(self, number: int, lost: list[tuple[int, Asked, "array[int]"]]) -> None:
        self._router.index.forget(number)
        self.tally.num_moved += len(lost)
        for req_id, asked, outputs in lost:
            self._send(req_id, asked, outputs)

    def _return(self, replica: SimulatedReplica) -> None:
        replica.serves = True
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self._send(*request)
