"""A request on a GPU continues exactly after kill -9 of the worker and of the core.

In float32, in bfloat16 with batch invariance, and in ranks on two GPUs.
"""

import json
import threading
import urllib.request
from typing import Any

import pytest
import torch

from protocol.lifecycle import Role
from scripts.testing import Engine, EngineFactory, eventually

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

START_S = 300.0
BODY: dict[str, Any] = {
    "model": "demo",
    "prompt": "def __init__(self, ",
    "max_tokens": 500,
    "temperature": 0.0,
    "ignore_eos": True,
    "return_token_ids": True,
}


def complete(engine: Engine) -> list[int]:
    headers = {"content-type": "application/json"}
    url = engine.url() + "/v1/completions"
    request = urllib.request.Request(url, json.dumps(BODY).encode(), headers)
    with urllib.request.urlopen(request, timeout=START_S) as response:
        tokens: list[int] = json.loads(response.read())["choices"][0]["token_ids"]
    return tokens


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "flags",
    [
        ("--dtype", "float32"),
        ("--dtype", "bfloat16", "--batch-invariant"),
        ("--dtype", "float32", "--tensor-parallel-size", "2"),
    ],
    ids=["float32", "invariant", "ranks"],
)
def test_requests_continue_exactly(flags: tuple[str, ...]) -> None:
    if "--tensor-parallel-size" in flags and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with EngineFactory() as start_engine:
        engine = start_engine("--device", "cuda", *flags, model="demo", timeout_s=START_S)
        assert engine.readiness()["exact_resume"] == ("--batch-invariant" in flags)
        expected = complete(engine)
        assert len(expected) == BODY["max_tokens"]
        for role in (Role.WORKER, Role.CORE):
            found: list[list[int]] = []
            client = threading.Thread(target=lambda found=found: found.append(complete(engine)))
            client.start()
            eventually(lambda: engine.get("/load")["server_load"], "the request runs")
            assert not found, "it ended before the kill"
            engine.kill(role)
            client.join(START_S)
            assert found == [expected]
