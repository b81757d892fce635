"""An engine that stores its blocks, and that other machines can reach."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

from protocol.client import AsyncEngineClient
from protocol.lifecycle import Role
from protocol.stores.tiers import memory_directory
from scripts.testing import Engine, EngineFactory, is_alive
from tests.ports import free_port
from tests.system.offload.stored_blocks import MEMORY, start


class Machine:
    """An engine that other machines reach, and that stores its blocks."""

    def __init__(
        self,
        start_engine: EngineFactory,
        keys: Path,
        *null_flags: str,
        begin: Callable[..., Engine] | None = None,
        num_ranks: int = 1,
    ) -> None:
        """Start it with the demo model, or with `null_flags` and the null model.

        `begin` starts another model, with all flags; `num_ranks`: that have a part of each block.
        """
        self.num_ranks = num_ranks
        self.port = free_port()
        self.kv_port = free_port()
        listen = ("--core-listen", f"127.0.0.1:{self.port}", "--curve-keys", str(keys))
        flags = (*MEMORY, *listen, "--kv-listen", f"127.0.0.1:{self.kv_port}")
        if begin is not None:
            self.engine: Engine = begin(start_engine, *null_flags, *flags)
        elif null_flags:
            self.engine = start_engine("--no-api", *null_flags, *flags)
        else:
            self.engine = start(start_engine, *flags)

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def files(self) -> Path:
        return memory_directory(self.engine.run_dir)

    def lose_engine(self) -> None:
        """Kill core and workers for good: their supervisor is stopped, the block server lives."""
        rows = self.engine.ready().processes
        server = self.engine.pid(Role.BLOCK_SERVER)
        self.engine.process.send_signal(signal.SIGSTOP)
        for row in rows:
            if row.pid not in (None, server, self.engine.process.pid):
                os.kill(row.pid, signal.SIGKILL)
        assert is_alive(server)


def num_remote(client: AsyncEngineClient) -> int:
    return 0 if client.status is None else client.status.stats.kv_remote_tokens_loaded
