"""Fetches the files of one commit into the hub's cache, and resumes interrupted downloads.

huggingface_hub uses a new temporary file for every attempt: a killed download starts over, and its
temporary file is never removed. Here a file grows as blobs/ETAG.incomplete, the name that earlier
versions of the library used, and is renamed when it is complete. The process that writes a file
holds a lock on it, which is released if the process dies.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from huggingface_hub import constants, get_hf_file_metadata, get_session, hf_hub_url
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from scripts.hub.failures import DISK_FULL, CutShort, hub_address, is_transient
from scripts.hub.folders import model_folder, snapshots_folder
from scripts.hub.messages import Refusal

_MAX_FILES_AT_ONCE = 8
_MAX_FAILURES = 5
"""Maximum number of consecutive failures without a new byte."""
_PAUSE_S = 1.0
_LOCK_POLL_S = 0.1
_WATCH_S = 1.0
_STALL_S = 120.0
"""Longest wait for another process that holds a file without adding to it."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[\w-]{1,200}")
_PARTIAL_CONTENT = 206

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of the hub and its path in the cache."""

    path: str
    url: str
    etag: str
    size: int
    blob: Path

    @property
    def partial(self) -> Path:
        return self.blob.with_name(f"{self.etag}.incomplete")

    @property
    def size_here(self) -> int:
        """Number of bytes that are already in the cache."""
        # Another thread or process may rename the partial file between two of these calls.
        for path in (self.blob, self.partial, self.blob):
            with contextlib.suppress(FileNotFoundError):
                return min(path.stat().st_size, self.size)
        return 0


class _Stopped(Exception):
    """Raised in a thread when another file has failed."""


class Transfer:
    """Fetches files of one commit. `run` may be called again unless it has failed."""

    def __init__(self, name: str, commit: str, report: Callable[[int, int], None]) -> None:
        """Every change calls `report` with the number of fetched bytes and the total."""
        self._name = name
        self._commit = commit
        self._report = report
        self._folder = model_folder(name)
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._done = self._total = 0
        self._left_out = 0
        """Bytes of files that are left to huggingface_hub."""

    @property
    def directory(self) -> Path:
        """The snapshot, whose files are links to blobs."""
        return snapshots_folder(self._name) / self._commit

    def run(self, paths: Sequence[str]) -> None:
        """Fetch the files that are not in the cache.

        huggingface_hub creates the links later, and fetches files that are too large for HTTP.
        """
        missing = [path for path in paths if not (self.directory / path).is_file()]
        found = self.each(self.describe, missing)
        files = [file for file in found if file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE]
        self._left_out = sum(file.size for file in found) - sum(file.size for file in files)
        self._done = sum(file.size_here for file in files)
        self._total = sum(file.size for file in files)
        if self._done == self._total:
            return
        self._check_space()
        (self._folder / "blobs").mkdir(parents=True, exist_ok=True)
        self._count(0)
        try:
            self.each(self._fetch, files)
        except OSError as error:
            if error.errno in DISK_FULL:  # other programs need the space
                for file in files:
                    file.partial.unlink(missing_ok=True)
            raise

    def read(self, file: RemoteFile, begin: int, num_bytes: int) -> bytes:
        """Return part of a file without storing it in the cache."""
        return self._persist(lambda: self._read(file, begin, num_bytes))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Report the bytes that huggingface_hub adds; a fetch without reports would be ended."""
        if not self._left_out:
            yield
            return
        ended = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(self._num_blob_bytes(), ended))
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()

    def _watch(self, before: int, ended: threading.Event) -> None:
        done, total = 0, self._left_out
        while not ended.wait(_WATCH_S):
            grown = self._num_blob_bytes() - before
            if grown != done:
                done = grown
                self._report(min(max(done, 0), total - 1), total)

    def _num_blob_bytes(self) -> int:
        """Return the disk space of the files, which may be written in any order."""
        num_blocks = 0
        for file in (self._folder / "blobs").glob("*"):
            with contextlib.suppress(FileNotFoundError):
                num_blocks += file.stat().st_blocks
        return num_blocks * 512

    def each(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Call a function with each item in threads; the first failure stops the others."""
        pool = ThreadPoolExecutor(_MAX_FILES_AT_ONCE)
        futures = [pool.submit(function, item) for item in items]
        ended, running = wait(futures, return_when=FIRST_EXCEPTION)
        if running:
            self._stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for future in ended:
            future.result()
        return [future.result() for future in futures]

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._report(self._done, self._total)

    def describe(self, path: str) -> RemoteFile:
        """Ask the hub for the size of a file."""
        url = hf_hub_url(self._name, path, revision=self._commit)
        found = self._persist(lambda: get_hf_file_metadata(url))
        if found.etag is None or found.size is None or not _FILE_NAME.fullmatch(found.etag):
            raise Refusal(
                f"model {self._name} cannot be fetched: {hub_address()} sends no size or no "
                f"usable ETag of {path}"
            )
        return RemoteFile(path, url, found.etag, found.size, self._folder / "blobs" / found.etag)

    def _check_space(self) -> None:
        place = next(path for path in (self._folder, *self._folder.parents) if path.exists())
        missing, free = self._total - self._done, shutil.disk_usage(place).free
        if missing > free:
            raise Refusal(
                f"model {self._name} needs {missing / 1e9:.1f} GB more on the disk of "
                f"{constants.HF_HUB_CACHE}, which has {free / 1e9:.1f} GB left; free some space, "
                "or set HF_HUB_CACHE to a directory of another disk"
            )

    def _fetch(self, file: RemoteFile) -> None:
        partial = self._open(file)
        if partial is None:
            return
        with partial:
            begun_at = partial.tell()
            self._complete(file, partial)
            if begun_at and _SHA256.fullmatch(file.etag) and _sha256(file.partial) != file.etag:
                # The earlier part is damaged, for example by a power failure.
                self._count(-file.size)
                _empty(partial)
                self._complete(file, partial)
            os.replace(file.partial, file.blob)

    def _complete(self, file: RemoteFile, partial: BinaryIO) -> None:
        self._persist(lambda: self._append(file, partial), partial)

    def _open(self, file: RemoteFile) -> BinaryIO | None:
        """Open and lock the partial file; return None if another process has completed it."""
        size, deadline = file.size_here, time.monotonic() + _STALL_S
        while not file.blob.exists():
            partial = file.partial.open("ab")
            try:
                fcntl.flock(partial, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if partial.tell() > file.size:
                    _empty(partial)
                is_here = os.fstat(partial.fileno()).st_ino == file.partial.stat().st_ino
                if is_here and not file.blob.exists():
                    return partial
                if is_here:  # it was completed since the loop's check
                    file.partial.unlink()
            except (BlockingIOError, FileNotFoundError):
                pass  # another process writes it, or has just completed it
            except BaseException:
                partial.close()
                raise
            partial.close()
            if self._stopped.wait(_LOCK_POLL_S):
                raise _Stopped
            grown = file.size_here - size
            if grown:
                size, deadline = size + grown, time.monotonic() + _STALL_S
                self._count(grown)
            elif time.monotonic() > deadline:
                raise Refusal(
                    f"model {self._name} cannot be fetched: another process holds {file.partial} "
                    f"and has added nothing for {_STALL_S:g} s"
                )
        self._count(file.size - size)
        return None

    def _read(self, file: RemoteFile, begin: int, num_bytes: int) -> bytes:
        data = bytearray()
        with _get(file, f"{begin}-{begin + num_bytes - 1}") as response:
            # A hub that does not support ranges sends the whole file.
            left_out = begin if response.status_code != _PARTIAL_CONTENT else 0
            for chunk in response.iter_raw():
                data += chunk[left_out:]
                left_out -= min(left_out, len(chunk))
                if len(data) >= num_bytes:
                    return bytes(data[:num_bytes])
                if self._stopped.is_set():
                    raise _Stopped
        raise CutShort(f"{file.path} ended after {begin - left_out + len(data)} bytes")

    def _append(self, file: RemoteFile, partial: BinaryIO) -> None:
        """Fetch the rest of a file; after an error the bytes received so far remain."""
        begin = partial.tell()
        if begin == file.size:
            return
        with _get(file, f"{begin}-" if begin else "") as response:
            if begin and response.status_code != _PARTIAL_CONTENT:  # ranges are not supported
                _empty(partial)
                self._count(-begin)
            for chunk in response.iter_raw():
                if partial.tell() + len(chunk) > file.size:
                    _empty(partial)
                    raise Refusal(
                        f"model {self._name} cannot be fetched: {hub_address()} sends more "
                        f"of {file.path} than the {file.size} bytes it states"
                    )
                partial.write(chunk)
                partial.flush()  # so that a kill loses no byte that was counted
                self._count(len(chunk))
                if self._stopped.is_set():
                    raise _Stopped
        if partial.tell() != file.size:
            raise CutShort(f"{file.path} ended after {partial.tell()} of {file.size} bytes")

    def _persist(self, act: Callable[[], R], file: BinaryIO | None = None) -> R:
        """Repeat `act` after transient failures, as long as `file` grows between them."""
        num_failures, size = 0, 0 if file is None else file.tell()
        while True:
            try:
                return act()
            except Exception as error:
                if not is_transient(error):
                    raise
                size_before, size = size, 0 if file is None else file.tell()
                num_failures = 1 if size > size_before else num_failures + 1
                if num_failures > _MAX_FAILURES:
                    raise
            if self._stopped.wait(_PAUSE_S):
                raise _Stopped


@contextmanager
def _get(file: RemoteFile, range: str = "") -> Iterator[Any]:
    """Open a response with a range of a file's bytes, or with all of them if it is empty."""
    # A later request counts uncompressed bytes.
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    if range:
        headers["Range"] = f"bytes={range}"
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", file.url, headers=headers, timeout=timeout) as response:
        hf_raise_for_status(response)
        yield response


def _empty(file: BinaryIO) -> None:
    file.seek(0)
    file.truncate()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
