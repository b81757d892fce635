"""A hub on 127.0.0.1: what huggingface_hub asks of one, with every request recorded."""

import hashlib
import json
import os
import threading
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from huggingface_hub import close_session, constants, set_client_factory
from huggingface_hub.utils._http import default_client_factory

from scripts.hub import transfer
from scripts.hub.waits import bound_waits

_PIECE_BYTES = 65_536


@dataclass
class Repository:
    """A model: its files by commit, and its branches."""

    commits: dict[str, Path] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    is_gated: bool = False

    def push(self, directory: Path, branch: str = "main") -> str:
        """Add a commit with the files of a directory, and move a branch to it."""
        commit = hashlib.sha1(f"{directory} {len(self.commits)}".encode()).hexdigest()
        self.commits[commit] = directory
        self.branches[branch] = commit
        return commit


@dataclass(frozen=True)
class Request:
    """A request that has arrived."""

    method: str
    path: str
    range: str | None


class Hub(ThreadingHTTPServer):
    """Serves repositories until its context ends."""

    daemon_threads = True
    token = "hf_secret"
    status = 0
    """What is sent instead of an answer."""
    login_page = b""
    """What is sent instead of the answers of a hub."""
    has_ranges = True
    """Whether parts of files are sent; else all of a file is."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.cuts: dict[str, list[int]] = {}
        """By file: the bytes after which its next answers end, one answer after the other."""
        self.holds: dict[str, int] = {}
        """By file: the bytes after which its answers wait until `released`."""
        self.released = threading.Event()
        self.is_holding = threading.Event()
        """Whether an answer waits."""
        self.num_sent: Counter[str] = Counter()
        """By file: how many of its bytes were sent."""
        self.announced: dict[str, int] = {}
        """By file: the size that its HEAD states, if it is not the file's."""
        self.listed: list[str] = []
        """Paths in the list of files, besides those of files."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def environ(self, home: Path) -> dict[str, str]:
        """Return the variables with which a process uses this hub, and a cache of its own."""
        names = [name for name in os.environ if name.startswith("HF_")]
        assert not names, f"tests choose their own hub, and {names} are set"
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}

    def add(self, name: str, directory: Path) -> Repository:
        """Add a model whose branch main has the files of a directory."""
        repository = self.repositories[name] = Repository()
        repository.push(directory)
        return repository

    def fetched(self, file: str) -> list[str | None]:
        """Return the ranges with which a file was fetched."""
        return [r.range for r in self.requests if r.method == "GET" and r.path.endswith(f"/{file}")]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: clients are killed while they read."""

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()


@contextmanager
def used_hub(directory: Path, patch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Yield a hub that huggingface_hub uses in this process, with an empty cache."""
    with Hub() as started:
        template = started.url + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "ENDPOINT", started.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(directory / "cache"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(directory / "token"))
        patch.setattr(transfer, "_PAUSE_S", 0.01)
        bound_waits()
        yield started
    set_client_factory(default_client_factory)
    close_session()


@cache
def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        path = urllib.parse.unquote(self.path.partition("?")[0])
        self.server.requests.append(Request(self.command, path, self.headers.get("Range")))
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        repository = self.server.repositories.get("/".join(parts[:2]))
        if self.server.status:
            self._fail(self.server.status, "")
            return
        if repository is None:
            self._fail(404, "RepoNotFound")
            return
        what, revision = ([*parts[2:4], "", "main"] if len(parts) < 4 else parts[2:4])[:2]
        commit = repository.branches.get(revision, revision)
        directory = repository.commits.get(commit)
        if directory is None:
            self._fail(404, "RevisionNotFound")
        elif is_api:
            name = "/".join(parts[:2])
            found = {"id": name, "sha": commit, "siblings": []}
            self._send_json(self._tree(directory) if what == "tree" else found)
        elif repository.is_gated and self.headers.get("Authorization") != f"Bearer {Hub.token}":
            self._fail(401, "GatedRepo")
        else:
            self._send_file(directory, "/".join(parts[4:]), commit)

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, content: Any) -> None:
        body = self.server.login_page or json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, directory: Path, file: str, commit: str) -> None:
        path = directory / file
        if not path.is_file():
            self._fail(404, "EntryNotFound")
            return
        content = path.read_bytes()
        given = self.headers.get("Range") if self.server.has_ranges else None
        first, _, last = (given or "bytes=0-").removeprefix("bytes=").partition("-")
        begin, end = int(first), int(last) + 1 if last else len(content)
        self.send_response(206 if given else 200)
        if given:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        self.send_header("ETag", f'"{_sha256(path)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(end - begin))
        if file in self.server.announced:
            self.send_header("X-Linked-Size", str(self.server.announced[file]))
        self.end_headers()
        if self.command == "GET":
            self._send_body(file, content[:end], begin)

    def _send_body(self, file: str, content: bytes, begin: int) -> None:
        hub = self.server
        cuts = hub.cuts.get(file)
        end = cuts.pop(0) if cuts else len(content)
        held_at = hub.holds.get(file, len(content))
        for position in range(begin, end, _PIECE_BYTES):
            if position >= held_at and not hub.released.is_set():
                hub.is_holding.set()
                hub.released.wait()
            piece = content[position : min(position + _PIECE_BYTES, end)]
            self.wfile.write(piece)
            hub.num_sent[file] += len(piece)
        if end < len(content):
            self.close_connection = True

    def _tree(self, directory: Path) -> list[dict[str, Any]]:
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        listed = [
            {
                "type": "file",
                "path": str(path.relative_to(directory)),
                "size": path.stat().st_size,
                "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
            }
            for path in files
        ]
        return listed + [
            {"type": "file", "path": path, "size": 1, "oid": "0" * 40}
            for path in self.server.listed
        ]
