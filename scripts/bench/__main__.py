"""Benchmarks: `troika bench COMMAND [flags] [-- flags of the engine]`.

offline    W1 to W3 through the embedded client
serving    W1 to W4 and W6 over HTTP, also for peers
control    W5: what everything around the model costs
startup    time to ready and to the first token
growth     time of a step against running requests, context and waiting requests
sampler    the choice of tokens alone
routing    conversations over replicas of the null model, by policy
prefill    chats alongside long prompts, with and without replicas for prompts
scheduler  the scheduler alone
table      results as Markdown tables

docs/benchmarking.md describes the workloads, and docs/benchmarks.md has figures.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from protocol.config import RoutingPolicy
from protocol.config.settings import OneLineParser
from scripts.bench import machine, plots, report
from scripts.bench.client import BenchError
from scripts.bench.commands import (
    control,
    growth,
    offline,
    prefill,
    routing,
    sampler,
    scheduler,
    serving,
    startup,
)
from scripts.bench.peers import http_url, named_url
from scripts.bench.workloads import DEFAULT_OFFLINE, OFFLINE

PROGRAM = "python -m scripts.bench"
RUNS: dict[str, Callable[[argparse.Namespace, report.Record], None]] = {
    "offline": offline.run,
    "serving": serving.run,
    "control": control.run,
    "startup": startup.run,
    "growth": growth.run,
    "sampler": sampler.run,
    "routing": routing.run,
    "prefill": prefill.run,
}
LENGTHS = (1024, 4000, 7900)
RUNNING = (16, 64, 256, 1024)
CONTEXT = (128, 512, 2048, 8192, 32_768)
WAITING = (0, 10, 100, 1000, 10_000)


def _count(lowest: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if int(text) < lowest:
            raise argparse.ArgumentTypeError(f"must be at least {lowest}")
        return int(text)

    count.__name__ = "number"
    return count


def _positive(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError("must be greater than 0")
    return float(text)


def _not_negative(text: str) -> float:
    if not 0 <= float(text) < float("inf"):
        raise argparse.ArgumentTypeError("must be at least 0")
    return float(text)


_positive.__name__ = _not_negative.__name__ = "number"  # argparse shows it


def _add_number(
    parser: argparse.ArgumentParser, flag: str, default: float, kind: Any, text: str
) -> None:
    about = f"{text} (default: {default})"
    parser.add_argument(flag, type=kind, default=default, metavar="N", help=about)


def _add_common(parser: argparse.ArgumentParser, model: str) -> None:
    parser.add_argument(
        "--model", default=model, metavar="DIR", help=f"checkpoint, or null (default: {model})"
    )
    _add_number(parser, "--repeats", 5, _count(1), "repetitions, each with new prompts")
    _add_number(parser, "--seed", 0, int, "seed of the first repetition")
    _add_number(parser, "--timeout-s", 600.0, _positive, "longest time for one request")
    text = "ids in prompts are smaller (at most 16,000)"
    parser.add_argument("--vocab-size", type=_count(1), metavar="N", help=text)
    _add_outputs(parser)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to a file")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write plots as PNG files")


def _add_rounds(parser: argparse.ArgumentParser, num_processes: int) -> None:
    parser.add_argument(
        "--against",
        type=named_url,
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a running server with OpenAI's API to compare with; may be repeated",
    )
    parser.add_argument(
        "--load-processes",
        type=_count(1),
        default=num_processes,
        metavar="N",
        help=f"processes that share the requests of a run (default: {num_processes})",
    )


def _add_work(
    parser: argparse.ArgumentParser, names: Sequence[str], default: Sequence[str] = ()
) -> None:
    text = f"workloads (default: {', '.join(default) or 'all'})"
    chosen = list(default or names)
    parser.add_argument("--work", nargs="+", choices=names, default=chosen, help=text)


def _add_pause(parser: argparse.ArgumentParser) -> None:
    text = "seconds between runs on different servers (default: 2)"
    parser.add_argument("--pause-s", type=_not_negative, default=2.0, metavar="S", help=text)


def _numbers(
    parser: argparse.ArgumentParser, flag: str, default: Sequence[int], text: str, lowest: int = 1
) -> None:
    shown = f"{text} (default: {' '.join(map(str, default))})"
    options: dict[str, Any] = {"nargs": "*", "type": _count(lowest), "metavar": "N"}
    parser.add_argument(flag, default=list(default), help=shown, **options)


def _add_offline(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, "demo")
    _add_work(parser, list(OFFLINE), DEFAULT_OFFLINE)
    _add_pause(parser)
    text = "also the parts of a step, from an engine in this process"
    parser.add_argument("--profile", action="store_true", help=text)


def _add_serving(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, "demo")
    _add_work(parser, serving.WORK)
    _add_rounds(parser, 1)
    _add_pause(parser)
    text = "a running server, instead of starting an engine"
    parser.add_argument("--base", type=http_url, metavar="URL", help=text)
    text = "ask for ids, so that tokens without text arrive, too (default: no)"
    parser.add_argument("--return-token-ids", action="store_true", help=text)
    text = "W4: requests/s (default: 5)"
    parser.add_argument("--rate", type=_positive, default=5.0, metavar="R", help=text)
    text = "W4: how many (default: 200)"
    parser.add_argument("--requests", type=_count(1), default=200, metavar="N", help=text)
    _numbers(parser, "--lengths", LENGTHS, "W6: prompt tokens")


def _add_control(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, "null")
    _add_rounds(parser, 2)
    _add_pause(parser)
    _numbers(parser, "--sequences", (64, 256), "requests at once")


def _add_sampler(parser: argparse.ArgumentParser) -> None:
    _add_number(parser, "--repeats", 9, _count(1), "repetitions, after a warm-up")
    _add_number(parser, "--seed", 0, int, "seed of the logits")
    _add_number(parser, "--rows", 64, _count(1), "rows of a step")
    _add_number(parser, "--vocab-size", 151_936, _count(1), "tokens of the vocabulary")
    _add_work(parser, list(sampler.WORK))
    text = "also without the native kernel"
    parser.add_argument("--torch", action="store_true", help=text)
    _add_outputs(parser)


def _add_growth(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, "null")
    _numbers(parser, "--running", RUNNING, "requests that run")
    _numbers(parser, "--context", CONTEXT, "context of one request")
    _numbers(parser, "--waiting", WAITING, "requests that wait", 0)
    text = "requests that run in front of those that wait (default: 64)"
    parser.add_argument("--behind", type=_count(1), default=64, metavar="N", help=text)
    text = "processor time of all threads, for a machine with other work, instead of wall clock"
    parser.add_argument("--processor-time", action="store_true", help=text)
    text = "steps of a repetition (default: 48)"
    parser.add_argument("--steps", type=_count(1), default=48, metavar="N", help=text)


def _add_routing(parser: argparse.ArgumentParser) -> None:
    _add_number(parser, "--repeats", 3, _count(1), "repetitions, each with new prompts")
    _add_number(parser, "--seed", 0, int, "seed of the first repetition")
    _numbers(parser, "--replicas", (2, 4), "replicas")
    _add_number(parser, "--conversations", 200, _count(1), "conversations")
    _add_number(parser, "--turns", 6, _count(1), "turns of each")
    _add_number(parser, "--systems", 100, _count(1), "system prompts that they share")
    _add_number(parser, "--begin-s", 10.0, _positive, "time within which they begin")
    _add_number(parser, "--pause-s", 4.0, _positive, "mean time between an answer and a question")
    _add_number(parser, "--step-ms", 5.0, _not_negative, "time of a step")
    _add_number(parser, "--token-ms", 0.04, _not_negative, "time that a token adds")
    text = "tokens that all caches hold, over those of all conversations at their end"
    _add_number(parser, "--cache", 0.5, _positive, text)
    text = "the client follows the events of the caches"
    parser.add_argument("--kv-events", action="store_true", help=text)
    _add_number(parser, "--timeout-s", 60.0, _positive, "longest time for one turn")
    _add_work(parser, [str(policy) for policy in RoutingPolicy])
    _add_outputs(parser)


def _add_prefill(parser: argparse.ArgumentParser) -> None:
    _add_number(parser, "--repeats", 3, _count(1), "repetitions, each with new prompts")
    _add_number(parser, "--seed", 0, int, "seed of the first repetition")
    _add_number(parser, "--replicas", 4, _count(2), "replicas")
    _numbers(parser, "--prefill-replicas", (1,), "of them, those that compute prompts")
    _add_number(parser, "--seconds", 20.0, _positive, "time within which requests are sent")
    _add_number(parser, "--chats-per-s", 16.0, _positive, "chats a second")
    _add_number(parser, "--long-per-s", 3.0, _positive, "long prompts a second")
    _add_number(parser, "--step-ms", 5.0, _not_negative, "time of a step")
    _add_number(parser, "--token-ms", 0.04, _not_negative, "time that a token adds")
    _add_number(parser, "--timeout-s", 60.0, _positive, "longest time for one request")
    _add_outputs(parser)


def _add_startup(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, "demo")


def _add_scheduler(parser: argparse.ArgumentParser) -> None:
    """Add no flag: the command parses its arguments itself."""


def _add_table(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")


_FLAGS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "offline": _add_offline,
    "serving": _add_serving,
    "control": _add_control,
    "startup": _add_startup,
    "growth": _add_growth,
    "sampler": _add_sampler,
    "routing": _add_routing,
    "prefill": _add_prefill,
    "scheduler": _add_scheduler,
    "table": _add_table,
}


def make_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Return the parser of everything before `--`."""
    parser = OneLineParser(
        program,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, add_flags in _FLAGS.items():
        add_flags(commands.add_parser(name, allow_abbrev=False))
    return parser


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Run a command. Returns 0, 1 if nothing could be measured, or 2 for wrong arguments."""
    # As after an interrupt, the engine that was started ends too.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return _run(list(sys.argv[1:] if argv is None else argv), program)
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)


def _run(argv: list[str], program: str) -> int:
    if argv[:1] == ["scheduler"]:
        return scheduler.main(argv[1:], f"{program} scheduler")
    place = argv.index("--") if "--" in argv else len(argv)
    parser = make_parser(program)
    arguments = parser.parse_args(argv[:place])
    arguments.engine_flags = argv[place + 1 :]
    if arguments.engine_flags and (
        arguments.command in {"table", "sampler", "routing", "prefill"} or _base(arguments)
    ):
        parser.error(f"{arguments.engine_flags[0]} has no effect: no engine is started")
    try:
        if arguments.command == "table":
            print("\n\n".join(report.table(report.load(path)) for path in arguments.files))
        else:
            _measure(arguments, [*program.split(), *argv])
    except (BenchError, OSError) as error:
        print(f"troika: {error}", file=sys.stderr)
        return 1
    return 0


def _base(arguments: argparse.Namespace) -> str | None:
    return getattr(arguments, "base", None)


def _measure(arguments: argparse.Namespace, command: list[str]) -> None:
    if arguments.plot is not None:
        plots.require_matplotlib()
    settings = {name: _plain(value) for name, value in vars(arguments).items()}
    record = report.Record(
        benchmark=arguments.command,
        command=command,
        machine=machine.describe(),
        settings=settings,
    )
    RUNS[arguments.command](arguments, record)
    print(report.table(record))
    if arguments.json is not None:
        report.save(record, arguments.json)
    if arguments.plot is not None:
        for path in plots.plot(record, arguments.plot):
            print(path, file=sys.stderr)


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    sys.exit(main())
