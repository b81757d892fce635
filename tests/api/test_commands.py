"""The API process executes commands, and repeated ones once."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from api_proc.process.commands import Commands
from protocol.lifecycle import Drain, Health, StatusReply


class Played:
    """Replaces child, state, server and client, and records the calls."""

    def __init__(self, *, has_supervisor: bool = True) -> None:
        self.config = SimpleNamespace(recovery=SimpleNamespace(shutdown_timeout_s=7.0))
        self.client = self.processes = self
        self.sessions = None
        self.calls: list[str] = []
        self.is_idle = asyncio.Event()
        self._has_supervisor = has_supervisor

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.calls.append(name)

    def ask_for_restart(self) -> bool:
        self.calls.append("ask_for_restart")
        return self._has_supervisor

    async def retire(self, timeout_s: float) -> None:
        self.calls.append(f"retire {timeout_s:g}")

    async def resume(self) -> None:
        self.calls.append("resume")

    async def wait_idle(self) -> None:
        await self.is_idle.wait()


def commands_to(played: Played) -> Commands:
    return Commands(*cast(Any, (played, played, played)))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("message", "calls"),
    [
        (Drain(), ["drain", "resume", "drained"]),
        (Drain(is_replaced=True), ["retire 7"]),
        (Health(True, 2.0), ["set_health"] * 3),
        (StatusReply([], True, None), ["receive"] * 3),
    ],
)
def test_a_repeated_command_is_executed_once(
    message: Drain | Health | StatusReply, calls: list[str]
) -> None:
    """Reports are the exception: each replaces the one before."""

    async def play() -> Played:
        played = Played()
        commands = commands_to(played)
        for _ in range(3):
            commands.execute(message)
            await settle()
        played.is_idle.set()
        await settle()
        return played

    assert asyncio.run(play()).calls == calls


@pytest.mark.parametrize("has_supervisor", [True, False])
def test_sigterm_asks_the_supervisor_or_drains(has_supervisor: bool) -> None:
    async def play() -> Played:
        played = Played(has_supervisor=has_supervisor)
        commands_to(played).on_sigterm()
        await settle()
        return played

    retires = [] if has_supervisor else ["retire 7"]
    assert asyncio.run(play()).calls == ["ask_for_restart", *retires]
