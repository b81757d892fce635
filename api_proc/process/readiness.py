"""Reports an API process as ready once requests for the model and its adapters are served."""

import asyncio
import contextlib
import itertools

from api_proc.adapters.registry import NamedAdapter, NamesLocked
from api_proc.state import ApiState
from protocol.adapters import Adapter, AdapterError
from protocol.client import ReplicatedClient
from protocol.client.errors import RequestFailed, RequestQuarantined
from protocol.process.child_runtime import ChildProcess

_PROGRESS_INTERVAL_S = 10.0
_PAUSE_S = 1.0
"""The pause before a check of an adapter is repeated."""


async def name_adapters(child: ChildProcess, state: ApiState) -> list[NamedAdapter]:
    """Name the adapters of the settings at the engine's start; one in error ends the engine."""
    if child.config.lora.lora_modules:
        child.progress("adapters")
    try:
        return await asyncio.to_thread(state.adapters.begin)
    except AdapterError as error:
        child.fatal("lora_modules", error, retry=False)


async def report_ready(
    child: ChildProcess, client: ReplicatedClient, state: ApiState, named: list[NamedAdapter]
) -> None:
    """Report ready once requests are served, and progress before: loading a model may take long.

    The adapters of the settings are loaded, or checked, before; then they are named. If this
    process dies in between, its successor checks them.
    """
    interval_s = min(_PROGRESS_INTERVAL_S, child.config.recovery.startup_timeout_s / 3)
    for number in itertools.count():
        # Neither a long start nor a step that takes too long is the fault of this process.
        child.progress("wait for the model", number)
        child.reporter.turn()
        with contextlib.suppress(TimeoutError):
            await client.wait_ready(interval_s)
            break
    for number, one in enumerate(named):
        child.progress("adapters", number, len(named))
        child.reporter.turn()
        if error := await _check_adapter(child, client, one.adapter):
            text = f"{one.adapter.name} ({one.adapter.path}): {error}"
            child.fatal("lora_modules", AdapterError(text), retry=False)
    try:
        await asyncio.to_thread(state.adapters.settle, named)
    except (NamesLocked, OSError) as error:
        child.fatal("lora_modules", error)
    child.ready()


async def _check_adapter(child: ChildProcess, client: ReplicatedClient, adapter: Adapter) -> str:
    """Return what is wrong with an adapter, or nothing.

    A check that no worker could make is repeated. The supervisor ends this process if that takes
    longer than a start may take.
    """
    while True:
        try:
            return await client.load_adapter(adapter)
        except RequestQuarantined as failure:
            return failure.error.message
        except (TimeoutError, RequestFailed) as failure:
            child.log.warning("adapter %s is not checked yet: %s", adapter.name, failure)
            await asyncio.sleep(_PAUSE_S)
            child.reporter.turn()
