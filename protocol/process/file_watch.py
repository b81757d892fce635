"""Loads configuration files again when they change, off the event loop."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

POLL_S = 1.0
_MAX_UNSTABLE_POLLS = 5

T = TypeVar("T")
Signature = list[tuple[int, int, int] | None]

log = logging.getLogger("troika.files")


async def watch_files(
    paths: Sequence[Path],
    load: Callable[[], T],
    take: Callable[[T], None],
    poll_s: float = POLL_S,
) -> None:
    """Call `take` with a loaded value whenever the files have changed, until it is cancelled.

    Files count as changed once they have been the same for one interval, because certificate and
    key are written one after the other, or after five intervals with a change in each. Where they
    cannot be loaded, the value in use stays.
    """
    loaded: Signature | None = None  # the files may have changed since the caller has loaded them
    seen = await asyncio.to_thread(signature_of, paths)
    num_unstable = 0
    names = ", ".join(map(str, paths))
    while True:
        await asyncio.sleep(poll_s)
        before, seen = seen, await asyncio.to_thread(signature_of, paths)
        num_unstable = num_unstable + 1 if seen != before else 0
        if seen == loaded or 0 < num_unstable < _MAX_UNSTABLE_POLLS:
            continue
        num_unstable = 0
        is_first, loaded = loaded is None, seen
        try:
            take(await asyncio.to_thread(load))
        except (OSError, ValueError) as error:
            log.error("%s: what was loaded before stays in use: %s", names, error)
        else:
            if not is_first:
                log.info("loaded again: %s", names)


def signature_of(paths: Sequence[Path]) -> Signature:
    """Return what changes with the contents of files; None for one that cannot be found."""
    return [_signature(path) for path in paths]


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_mtime_ns, info.st_ino, info.st_size
