"""Another server with OpenAI's API, measured with the same client and the same kills."""

import asyncio
import json
import random
import time

from tests.chaos import processes
from tests.chaos.client import StreamClient
from tests.chaos.history import History
from tests.chaos.injection import Kill
from tests.chaos.recording import End
from tests.chaos.workload import COMPLETIONS, ChaosRequest

_MODELS_TIMEOUT_S = 10.0
_RETURN_POLL_S = 0.1


class ExternalServer:
    """The address of a server, and a way to kill it."""

    def __init__(self, url: str, kill_command: str | None, kill_pattern: str | None) -> None:
        """Take the root of its API, and one of two ways to kill."""
        self.client = StreamClient(url.rstrip("/").removesuffix("/v1"))
        self._kill_command = kill_command
        self._kill_pattern = kill_pattern

    async def model(self) -> str:
        """Return the first model that it serves.

        Raises:
            OSError: it cannot be reached.
            Declined: it does not list its models.
        """
        page = await self.client.get("/v1/models", _MODELS_TIMEOUT_S)
        return str(json.loads(page)["data"][0]["id"])

    async def kill(self, rng: random.Random) -> Kill | None:
        """Kill; None if there was no process to kill."""
        if self._kill_command is not None:
            moment = time.monotonic()
            process = await asyncio.create_subprocess_shell(self._kill_command)
            status = await process.wait()
            return Kill(moment, "command", 0, self._kill_command) if status == 0 else None
        assert self._kill_pattern is not None
        pids = processes.matching(self._kill_pattern)
        if not pids:
            return None
        pid = rng.choice(pids)
        moment_or_none = processes.kill(pid)
        if moment_or_none is None:
            return None
        return Kill(moment_or_none, self._kill_pattern, pid, "outside")

    async def wait_back(self, model: str, timeout_s: float) -> bool:
        """Wait until it generates a token; False if it does not in time.

        A server whose engine is dead may still list its models.
        """
        body = {"model": model, "prompt": "x", "max_tokens": 1, "stream": True}
        request = ChaosRequest("probe", COMPLETIONS, body)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            recording = await self.client.record(request, deadline)
            if recording.end is End.DONE and not History(recording).errors:
                return True
            await asyncio.sleep(_RETURN_POLL_S)
        return False
