"""Kill processes of a real engine repeatedly, and compare every stream with a run without faults.

    python -m tests.chaos --kills 100
    python -m tests.chaos --matrix --model demo --json chaos.json
    python -m tests.chaos --faults worker,core --seed 7 --round 12
    python -m tests.chaos --journal --faults api,supervisor --matrix
    python -m tests.chaos --replicas 2 --faults worker,core,replica,lost
    python -m tests.chaos --model demo --every 1.8 --kills 100 --streams 24 -- --dtype float32
    python -m tests.chaos --url http://127.0.0.1:8000 --kill-pid-pattern EngineCore

Arguments after `--` go to the engine. The exit status is 1 if a token was lost, duplicated or
otherwise wrong; docs/chaos.md explains the rest.
"""

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import msgspec

from tests.chaos import report
from tests.chaos.client import Declined
from tests.chaos.engine import EngineFailed
from tests.chaos.external_server import ExternalServer
from tests.chaos.faults import DEADLY_FAULTS, Fault, Phase
from tests.chaos.session import ExternalSession, Session, SessionOptions
from tests.chaos.steady import SteadySession
from tests.chaos.workload import KINDS

Choice = TypeVar("Choice", bound=StrEnum)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, and return the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.url and (arguments.kill_command is None) == (arguments.kill_pattern is None):
        parser.error("--url needs one of --kill-command and --kill-pid-pattern")
    if arguments.every is not None and arguments.every <= 0:
        parser.error("--every must be greater than 0")
    if arguments.replicas < 1:
        parser.error("--replicas must be at least 1")
    base = Path(tempfile.mkdtemp(prefix="chaos-"))
    options = SessionOptions(
        model=arguments.model,
        seed=arguments.seed,
        num_streams=arguments.streams,
        num_kills=arguments.kills,
        duration_s=arguments.duration,
        is_matrix=arguments.matrix,
        only_round=arguments.round,
        faults=arguments.faults,
        phases=arguments.phases,
        stream_timeout_s=arguments.timeout,
        engine_flags=tuple(arguments.engine_flags),
        has_journal=arguments.journal,
        kinds=arguments.kinds,
        num_replicas=arguments.replicas,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the engine must be stopped, too
    try:
        if arguments.url:
            server = ExternalServer(arguments.url, arguments.kill_command, arguments.kill_pattern)
            session: Session = ExternalSession(options, base, _log, server)
        elif arguments.every is not None:
            session = SteadySession(options, base, _log, arguments.every)
        else:
            session = Session(options, base, _log)
        asyncio.run(session.run())
    except (EngineFailed, Declined, OSError, KeyboardInterrupt) as error:
        _log(f"stopped: {error}")
        session.failure = str(error) or "interrupted"
    finally:
        if arguments.keep:
            _keep(Path(arguments.keep), base, session)
        shutil.rmtree(base, ignore_errors=True)
    return _report(session, arguments)


def _report(session: Session, arguments: argparse.Namespace) -> int:
    results = session.results
    print(report.table(results))
    print(report.summary(results, num_skipped=len(session.skipped), seed=arguments.seed))
    found = report.violations(results)
    if found:
        print(found)
    if session.failure:
        print(f"the run was not completed: {session.failure}")
    if arguments.json:
        facts = {"seed": arguments.seed, "model": arguments.model, "failure": session.failure}
        Path(arguments.json).write_bytes(report.document(results, **facts))
    return 1 if found or session.failure else 0


def _keep(directory: Path, base: Path, session: Session) -> None:
    """Keep the engine's log, the golden run, and the recordings of streams with violations."""
    directory.mkdir(parents=True, exist_ok=True)
    log = base / "engine.log"
    if log.exists():
        shutil.copyfile(log, directory / "engine.log")
    bad = [result for result in session.results if result.violations]
    (directory / "recordings.json").write_bytes(msgspec.json.encode(bad))
    (directory / "golden.json").write_bytes(msgspec.json.encode(session.golden))


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _choices(kind: type[Choice]) -> Callable[[str], tuple[Choice, ...]]:
    def read(text: str) -> tuple[Choice, ...]:
        try:
            return tuple(map(kind, text.split(",")))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}; there are {', '.join(kind)}") from error

    return read


def _kinds(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in KINDS]:
        raise argparse.ArgumentTypeError(f"unknown {unknown[0]!r}; there are {', '.join(KINDS)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tests.chaos",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="null", help="null, demo or a checkpoint directory")
    parser.add_argument("--kills", type=int, help="minimum number of kills (default: 10)")
    parser.add_argument("--duration", type=float, help="minimum duration in seconds")
    parser.add_argument(
        "--every",
        type=float,
        metavar="SECONDS",
        help="kill worker or core at random, SECONDS apart in the mean, under streams that\n"
        "follow one another, on an engine with default settings",
    )
    parser.add_argument(
        "--matrix", action="store_true", help="run every cell in order, at least once"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of requests and faults")
    parser.add_argument("--streams", type=int, default=32, help="streams per round")
    parser.add_argument(
        "--kinds",
        type=_kinds,
        help=f"comma-separated, of: {','.join(KINDS)} (default: all in turn)",
    )
    parser.add_argument(
        "--timeout", type=float, default=90.0, help="longest duration of a stream in seconds"
    )
    parser.add_argument(
        "--faults",
        type=_choices(Fault),
        default=DEADLY_FAULTS,
        help=f"comma-separated, of: {','.join(Fault)} (default: no hangs)",
    )
    parser.add_argument(
        "--phases",
        type=_choices(Phase),
        default=tuple(Phase),
        help=f"comma-separated, of: {','.join(Phase)}",
    )
    parser.add_argument(
        "--journal",
        action="store_true",
        help="the engine keeps a journal, and clients resume broken streams",
    )
    parser.add_argument("--replicas", type=int, default=1, help="replicas of the engine")
    parser.add_argument("--round", type=int, help="run only this round of the plan")
    parser.add_argument("--json", help="write all results to this file")
    parser.add_argument(
        "--keep", help="directory for the engine's log and the streams with violations"
    )
    foreign = parser.add_argument_group("another server", "Killed at random times only.")
    foreign.add_argument("--url", help="root of a server with OpenAI's API")
    foreign.add_argument("--kill-command", help="shell command that kills a process of it")
    foreign.add_argument(
        "--kill-pid-pattern",
        dest="kill_pattern",
        help="kill one process whose command line contains this",
    )
    parser.add_argument("engine_flags", nargs="*", metavar="-- FLAGS", help="flags for the engine")
    return parser


if __name__ == "__main__":
    sys.exit(main())
