"""Replaces processes of a running engine: `python -m scripts.restart ROLE [--run-dir DIR]`.

Open requests are finished, or continued by the successor.
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
from protocol.process.status import StatusLink
from scripts.status import only_run_dir
from scripts.supervisor.planned_restarts import RESTARTABLE, already_replaced

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 660.0
"""More than the default `startup_timeout_s`: a worker may have to load its model."""
_ANSWER_TIMEOUT_S = 2.0
_MAX_QUERIES = 5
"""Before the supervisor is given up."""
_POLL_S = 0.05


class RestartFailed(Exception):
    """The processes were not replaced, for the reason given."""


def main(argv: Sequence[str] | None = None, program: str = "python -m scripts.restart") -> int:
    """Replace the processes of one role. Returns 1 if that was not possible."""
    parser = OneLineParser(
        program,
        description="Replace the processes of one role of a running engine. Requests go on.",
        allow_abbrev=False,
    )
    parser.add_argument("role", choices=[str(role) for role in RESTARTABLE], help="what to replace")
    parser.add_argument("--run-dir", help="which engine, if several run")
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help="longest wait for the successors (default: %(default)g)",
    )
    arguments = parser.parse_args(argv)
    try:
        with contextlib.closing(StatusLink(arguments.run_dir or only_run_dir())) as link:
            print(restart(link, Role(arguments.role), arguments.timeout))
    except (LookupError, ProtocolError, ValueError, RestartFailed) as error:
        print(error.args[0], file=sys.stderr)
        return 1
    return 0


def restart(link: StatusLink, role: Role, timeout_s: float) -> str:
    """Replace the processes of `role`, wait until their successors serve, and describe that.

    RestartFailed: refused, or not within `timeout_s`.
    """
    began = time.monotonic()
    had_successor = False
    before = [row for row in _rows(link, role) if role is not Role.API or row.rank == 0]
    _ask(link, role)
    while True:
        rows = _rows(link, role)  # with a second API, if there is one
        after = rows[: len(before)]
        pairs = zip(before, after, strict=True)
        if all(new.state is ProcessState.READY and new.epoch > old.epoch for old, new in pairs):
            break
        is_old = after[0].epoch == before[0].epoch
        if is_old and had_successor and len(rows) == len(before):
            raise RestartFailed(f"the {role} stays: its successor has died")
        had_successor = len(rows) > len(before)
        if time.monotonic() - began > timeout_s:
            raise RestartFailed(f"the {role} is not replaced after {timeout_s:g} s")
        time.sleep(_POLL_S)
    seconds = time.monotonic() - began
    return f"{role} replaced in {seconds:.2f} s: pid {_pids(before)} by {_pids(after)}"


def _ask(link: StatusLink, role: Role) -> None:
    """Request the restart. After a late answer the next one may report that it has begun."""
    reply, is_repeated = _query(functools.partial(link.restart, role))
    has_begun = is_repeated and reply.reason == already_replaced(role)
    if not reply.accepted and not has_begun:
        raise RestartFailed(reply.reason)


def _query(ask: Callable[[float], T | None]) -> tuple[T, bool]:
    """Repeat a query until it is answered: a busy host may be late. Returns whether it was."""
    for number in range(_MAX_QUERIES):
        reply = ask(_ANSWER_TIMEOUT_S)
        if reply is not None:
            return reply, number > 0
    raise RestartFailed("the supervisor does not answer")


def _rows(link: StatusLink, role: Role) -> list[ProcessStatus]:
    """The rows of a role by rank."""
    reply, _ = _query(link.query)
    rows = [row for row in reply.processes if row.role is role]
    if not rows:
        raise RestartFailed(f"this engine has no {role}")
    return rows


def _pids(rows: list[ProcessStatus]) -> str:
    return ", ".join(str(row.pid) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
