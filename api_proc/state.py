"""The state that all routes share: engine client, text processor, metrics, open requests."""

import asyncio
import math
import random
import secrets
import time
from collections.abc import Mapping
from pathlib import PurePath

from api_proc.adapters.registry import AdapterRegistry
from api_proc.errors import ApiError, overloaded, unavailable
from api_proc.fairness.admission import PARTS_PER_TURN, Admission
from api_proc.fairness.budget import Budget
from api_proc.fairness.client_budget import ClientBudget
from api_proc.fairness.fair_gate import FairGate
from api_proc.http.api_keys import ApiKeys
from api_proc.http.json_body import LargeRequests
from api_proc.http.open_requests import OpenRequests
from api_proc.http.request_ids import RequestIds
from api_proc.metrics.collector import MetricsCollector
from api_proc.metrics.process_metrics import Metrics
from api_proc.page.process_list import ProcessList
from api_proc.peers.peers import Peers
from api_proc.peers.shared_counters import SharedCounters
from api_proc.responses.store import ResponseStore
from api_proc.resumption.sessions import Sessions
from api_proc.text.processor import TextProcessor
from api_proc.unknown_fields import UnknownFields
from protocol.adapters import Adapter
from protocol.api_core import EngineState, EngineStats, ErrorCode, RequestError
from protocol.client import AsyncEngineClient, ReplicatedClient
from protocol.client.errors import RequestFailed
from protocol.config import EngineConfig
from protocol.fairness.shares import has_share, largest_share
from protocol.lifecycle import HEALTH_HOLDS_S, Health
from protocol.model_facts import ModelFacts

DEGRADED = "degraded"
STATUS_FRESH_S = 5.0
"""The core reports about once a second; an older report counts as none."""
_FIRST_FACTS_S = 2.0
"""A new server waits this long for the engine before it responds that the engine is starting."""
_POLL_S = 0.01
_MAX_SHOWN_NAMES = 16


class ApiState:
    """The state of one API process, which has one application."""

    def __init__(
        self,
        client: ReplicatedClient,
        config: EngineConfig,
        text: TextProcessor,
        *,
        index: int = 0,
        counters: SharedCounters | None = None,
        run_dir: str | None = None,
    ) -> None:
        """Make the state of one API process.

        Args:
            index: number of this API process.
            counters: the counters of all API processes, if there are several.
            run_dir: the directory in which they share the names of adapters.
        """
        api = config.api
        self.client = client
        self.ids = RequestIds(index, api.api_server_count)
        self.peers: Peers | None = None
        """Only with other API processes."""
        self.config = config
        self.text = text
        names = config.model.served_model_name or (PurePath(config.model.model).name,)
        self.model_name = names[0]
        self.model_names = names
        """All names of the model; responses have the first one."""
        self.adapters = AdapterRegistry(run_dir, config.lora)
        self.api_keys = ApiKeys(api)
        self.created = int(time.time())
        self.metrics = Metrics() if counters is None else Metrics(counters.own())
        others = [] if counters is None else [Metrics(take) for take in counters.others()]
        self._collector = MetricsCollector(
            self.model_name,
            [self.metrics, *others],
            self.replica_stats,
            lambda: self.client.facts,
            config,
        )
        self.is_draining = False
        clients = ClientBudget(api.max_open_requests_per_client, api.max_open_requests)
        self.budget = Budget(
            api.max_open_requests, api.max_open_bytes, clients, num_others=self.ids.count - 1
        )
        self.control_budget = Budget(api.max_open_requests, api.max_open_bytes)
        """Counts the requests that end or control others, which must not wait for their end."""
        self.admission = Admission()
        self.reading = Admission(PARTS_PER_TURN)
        """Admits connections that read a further part of a body."""
        self.large_requests = LargeRequests(api.tokenizer_pool_size + 1)
        """One of them is processed in slices, while others are tokenized."""
        self.large_answers = FairGate()
        """The same for answers; one that waited for requests would hold its memory meanwhile."""
        self.unknown_fields = UnknownFields(api.unknown_fields)
        self.sessions: Sessions | None = None
        """Only with a journal; see `api_proc.app.start_sessions`."""
        self.stored_responses = ResponseStore(
            api.max_stored_responses, api.max_stored_response_bytes
        )
        self.open_requests = OpenRequests()
        self.processes: ProcessList | None = None
        """Only with a supervisor."""
        self._health = Health(False)
        self._health_time = 0.0
        self._started = time.monotonic()
        self._random = _make_random(config.model.seed, index)

    def draw_seed(self) -> int:
        return self._random.getrandbits(63)

    def drain(self) -> None:
        self.is_draining = True

    async def wait_idle(self) -> None:
        """Wait until no request is open or forwarded; the caller has the deadline."""
        await self.open_requests.wait_none()
        if self.peers is not None:
            await self.peers.wait_none()

    def fail_open(self) -> None:
        """End all open requests with an error, because the process is about to leave."""
        self.drain()
        error = RequestError(ErrorCode.DRAINING, "the server is shutting down")
        self.open_requests.fail_all(RequestFailed(error))

    async def accepting(self, origin: str) -> ModelFacts:
        """Return the model's facts if a client's request is accepted, or raise a 503 or 429.

        The request, of which the body was read, counts already.
        """
        while self._may_learn_facts():
            await asyncio.sleep(_POLL_S)
        facts = self.require_facts()
        if not self.client.connected:
            self._check_waiting(max(0, self.budget.clients.num_of(origin) - 1))
        return facts

    def _check_waiting(self, num_own: int) -> None:
        """Raise a 429 if too many requests wait for the engine, of all clients or of this one."""
        # The other API processes accept their parts.
        limit = math.ceil(self.config.scheduler.max_num_waiting / self.ids.count)
        num_free = limit - self.client.num_open_requests
        if num_free <= 0:
            message = f"max_num_waiting: {limit} requests wait for the engine to come back"
            raise overloaded(message)
        if not has_share(num_own, num_free):
            message = f"max_num_waiting: {num_own} requests of this client wait for the engine"
            raise overloaded(f"{message} to come back, its share of {limit}")

    def refusal(
        self, error: RequestError, num_sequences: int, num_prompt_tokens: int
    ) -> RequestError:
        """Return an error of the engine as the client of a request gets it.

        A 429 becomes a 400 where the request alone exceeds one client's share of the queues, for
        the same request would hardly be accepted later. The prompts of all sequences count.
        """
        scheduler = self.config.scheduler
        bounds = (
            ("max_num_waiting", num_sequences, scheduler.max_num_waiting, "sequences"),
            ("max_waiting_tokens", num_prompt_tokens, scheduler.max_waiting_tokens, "tokens"),
        )
        if error.code is not ErrorCode.OVERLOADED or num_sequences == 1:
            return error
        for setting, number, bound, unit in bounds:
            limit = len(self.client.clients) * largest_share(bound)
            if number > limit:
                text = f"{setting}: {number} {unit} are more than {limit}, all that one client gets"
                return RequestError(ErrorCode.INVALID, f"{text}; divide the request")
        return error

    def _may_learn_facts(self) -> bool:
        """Return whether this process is too new to know the state of a running engine.

        A core that was started at the same time seems to be starting until it adopts its workers.
        """
        is_new = time.monotonic() - self._started < _FIRST_FACTS_S
        is_known = self.client.facts is not None or self.is_draining or self.is_degraded
        return is_new and not is_known

    def require_facts(self) -> ModelFacts:
        """Return the model's facts, or raise a 503 while the engine starts, fails or drains."""
        if self.is_draining:
            raise unavailable("the server is shutting down", ErrorCode.DRAINING)
        if self.is_degraded:
            retry_after_s = max(1, math.ceil(self._health.retry_after_s))
            raise unavailable("the engine's processes die repeatedly", DEGRADED, retry_after_s)
        facts = self.client.facts
        if facts is None:
            is_here = self.config.parallel.data_parallel_size > 0
            elsewhere = "no engine of another machine has joined, or all have left"
            others = next(iter(self.other_models()), "")
            reason = others or ("the engine is starting" if is_here else elsewhere)
            raise unavailable(reason, ErrorCode.STARTING)
        return facts

    def is_base_model(self, name: str | None) -> bool:
        """Return whether a name stands for the model without an adapter."""
        model = self.config.model
        return name is None or name in (*self.model_names, model.model, model.shown_model)

    def require_model(self, name: str | None) -> Adapter | None:
        """Return the adapter that a name stands for, None for the model alone, or raise a 404.

        No name and an empty one stand for the model.
        """
        if not name or self.is_base_model(name):
            return None
        named = self.adapters.find(name)
        if named is not None:
            return named.adapter
        known = [*self.model_names, *(one.adapter.name for one in self.adapters.all())]
        names = ", ".join(map(repr, known[:_MAX_SHOWN_NAMES]))
        if len(known) > _MAX_SHOWN_NAMES:
            names += f" and {len(known) - _MAX_SHOWN_NAMES} more"
        raise ApiError(
            404,
            f"the model {name!r} does not exist; this server has {names}",
            param="model",
            code="model_not_found",
        )

    def shown_model(self, name: str | None) -> str:
        """Return the name in the response to a request that was accepted for a model."""
        return self.model_name if not name or self.is_base_model(name) else name

    def set_health(self, health: Health) -> None:
        self._health = health
        self._health_time = time.monotonic()

    @property
    def is_degraded(self) -> bool:
        """Whether the engine's processes die repeatedly; the report expires, as it may be lost."""
        is_old = time.monotonic() - self._health_time >= HEALTH_HOLDS_S
        return self._health.is_degraded and not is_old

    def is_fresh(self) -> bool:
        return _is_fresh(self.client)

    def engine_state(self) -> EngineState:
        """Return the core's last state; STARTING without one, RECOVERING if the core is lost.

        With several replicas it is the best of their states.
        """
        return _state_of(self.client)

    def replica_states(self) -> list[str]:
        """Return the state of each replica; `left` for one that has."""
        return [_replica_state(client) for client in self.client.clients]

    def other_models(self) -> list[str]:
        """Return a line for each replica that gets no requests because it has another model."""
        return [
            f"replica {number} gets no requests: its {client.engine.other_model}"
            for number, client in enumerate(self.client.clients)
            if client.is_open and client.engine.other_model
        ]

    def is_serving(self) -> bool:
        """Return whether requests make progress, or will as soon as a lost worker is replaced."""
        return (
            self.client.facts is not None
            and self.is_fresh()
            and self.engine_state() is not EngineState.STARTING
        )

    def is_ready(self) -> bool:
        """Return whether a load balancer should send new requests."""
        return (
            self.client.facts is not None
            and self.engine_state() is EngineState.READY
            and self.adapters.is_complete
            and not self.is_draining
            and not self.is_degraded
        )

    def shown_state(self) -> str:
        """Return the state that probes and the page show.

        An engine is starting until the adapters of its settings have their names. A process that
        finishes its requests at the engine's end is draining earlier than the core.
        """
        if self.is_draining:
            return EngineState.DRAINING
        if self.is_degraded:
            return DEGRADED
        state = self.engine_state()
        is_starting = state is EngineState.READY and not self.adapters.is_complete
        return EngineState.STARTING if is_starting else state

    def engine_stats(self) -> EngineStats:
        """Return the core's last statistics."""
        status = self.client.status
        return EngineStats() if status is None else status.stats

    def replica_stats(self) -> list[EngineStats]:
        """Return the last statistics of each replica's core."""
        statuses = [client.status if client.is_open else None for client in self.client.clients]
        return [EngineStats() if status is None else status.stats for status in statuses]

    def gauges(self) -> dict[str, float]:
        """Measure what this process holds, and bring its counters up to date."""
        measured: dict[str, float] = {
            "http_requests_open": self.budget.num_requests + self.control_budget.num_requests,
            "http_request_bytes": self.budget.num_bytes + self.control_budget.num_bytes,
            "ledger_requests": self.client.num_open_requests,
            "stored_responses": len(self.stored_responses),
            "stored_response_bytes": self.stored_responses.num_bytes,
        }
        counters = {
            "requests_moved": self.client.num_moved,
            "requests_handed_over": self.client.num_handed_over,
            "requests_resumed_inexactly": self.client.num_inexact,
        }
        if self.sessions is not None:
            journaling = self.sessions.journaling
            measured["sessions"] = len(self.sessions)
            measured["journal_failed"] = int(journaling.is_failed)
            counters |= {
                "requests_resumed": self.sessions.num_resumed,
                "journal_bytes": journaling.num_bytes,
                "journal_failures": journaling.num_failures,
            }
        self.metrics.take_measured(counters)
        return measured

    def exposition(self, gauges: Mapping[str, float]) -> bytes:
        """Render the metrics, with these sums of gauges."""
        return self._collector.exposition({**gauges, "api_servers": self.ids.count})


def _make_random(seed: int, index: int) -> random.Random:
    """Return the source of requests' seeds; processes with the same `seed` draw different ones."""
    if not seed:
        return secrets.SystemRandom()
    return random.Random(seed if index == 0 else f"{seed} {index}")


def _is_fresh(client: ReplicatedClient | AsyncEngineClient) -> bool:
    return time.monotonic() - client.last_status_time < STATUS_FRESH_S


def _replica_state(client: AsyncEngineClient) -> str:
    if not client.is_open:
        return "left"
    return "other_model" if client.engine.other_model else str(_state_of(client))


def _state_of(client: ReplicatedClient | AsyncEngineClient) -> EngineState:
    status = client.status
    if status is None:
        return EngineState.STARTING
    if status.state is EngineState.READY and not (client.connected and _is_fresh(client)):
        return EngineState.RECOVERING
    return status.state
