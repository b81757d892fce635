"""Adapters over HTTP: which requests get which, their names, and the admin routes."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_proc.adapters import registry as registry_module
from api_proc.adapters.registry import AdapterRegistry, NamesLocked, NameTaken
from protocol import adapters as adapter_files
from protocol.adapters import (
    ADAPTERS_FILE,
    CONFIG_FILE,
    WEIGHTS_FILE,
    Adapter,
    AdapterError,
    read_adapter,
)
from protocol.api_core import ErrorCode, RequestError
from protocol.client.errors import failure_of
from protocol.config.lora_modules import LoraModule
from protocol.config.settings import configure
from tests.api.conftest import MakeServer
from tests.api.fake_engine import FakeClient, LiveServer

CHAT = [{"role": "user", "content": "hi"}]
GOOD = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}


def write(directory: Path, content: str = "weights", **config: Any) -> Path:
    """Write the files of an adapter; only the worker reads its matrices."""
    directory.mkdir(exist_ok=True)
    (directory / CONFIG_FILE).write_text(json.dumps(GOOD | config))
    (directory / WEIGHTS_FILE).write_text(content)
    return directory


@pytest.fixture
def live(make_server: MakeServer) -> LiveServer:
    return make_server(
        enable_lora=True, enable_admin_routes=True, served_model_name=["base", "alias"]
    )


def post(live: LiveServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(live.url + path, json=body, timeout=30)


def load(live: LiveServer, path: Path, name: str = "sql", **more: Any) -> httpx.Response:
    return post(live, "/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **more)


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 3}),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 3}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
        ("/v1/embeddings", {"input": "hi"}),
    ],
)
def test_every_route_that_computes_takes_an_adapter_by_its_name(
    path: str, body: dict[str, Any], live: LiveServer, tmp_path: Path
) -> None:
    client: FakeClient = live.client
    assert load(live, write(tmp_path / "a")).status_code == 200
    for model, name in (("sql", "sql"), ("alias", "base")):
        answer = post(live, path, model=model, **body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == name
        add = client.requests[-1]
        assert (add.adapter.name if add.adapter else "base") == name
        assert add.tenant == "", "the core charges the client"
    status, param, message = error_of(post(live, path, model="other", **body))
    assert (status, param) == (404, "model")
    assert "'base', 'alias', 'sql'" in message


def test_names_are_listed_with_their_parents(live: LiveServer, tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    load(live, path)
    load(live, path, "tone", base_model_name="Qwen/Qwen3-0.6B")
    listed = httpx.get(live.url + "/v1/models").json()["data"]
    assert [(one["id"], one["parent"]) for one in listed] == [
        *(("base", None), ("alias", None), ("sql", "base"), ("tone", "Qwen/Qwen3-0.6B")),
    ]
    one = httpx.get(live.url + "/v1/models/sql").json()
    assert (one["id"], one["root"], one["parent"]) == ("sql", str(path), "base")


def test_what_cannot_be_loaded_changes_nothing(live: LiveServer, tmp_path: Path) -> None:
    client: FakeClient = live.client
    good = write(tmp_path / "a")
    assert error_of(load(live, tmp_path / "none"))[2].endswith("none does not exist")
    (tmp_path / "bin").mkdir()
    write(tmp_path / "bin")
    (tmp_path / "bin" / WEIGHTS_FILE).rename(tmp_path / "bin" / "adapter_model.bin")
    assert "adapter_model.bin is not read" in error_of(load(live, tmp_path / "bin"))[2]
    dora = write(tmp_path / "dora", use_dora=True)
    assert "use_dora is true" in error_of(load(live, dora))[2]
    large = write(tmp_path / "large", r=17)
    assert "r is 17, more than max_lora_rank 16" in error_of(load(live, large))[2]
    assert error_of(load(live, good, "alias"))[1] == "lora_name"
    assert error_of(load(live, good, ""))[:2] == (400, "lora_name")
    assert client.controls == [], "the engine was not asked"
    client.response = False
    assert error_of(load(live, good)) == (400, "lora_path", f"lora_path: {good}: r is 64")
    client.response = TimeoutError()
    assert load(live, good).status_code == 503
    assert len(httpx.get(live.url + "/v1/models").json()["data"]) == 2


def test_a_name_is_replaced_only_on_demand_and_can_be_given_up(
    live: LiveServer, tmp_path: Path
) -> None:
    client: FakeClient = live.client
    first, second = write(tmp_path / "a"), write(tmp_path / "b", "others")
    load(live, first)
    assert load(live, second).json()["error"]["code"] == "already_loaded"
    assert load(live, second, load_inplace=None).json()["error"]["code"] == "already_loaded"
    assert load(live, second, load_inplace=True).status_code == 200
    post(live, "/v1/completions", model="sql", prompt="hi", max_tokens=3)
    assert client.requests[-1].adapter is not None
    assert client.requests[-1].adapter.path == str(second)
    load(live, second, "same")
    answer = post(live, "/v1/unload_lora_adapter", lora_name="sql")
    assert answer.status_code == 200
    assert ("unload", "sql") not in client.controls, "another name has the same files"
    assert post(live, "/v1/unload_lora_adapter", lora_name="same").status_code == 200
    assert client.controls[-1] == ("unload", "same")
    assert error_of(post(live, "/v1/unload_lora_adapter", lora_name="same"))[:2] == (
        404,
        "lora_name",
    )


def test_a_server_without_adapters_refuses_them(make_server: MakeServer, tmp_path: Path) -> None:
    live = make_server(enable_admin_routes=True)
    answer = load(live, write(tmp_path / "a"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "lora_disabled")
    assert "enable-lora" in answer.text
    assert error_of(post(live, "/v1/completions", model="sql", prompt="hi"))[0] == 404


def test_a_server_is_ready_once_the_adapters_of_its_settings_have_names(
    make_server: MakeServer, tmp_path: Path
) -> None:
    """A load balancer that waits for /readyz sends no request that gets 404 for such an adapter."""
    path = write(tmp_path / "a")
    live = make_server(enable_lora=True, lora_modules=[f"sql={path}"])

    def readiness() -> tuple[int, bool, str]:
        answer = httpx.get(f"{live.url}/readyz")
        return answer.status_code, answer.json()["ready"], answer.json()["state"]

    assert readiness() == (503, False, "starting")
    live.state.adapters.settle(live.state.adapters.begin())
    assert readiness() == (200, True, "ready")
    live.state.adapters.remove("sql")
    assert readiness() == (200, True, "ready")


def test_processes_share_the_names_and_a_later_one_keeps_them(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, name) for name in ("a", "b")]
    modules = [f"x={paths[0]}", json.dumps({"name": "y", "path": str(paths[1])})]
    config = configure(enable_lora=True, lora_modules=modules).lora
    first, second = (AdapterRegistry(tmp_path, config) for _ in range(2))
    named = first.begin()
    assert [one.adapter.name for one in named] == ["x", "y"]
    again = [one.adapter for one in second.begin()]
    assert again == [one.adapter for one in named], "not checked yet, so that each process does it"
    assert first.all() == []
    assert not second.is_complete
    first.settle(named)
    assert second.is_complete
    assert second.begin() == [], "they were named already"
    second.remove("x")
    assert first.find("x") is None
    third = first.read(LoraModule("z", str(paths[0])))
    first.add(third)
    assert second.find("z") == third
    with pytest.raises(NameTaken):
        second.add(third)
    second.settle(named)
    assert first.find("x") is None, "an unload is not undone"
    later = AdapterRegistry(tmp_path, config)
    assert later.begin() == []
    assert [one.adapter.name for one in later.all()] == ["y", "z"]


@pytest.mark.parametrize("removed", [{""}, {".settled"}, {"", ".settled", ".lock"}])
def test_names_are_kept_although_their_files_were_removed(
    tmp_path: Path, removed: set[str]
) -> None:
    """A later process finds them, and no unload is undone."""
    paths = [write(tmp_path / name, name) for name in ("a", "b")]
    config = configure(enable_lora=True, lora_modules=[f"x={paths[0]}"]).lora
    registry = AdapterRegistry(tmp_path, config)
    registry.settle(registry.begin())
    registry.remove("x")
    registry.add(registry.read(LoraModule("z", str(paths[1]))))
    assert [one.adapter.name for one in registry.all()] == ["z"]
    for suffix in removed:
        (tmp_path / ADAPTERS_FILE).with_suffix(suffix).unlink()
    registry.restore()
    later = AdapterRegistry(tmp_path, config)
    assert later.begin() == []
    assert [one.adapter.name for one in later.all()] == ["z"]


@pytest.mark.parametrize("has_run_dir", [True, False])
def test_a_load_during_the_start_takes_no_name_of_the_settings(
    has_run_dir: bool, tmp_path: Path
) -> None:
    """The adapters of the settings and that of the client are all kept."""
    paths = [write(tmp_path / name, name) for name in ("a", "b", "c")]
    config = configure(enable_lora=True, lora_modules=[f"x={paths[0]}", f"y={paths[1]}"]).lora
    registry = AdapterRegistry(tmp_path if has_run_dir else None, config)
    named = registry.begin()
    added = [registry.read(LoraModule(name, str(paths[2]))) for name in ("y", "z")]
    for one in added:
        registry.add(one)
    registry.settle(named)
    assert {one.adapter.name for one in registry.all()} == {"x", "y", "z"}
    assert registry.find("y") == added[0]
    registry.remove("x")
    registry.settle(named)
    assert registry.find("x") is None


def test_names_that_another_process_does_not_release_are_an_error_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "LOCK_TIMEOUT_S", 0.05)
    registry = AdapterRegistry(tmp_path, configure(enable_lora=True).lora)
    named = registry.read(LoraModule("a", str(write(tmp_path / "a"))))
    with (tmp_path / ADAPTERS_FILE).with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(NamesLocked, match="is locked for more than"):
            registry.add(named)
    registry.add(named)
    assert registry.find("a") == named


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_only_regular_files_of_bounded_size_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FIFO would block its reader, and a device has no end."""
    for kind in ("fifo", "device", "large"):
        path = write(tmp_path / kind)
        if kind == "large":
            monkeypatch.setattr(adapter_files, "MAX_WEIGHTS_BYTES", 2**20)
            os.truncate(path / name, 2**20 + 1)
            reason = "1048577 bytes, more than 1048576"
        else:
            (path / name).unlink()
            reason = "is not a regular file"
        if kind == "fifo":
            os.mkfifo(path / name)
        elif kind == "device":
            (path / name).symlink_to("/dev/zero")
        with pytest.raises(AdapterError, match=reason):
            read_adapter("x", str(path))


def test_a_load_beyond_the_bound_may_be_tried_again(
    live: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(adapter: Adapter) -> str:
        raise failure_of(RequestError(ErrorCode.OVERLOADED, "64 adapters are being loaded already"))

    monkeypatch.setattr(live.client, "load_adapter", refuse)
    answer = load(live, write(tmp_path / "a"))
    assert answer.status_code == 429
    assert "64 adapters" in answer.text
    assert float(answer.headers["retry-after"]) > 0


def test_a_module_in_error_names_nothing(tmp_path: Path) -> None:
    modules = [f"x={write(tmp_path / 'a')}", f"y={tmp_path / 'none'}"]
    registry = AdapterRegistry(tmp_path, configure(enable_lora=True, lora_modules=modules).lora)
    with pytest.raises(AdapterError, match="none does not exist"):
        registry.begin()
    assert registry.all() == []
