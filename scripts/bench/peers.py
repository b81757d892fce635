"""The servers of a benchmark: an engine that is started for it, a running one, and peers."""

import argparse
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from protocol.client import EngineClient
from protocol.model_facts import ModelFacts
from scripts.bench.client import BenchError
from scripts.testing import Engine, EngineFactory

OURS, BASE = "troika", "base"
"""Names of an engine that is started, and of a running server."""
EMBEDDED = "embedded"
_TIMEOUT_S = 30.0
_LOAD_TIMEOUT_S = 600.0
"""The longest wait for a large model on a slow disk."""


class Server(NamedTuple):
    """An address that takes requests."""

    name: str
    target: str
    """Root of an HTTP API, or the address of a core."""
    model: str


class Started(NamedTuple):
    """An engine of this program."""

    engine: Engine
    http: Server
    embedded: Server
    facts: ModelFacts


def http_url(text: str) -> str:
    """Return the root of an API, as http://127.0.0.1:8000/v1, for an argument."""
    url = urlsplit(text)
    if url.scheme != "http" or not url.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address as http://127.0.0.1:8000")
    path = url.path.rstrip("/") or "/v1"
    return f"http://{url.netloc}{path}"


def named_url(text: str) -> tuple[str, str]:
    """Return the name and the address of a peer, for an argument."""
    name, separator, address = text.partition("=")
    if not separator or not name or name in (OURS, BASE, EMBEDDED):
        form = "NAME=URL, with another name than that of the engine"
        raise argparse.ArgumentTypeError(f"{text!r} is not {form}")
    return name, http_url(address)


def running_server(name: str, url: str) -> Server:
    """Ask a server for its model; BenchError: it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=_TIMEOUT_S) as response:
            model = json.load(response)["data"][0]["id"]
    except urllib.error.HTTPError as error:
        with error:
            text = error.read().decode(errors="replace")
        raise BenchError(f"{name}: {url}/models answers {error.code}: {text}") from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{name}: {url}/models does not answer: {error}") from error
    return Server(name, url, str(model))


@contextlib.contextmanager
def started_engine(model: str, flags: Sequence[str]) -> Iterator[Started]:
    """Start an engine with default settings but for `flags`; BenchError: it does not start."""
    with EngineFactory() as factory:
        engine = start(factory, model, flags)
        url = http_url(engine.url())
        with EngineClient(engine.address) as client:
            facts = client.wait_ready(_TIMEOUT_S)
        http = running_server(OURS, url)
        yield Started(engine, http, Server(EMBEDDED, engine.address, http.model), facts)


def start(factory: EngineFactory, model: str, flags: Sequence[str]) -> Engine:
    """Start an engine and wait until it serves."""
    engine = factory(*flags, model=model, timeout_s=_LOAD_TIMEOUT_S)
    try:
        engine.readiness()
    except RuntimeError as error:  # its text has the log
        raise BenchError(str(error)) from error
    except TimeoutError as error:
        raise BenchError(f"{error}:\n{engine.log}") from error
    return engine


def describe(model: str, flags: Sequence[str], facts: ModelFacts | None) -> dict[str, object]:
    """Return what identifies an engine in a result."""
    known = {} if facts is None else msgspec.structs.asdict(facts)
    return {name: msgspec.to_builtins(value) for name, value in known.items()} | {
        "model": model,
        "flags": list(flags),
    }
