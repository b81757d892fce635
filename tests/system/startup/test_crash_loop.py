"""A worker that dies at every start: open requests wait, new ones are refused, and the end."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx

from protocol.lifecycle import Role
from protocol.process import failpoints
from scripts.testing import Engine, EngineFactory, eventually
from tests.system.streams import Stream
from tests.timing import within

BODY = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True}


def readiness(engine: Engine, url: str) -> tuple[int, dict[str, Any]]:
    """Return status and body of /readyz."""
    answer = httpx.get(url + "/readyz", timeout=5.0)
    assert ("retry-after" in answer.headers) == (answer.status_code == 503)
    return answer.status_code, answer.json()


def break_worker(engine: Engine, directory: Path) -> Path:
    """Let each worker die when it loads, until the returned file is removed."""
    order = directory / "worker.load"
    order.write_text("exc@*")
    os.kill(engine.pid(Role.WORKER), signal.SIGKILL)
    return order


def test_new_requests_are_sent_away_and_open_ones_held(
    start_engine: EngineFactory, tmp_path: Path
) -> None:
    """/readyz reports degraded soon; when the worker starts again, the stream goes on."""
    start_engine.environ[failpoints.VARIABLE] = str(tmp_path)
    engine = start_engine("--null-step-ms", "5", "--restart-backoff-max-s", "0.5")
    url = engine.url()
    expected = "".join(event.text for event in Stream(url, BODY).events())
    stream = Stream(url, BODY, timeout_s=60.0)
    first = stream.next()
    assert first is not None
    order = break_worker(engine, tmp_path)
    eventually(lambda: readiness(engine, url)[1]["state"] == "degraded", "it is noticed", 60.0)
    assert readiness(engine, url)[0] == 503

    def refuse() -> dict[str, float]:
        began = time.monotonic()
        refusal = Stream(url, BODY)
        assert refusal.read_head() == 503
        took_s = time.monotonic() - began
        assert int(refusal.headers["retry-after"]) >= 1
        assert json.loads(refusal.body())["error"]["code"] == "degraded"
        return {"refusal_s": took_s}

    within(10, refuse, refusal_s=0.05)
    assert httpx.get(url + "/livez").status_code == 200
    order.unlink()
    eventually(lambda: readiness(engine, url)[0] == 200, "it serves again", 60.0)
    assert first.text + "".join(event.text for event in stream.events()) == expected


def test_giving_up_ends_with_status_1(start_engine: EngineFactory, tmp_path: Path) -> None:
    """The supervisor ends with a status that a restarter notices."""
    start_engine.environ[failpoints.VARIABLE] = str(tmp_path)
    engine = start_engine("--no-api", "--restart-backoff-max-s", "0.5", "--give-up-after-s", "1")
    engine.ready()
    break_worker(engine, tmp_path)
    assert engine.process.wait(60.0) == 1
