"""The live view's route and a stream, while processes are killed."""

import os
import signal
from typing import Any

from protocol.lifecycle import ProcessState, Role
from scripts.testing import Engine, EngineFactory, eventually
from tests.system.streams import Stream

BODY: dict[str, Any] = {"prompt": "a page", "max_tokens": 300, "seed": 3, "ignore_eos": True}


def process(view: Any, role: Role) -> Any:
    return next(row for row in view["processes"] if row["role"] == role)


def replaced(engine: Engine, role: Role, epoch: int) -> Any:
    """Return the view once a process has a successor that is ready, and the engine is."""
    view = engine.get("/debug/engine")
    if view["processes"] is None:
        return None
    row = process(view, role)
    is_back = row["epoch"] > epoch and row["state"] == "ready" and view["is_ready"]
    return view if is_back else None


def settled(engine: Engine) -> Any:
    """Return the pids and epochs of all processes once each of them, also a standby, is ready."""
    rows = engine.ready().processes
    is_settled = all(row.state is ProcessState.READY for row in rows)
    return [(row.pid, row.epoch) for row in rows] if is_settled else None


def test_view_follows_the_processes_and_the_stream_is_exact(start_engine: EngineFactory) -> None:
    engine = start_engine("--null-step-ms", "5")
    engine.readiness()
    processes = eventually(lambda: settled(engine), "all processes are ready")
    view = engine.get("/debug/engine")
    assert [(row["pid"], row["epoch"]) for row in view["processes"]] == processes
    undisturbed = engine.post("/v1/completions", **BODY)["choices"][0]["text"]
    stream = Stream(engine.url(), BODY | {"stream": True})
    text = ""
    for role in (Role.WORKER, Role.CORE):
        for _ in range(20):
            event = stream.next()
            assert event is not None
            text += event.text
        before = process(engine.get("/debug/engine"), role)
        os.kill(before["pid"], signal.SIGKILL)
        view = eventually(
            lambda role=role, epoch=before["epoch"]: replaced(engine, role, epoch), "it is replaced"
        )
        assert process(view, role)["pid"] != before["pid"]
        assert process(view, role)["num_restarts"] == before["num_restarts"] + 1
        assert view["load_age_s"] < 5
    text += "".join(event.text for event in stream.events())
    assert text == undisturbed
