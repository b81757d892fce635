"""A core and a null worker without a supervisor, and the tokens of their streams."""

import subprocess
import sys

from protocol.client import AsyncEngineClient
from protocol.config.settings import configure
from protocol.process.run_dir import client_address
from protocol.sampling import SamplingParams
from scripts.inprocess import InprocEngine
from tests.paths import ROOT

PROMPTS = [[5, 6, 7, n] for n in range(16)]


class BareEngine:
    """A core and a null worker started by hand, each replaceable."""

    def __init__(self, run_dir: str, *flags: str) -> None:
        self._run_dir = run_dir
        self._flags = flags
        self._epoch = 0
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.start("core_proc")
        self.start("worker_proc")

    @property
    def address(self) -> str:
        return client_address(self._run_dir)

    def start(self, module: str) -> None:
        self._epoch += 1
        command = [sys.executable, "-m", module, "--run-dir", self._run_dir, "--model", "null"]
        command += ["--epoch", str(self._epoch), *self._flags]
        self.processes[module] = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)

    def replace(self, module: str) -> None:
        self.kill(module)
        self.start(module)

    def kill(self, module: str) -> None:
        self.processes[module].kill()
        self.processes[module].wait(timeout=10)

    def close(self) -> None:
        for module in self.processes:
            self.kill(module)


def expected_tokens(prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """Return the outputs of the same engine in one process."""
    reference = InprocEngine(configure(model="null"))
    tokens: dict[int, list[int]] = {}
    for output in reference.generate(prompts, params):
        tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return [tokens[request_id] for request_id in sorted(tokens)]


async def collect(
    client: AsyncEngineClient, prompt: list[int], params: SamplingParams, tokens: list[int]
) -> None:
    async for output in client.submit(prompt, params):
        assert output.first_index == len(tokens)
        tokens += output.token_ids
