"""Shows the processes of a running engine: `python -m scripts.status [--json]`."""

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from api_proc.http.listener import api_root
from protocol.config.settings import OneLineParser
from protocol.lifecycle import StatusReply
from protocol.message import ProtocolError
from protocol.process.status import StatusLink
from scripts.supervisor.run_dirs import live_run_dirs

TIMEOUT_S = 2.0
_COLUMNS = ("process", "pid", "epoch", "state", "memory", "restarts")


def main(argv: Sequence[str] | None = None, program: str = "python -m scripts.status") -> int:
    """Print the status. Returns 1 if no engine answers."""
    parser = OneLineParser(
        program, description="Show the processes of a running engine.", allow_abbrev=False
    )
    parser.add_argument("--run-dir", help="which engine, if several run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    try:
        run_dir = arguments.run_dir or only_run_dir()
        with contextlib.closing(StatusLink(run_dir)) as link:
            reply = link.query(TIMEOUT_S)
        if reply is None:
            raise LookupError(f"no supervisor answers in run dir {run_dir}")
    except (LookupError, ProtocolError, ValueError) as error:
        print(error.args[0], file=sys.stderr)
        return 1
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(as_dict(reply)), indent=2).decode())
    else:
        print(render(reply, run_dir))
    return 0


def as_dict(reply: StatusReply) -> dict[str, Any]:
    """The reply with names, as JSON shows it."""
    rows = [msgspec.structs.asdict(row) for row in reply.processes]
    return {**msgspec.structs.asdict(reply), "processes": rows}


def render(reply: StatusReply, run_dir: str) -> str:
    """Return a table of the processes, and a line about the engine."""
    table = [_COLUMNS]
    for row in reply.processes:
        pid = "-" if row.pid is None else str(row.pid)
        memory = f"{row.rss_bytes / 2**20:.0f} MiB"
        table.append((row.name, pid, str(row.epoch), row.state, memory, str(row.num_restarts)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    state = "ready" if reply.ready else "not ready"
    where = f" at {api_root(reply.url)}" if reply.url else ""
    lines.append(f"{state}{where}, run dir {run_dir}")
    return "\n".join([*lines, *([reply.failure] if reply.failure else [])])


def only_run_dir() -> str:
    """The run directory of this user's only running engine; LookupError: none, or several."""
    found = live_run_dirs()
    if not found:
        raise LookupError("no engine of this user is running")
    if len(found) > 1:
        choices = "\n".join(f"  --run-dir {run_dir}" for run_dir in found)
        raise LookupError(f"several engines are running; choose one:\n{choices}")
    return found[0]


if __name__ == "__main__":
    sys.exit(main())
