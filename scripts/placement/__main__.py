"""The placer process: keeps the wanted number of engines in a Ray cluster.

The supervisor starts it. Engines and API do not depend on it: if the placer is gone, or the cluster
does not answer, running engines continue, and only starts and ends of engines wait.
"""

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from protocol.client import ReplicatedClient
from protocol.config import ConfigError, EngineConfig
from protocol.lifecycle import Drain, Health, Role, StatusReply, Stop
from protocol.process.child_runtime import ChildProcess
from protocol.process.file_watch import watch_files
from protocol.process.machines import address_files, client_keys, read_addresses
from scripts.placement.scaling import Demand, Scaler

if TYPE_CHECKING:
    from scripts.placement.cluster import Cluster

_INTERVAL_S = 1.0
_SILENCE_S = 10.0
"""Time without an answer of the cluster after which a warning is logged."""
_END_S = 3.0
"""Time for an orderly end of all engines, before the supervisor kills this process."""
_MARGIN_S = 30.0
"""Time for an engine in the cluster to end after it has finished its requests."""
LEAVE_AFTER_S = 600
"""Time without this engine after which the engines in the cluster end."""


def main() -> None:
    child = ChildProcess.from_argv("scripts.placement", Role.PLACER, sys.argv[1:])
    child.progress("import ray")
    try:
        from scripts.placement.cluster import Cluster
    except ImportError as error:
        text = f"ray needs its package: pip install ray ({error})"
        child.fatal("ray", ConfigError(text), retry=False)
    asyncio.run(_serve(child, _cluster(child.config, Cluster)))
    child.leave()


def _cluster(config: EngineConfig, make: "type[Cluster]") -> "Cluster":
    placement, parallel = config.placement, config.parallel
    assert placement.ray is not None
    assert parallel.agents_listen is not None
    assert parallel.curve_keys is not None
    keys = os.path.abspath(parallel.curve_keys)  # agents have other working directories
    arguments = ["--join", parallel.agents_listen, "--curve-keys", keys]
    arguments += ["--leave-after-s", str(LEAVE_AFTER_S)]
    return make(
        placement.ray,
        f"troika:{parallel.agents_listen}",
        arguments,
        config.ray_bundle,
        placement.min_engines,
        leave_s=config.recovery.shutdown_timeout_s + _MARGIN_S,
    )


async def _serve(child: ChildProcess, cluster: "Cluster") -> None:
    config = child.config
    loop = asyncio.get_running_loop()
    stops = asyncio.Event()

    def on_message(message: Drain | Stop | Health | StatusReply) -> None:
        if isinstance(message, Stop):
            stops.set()

    def beat() -> None:
        child.reporter.turn()
        if child.reporter.tick_ms is not None:
            loop.call_later(child.reporter.tick_ms / 1000, beat)

    child.attach_asyncio(loop, on_message)
    beat()
    for name in ("troika.client", "troika.files"):  # the API reports these
        logging.getLogger(name).setLevel(logging.WARNING)
    files = address_files(config, child.run_dir)
    async with ReplicatedClient([], may_change=True, keys=client_keys(config)) as client:
        child.ready()
        await run_until(
            stops,
            watch_files(files, lambda: read_addresses(files), client.set_addresses),
            _keep(child, cluster, client),
        )
        with contextlib.suppress(Exception):  # the cluster may be lost
            await asyncio.wait_for(asyncio.to_thread(cluster.end_all, _END_S), _END_S + 1)


async def run_until(stops: asyncio.Event, *jobs: Coroutine[Any, Any, None]) -> None:
    """Run endless jobs until an event is set; raise the first error of a job."""
    tasks = [asyncio.create_task(job) for job in (*jobs, _wait(stops))]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def _keep(child: ChildProcess, cluster: "Cluster", client: ReplicatedClient) -> None:
    """Keep the wanted number of engines until cancelled."""
    placement = child.config.placement
    scaler = Scaler(
        placement.replicas,
        placement.min_engines,
        placement.max_engines,
        child.config.scheduler.max_num_seqs,
        grow_after_s=placement.grow_after_s,
        shrink_after_s=placement.shrink_after_s,
    )
    contact = Contact(child.log)
    while True:
        before = scaler.num_wanted
        num_wanted = scaler.update(_demand(client), time.monotonic())
        if num_wanted != before:
            child.log.info("%d engines are wanted, instead of %d", num_wanted, before)
        notes = await contact.ask(partial(cluster.reconcile, num_wanted))
        for note in notes:
            child.log.info("%s", note)
        await asyncio.sleep(_INTERVAL_S)


class Contact:
    """Calls the cluster, and logs once when it stops answering and once when it answers again."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._is_lost = False

    async def ask(self, call: Callable[[], list[str]]) -> list[str]:
        """Run a call, which may take long, and return its result; an empty list if it fails."""
        answer = asyncio.create_task(asyncio.to_thread(call))
        done, _ = await asyncio.wait([answer], timeout=_SILENCE_S)
        if not done:
            self._lost(f"for {_SILENCE_S:g} s")
        try:
            notes = await answer
        except Exception as error:  # Ray passes on any error of its libraries
            self._lost(str(error).partition("\n")[0] or type(error).__name__)
            return []
        if self._is_lost:
            self._log.info("the Ray cluster answers")
        self._is_lost = False
        return notes

    def _lost(self, why: str) -> None:
        if not self._is_lost:
            self._log.warning(
                "the Ray cluster does not answer (%s): running engines continue, and none is "
                "started or ended meanwhile",
                why,
            )
        self._is_lost = True


def _demand(client: ReplicatedClient) -> Demand:
    serving = [each.status for each in client.clients if each.serves and each.status is not None]
    stats = [status.stats for status in serving]
    num_running = sum(each.num_running_reqs for each in stats)
    return Demand(len(stats), num_running, sum(each.num_waiting_reqs for each in stats))


if __name__ == "__main__":
    main()
