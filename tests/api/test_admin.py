"""Admin routes: disabled by default, behind the API key, with the engine's response."""

import httpx
import pytest

from protocol.api_core import ErrorCode, PauseMode, RequestError
from protocol.client.errors import RequestFailed
from tests.api.conftest import MakeServer
from tests.api.fake_engine import FakeClient

ROUTES = [
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/reset_prefix_cache"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_routes_do_not_exist_without_the_setting(
    http: httpx.Client, method: str, path: str
) -> None:
    answer = http.request(method, path)
    assert answer.status_code == 404
    message = f"Not Found: {method} {path}, which exists only with --enable-admin-routes"
    assert answer.json()["error"]["message"] == message


def test_routes_need_the_key(make_server: MakeServer) -> None:
    client = FakeClient()
    live = make_server(client, enable_admin_routes=True, api_key="secret")
    for method, path in ROUTES:
        assert httpx.request(method, live.url + path).status_code == 401
    assert client.controls == []
    key = {"authorization": "Bearer secret"}
    for method, path in ROUTES:
        assert httpx.request(method, live.url + path, headers=key).status_code == 200
    assert len(client.controls) == 5


@pytest.mark.parametrize(
    ("path", "control"),
    [
        ("/pause", ("pause", PauseMode.PAUSED_ALL)),
        ("/pause?mode=all", ("pause", PauseMode.PAUSED_ALL)),
        ("/pause?mode=new", ("pause", PauseMode.PAUSED_NEW)),
        ("/resume", ("resume", PauseMode.RUNNING)),
        ("/wake_up", ("resume", PauseMode.RUNNING)),
        ("/sleep", ("sleep", PauseMode.PAUSED_ALL)),
        ("/wake_up?tags=kv_cache", ("resume", PauseMode.RUNNING)),
        ("/wake_up?tags=weights&tags=kv_cache", ("resume", PauseMode.RUNNING)),
        ("/sleep?level=1", ("sleep", PauseMode.PAUSED_ALL)),
        ("/sleep?level=2", ("sleep", PauseMode.PAUSED_ALL)),
        ("/reset_prefix_cache", ("reset", False)),
        ("/reset_prefix_cache?reset_running_requests=true", ("reset", True)),
        ("/reset_prefix_cache?reset_running_requests=False", ("reset", False)),
    ],
)
def test_each_route_sends_its_command(
    make_server: MakeServer, path: str, control: tuple[str, object]
) -> None:
    client = FakeClient()
    live = make_server(client, enable_admin_routes=True)
    assert httpx.post(live.url + path).status_code == 200
    assert client.controls == [control]
    if control[0] == "reset":
        return
    asleep = httpx.get(live.url + "/is_sleeping").json()
    assert asleep == {"is_sleeping": control[0] == "sleep"}
    paused = httpx.get(live.url + "/is_paused").json()
    mode = control[1]
    assert paused == {"is_paused": mode is not PauseMode.RUNNING, "pause_mode": mode}


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/pause?mode=some", "mode"),
        ("/pause?mod=new", "mod"),
        ("/reset_prefix_cache?reset_running_requests=maybe", "reset_running_requests"),
        ("/reset_prefix_cache?reset=true", "reset"),
        ("/resume?mode=new", "mode"),
        ("/sleep?level=3", "level"),
        ("/sleep?level=", "level"),
        ("/wake_up?tags=adapters", "tags"),
        ("/wake_up?tags=weights&tags=", "tags"),
        ("/wake_up?tag=weights", "tag"),
    ],
)
def test_a_bad_parameter_is_named_and_no_command_is_sent(
    make_server: MakeServer, path: str, param: str
) -> None:
    client = FakeClient()
    live = make_server(client, enable_admin_routes=True)
    response = httpx.post(live.url + path)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert client.controls == []


@pytest.mark.parametrize(
    ("path", "body", "control"),
    [
        ("/pause", {"mode": "new"}, ("pause", PauseMode.PAUSED_NEW)),
        ("/pause", {}, ("pause", PauseMode.PAUSED_ALL)),
        ("/sleep", {"level": 1}, ("sleep", PauseMode.PAUSED_ALL)),
        ("/reset_prefix_cache", {"reset_running_requests": True}, ("reset", True)),
        ("/wake_up", {"tags": ["weights", "kv_cache"]}, ("resume", PauseMode.RUNNING)),
        ("/pause", {"mode": None}, ("pause", PauseMode.PAUSED_ALL)),
        ("/pause?mode=new", {"mode": None}, ("pause", PauseMode.PAUSED_NEW)),
        ("/sleep", {"level": None}, ("sleep", PauseMode.PAUSED_ALL)),
        ("/wake_up", {"tags": None}, ("resume", PauseMode.RUNNING)),
        ("/reset_prefix_cache", {"reset_running_requests": None}, ("reset", False)),
    ],
)
def test_parameters_may_be_in_a_json_body(
    make_server: MakeServer, path: str, body: dict[str, object], control: tuple[str, object]
) -> None:
    client = FakeClient()
    live = make_server(client, enable_admin_routes=True)
    assert httpx.post(live.url + path, json=body).status_code == 200
    assert client.controls == [control]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/pause", b'{"mode": "some"}', 400, "mode"),
        ("/pause", b'{"mod": "new"}', 400, "mod"),
        ("/pause", b'{"mod": null}', 400, "mod"),
        ("/wake_up", b'{"tags": [null]}', 400, "tags[0]"),
        ("/sleep", b'{"level": 1.5}', 400, "level"),
        ("/wake_up", b'{"tags": ["weights", {}]}', 400, "tags[1]"),
        ("/pause", b"mode=new", 400, None),
        ("/pause", b'["new"]', 400, None),
        ("/resume", b'{"mode": "new"}', 400, "mode"),
        ("/pause", b'{"mode": "new"}' + b" " * 5000, 413, None),
    ],
)
def test_a_bad_body_sends_no_command(
    make_server: MakeServer, path: str, body: bytes, status: int, param: str | None
) -> None:
    client = FakeClient()
    live = make_server(client, enable_admin_routes=True)
    response = httpx.post(live.url + path, content=body)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param
    described = httpx.get(live.url + "/openapi.json").json()["paths"][path]["post"]["responses"]
    assert str(status) in described
    assert client.controls == []


def test_the_weights_alone_do_not_end_a_sleep(make_server: MakeServer) -> None:
    client = FakeClient()
    live = make_server(client, enable_admin_routes=True)
    slept = httpx.post(live.url + "/sleep?level=2").json()
    assert slept["status"] == "sleeping"
    assert "the weights stay in memory" in slept["message"]
    woken = httpx.post(live.url + "/wake_up?tags=weights")
    assert (woken.status_code, woken.json()["status"]) == (200, "unchanged")
    assert httpx.get(live.url + "/is_sleeping").json() == {"is_sleeping": True}
    assert httpx.post(live.url + "/wake_up?tags=kv_cache").json() == {"status": "resumed"}
    assert httpx.get(live.url + "/is_sleeping").json() == {"is_sleeping": False}


@pytest.mark.parametrize("path", ["/is_paused?mode=new", "/is_sleeping?level=1"])
def test_a_get_route_has_no_parameters(make_server: MakeServer, path: str) -> None:
    live = make_server(FakeClient(), enable_admin_routes=True)
    assert httpx.get(live.url + path).status_code == 400


def test_a_starting_engine_gets_no_command(make_server: MakeServer) -> None:
    client = FakeClient(facts=None)
    live = make_server(client, enable_admin_routes=True)
    for method, path in ROUTES:
        if method == "POST":
            response = httpx.post(live.url + path)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "starting")
    assert client.controls == []


@pytest.mark.parametrize(
    ("response", "status"),
    [
        (False, 409),
        (TimeoutError(), 503),
        (RequestFailed(RequestError(ErrorCode.INTERNAL, "the client was closed")), 500),
    ],
)
def test_a_rejected_command_is_an_error(
    make_server: MakeServer, response: bool | Exception, status: int
) -> None:
    client = FakeClient()
    client.response = response
    live = make_server(client, enable_admin_routes=True)
    for method, path in ROUTES:
        if method == "POST":
            response = httpx.post(live.url + path)
            assert response.status_code == status
            assert response.json()["error"]["message"]


def test_the_user_of_a_request_is_its_tenant(make_server: MakeServer) -> None:
    client = FakeClient()
    live = make_server(client)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    httpx.post(live.url + "/v1/completions", json={"prompt": "hi", "user": "gold"})
    httpx.post(live.url + "/v1/chat/completions", json=chat | {"user": "free"})
    httpx.post(live.url + "/v1/chat/completions", json=chat)
    assert [add.tenant for add in client.requests] == ["gold", "free", ""]
    refused = httpx.post(live.url + "/v1/completions", json={"prompt": "hi", "user": "x" * 257})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "user")


def test_an_api_without_an_engine_here_names_the_engines_that_are_missing(
    make_server: MakeServer,
) -> None:
    elsewhere = {"data_parallel_size": 0, "agents_listen": "10.0.0.1:7100", "curve_keys": "keys"}
    live = make_server(FakeClient(facts=None), enable_admin_routes=True, **elsewhere)
    response = httpx.post(live.url + "/pause")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "starting")
    message = "no engine of another machine has joined, or all have left"
    assert response.json()["error"]["message"] == message
