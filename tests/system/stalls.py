"""The pause of streams after a kill or a planned restart: `python -m tests.system.stalls --help`.

The engine has the demo model and some greedy streams; events follow each other. A stall is the time
to the next token, the longest within five seconds of the event; every stream is compared with an
undisturbed one.
"""

import argparse
import os
import signal
import statistics
import time

from protocol.lifecycle import ProcessState, Role
from protocol.process.status import StatusLink
from scripts.testing import Engine, EngineFactory, eventually
from tests.system.null_load import Stream

PROMPTS = (
    "def __init__(self, ",
    "import os\n",
    "class Reader:\n",
    "for line in ",
    "return ",
    "if ",
)
LOAD_TIMEOUT_S = 120.0


def main() -> None:
    """Run the events, and print one row of a table."""
    parser = argparse.ArgumentParser("tests.system.stalls", description=__doc__)
    parser.add_argument("--role", default="worker", choices=["worker", "core", "api"])
    parser.add_argument("--how", default="kill", choices=["kill", "restart"])
    parser.add_argument("--standby", default="1", choices=["0", "1"])
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--num-threads", default="1")
    arguments = parser.parse_args()
    flags = ["--standby-workers", arguments.standby, "--num-threads", arguments.num_threads]
    flags += ["--num-gpu-blocks-override", "1024"]
    with EngineFactory() as factory:
        engine = factory(*flags, model="demo")
        role = Role(arguments.role)
        stalls = measure(engine, role, arguments.how, arguments.standby == "1", arguments.events)
    cuts = statistics.quantiles(stalls, n=100, method="inclusive")
    print(
        f"{arguments.how} {role}, standby {arguments.standby}: {arguments.events} events,"
        f" {len(stalls)} stalls, p50 {cuts[49]:.3f} s, p99 {cuts[98]:.3f} s,"
        f" max {max(stalls):.3f} s, load {os.getloadavg()[0]:.1f}"
    )


def measure(engine: Engine, role: Role, how: str, standby: bool, num_events: int) -> list[float]:
    """Return the seconds from each event to the next token of each stream."""
    wait_all_ready(engine, standby)
    expected = [stream.join().token_ids for stream in open_streams(engine)]
    stalls: list[float] = []
    for _ in range(num_events):
        wait_all_ready(engine, standby)
        streams = open_streams(engine)
        wait_for_tokens(streams, 10)
        began = time.monotonic()
        begin_event(engine, role, how)
        for stream, want in zip(streams, expected, strict=True):
            stream.join()
            assert stream.error is None, stream.error
            assert stream.token_ids == want, "a stream has other tokens"
        stalls += [stream.longest_gap_s(began, began + 5.0) for stream in streams]
    return stalls


def wait_for_tokens(streams: list[Stream], number: int) -> None:
    """Wait until each stream has this number of tokens."""
    eventually(lambda: all(len(s.token_ids) >= number for s in streams), "tokens come", 60.0)


def open_streams(engine: Engine) -> list[Stream]:
    """Open one stream for each prompt."""
    return [
        Stream(engine.url(), model="demo", prompt=prompt, max_tokens=80, temperature=0)
        for prompt in PROMPTS
    ]


def begin_event(engine: Engine, role: Role, how: str) -> None:
    """Kill a process, or ask for its restart."""
    if how == "kill":
        os.kill(engine.pid(role), signal.SIGKILL)
        return
    link = StatusLink(engine.run_dir)
    reply = link.restart(role, 5.0)
    link.close()
    assert reply is not None
    assert reply.accepted, reply.reason


def wait_all_ready(engine: Engine, standby: bool) -> None:
    """Whether all processes are ready, helpers included, and none is about to leave."""

    def are_ready() -> bool:
        reply = engine.status()
        rows = [] if reply is None else reply.processes
        roles = {row.role for row in rows}
        is_full = not standby or Role.STANDBY in roles
        return bool(rows) and is_full and all(row.state is ProcessState.READY for row in rows)

    eventually(are_ready, "all processes are ready", LOAD_TIMEOUT_S)


if __name__ == "__main__":
    main()
