"""Replaces processes of a running engine: `python -m scripts.restart ROLE [--run-dir DIR]`.

Open requests are finished, or continued by the successor. Several API processes are replaced one
after the other; with `--index N` only that one. So are the cores, or the workers, of several
replicas; with `--replica N` only those of that one.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from protocol.config.settings import OneLineParser
from protocol.lifecycle import ProcessState, ProcessStatus, Role
from protocol.message import ProtocolError
from protocol.process.run_dir import replica_dir
from protocol.process.status import StatusLink
from scripts.status import chosen_run_dir
from scripts.supervisor.planned_restarts import ALREADY_REPLACED, RESTARTABLE

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 660.0
"""More than the default `startup_timeout_s`: a worker may have to load its model."""
_ANSWER_TIMEOUT_S = 2.0
_MAX_QUERIES = 5
"""The number of queries without an answer after which the supervisor is given up."""
_POLL_S = 0.05


class RestartFailed(Exception):
    """The processes were not replaced, for the reason given."""


def main(argv: Sequence[str] | None = None, program: str = "python -m scripts.restart") -> int:
    """Replace the processes of one role. Returns 1 if that was not possible."""
    parser = OneLineParser(
        program,
        description="Replace the processes of one role of a running engine. Requests continue.",
        allow_abbrev=False,
    )
    parser.add_argument("role", choices=[str(role) for role in RESTARTABLE], help="what to replace")
    parser.add_argument("--run-dir", help="which engine, if several run")
    parser.add_argument("--index", type=int, metavar="N", help="only this one of the API processes")
    parser.add_argument(
        "--replica", type=int, metavar="N", help="only the core or the workers of this replica"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help="longest wait for the successors (default: %(default)g)",
    )
    arguments = parser.parse_args(argv)
    role, index = Role(arguments.role), arguments.index
    if index is not None and (role is not Role.API or not 0 <= index < 1024):
        parser.error("--index needs the role api, and a number from 0 to 1023")
    replica = arguments.replica
    if replica is not None and role is Role.API:
        parser.error("--replica needs the role core or worker")
    try:
        for run_dir, owner in _run_dirs(chosen_run_dir(arguments.run_dir), role, replica):
            with contextlib.closing(StatusLink(run_dir)) as link:
                print(f"{owner}{restart(link, role, arguments.timeout, index)}", flush=True)
    except (LookupError, ProtocolError, ValueError, RestartFailed) as error:
        print(f"troika: {error.args[0]}", file=sys.stderr)
        return 1
    return 0


def _run_dirs(run_dir: str, role: Role, replica: int | None) -> list[tuple[str, str]]:
    """Return the run directories of the supervisors to ask, each with the beginning of a line."""
    if role is Role.API:
        return [(run_dir, "")]
    with contextlib.closing(StatusLink(run_dir)) as link:
        reply, _ = _query(link, link.query)
    replicas = [row.rank for row in reply.processes if row.role is Role.REPLICA]
    if replica is not None and replica not in replicas:
        raise RestartFailed(f"this engine has no replica {replica}")
    chosen = replicas if replica is None else [replica]
    return [(replica_dir(run_dir, n), f"replica {n}: ") for n in chosen] or [(run_dir, "")]


def restart(link: StatusLink, role: Role, timeout_s: float, index: int | None = None) -> str:
    """Replace the processes of `role`, wait until their successors serve, and describe that.

    With an `index` only one API process is replaced. RestartFailed: refused, or not within
    `timeout_s`.
    """
    began = time.monotonic()
    had_successor = False
    name = str(role) if index is None else f"{role}-{index}"
    before, _ = _rows(link, role, index)
    _ask(link, role, index)
    while True:
        after, has_successor = _rows(link, role, index)
        pairs = list(zip(before, after, strict=True))
        if all(new.state is ProcessState.READY and new.epoch > old.epoch for old, new in pairs):
            break
        is_old = any(
            new.epoch == old.epoch and new.state is ProcessState.READY for old, new in pairs
        )
        if is_old and had_successor and not has_successor:
            raise RestartFailed(f"the {name} stays: its successor has died")
        had_successor = has_successor
        if time.monotonic() - began > timeout_s:
            raise RestartFailed(f"the {name} is not replaced after {timeout_s:g} s")
        time.sleep(_POLL_S)
    seconds = time.monotonic() - began
    return f"{name} replaced in {seconds:.2f} s: pid {_pids(before)} by {_pids(after)}"


def _ask(link: StatusLink, role: Role, index: int | None) -> None:
    """Request the restart. After a late answer the next one may report that it has begun."""
    reply, is_repeated = _query(link, functools.partial(link.restart, role, index=index))
    has_begun = is_repeated and reply.reason.endswith(ALREADY_REPLACED)
    if not reply.accepted and not has_begun:
        raise RestartFailed(reply.reason)


def _query(link: StatusLink, ask: Callable[[float], T | None]) -> tuple[T, bool]:
    """Repeat a query until it is answered: a busy host may be late. Returns whether it was."""
    for number in range(_MAX_QUERIES):
        reply = ask(_ANSWER_TIMEOUT_S)
        if reply is not None:
            return reply, number > 0
    if link.unreadable:
        raise RestartFailed(f"the supervisor's answer cannot be read: {link.unreadable}")
    raise RestartFailed("the supervisor does not answer")


def _rows(link: StatusLink, role: Role, index: int | None) -> tuple[list[ProcessStatus], bool]:
    """Return the rows of a role by rank, and whether an API process of it has a successor."""
    reply, _ = _query(link, link.query)
    rows = [row for row in reply.processes if row.role is role]
    mains = [row for row in rows if not row.is_spare and index in (None, row.rank)]
    if not mains:
        raise RestartFailed(f"this engine has no {role}{'' if index is None else f' {index}'}")
    return mains, any(row.is_spare for row in rows)


def _pids(rows: list[ProcessStatus]) -> str:
    return ", ".join(str(row.pid) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
