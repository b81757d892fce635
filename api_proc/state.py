"""What all routes share: the engine's client, the model's text side, metrics, open requests."""

import asyncio
import random
import secrets
import time
from pathlib import PurePath

from api_proc.errors import ApiError, unavailable
from api_proc.metrics import Metrics, MetricsCollector, make_exposition
from api_proc.text import TextProcessor
from protocol.api_core import EngineState, EngineStats, ErrorCode
from protocol.client import AsyncEngineClient
from protocol.config import EngineConfig
from protocol.core_worker import ModelFacts

STATUS_FRESH_S = 5.0
"""The core reports about once a second; without a report for so long it is not well."""


class ApiState:
    """One per application."""

    def __init__(
        self, client: AsyncEngineClient, config: EngineConfig, text: TextProcessor
    ) -> None:
        self.client = client
        self.config = config
        self.text = text
        self.model_name = config.model.served_model_name or PurePath(config.model.model).name
        self.created = int(time.time())
        self.metrics = Metrics()
        self.exposition = make_exposition(
            MetricsCollector(self.model_name, self.metrics, self._engine_stats)
        )
        self.is_draining = False
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        base = config.model.seed
        self._random = random.Random(base) if base else secrets.SystemRandom()

    def draw_seed(self) -> int:
        """A seed for a request that brings none."""
        return self._random.getrandbits(63)

    def drain(self) -> None:
        """From now on refuse new requests."""
        self.is_draining = True

    async def wait_idle(self) -> None:
        """Wait until no request is open; the caller sets the deadline."""
        await self._idle.wait()

    def opened(self) -> None:
        """A request begins."""
        self._num_open += 1
        self._idle.clear()

    def closed(self) -> None:
        """A request has ended."""
        self._num_open -= 1
        if self._num_open == 0:
            self._idle.set()

    def require_facts(self) -> ModelFacts:
        """Return the model's facts, where requests are accepted.

        Raises:
            ApiError: 503 while the engine starts or drains.
        """
        if self.is_draining:
            raise unavailable("the server is shutting down", ErrorCode.DRAINING)
        facts = self.client.facts
        if facts is None:
            raise unavailable("the engine is starting", "starting")
        return facts

    def require_model(self, name: str | None) -> None:
        """Check the name of a model.

        Raises:
            ApiError: 404 where another model is asked for.
        """
        if name is not None and name not in (self.model_name, self.config.model.model):
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def is_fresh(self) -> bool:
        """Whether the core has reported lately."""
        return time.monotonic() - self.client.last_status_time < STATUS_FRESH_S

    def engine_state(self) -> EngineState:
        """The core's last word, or STARTING where there was none."""
        status = self.client.status
        return EngineState.STARTING if status is None else status.state

    def is_serving(self) -> bool:
        """Whether requests make progress, or will as soon as a lost worker is replaced."""
        return (
            self.client.facts is not None
            and self.is_fresh()
            and self.engine_state() is not EngineState.STARTING
        )

    def is_ready(self) -> bool:
        """Whether new requests are welcome."""
        return (
            self.is_serving()
            and not self.is_draining
            and self.engine_state() is not EngineState.DRAINING
        )

    def _engine_stats(self) -> EngineStats:
        status = self.client.status
        return EngineStats() if status is None else status.stats
