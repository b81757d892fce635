"""The bound of each client's open requests, with a journal: also without connections."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_proc.app import start_sessions
from api_proc.peers import forwarding
from protocol.api_core import AddRequest, RequestOutput
from protocol.config.settings import configure
from tests.api.fake_engine import FakeClient, LiveServer, repeating, wait_until

KEYS = ("one", "two")
MAX_OPEN = 4


class JournaledServer(LiveServer):
    """A server with a journal, whose requests wait for `proceed` after their first output."""

    def __init__(self, directory: Path) -> None:
        config = configure(
            model="null",
            journal_dir=str(directory),
            api_key=KEYS,
            max_open_requests_per_client=MAX_OPEN,
            resume_window_s=600.0,
        )
        # A stream without an output begins with a comment: the wait for its status is short.
        super().__init__(config, FakeClient(script=self._script), keep_alive_interval_s=0.05)
        self.has_proceeded = False

    def _script(self, add: AddRequest) -> Iterator[RequestOutput]:
        for i, output in enumerate(repeating()(add)):
            self.client.is_paused = i >= 1 and not self.has_proceeded
            yield output

    def proceed(self) -> None:
        """Let all requests end."""
        self.has_proceeded = True
        self.client.is_paused = False

    async def _serve(self) -> None:
        await start_sessions(self.state)
        await super()._serve()
        assert self.state.sessions is not None
        self.state.sessions.close()

    @property
    def sessions(self) -> Any:
        return self.state.sessions

    def num_of(self, name: str) -> int:
        """Return the number of sequences that count for a key."""
        origin = self.state.api_keys.name_of(name.encode())
        assert origin is not None
        return self.state.budget.clients.num_of(origin)

    def post(self, name: str, n: int = 1, key: str = "one", **fields: Any) -> Any:
        """Return a stream, as a context manager."""
        headers = {"authorization": f"Bearer {key}", "x-request-id": name}
        body = {"prompt": "hi", "max_tokens": 20, "stream": True, "seed": 1, "n": n, **fields}
        return httpx.stream(
            "POST", self.url + "/v1/completions", json=body, headers=headers, timeout=30
        )

    def status(self, name: str, n: int = 1, key: str = "one", **fields: Any) -> int:
        """Begin a request, and drop its connection."""
        with self.post(name, n, key, **fields) as response:
            status: int = response.status_code
        return status

    def wait_dropped(self) -> None:
        """Wait until no connection reads."""
        wait_until(lambda: not self.state.budget.num_requests)


def test_requests_that_run_without_a_connection_count_for_their_client(tmp_path: Path) -> None:
    """They count after a restart, too. A client that has reached its bound can still read them."""
    with JournaledServer(tmp_path) as server:
        assert [server.status(name, n=2) for name in "ab"] == [200, 200]
        server.wait_dropped()
        assert server.num_of("one") == MAX_OPEN
        assert server.status("c") == 429
        assert server.status("other", n=MAX_OPEN, key="two") == 200
        with server.post("a", n=2) as reading:
            assert reading.status_code == 200
            texts = reading.iter_text()  # its end would close the connection
            next(texts)
            assert server.num_of("one") == MAX_OPEN, "with its connection it counts no more"
            assert server.status("a", n=2) == 429, "further connections count"
            assert server.status("b", n=2, key="two") == 429, "those of others do, too"
        server.wait_dropped()
    with JournaledServer(tmp_path) as server:
        assert (server.num_of("one"), server.num_of("two")) == (MAX_OPEN, MAX_OPEN)
        assert server.status("c") == 429
        with server.post("a", n=2) as reading:
            assert reading.status_code == 200
            server.proceed()
            assert reading.read().endswith(b"data: [DONE]\n\n")
        wait_until(lambda: server.num_of("one") == 2)
        with server.post("c", n=2) as whole:
            assert whole.status_code == 200
            assert whole.read().endswith(b"data: [DONE]\n\n")
        for name, n, key in (("b", 2, "one"), ("other", MAX_OPEN, "two")):
            with server.post(name, n, key) as rest:
                assert rest.read().endswith(b"data: [DONE]\n\n")
        wait_until(lambda: not server.num_of("one") + server.num_of("two"))


def test_after_a_restart_answers_count_until_they_are_sent(tmp_path: Path) -> None:
    with JournaledServer(tmp_path) as server:
        assert [server.status(name, n=2) for name in ("sent", "unsent")] == [200, 200]
        server.wait_dropped()
        server.proceed()
        with server.post("sent", n=2) as response:
            assert response.read().endswith(b"data: [DONE]\n\n")
        session = server.sessions._by_id["unsent"]
        wait_until(lambda: session.is_ended and server.num_of("one") == 2)
    for _ in range(2):  # the second one reads the snapshot of the first
        with JournaledServer(tmp_path) as server:
            assert server.num_of("one") == 2
            assert server.status("more", n=MAX_OPEN - 1) == 429
    with JournaledServer(tmp_path) as server:
        assert server.status("more", n=2) == 200
        server.wait_dropped()
        with server.post("unsent", n=2) as response:
            assert response.status_code == 200, "its client is at its bound"
            assert response.read().endswith(b"data: [DONE]\n\n")
        wait_until(lambda: server.num_of("one") == 2)


def test_a_request_with_the_id_of_one_that_is_over_counts(tmp_path: Path) -> None:
    with JournaledServer(tmp_path) as server:
        assert server.status("r", n=2) == 200
        server.wait_dropped()
        server.proceed()
        [session] = server.sessions._by_id.values()
        wait_until(lambda: session.is_ended)
        assert server.num_of("one") == 2, "its answer was not sent"
        server.has_proceeded = False
        for n, status in ((MAX_OPEN + 1, 400), (MAX_OPEN, 200)):
            assert server.status("r", n=n, prompt="another") == status
            server.wait_dropped()
        assert server.num_of("one") == MAX_OPEN
        assert server.status("more") == 429


@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_were_sent_do_not_count(tmp_path: Path, stream: bool) -> None:
    with JournaledServer(tmp_path) as server:
        server.proceed()
        for i in range(2 * MAX_OPEN):
            with server.post(f"r{i}", n=2, stream=stream, max_tokens=2) as response:
                assert response.status_code == 200
                response.read()
            server.wait_dropped()
            assert server.num_of("one") == 0


@pytest.mark.parametrize("is_foreign", [False, True])
def test_other_routes_count_whatever_their_ids_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_foreign: bool
) -> None:
    """A request for the tokenizer reads no session, and belongs to no other process."""
    with JournaledServer(tmp_path) as server:
        assert server.status("a", n=MAX_OPEN) == 200
        server.wait_dropped()
        monkeypatch.setattr(forwarding, "_is_foreign", lambda *_: is_foreign)
        headers = {"authorization": "Bearer one", "x-request-id": "a"}
        for path in ("/tokenize", "/apply-template", "/v1/messages/count_tokens"):
            response = httpx.post(server.url + path, json={}, headers=headers)
            assert response.status_code == 429, path
        server.proceed()


def test_a_connection_to_a_request_of_the_journal_takes_the_share_of_its_client(
    tmp_path: Path,
) -> None:
    """It takes the share although it counts for no bound of each client."""
    with JournaledServer(tmp_path) as server:
        assert server.status("a") == 200
        server.wait_dropped()
        origin = server.state.api_keys.name_of(b"one")
        with server.post("a") as reading:
            assert reading.status_code == 200
            assert server.state.budget._requests.held_by(str(origin)) == 1
            assert server.num_of("one") == 1
        server.wait_dropped()
