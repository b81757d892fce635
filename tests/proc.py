"""The processes of this machine, as /proc lists them."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class ProcessStat(NamedTuple):
    """The fields of a process's stat file that tests need."""

    pid: int
    name: str
    state: str
    """One letter; Z: a zombie."""
    parent: int


def process_stats() -> Iterator[ProcessStat]:
    """Yield all processes, zombies included."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path(f"/proc/{entry}/stat").read_text()
        except OSError:  # it has ended
            continue
        name, _, fields = stat.partition("(")[2].rpartition(")")
        state, parent = fields.split()[:2]
        yield ProcessStat(int(entry), name, state, int(parent))
