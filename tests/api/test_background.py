"""Work alongside the server of an API process."""

import asyncio
from types import SimpleNamespace
from typing import cast

from api_proc.process.background import begin
from protocol.process.child_runtime import ChildProcess


def test_work_that_fails_ends_the_process_and_work_that_is_cancelled_does_not() -> None:
    failures: list[tuple[str, BaseException]] = []
    child = cast(ChildProcess, SimpleNamespace(fatal=lambda *failure: failures.append(failure)))
    error = RuntimeError("the keys cannot be taken")

    async def fail() -> None:
        raise error

    async def run() -> None:
        failing, lasting = begin(child, fail()), begin(child, asyncio.sleep(60))
        await asyncio.sleep(0)
        lasting.cancel()
        await asyncio.wait([failing, lasting])

    asyncio.run(run())
    assert failures == [("running", error)]
