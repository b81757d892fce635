"""The listening socket: a Unix socket's mode, leftovers of a killed server, and its removal."""

import stat
from pathlib import Path

import httpx
import pytest

from api_proc.http.listener import close_listener, listen_unix, url_of
from protocol.config.settings import configure
from tests.api.fake_engine import FakeClient, LiveServer


def test_only_this_user_may_connect(tmp_path: Path) -> None:
    path = tmp_path / "new" / "socket"
    with listen_unix(str(path)) as listening:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert url_of(listening) == f"unix:{path}"
        close_listener(listening)
    assert not path.exists()


def test_the_socket_of_a_killed_server_is_replaced_and_that_of_a_living_one_is_not(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "socket")
    listen_unix(path).close()  # the file stays, as after kill -9
    with listen_unix(path) as first:
        first.listen(0)
        for _ in range(3):  # each attempt leaves a connection in the queue, which is full then
            with pytest.raises(OSError, match="Address already in use"):
                listen_unix(path)


def test_the_file_of_a_successor_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with listen_unix(str(path)) as first:
        path.unlink()
        with listen_unix(str(path)):
            close_listener(first)
            assert path.exists()


def test_other_files_and_long_paths_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(ValueError, match="not a socket"):
        listen_unix(str(file))
    assert file.read_text() == "precious"
    link = tmp_path / "link"
    link.symlink_to(file)
    with pytest.raises(ValueError, match="not a socket"):
        listen_unix(str(link))
    with pytest.raises(ValueError, match="more than 107 bytes"):
        listen_unix(str(tmp_path / ("x" * 107)))


def test_requests_are_answered_over_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with LiveServer(configure(model="null", uds=str(path)), FakeClient()) as live:
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost") as client:
            body = {"prompt": [1, 2, 3], "max_tokens": 4, "stream": True}
            assert client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
            assert client.get("/v1/models").status_code == 200
        assert live.url == f"unix:{path}"
