"""An engine as one client sees it: its facts, its state, and whether it gets requests.

Opens no sockets: statuses of the core and elapsed seconds are passed in. The last status and the
facts are kept while the core is gone. Requests wait up to `stall_timeout_s` for an engine that
recovers. An engine with another model than the expected one gets none.
"""

import logging

from protocol.api_core import EngineState, ErrorCode, PauseMode, RequestError, Status
from protocol.client.errors import failure_of
from protocol.client.expected_model import ExpectedModel
from protocol.message import MAX_TEXT
from protocol.model_facts import ModelFacts
from protocol.process.machines import blocks_address_seen_at

_SERVING = (EngineState.READY, EngineState.DRAINING)
_NONE_THERE = "the engine is starting, or all replicas have left"
_LAST_DRAINS = "the last replica that served is shutting down, and no other one has joined"
_NO_EQUAL_ENGINE = RequestError(
    ErrorCode.ENGINE_FAILED,
    "the engine that began the request is gone, and none with its fingerprint has served in time",
)

log = logging.getLogger("troika.client")


class KnownEngine:
    """The engine at one address, as the statuses of its core describe it."""

    def __init__(
        self,
        address: str,
        stall_timeout_s: float,
        now: float,
        expected: ExpectedModel,
        *,
        is_replica: bool = False,
    ) -> None:
        """Begin at the monotonic time `now`, before the first status.

        Args:
            stall_timeout_s: seconds without service after which requests fail.
            expected: the model that the engine must have, as far as it is known.
            is_replica: the engine is one of several, to which requests can be moved.
        """
        self.address = address
        self._stall_timeout_s = stall_timeout_s
        self._expected = expected
        self._is_replica = is_replica
        self._unserved_s = 0.0
        """Seconds since the last status of an engine that served, counted in ticks."""
        self.status: Status | None = None
        self.facts: ModelFacts | None = None
        """The model's facts; kept while the engine recovers."""
        self.fingerprint = ""
        """Fingerprint of the facts; empty until they are known."""
        self.other_model = ""
        """How the engine's model differs from the expected one; empty: it does not, or is not
        known yet."""
        self.num_other_requests = 0
        """Requests of other clients at the core when `status` arrived."""
        self.last_status_time = 0.0
        """Time at which `status` arrived, on the monotonic clock."""
        self.last_progress_time = now
        """Time of the last status that showed further steps, or that there were none to compute."""

    # Events -------------------------------------------------------------------------------------

    def take(self, status: Status, now: float, num_own_requests: int) -> None:
        """Process a status; `num_own_requests` of the core's requests are this client's."""
        num_requests = status.stats.num_running_reqs + status.stats.num_waiting_reqs
        is_idle = num_own_requests + num_requests == 0
        if is_idle or _shows_progress(status, self.status):
            self.last_progress_time = now
        self.last_status_time = now
        self.num_other_requests = max(0, num_requests - num_own_requests)
        self.status = status
        if status.state in _SERVING:
            self._unserved_s = 0.0
        if status.facts is not None:
            self._take_facts(status.facts)

    def _take_facts(self, facts: ModelFacts) -> None:
        if facts != self.facts:
            self.facts, self.fingerprint = facts, facts.fingerprint
        before, self.other_model = self.other_model, self._expected.difference(facts, self.address)
        if self.is_ready:
            self._expected.learn(facts)
        is_news = self.other_model and self.other_model != before
        if is_news and not self._is_replica:  # those of replicas are reported together
            log.error("%s gets no requests: its %s", self.address, self.other_model)

    def tick(self, elapsed_s: float) -> None:
        """Count time without service.

        The clock is not read: while the client's loop was blocked, the engine may have served.
        """
        self._unserved_s += elapsed_s

    # State --------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """True if the engine was serving at its last status, with the expected model."""
        status = self.status
        return status is not None and status.state is EngineState.READY and not self.other_model

    @property
    def is_stalled(self) -> bool:
        """True if the engine has not served for longer than requests wait for it."""
        return self._unserved_s > self._stall_timeout_s

    @property
    def is_stalled_for_good(self) -> bool:
        """True if requests have already failed because the engine has not served for too long."""
        return self._unserved_s > 2 * self._stall_timeout_s

    @property
    def blocks_at(self) -> str:
        """Address at which other machines read the KV blocks on the core's machine, or "".

        It is taken from the last status, so the core may no longer exist.
        """
        status = self.status
        return "" if status is None else blocks_address_seen_at(status.blocks_at, self.address)

    def require_facts(self, *, is_resent: bool = False) -> ModelFacts:
        """Return the facts if the engine accepts requests, or raise RequestFailed.

        An engine that drains accepts only the parts of requests that it has accepted (`is_resent`).
        """
        if self.status is None or self.facts is None:
            text = _NONE_THERE if self._is_replica else "the engine is starting"
            raise failure_of(RequestError(ErrorCode.STARTING, text))
        if self.other_model:
            raise failure_of(self.holding_error)
        if self.is_stalled:
            raise failure_of(self.stall_error)
        if self.status.state is EngineState.DRAINING and not is_resent:
            text = _LAST_DRAINS if self._is_replica else "the engine is shutting down"
            raise failure_of(RequestError(ErrorCode.DRAINING, text))
        return self.facts

    @property
    def stall_error(self) -> RequestError:
        """The error of requests that have waited too long for the engine to serve."""
        text = f"no engine has served for {self._stall_timeout_s:g} s"
        return RequestError(ErrorCode.ENGINE_FAILED, text)

    @property
    def holding_error(self) -> RequestError:
        """The error of requests that were held for too long: the engine cannot continue them."""
        if not self.other_model:
            return _NO_EQUAL_ENGINE
        return RequestError(ErrorCode.ENGINE_FAILED, self.other_model[:MAX_TEXT])

    def why_not_ready(self, *, is_connected: bool) -> str:
        """Return why the engine does not serve, as far as this is known."""
        if self.status is None:
            return f"nothing answers at {self.address}"
        if self.status.state is EngineState.READY and not is_connected:
            return f"nothing answers any more at {self.address}"
        if self.other_model:
            return f"its {self.other_model}"
        return f"its last state is {self.status.state}"


def _shows_progress(status: Status, before: Status | None) -> bool:
    """Return whether the core has sent steps since the last status, or is paused."""
    is_paused = status.pause_mode is not PauseMode.RUNNING
    is_further = before is None or before.stats.num_steps != status.stats.num_steps
    return is_paused or is_further
