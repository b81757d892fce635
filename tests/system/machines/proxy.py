"""A proxy between a client and a port, which delays data and can cut the connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

STALL_S = 0.3
"""As after a lost packet, which is sent again."""


class Proxy:
    """A wire between two machines that can be cut: then nothing passes, and nothing is closed."""

    def __init__(self, port: int, delay_s: float = 0.0, stalls: float = 0.0) -> None:
        """Take the port behind it, the delay of all data, and the share of it that stalls."""
        self._port = port
        self._delay_s = delay_s
        self._stalls = stalls
        self._random = Random(1)
        self._max_bytes = 2**62
        self.num_bytes = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._is_over = False
        self._is_open = asyncio.Event()
        self._is_open.set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Forward connections to the port; yields the address to connect to."""
        server = await asyncio.start_server(self._on_connection, "127.0.0.1", 0)
        async with server:
            yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._is_over = True
            self.mend()
        for writer in self._writers:  # of peers that keep their connections
            writer.transport.abort()
        closed = [writer.wait_closed() for writer in self._writers]
        await asyncio.gather(*closed, *self._tasks, return_exceptions=True)

    def cut(self) -> None:
        self._is_open.clear()

    def cut_after(self, num_bytes: int) -> None:
        """Let some more bytes pass."""
        self._max_bytes = self.num_bytes + num_bytes

    def mend(self) -> None:
        self._max_bytes = 2**62
        self._is_open.set()

    @property
    def is_cut(self) -> bool:
        return not self._is_open.is_set()

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._writers.append(writer)
        await self._is_open.wait()
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.close()
            return
        self._writers.append(back)
        if self._is_over:
            back.transport.abort()
        self._tasks += [
            asyncio.create_task(self._forward(reader, back)),
            asyncio.create_task(self._forward(there, writer)),
        ]

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(2**16):
                is_stalled = self._random.random() < self._stalls
                await asyncio.sleep(self._delay_s + STALL_S * is_stalled)
                self.num_bytes += len(data)
                if self.num_bytes >= self._max_bytes:
                    self.cut()
                await self._is_open.wait()
                target.write(data)
                await target.drain()
        except OSError:
            pass
        finally:
            target.close()
