"""Vectors are the same if processes of the engine are killed while they are computed."""

import os
import signal
import threading
from typing import Any

import pytest

from protocol.client import EngineClient
from protocol.lifecycle import Role
from protocol.sampling import Pooling, PoolingType
from scripts.testing import Engine, EngineFactory, eventually

NULL_FLAGS = ("--null-step-ms", "15", "--max-num-batched-tokens", "256")
DEMO_FLAGS = ("--num-threads", "1", "--max-num-batched-tokens", "256", "--max-num-seqs", "64")
TEXTS = [f"{number}: " + f"def work_{number}(self, path): " * 9 for number in range(32)]
BODIES: dict[str, dict[str, Any]] = {
    "last": {"input": TEXTS, "cache_salt": "a"},
    "mean": {"input": TEXTS, "pooling": "mean", "encoding_format": "base64"},
}
PROMPT = [5, 6, 7] * 400


class Vectors:
    """Requests for many vectors at once: over HTTP, and from a host."""

    def __init__(self, engine: Engine, salt: str) -> None:
        self.results: dict[str, Any] = {}
        self._engine = engine
        works: dict[str, Any] = {
            name: lambda body=body: engine.post("/v1/embeddings", **body | {"cache_salt": salt})
            for name, body in BODIES.items()
        }
        works["host"] = self._embed
        self._threads = [
            threading.Thread(target=self._keep, args=(name, work), daemon=True)
            for name, work in works.items()
        ]
        for thread in self._threads:
            thread.start()

    def _keep(self, name: str, work: Any) -> None:
        self.results[name] = work()

    def _embed(self) -> list[bytes]:
        with EngineClient(self._engine.address) as client:
            client.wait_ready(timeout_s=20)
            pooling = Pooling(PoolingType.MEAN, normalize=False)
            return [client.embed(PROMPT, pooling).tobytes() for _ in range(6)]

    def are_computed(self) -> bool:
        """Whether an HTTP request has got some of its vectors, and not all."""
        return any(slot["state"] == "running" for slot in self._engine.get("/slots"))

    def finish(self) -> dict[str, Any]:
        for thread in self._threads:
            thread.join(timeout=60)
        assert set(self.results) == {*BODIES, "host"}
        for name in BODIES:
            assert len(self.results[name]["data"]) == len(TEXTS)
        return {
            name: result if name == "host" else (result["data"], result["usage"])
            for name, result in self.results.items()
        }


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("model", "flags"),
    [("null", NULL_FLAGS), pytest.param("demo", DEMO_FLAGS, marks=pytest.mark.slow)],
    ids=["null", "demo"],
)
def test_vectors_survive_kill_9_of_worker_and_core(
    start_engine: EngineFactory, model: str, flags: tuple[str, ...]
) -> None:
    engine = start_engine(*flags, model=model)
    engine.readiness()
    undisturbed = Vectors(engine, "a").finish()
    assert len({str(item["embedding"]) for item in undisturbed["last"][0]}) == len(TEXTS)
    disturbed = Vectors(engine, "b")
    epochs = []
    for role in (Role.WORKER, Role.CORE):
        eventually(disturbed.are_computed, "vectors are computed")
        epochs.append(engine.row(role).epoch)
        os.kill(engine.pid(role), signal.SIGKILL)
        eventually(lambda r=role: engine.row(r).epoch > epochs[-1], "its successor serves")
    assert len(disturbed.results) < len(undisturbed), "killed in the middle"
    assert disturbed.finish() == undisturbed
