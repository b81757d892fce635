"""Where the user's cache has the checkpoint directories that stand for GGUF models.

A directory is used again while the files, the code that makes it and the tokenizers library are the
same.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from scripts.gguf.locks import alone, has_locks
from worker_proc import gguf
from worker_proc.gguf.model_header import Header
from worker_proc.gguf.parts import part_name
from worker_proc.native.build import cache_directory

MAX_DIRECTORIES = 64
"""The ones that were used first are removed."""
MIN_AGE_S = 86_400.0
"""What was used later than this stays: an engine that is starting holds its directory late."""


def find_directory(header: Header, *, needs_tokenizer: bool = True) -> Path | None:
    """Return the directory of a model, if it is there."""
    directory = place_of(header, needs_tokenizer=needs_tokenizer)
    if not is_complete(directory):
        return None
    with contextlib.suppress(OSError):
        os.utime(directory.parent)
    return directory


def place_of(header: Header, *, needs_tokenizer: bool) -> Path:
    """Return where the directory of a model is, or will be; errors show its name, the file's."""
    key = _key(header, needs_tokenizer=needs_tokenizer)
    return cache_directory() / "gguf" / key / part_name(header.path.name).model


def is_complete(directory: Path) -> bool:
    """Return whether a directory is there, and this user's."""
    config = directory / "config.json"
    return config.is_file() and config.stat().st_uid == os.getuid()


def make_room(directory: Path) -> Path:
    """Return the existing directory with those of all files, with room for another one.

    Those that an engine uses, or that were used a short time ago, stay: there may be more than
    `MAX_DIRECTORIES`. On a file system without locks all stay (`why_not_bounded`).
    """
    keys = directory.parent.parent
    for place in (keys.parent, keys):
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
    used_at = {path: path.lstat().st_mtime for path in keys.iterdir()}
    oldest = sorted(used_at, key=used_at.__getitem__)[: max(0, len(used_at) - MAX_DIRECTORIES + 1)]
    for path in oldest:
        if used_at[path] > time.time() - MIN_AGE_S:
            break
        with contextlib.suppress(OSError), alone(path) as is_alone:
            if is_alone:
                remove(path)
    return keys


def why_not_bounded() -> str:
    """Return why more directories are there than are kept, if no start will remove them."""
    keys = cache_directory() / "gguf"
    found = list(keys.iterdir()) if keys.is_dir() else []
    if len(found) <= MAX_DIRECTORIES or has_locks(keys):
        return ""
    sizes = (path.lstat().st_size for path in keys.rglob("*") if not path.is_symlink())
    return (
        f"{keys} has {len(found)} directories of GGUF files, {sum(sizes) / 1e6:,.0f} MB, and none"
        " is removed, since its file system has no locks that show which are in use; remove old"
        " ones while no engine runs"
    )


def remove(path: Path) -> None:
    """Remove a directory, of which no part is left in its place at any time."""
    doomed = Path(tempfile.mkdtemp(dir=path.parent, prefix="."))
    try:
        os.rename(path, doomed / "removed")
    finally:
        shutil.rmtree(doomed, ignore_errors=True)


def _key(header: Header, *, needs_tokenizer: bool) -> str:
    """Return a digest of what the directory depends on."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((needs_tokenizer, version("tokenizers"))).encode())
    for file in header.files:
        state = file.path.stat()
        place = (str(file.path.absolute()), state.st_dev, state.st_ino, state.st_size)
        digest.update(repr((place, state.st_mtime_ns, state.st_ctime_ns)).encode())
        with file.path.open("rb") as opened:
            digest.update(opened.read(file.num_bytes))
    worker = Path(gguf.__file__).parent
    sources = [*sorted(Path(__file__).parent.glob("*.py")), *sorted(worker.glob("*.py"))]
    settings = [worker.parent / "quantization" / name for name in ("gguf.py", "scheme.py")]
    for source in (*sources, *settings):
        digest.update(source.read_bytes())
    return digest.hexdigest()
