"""The places where KV blocks are kept outside the workers: shared memory and a disk.

All workers of the engine, of all its replicas on this machine, write to the same directories and
read from them. `worker_proc/offload/block_store.py` has the format of the files.
"""

import contextlib
import fcntl
import os
import shutil
import stat
from pathlib import Path
from typing import NamedTuple

from protocol.config import EngineConfig

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "troika-kv-"
_INDEX = "index"
_ENGINE = "engine"
"""Name of a link, in a directory of shared memory, to the run directory of its engine."""


class Tier(NamedTuple):
    """A directory of blocks, and how many bytes they may take together."""

    directory: Path
    max_bytes: int
    is_memory: bool = False
    """Whether it is the engine's own, in shared memory."""

    def private_directory(self, layout: str) -> Path:
        """Return the directory that no other user may enter: the root, or one layout's part."""
        return self.directory if self.is_memory else self.directory / layout


def tiers(config: EngineConfig) -> list[Tier]:
    """Return the tiers of an engine with a run directory, the fastest first."""
    found = []
    cache = config.cache
    if cache.kv_offload_bytes:
        directory = memory_directory(engine_directory(config))
        found.append(Tier(directory, cache.kv_offload_bytes, is_memory=True))
    if cache.kv_offload_dir is not None:
        found.append(Tier(Path(cache.kv_offload_dir), cache.kv_offload_dir_bytes))
    return found


def engine_directory(config: EngineConfig) -> str:
    """Return the run directory of the engine that a replica belongs to, or of the only one."""
    run_dir = str(config.run.run_dir)
    return run_dir if config.run.replica is None else os.path.dirname(run_dir)


def memory_directory(engine_dir: str) -> Path:
    """Return the directory of the blocks in memory: it is not the same for two run directories."""
    if not os.access(SHARED_MEMORY, os.W_OK):
        return Path(engine_dir) / "kv"
    place = os.stat(engine_dir)
    return SHARED_MEMORY / f"{_PREFIX}{place.st_dev:x}-{place.st_ino:x}"


def name_engine(directory: Path, engine_dir: str) -> None:
    """Write the name of its engine into a directory of blocks in memory."""
    with contextlib.suppress(FileExistsError):
        (directory / _ENGINE).symlink_to(os.path.abspath(engine_dir))


def make_private(directory: Path) -> None:
    """Make a directory that only this user can enter; an OSError: it is there, and is another's.

    Its name can be guessed: another user of the machine could have made it.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(directory)


def check_private(directory: Path) -> None:
    """Raise an OSError for a directory that others could write to."""
    info = os.lstat(directory)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise PermissionError(f"{directory} must be a directory of this user with mode 0700")


def blocks_directory(tier: Tier, layout: str, rank: int) -> Path:
    """Return the directory of the blocks of one rank; `layout` is that of `ModelFacts`."""
    return tier.directory / layout / f"rank-{rank}"


def block_path(directory: Path, key: bytes) -> Path:
    """Return the path of a block; `directory` is that of its rank."""
    name = key.hex()
    return directory / name[:2] / name


def index_path(tier: Tier, layout: str, rank: int) -> Path:
    """Return the path of the index of these blocks: see `protocol/stores/index.py`."""
    return blocks_directory(tier, layout, rank) / _INDEX


def hold_memory(engine_dir: str) -> int | None:
    """Make the directory of an engine's blocks in memory; returns a descriptor of it.

    While that is open, other engines do not remove the directory: one in another container may see
    the blocks, but not the run directory. None: it cannot be made; the workers report why.
    """
    directory = memory_directory(engine_dir)
    while True:
        try:
            make_private(directory)
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError:
            return None
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_nlink:
            with contextlib.suppress(OSError):
                name_engine(directory, engine_dir)
            return fd
        os.close(fd)


def remove_memory(engine_dir: str) -> None:
    """Remove the blocks in memory of an engine that has ended, if it has left some."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(memory_directory(engine_dir), ignore_errors=True)


def remove_orphaned_memory() -> None:
    """Remove the blocks in memory that dead engines of this user have left.

    Their run directories are gone, and no supervisor holds the blocks.
    """
    for directory in SHARED_MEMORY.glob(f"{_PREFIX}*"):
        try:
            check_private(directory)
            engine_dir = os.readlink(directory / _ENGINE)
        except OSError:  # another user's, or just being made
            continue
        with contextlib.suppress(FileNotFoundError):
            if memory_directory(engine_dir) == directory:
                continue
        with contextlib.suppress(OSError):
            _remove_if_not_held(directory)


def _remove_if_not_held(directory: Path) -> None:
    """Remove a directory; a BlockingIOError: an engine holds it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(fd)
