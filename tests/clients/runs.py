"""Runs the program of a client against a server, and reads what its checks print."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from scripts.testing import EngineFactory
from tests.clients.catalogue import ENGINES, Client
from tests.clients.environments import Unavailable, ensure

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "troika" / "clients"
_LINE = re.compile(r"^(passed|failed|skipped) ([^:\n]+)(?:: (.*))?$", re.MULTILINE)
_LOG_CHARS = 20_000


class Outcome(msgspec.Struct):
    """What the last run of a client has shown."""

    versions: dict[str, str] = {}
    passed: list[str] = []
    failed: list[str] = []
    skipped: dict[str, str] = {}
    """Checks that do not apply to the server, with the reason."""
    reason: str = ""
    """Why the client was not run."""


def run_client(client: Client, engines: "Engines", cache: Path = CACHE) -> tuple[Outcome, str]:
    """Install a client if necessary, run it, and return its outcome and its output."""
    directory = cache / client.name
    try:
        ensure(client.environment, directory)
    except Unavailable as reason:
        return Outcome(reason=str(reason)), ""
    url = engines.url(client)
    with tempfile.TemporaryDirectory(prefix="troika-client-") as work:
        command = [*client.environment.command(directory, client.program), url, work]
        status, output = _run(command, _environ(directory, work), work, client.timeout_s)
    outcome = read_outcome(output, status)
    outcome.versions = client.environment.versions(directory)
    return outcome, output


def read_outcome(output: str, status: int) -> Outcome:
    """Return what the lines of a program state; a program that breaks off has failed."""
    outcome = Outcome()
    for kind, name, reason in _LINE.findall(output):
        if kind == "skipped":
            outcome.skipped[name] = reason
        else:
            getattr(outcome, kind).append(name)
    if status not in (0, 1) or bool(status) != bool(outcome.failed):
        outcome.failed.append(f"the program, which ended with status {status}")
    return outcome


def _environ(directory: Path, work: str) -> dict[str, str]:
    """Return variables without settings of the caller, and without any network."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": work,
        "LANG": "C.UTF-8",
        "NO_PROXY": "*",
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_API_KEY": "none",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OMP_NUM_THREADS": "1",
        "CLIENT_DIRECTORY": str(directory),
        "TROIKA_PYTHON": sys.executable,
    }


def _run(
    command: list[str], environ: dict[str, str], work: str, timeout_s: float
) -> tuple[int, str]:
    process = subprocess.Popen(
        command,
        env=environ,
        cwd=work,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += f"\nkilled after {timeout_s:g} s\n"
    return process.returncode, output


def excerpt(output: str) -> str:
    """Return the end of an output."""
    return output[-_LOG_CHARS:]


class Engines:
    """Starts each engine once, when the first client needs it."""

    def __init__(self, start_engine: EngineFactory) -> None:
        self._start_engine = start_engine
        self._urls: dict[str, str] = {}

    def url(self, client: Client) -> str:
        """Return the root of the server for a client."""
        if client.engine not in self._urls:
            model, *flags = ENGINES[client.engine]
            engine = self._start_engine(*flags, model=model)
            engine.readiness()
            self._urls[client.engine] = engine.url()
        return self._urls[client.engine]
