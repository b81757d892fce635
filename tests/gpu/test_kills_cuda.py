"""A request on a GPU continues exactly after kill -9 of the worker and of the core, in fp32."""

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
def test_requests_continue_exactly() -> None:
    with EngineFactory() as start_engine:
        flags = ("--device", "cuda", "--dtype", "float32")
        engine = start_engine(*flags, model="demo", timeout_s=START_S)
        engine.readiness()
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
