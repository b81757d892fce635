"""`startup`: the time from the command to an engine that serves, and to its first token.

Each repetition has a separate cache directory with the kernels, as `scripts/setup` compiles them.
The first start proves the model; the second one finds the proofs, as every later start does.
"""

import argparse
import http.client
import shutil
import socket
import tempfile
import time
from pathlib import Path

import msgspec

from protocol.client import EngineClient
from scripts.bench.client import BenchError
from scripts.bench.peers import OURS, describe
from scripts.bench.report import Record, RunRecord
from scripts.bench.rounds import add
from scripts.bench.workloads import LOWEST_ID
from scripts.testing import Engine, EngineFactory, eventually
from worker_proc.native.build import build

STARTS = {
    "first": "first start, which proves the model",
    "second": "second start",
}
_HOST = "127.0.0.1"
_PROMPT = list(range(LOWEST_ID, LOWEST_ID + 8))
_FACTS_TIMEOUT_S = 30.0


def run(arguments: argparse.Namespace, record: Record) -> None:
    """Start and end engines."""
    record.workloads = dict(STARTS)
    record.servers = {OURS: "started by the tool"}
    for repeat in range(arguments.repeats):
        with tempfile.TemporaryDirectory(prefix="troika-bench-") as cache:
            if arguments.model != "null":
                _provide_kernels(Path(cache) / "troika")
            for name in STARTS:
                figures = _measure(arguments, record, cache)
                add(record, RunRecord(name, OURS, repeat, arguments.seed, figures))


def _measure(arguments: argparse.Namespace, record: Record, cache: str) -> dict[str, float]:
    model, flags, limit_s = arguments.model, arguments.engine_flags, arguments.timeout_s
    port = _free_port()
    with EngineFactory() as factory:
        factory.environ["XDG_CACHE_HOME"] = cache
        began = time.monotonic()
        engine = factory(*flags, "--host", _HOST, "--port", str(port), model=model)
        eventually(lambda: _serves(engine, port, limit_s), "the engine serves", limit_s)
        ready_s = time.monotonic() - began
        _complete(port, limit_s)
        first_token_s = time.monotonic() - began
        if not record.engine:
            with EngineClient(engine.address) as client:
                facts = client.wait_ready(_FACTS_TIMEOUT_S)
            record.engine = describe(model, flags, facts)
    return {"ready_s": ready_s, "first_token_s": first_token_s}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _serves(engine: Engine, port: int, timeout_s: float) -> bool:
    """Return whether /readyz answers 200; the supervisor's status may come later."""
    if engine.process.poll() is not None:
        raise BenchError(f"the engine has ended:\n{engine.log}")
    connection = http.client.HTTPConnection(_HOST, port, timeout=timeout_s)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _complete(port: int, timeout_s: float) -> None:
    """Wait for one token."""
    body = msgspec.json.encode({"prompt": _PROMPT, "max_tokens": 1, "temperature": 0})
    connection = http.client.HTTPConnection(_HOST, port, timeout=timeout_s)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise BenchError(f"the first request has failed: {error}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise BenchError(f"the first request was answered with {response.status}: {text}")


def _provide_kernels(directory: Path) -> None:
    """Put the compiled kernels into a cache directory."""
    try:
        library = build()
    except (OSError, RuntimeError) as error:
        raise BenchError(f"the kernels are not compiled: {error}") from error
    directory.mkdir(mode=0o700)
    shutil.copy(library, directory)
