"""A request on a GPU continues exactly after kill -9 of the worker and of the core.

In float32, and in bfloat16 with batch invariance.
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
@pytest.mark.parametrize("is_invariant", [False, True])
def test_requests_continue_exactly(is_invariant: bool) -> None:
    with EngineFactory() as start_engine:
        flags = (
            ("--dtype", "bfloat16", "--batch-invariant") if is_invariant else ("--dtype", "float32")
        )
        engine = start_engine("--device", "cuda", *flags, model="demo", timeout_s=START_S)
        assert engine.readiness()["exact_resume"] == is_invariant
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
