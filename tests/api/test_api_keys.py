"""Several API keys: given, from a file that changes, in two headers, and web pages without one."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_proc.http.api_keys import MAX_KEYS, ApiKeys, read_keys
from api_proc.http.connection import Connection
from protocol.config.settings import configure
from protocol.process.file_watch import watch_files
from tests.api.fake_engine import FakeClient, LiveServer, wait_until

POLL_S = 0.05
ORIGIN = "https://app.example.com"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# team a\nfrom-file-1\n\n  from-file-2 \n")
    return file


@pytest.fixture(scope="module")
def live(file: Path) -> Iterator[LiveServer]:
    config = configure(
        model="null",
        api_key=["given-1", "given-2"],
        api_key_file=str(file),
        allowed_origins=[ORIGIN],
    )
    with LiveServer(config, FakeClient()) as live:
        yield live


def status(live: LiveServer, *headers: tuple[str, str]) -> int:
    return httpx.get(live.url + "/v1/models", headers=list(headers)).status_code


@pytest.mark.parametrize("key", ["given-1", "given-2", "from-file-1", "from-file-2"])
def test_every_key_is_valid_in_both_headers(live: LiveServer, key: str) -> None:
    assert status(live, ("authorization", f"Bearer {key}")) == 200
    assert status(live, ("x-api-key", key)) == 200
    assert status(live, ("authorization", f"Bearer {key}"), ("x-api-key", key)) == 200


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", "Bearer given-1"), ("authorization", "Bearer given-1")],
        [("authorization", "Bearer wrong"), ("authorization", "Bearer given-1")],
        [("authorization", "Bearer wrong"), ("x-api-key", "given-1")],
        [("authorization", "Bearer given-1"), ("x-api-key", "wrong")],
        [("authorization", "Bearer given-1"), ("x-api-key", "given-2")],
        [("authorization", "Basic given-1")],
        [("x-api-key", "given-1"), ("x-api-key", "given-2")],
        [("authorization", "Bearer # team a")],
        [("authorization", "Bearer given-1,given-2")],
    ],
)
def test_ambiguous_or_wrong_credentials_are_rejected(
    live: LiveServer, headers: list[tuple[str, str]]
) -> None:
    assert status(live, *headers) == 401


def test_the_key_is_the_origin_of_a_request(live: LiveServer) -> None:
    """The engine gets a part of the key's hash, not the key."""
    for key in ("given-1", "from-file-2", "given-1"):
        headers = {"authorization": f"Bearer {key}"}
        body = {"prompt": "hi", "max_tokens": 1, "user": "gold"}
        httpx.post(live.url + "/v1/completions", headers=headers, json=body)
    assert isinstance(live.client, FakeClient)
    origins = [(add.origin, add.tenant) for add in live.client.requests]
    names = ["key 93a8f30d9e213cc0", "key 1b5841fc832e834d", "key 93a8f30d9e213cc0"]
    assert origins == [(name, "gold") for name in names]


def test_the_name_of_a_key_stays_when_others_come_and_go(tmp_path: Path) -> None:
    """A client's requests count for one account, also after a restart."""
    config = configure(model="null", api_key=["given"], api_key_file=str(tmp_path / "keys"))
    (tmp_path / "keys").write_text("first\nsecond\n")
    keys = ApiKeys(config.api)
    names = {key: keys.name_of(key) for key in (b"given", b"first", b"second")}
    assert len(set(names.values())) == 3
    keys.take([b"other", b"second"])
    assert keys.name_of(b"first") is None
    assert [keys.name_of(key) for key in (b"given", b"second")] == [
        names[b"given"],
        names[b"second"],
    ]
    (tmp_path / "keys").write_text("second # the first one was removed\n")
    assert ApiKeys(config.api).name_of(b"second") == names[b"second"]


@pytest.mark.parametrize(
    ("client", "origin"),
    [
        (("10.0.0.7", 1234), "10.0.0.7"),
        (("::ffff:10.0.0.7", 1234), "10.0.0.7"),
        (("2001:db8:1:2:3:4:5:6", 1234), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1234), "fe80::/64"),
        (None, "unix socket"),
        (("", 0), "unix socket"),
    ],
)
def test_without_keys_the_address_is_the_origin(
    client: tuple[str, int] | None, origin: str
) -> None:
    """A network of IPv6 is one: its hosts may take any address in it."""
    scope = {"type": "http", "headers": [], "client": client}

    async def unused(*_: object) -> Any:
        raise AssertionError

    assert Connection(scope, unused, unused).origin == origin


def test_a_preflight_needs_no_key_and_its_request_does(live: LiveServer) -> None:
    asked = {"origin": ORIGIN, "access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization,content-type"
    url = live.url + "/v1/chat/completions"
    preflight = httpx.options(url, headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    assert httpx.options(url, headers={**asked, "origin": "https://b"}).status_code == 400
    assert httpx.options(url).status_code == 401, "a preflight has an Origin"
    rejected = httpx.post(url, headers={"origin": ORIGIN}, content=b"{}")
    assert rejected.status_code == 401
    assert rejected.headers["access-control-allow-origin"] == ORIGIN, "the page can read it"
    other = httpx.get(live.url + "/livez", headers={"origin": "https://b"})
    assert "access-control-allow-origin" not in other.headers


def test_without_allowed_origins_no_page_is_allowed(http: httpx.Client) -> None:
    asked = {"origin": ORIGIN, "access-control-request-method": "POST"}
    assert http.options("/v1/chat/completions", headers=asked).status_code == 405
    response = http.get("/livez", headers=asked)
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_a_changed_file_is_read_again_and_a_bad_one_is_not_used(
    live: LiveServer, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A revoked key is rejected soon; a file without keys does not open or close the server."""
    take = live.state.api_keys.take

    async def begin() -> asyncio.Task[None]:
        return live.loop.create_task(watch_files([file], lambda: read_keys(file), take, POLL_S))

    watch = live.call(begin)
    new = file.with_suffix(".new")
    new.write_text("newer\n")
    new.rename(file)
    wait_until(lambda: status(live, ("x-api-key", "newer")) == 200, 5.0)
    assert status(live, ("x-api-key", "from-file-1")) == 401
    assert status(live, ("x-api-key", "given-1")) == 200
    file.write_text("# none\n")
    wait_until(lambda: "what was loaded before stays in use" in caplog.text, 5.0)
    assert status(live, ("x-api-key", "newer")) == 200
    live.call(watch.cancel)


def test_a_file_that_changes_all_the_time_is_read_nevertheless(tmp_path: Path) -> None:
    file, contents = tmp_path / "members", [""]
    file.write_text("")
    found: list[str] = []

    async def change() -> None:
        watch = asyncio.create_task(watch_files([file], file.read_text, found.append, 2 * POLL_S))
        async with asyncio.timeout(10.0):
            while len(set(found)) < 3:
                contents.append(contents[-1] + "x")
                file.write_text(contents[-1])
                await asyncio.sleep(POLL_S / 2)
        watch.cancel()

    asyncio.run(change())
    assert set(found) <= set(contents)


def test_a_process_without_its_file_of_keys_rejects_all(tmp_path: Path) -> None:
    """It rejects every request instead of serving without keys."""
    config = configure(model="null", api_key_file=str(tmp_path / "gone"))
    keys = ApiKeys(config.api)
    assert keys.name_of(b"") is None
    assert keys.name_of(b"x") is None


def test_the_number_of_keys_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("".join(f"key-{i}\n" for i in range(MAX_KEYS)))
    assert len(read_keys(file)) == MAX_KEYS
    file.write_text(file.read_text() + "one-more\n")
    with pytest.raises(ValueError, match=f"holds more than {MAX_KEYS} keys"):
        read_keys(file)


def test_a_comment_may_follow_a_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team a\nfirst # of team a\n\t# second\nwith#sign\t#\n")
    assert read_keys(file) == [b"first", b"with#sign"]
