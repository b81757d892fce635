"""The two places where prompts are computed: the engine's own processes, and this process."""

import asyncio
import logging
from typing import Protocol, Unpack

from protocol.api_core import EngineStats, ErrorCode, RequestError, RequestOutput
from protocol.client import ReplicatedClient, ReplicatedOptions
from protocol.client.errors import EngineFailed, failure_of
from protocol.client.ledger import RequestOptions
from protocol.client.request_stream import RequestStream
from protocol.config import EngineConfig
from protocol.message import MAX_TEXT
from protocol.model_facts import ModelFacts
from protocol.process.launch import EngineProcesses, EngineStartError
from protocol.process.machines import client_keys, own_model_files
from protocol.sampling import SamplingParams

log = logging.getLogger("troika.api")

_CHECK_S = 0.25
"""How often a start is checked for its failure."""
_IDLE_S = 0.001


class Engine(Protocol):
    """Computes token ids; all methods but `end` are called in one event loop."""

    async def start(self, timeout_s: float) -> ModelFacts:
        """Wait until requests are served."""

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> RequestStream:
        """Accept a request; RequestFailed: it is invalid, or there is no room for it."""

    async def disconnect(self) -> None:
        """Fail everything that is open."""

    def stats(self) -> EngineStats:
        """Return the core's last statistics."""

    def end(self) -> None:
        """End what `start` has started; blocks for less than 5 s. Idempotent, in any thread."""


class ProcessEngine:
    """Core and workers as child processes, which are replaced when they die."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._processes: EngineProcesses | None = None
        self._client: ReplicatedClient | None = None
        self._watched_pidfd = -1
        self._has_ended = False
        """True if no process is left, and no other engine can continue the requests."""

    @property
    def run_dir(self) -> str:
        """The directory of the engine's sockets, for `troika status` and for tests."""
        if self._processes is None:
            raise RuntimeError("the engine was not started")
        return self._processes.run_dir

    async def start(self, timeout_s: float) -> ModelFacts:
        """Start a separate engine; EngineStartError: it has ended, or is not ready in time."""
        self._processes = EngineProcesses(self._config)
        self._client = ReplicatedClient(
            [*self._processes.addresses, *self._config.parallel.replica_addresses],
            ReplicatedOptions.of(self._config),
            keys=client_keys(self._config),
            files=own_model_files(self._config),
        )
        await self._client.start()
        num_checks = 0
        while num_checks * _CHECK_S < timeout_s:
            try:
                facts = await self._client.wait_ready(_CHECK_S)
                self._watch(self._processes.pidfd)
                return facts
            except TimeoutError:
                self._processes.check()
            num_checks += not self._processes.is_fetching
        raise EngineStartError(f"the engine is not ready after {timeout_s:g} s")

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> RequestStream:
        assert self._client is not None
        if self._has_ended:
            self.check()
        return self._client.submit(prompt_token_ids, params, **options)

    def check(self) -> None:
        """Raise EngineFailed, with the reason, if the processes have ended by themselves."""
        if self._processes is None:
            return
        try:
            self._processes.check()
        except EngineStartError as error:
            reason = f"the engine's processes have ended: {error}"[:MAX_TEXT]
            raise EngineFailed(RequestError(ErrorCode.ENGINE_FAILED, reason)) from None

    def _watch(self, pidfd: int) -> None:
        """Fail requests when the supervisor ends, unless another engine may continue them."""
        is_only = not self._config.parallel.replica_addresses
        if self._config.run.run_dir is None and is_only:
            self._watched_pidfd = pidfd
            asyncio.get_running_loop().add_reader(pidfd, self._on_end)

    def _unwatch(self) -> None:
        if self._watched_pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._watched_pidfd)
            self._watched_pidfd = -1

    def _on_end(self) -> None:
        self._unwatch()
        self._has_ended = True
        try:
            self.check()
        except EngineFailed as failure:
            assert self._client is not None
            for client in self._client.clients:
                client.requests.fail_all(failure.error)

    async def disconnect(self) -> None:
        self._unwatch()
        if self._client is not None:
            await self._client.close()

    def stats(self) -> EngineStats:
        status = None if self._client is None else self._client.status
        return EngineStats() if status is None else status.stats

    def end(self) -> None:
        if self._processes is not None:
            self._processes.close()


class Stepper(Protocol):
    """An engine in this process, such as `scripts.inprocess.InprocEngine`."""

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def has_unfinished(self) -> bool: ...

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> int: ...

    def cancel(self, request_id: int) -> None: ...

    def step(self) -> list[RequestOutput]: ...

    def stats(self) -> EngineStats: ...


class SteppedEngine:
    """Steps an engine in this process, in its event loop, which has no other work."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._streams: dict[int, RequestStream] = {}
        self._stepping: asyncio.Task[None] | None = None

    async def start(self, timeout_s: float) -> ModelFacts:
        return self._stepper.facts

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> RequestStream:
        request_id = self._stepper.submit(prompt_token_ids, params, **options)
        stream = self._streams[request_id] = RequestStream(request_id, self._cancel)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_until_idle())
        return stream

    async def disconnect(self) -> None:
        self._fail_all(ErrorCode.ABORTED, "the client was closed")

    def stats(self) -> EngineStats:
        return self._stepper.stats()

    def end(self) -> None:
        """The caller owns the engine."""

    def _cancel(self, request_id: int) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._stepper.cancel(request_id)

    def _fail_all(self, code: ErrorCode, reason: str) -> None:
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            self._stepper.cancel(request_id)
            stream.fail(failure_of(RequestError(code, reason)))

    async def _step_until_idle(self) -> None:
        while self._stepper.has_unfinished:
            try:
                outputs = self._stepper.step()
            except Exception as error:
                log.exception("a step has failed")
                reason = f"a step has failed: {error}"[:MAX_TEXT]
                self._fail_all(ErrorCode.INTERNAL, reason)
                return
            for output in outputs:
                stream = self._streams.get(output.request_id)
                if stream is not None:
                    stream.deliver(output)
                if output.finish_reason is not None:
                    self._streams.pop(output.request_id, None)
            # A paused engine has work and no outputs.
            await asyncio.sleep(0 if outputs else _IDLE_S)
