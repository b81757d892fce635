"""Processes that do long text jobs, and their limits.

A lane is a task that owns one helper process and does one job after another. A helper that exceeds
the time for a job is killed, and its job is refused. If a helper dies, the next one tries its job
once more. Lanes start when there is work for them, and a killed helper is replaced at once.

An abandoned job, whose request has ended in the meantime, may continue while it is short. Its
helper is killed once the job has used as much processor time as a helper needs to start. So the
replacement never costs more than the job has already used. Clients that disconnect repeatedly can
at most double the work that they cause, and such a job occupies its lane for about two starts
instead of the time that its size allows.
"""

import asyncio
import logging
import socket
import subprocess
import sys
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections import Counter
from collections.abc import Callable

import msgspec

from api_proc.errors import ApiError, overloaded
from api_proc.fairness.waiting import MAX_WAIT_S, current_client
from api_proc.text.chat_template import ChatTemplateError
from api_proc.text.jobs import (
    LENGTH_BYTES,
    MAX_MEMORY_BYTES,
    Answer,
    OutOfMemory,
    Pieces,
    Rejected,
    Result,
    TextLimitReached,
    TextPoolUnavailable,
    TokenIdLists,
    TooLong,
)
from api_proc.text.shared_ids import shared_ids
from api_proc.text.tokenizer import TooManyTokens
from protocol.config import ModelConfig
from protocol.fairness.account import Account
from protocol.fairness.turns import Turns
from protocol.message import unpack_token_array
from protocol.process.cpu_clock import cpu_seconds

LIMIT_S = 2.0
"""Processor time for a job of any size."""
LIMIT_S_PER_MIB = 4.0
"""Additional time for each MiB of the job, which needs up to a second."""
START_S = 60.0
"""Longest wait for a helper to start and load the tokenizer."""
_CHECK_S = 0.1
_MAX_ANSWER_BYTES = 2**26
_SLICE_BYTES = 2**17

log = logging.getLogger("troika.api")
_decode_answer = msgspec.msgpack.Decoder(Answer).decode


class _Order:
    """A waiting job, and the future for its answer."""

    def __init__(self, body: bytes, account: Account) -> None:
        loop = asyncio.get_running_loop()
        self.body = body
        self.account = account
        self.answer: asyncio.Future[bytes] = loop.create_future()
        self._deadline = loop.call_later(MAX_WAIT_S, self._expire)

    def begin(self) -> None:
        """Note that a lane has taken it: it does not wait any more."""
        self._deadline.cancel()

    def end(self) -> None:
        """Free its memory: an order that nothing waits for may stay in the queue for a while."""
        self._deadline.cancel()
        self.body = b""

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def _expire(self) -> None:
        text = f"the prompt has waited for the tokenizer longer than {MAX_WAIT_S:g} s"
        self.fail(TextPoolUnavailable(text))


class TextPool:
    """Does jobs in up to `size` processes; all methods are called in one event loop."""

    def __init__(self, model: ModelConfig, size: int, max_waiting: int) -> None:
        """`max_waiting` bounds the waiting jobs of each client; the clients take turns."""
        self._model = model
        self._size = size
        self._max_waiting = max_waiting
        self._orders: Turns[_Order] = Turns()
        self._num_waiting: Counter[Account] = Counter()
        self._has_orders = asyncio.Event()
        self._lanes: list[asyncio.Task[None]] = []
        self._num_idle = 0

    async def run(self, body: bytes) -> Result:
        """Do a job and return its result, or raise its error or the error of a limit."""
        account = Account(current_client.get())
        if self._num_waiting[account] >= self._max_waiting:
            self._orders.keep(self._is_wanted)
        if self._num_waiting[account] >= self._max_waiting:
            raise too_many_long_texts(self._max_waiting)
        order = _Order(body, account)
        del body
        self._orders.put(account, order)
        self._num_waiting[account] += 1
        self._has_orders.set()
        if self._num_waiting.total() > self._num_idle and len(self._lanes) < self._size:
            lane = asyncio.create_task(self._serve_lane())
            self._lanes.append(lane)
            lane.add_done_callback(self._lanes.remove)
        try:
            answer = await order.answer
        finally:
            order.end()
        return await _unpacked(answer)

    def _is_wanted(self, order: _Order) -> bool:
        """Return whether a waiting job's request is still open; otherwise it counts no more."""
        if order.answer.done():
            self._remove(order)
        return not order.answer.done()

    def _remove(self, order: _Order) -> None:
        self._num_waiting[order.account] -= 1
        if not self._num_waiting[order.account]:
            del self._num_waiting[order.account]

    async def _next_order(self) -> _Order:
        """Wait for a job, and take it from the queue."""
        while (found := self._orders.take()) is None:
            self._has_orders.clear()
            await self._has_orders.wait()
        _, order = found
        self._remove(order)
        return order

    def close(self) -> None:
        """Kill all helpers; unfinished jobs are cancelled with their requests."""
        for lane in list(self._lanes):
            lane.cancel()

    async def _serve_lane(self) -> None:
        lane = _Lane(self._model)
        try:
            while True:
                self._num_idle += 1
                try:
                    order = await self._next_order()
                finally:
                    self._num_idle -= 1
                await lane.do(order)
                del order
                await lane.prepare()
        finally:
            lane.close()


class _Lane:
    """A place for a helper process, and the helper in it."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._helper: _Helper | None = None

    async def do(self, order: _Order) -> None:
        """Answer an order in every case."""
        try:
            await self._do(order)
        except Exception:
            log.exception("a long text could not be handled")
            self.close()
            order.fail(TextPoolUnavailable("the process for long texts has failed"))
        finally:
            order.answer.cancel()

    async def _do(self, order: _Order) -> None:
        order.begin()
        is_second = False
        while not order.answer.done():
            try:
                answer = await self._ask(order)
            except _Abandoned:
                self.close()
                log.info("a process for long texts was killed: the client of its job has left")
            except _HelperDied:
                self.close()
                if is_second:
                    order.fail(TextLimitReached(_DIED))
                is_second = True
            except (TextLimitReached, TextPoolUnavailable) as error:
                self.close()
                log.warning("a process for long texts was killed: %s", error)
                order.fail(error)
            else:
                if not order.answer.done():
                    order.answer.set_result(answer)

    async def prepare(self) -> None:
        """Replace a killed helper, so that the next job finds one."""
        if self._helper is None:
            try:
                self._helper = await _Helper.start(self._model)
            except TextPoolUnavailable as error:
                log.warning("%s", error)

    async def _ask(self, order: _Order) -> bytes:
        if self._helper is not None and self._helper.is_gone:
            self.close()
        if self._helper is None:
            self._helper = await _Helper.start(self._model)
        return await self._helper.ask(order.body, order.answer.done)

    def close(self) -> None:
        if self._helper is not None:
            self._helper.close()
            self._helper = None


_DIED = (
    f"rendering or tokenizing it has failed twice, probably beyond its {MAX_MEMORY_BYTES >> 20} "
    "MiB of memory"
)


class _HelperDied(Exception):
    """The process has ended."""


class _Abandoned(Exception):
    """The job's answer is no longer needed, but the job continues."""


class _Helper:
    """The API's end of a helper. It cannot be used after an exception."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: StreamReader, writer: StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._start_cpu_s = 0.0
        """Processor time until it was ready."""

    @classmethod
    async def start(cls, model: ModelConfig) -> "_Helper":
        """Return a helper that is ready; TextPoolUnavailable: it does not start."""
        try:
            helper = await cls._open()
        except OSError as error:
            text = f"the process for long texts does not start: {error}"
            raise TextPoolUnavailable(text) from error
        try:
            async with asyncio.timeout(START_S):
                await helper._exchange(msgspec.msgpack.encode(model))
        except BaseException as error:
            helper.close()
            if not isinstance(error, _HelperDied | TimeoutError):
                raise
            raise TextPoolUnavailable("the process for long texts does not start") from error
        helper._start_cpu_s = cpu_seconds(helper._process.pid)
        return helper

    @classmethod
    async def _open(cls) -> "_Helper":
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            fd = theirs.fileno()
            command = [sys.executable, "-P", "-m", "api_proc.text.helper", str(fd)]
            try:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[fd])
            except OSError:
                writer.transport.abort()
                raise
        return cls(process, reader, writer)

    @property
    def is_gone(self) -> bool:
        return self._process.poll() is not None

    async def ask(self, body: bytes, is_abandoned: Callable[[], bool]) -> bytes:
        """Do a job; TextLimitReached, TextPoolUnavailable, _Abandoned: it takes too long."""
        limit_s = LIMIT_S + LIMIT_S_PER_MIB * len(body) / 2**20
        began_cpu_s = cpu_seconds(self._process.pid)
        deadline = time.monotonic() + _longest_wait_s(limit_s)
        exchange = asyncio.ensure_future(self._exchange(body))
        del body
        try:
            while not (await asyncio.wait({exchange}, timeout=_CHECK_S))[0]:
                used_cpu_s = cpu_seconds(self._process.pid) - began_cpu_s
                if is_abandoned() and used_cpu_s >= self._start_cpu_s:
                    raise _Abandoned
                if used_cpu_s >= limit_s:
                    text = f"rendering and tokenizing it takes longer than {limit_s:.1f} s"
                    raise TextLimitReached(text)
                if time.monotonic() >= deadline:
                    raise TextPoolUnavailable("the process for long texts does not answer")
            return exchange.result()
        finally:
            exchange.cancel()

    async def _exchange(self, body: bytes) -> bytes:
        try:
            self._writer.write(len(body).to_bytes(LENGTH_BYTES, "little"))
            self._writer.write(body)
            del body
            await self._writer.drain()
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
            if length > _MAX_ANSWER_BYTES:
                raise TextLimitReached(f"its prompt has more than {_MAX_ANSWER_BYTES} bytes")
            return await self._reader.readexactly(length)
        except (OSError, EOFError) as error:
            raise _HelperDied from error

    def close(self) -> None:
        self._process.kill()
        self._writer.transport.abort()
        # A process that uses much memory takes a while to end.
        threading.Thread(target=self._process.wait, daemon=True).start()


def too_many_long_texts(limit: int) -> ApiError:
    """Return a 429 for a client that has too many texts in the queue."""
    return overloaded(f"{limit} long prompts of this client are waiting for the tokenizer")


def _longest_wait_s(limit_s: float) -> float:
    """Return the time for a helper that shares its processor with more important processes."""
    return 20.0 + 10 * limit_s


async def _unpacked(body: bytes) -> Result:
    """Decode an answer; long lists in slices, so that other tasks run in between."""
    match answer := _decode_answer(body):
        case Pieces():
            return answer
        case TooLong(num_tokens):
            raise TooManyTokens(num_tokens)
        case Rejected(message):
            raise ChatTemplateError(message)
        case OutOfMemory():
            text = f"rendering and tokenizing it needs more than {MAX_MEMORY_BYTES >> 20} MiB"
            raise TextLimitReached(text)
    lists = []
    num_bytes = 0
    for packed in answer.lists:
        token_ids: list[int] = []
        for start in range(0, len(packed), _SLICE_BYTES):
            piece = packed[start : start + _SLICE_BYTES]
            token_ids += shared_ids(unpack_token_array(piece))
            num_bytes += len(piece)
            if num_bytes >= _SLICE_BYTES:
                num_bytes = 0
                await asyncio.sleep(0)
        lists.append(token_ids)
    return TokenIdLists(lists)
