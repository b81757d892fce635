"""Shows the processes of a running engine: `python -m scripts.status [--json]`."""

import contextlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from api_proc.http.listener import api_root
from protocol.config.settings import OneLineParser
from protocol.lifecycle import ProcessState, ProcessStatus, Role, StatusReply
from protocol.message import ProtocolError
from protocol.process.run_dir import replica_dir
from protocol.process.status import StatusLink
from scripts.supervisor.run_dirs import is_live, live_run_dirs

TIMEOUT_S = 2.0
_CHOICE_TIMEOUT_S = 0.5
"""The longest wait for each of several engines, which are only listed."""
_COLUMNS = ("process", "pid", "epoch", "state", "memory", "restarts")
Replicas = Mapping[int, StatusReply | str]
"""What the supervisors of the replicas answer; a text: why there is no answer."""


def main(argv: Sequence[str] | None = None, program: str = "python -m scripts.status") -> int:
    """Print the status. Returns 1 if no engine answers."""
    parser = OneLineParser(
        program, description="Show the processes of a running engine.", allow_abbrev=False
    )
    parser.add_argument("--run-dir", help="which engine, if several run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    try:
        run_dir = chosen_run_dir(arguments.run_dir)
        reply = _query(run_dir)
        replicas = [row.rank for row in reply.processes if row.role is Role.REPLICA]
        inner = _ask_replicas(run_dir, replicas)
    except (LookupError, ProtocolError, ValueError) as error:
        print(f"troika: {error.args[0]}", file=sys.stderr)
        return 1
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(as_dict(reply, inner)), indent=2).decode())
    else:
        print(render(reply, run_dir, inner))
    return 0


def _query(run_dir: str, timeout_s: float = TIMEOUT_S) -> StatusReply:
    """Ask the supervisor of a run directory; LookupError: it has not answered, and perhaps why."""
    with contextlib.closing(StatusLink(run_dir)) as link:
        reply = link.query(timeout_s)
        if reply is not None:
            return reply
        if link.unreadable:
            raise LookupError(f"the answer in run dir {run_dir} cannot be read: {link.unreadable}")
        raise LookupError(f"no supervisor answers in run dir {run_dir}")


def _ask_replicas(run_dir: str, numbers: Sequence[int]) -> Replicas:
    """Ask all at the same time, so that several that do not answer take no longer than one."""

    def ask(number: int) -> StatusReply | str:
        with contextlib.closing(StatusLink(replica_dir(run_dir, number))) as link:
            reply = link.query(TIMEOUT_S)
            if reply is not None:
                return reply
            if link.unreadable:
                return f"its answer cannot be read: {link.unreadable}"
            return f"its supervisor has not answered within {TIMEOUT_S:g} s"

    with ThreadPoolExecutor(max(1, len(numbers))) as threads:
        return dict(zip(numbers, threads.map(ask, numbers), strict=True))


def as_dict(reply: StatusReply, replicas: Replicas = MappingProxyType({})) -> dict[str, Any]:
    """Return the reply with names, as JSON shows it, and those of the replicas by their numbers."""
    rows = [msgspec.structs.asdict(row) for row in reply.processes]
    body = {**msgspec.structs.asdict(reply), "processes": rows}
    body["ready"] = is_ready(reply, replicas)
    if replicas:
        body["replicas"] = {
            str(number): {"error": inner} if isinstance(inner, str) else as_dict(inner)
            for number, inner in replicas.items()
        }
    return body


def is_ready(reply: StatusReply, replicas: Replicas = MappingProxyType({})) -> bool:
    """Return whether new requests are served, as /readyz does: one replica and one API suffice.

    A replica that does not answer counts as its supervisor's row states it.
    """
    states: dict[Role, list[bool]] = {}
    for row in reply.processes:
        if row.role is Role.SUPERVISOR and row.state is ProcessState.DRAINING:
            return False
        inner = replicas.get(row.rank) if row.role is Role.REPLICA else None
        serves = not isinstance(inner, StatusReply) or inner.ready
        states.setdefault(row.role, []).append(serves and row.state is ProcessState.READY)
    several = [any(states[role]) for role in (Role.API, Role.REPLICA) if role in states]
    single = [all(states[role]) for role in (Role.CORE, Role.WORKER) if role in states]
    return all(several + single) if several or single else reply.ready


def render(reply: StatusReply, run_dir: str, replicas: Replicas = MappingProxyType({})) -> str:
    """Return a table of the processes, and lines about the engine and what is not in the table."""
    table, unknown = [_COLUMNS], []
    for row in reply.processes:
        table.append(_cells(row, row.name))
        inner = replicas.get(row.rank) if row.role is Role.REPLICA else None
        if isinstance(inner, str):
            unknown.append(f"{row.name}: {inner}")
        elif inner is not None:
            rows = [one for one in inner.processes if one.role is not Role.SUPERVISOR]
            table += [_cells(one, f"  {one.name}") for one in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    rows = [
        row
        for each in (reply, *replicas.values())
        if not isinstance(each, str)
        for row in each.processes
    ]
    if (num_bytes := _memory_of_all({row.pid for row in rows if row.pid is not None})) is not None:
        lines.append(f"memory of all, shared pages once: {num_bytes / 2**20:.0f} MiB")
    lines += [*unknown, *reply.remarks]
    state = "ready" if is_ready(reply, replicas) else "not ready"
    where = f" at {_place(reply)}" if _place(reply) else ""
    lines.append(f"{state}{where}, run dir {run_dir}")
    return "\n".join([*lines, *([reply.failure] if reply.failure else [])])


def _cells(row: ProcessStatus, name: str) -> tuple[str, str, str, str, str, str]:
    pid = "-" if row.pid is None else str(row.pid)
    memory = f"{row.rss_bytes / 2**20:.0f} MiB"
    return name, pid, str(row.epoch), row.state, memory, str(row.num_restarts)


def _memory_of_all(pids: Iterable[int]) -> int | None:
    """Return the proportional memory of processes in bytes; None: that of one cannot be read.

    Forks share the weights of their zygote, which the resident memory of each of them includes.
    """
    num_kib = 0
    try:
        for pid in pids:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            num_kib += int(text.partition("\nPss:")[2].split()[0])
    except (OSError, IndexError, ValueError):
        return None
    return num_kib * 1024 or None


def chosen_run_dir(given: str | None) -> str:
    """Return the run directory that is given, or that of this user's only running engine.

    LookupError: no engine runs there, or there is none, or several.
    """
    if given is not None:
        if not is_live(given):
            raise LookupError(f"no engine runs in run dir {given}")
        return given
    found = live_run_dirs()
    if not found:
        raise LookupError("no engine of this user is running")
    if len(found) > 1:
        choices = "\n".join(f"  --run-dir {run_dir}{_where(run_dir)}" for run_dir in found)
        raise LookupError(f"several engines are running; choose one:\n{choices}")
    return found[0]


def _where(run_dir: str) -> str:
    """Return the address in brackets; empty: no answer that can be read."""
    try:
        place = _place(_query(run_dir, _CHOICE_TIMEOUT_S))
    except (LookupError, ProtocolError):  # it may be of another version
        return ""
    return f"   ({place})" if place else ""


def _place(reply: StatusReply) -> str:
    """Return the address of the API, or those of the cores of an engine without one."""
    return api_root(reply.url) if reply.url else ", ".join(reply.cores)


if __name__ == "__main__":
    sys.exit(main())
