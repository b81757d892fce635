"""/healthz and /load: progress and load are different things."""

import time

import httpx

from api_proc.operation.load_routes import STUCK_AFTER_S
from protocol.api_core import EngineState
from tests.api.conftest import MakeServer
from tests.api.fake_engine import FakeClient


def test_load_counts_the_engines_requests(make_server: MakeServer) -> None:
    client = FakeClient()
    client.report(EngineState.READY, num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.5)
    live = make_server(client)
    report = httpx.get(live.url + "/load").json()
    assert report == {
        "server_load": 0,
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage": 0.5,
    }
    assert httpx.get(live.url + "/v1/load").json() == report


def test_healthz_fails_only_without_progress(make_server: MakeServer) -> None:
    """Load alone, or silence without requests, is healthy; the key is not needed."""
    client = FakeClient()
    live = make_server(client, api_key="secret")
    client.stuck_since = time.monotonic() - STUCK_AFTER_S - 1.0
    assert httpx.get(live.url + "/healthz").status_code == 200
    client.report(EngineState.READY, num_running_reqs=256, num_waiting_reqs=9000)
    response = httpx.get(live.url + "/healthz")
    report = response.json()
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert (report["healthy"], report["num_unfinished"]) == (False, 9256)
    assert report["seconds_without_step"] > STUCK_AFTER_S
    assert "no step for 6" in report["reason"]
    client.stuck_since = time.monotonic() - STUCK_AFTER_S + 10.0
    assert httpx.get(live.url + "/healthz").status_code == 200
