"""A standby takes the dead core's place under load; its own death has no effect on streams."""

import os
import re
import signal
from pathlib import Path

import pytest

from protocol.lifecycle import ProcessStatus, Role
from scripts.testing import Engine, EngineFactory, eventually, is_alive
from tests.system.null_load import loaded
from tests.system.shared_engines import EnginePool
from tests.system.successors import check_zombies, kill_and_wait, pid_of, wait_for

FLAGS = ("--null-step-ms", "5")
NUM_TOKENS = 400


def complete(engine: Engine) -> dict[Role, ProcessStatus]:
    """Wait until the core and its standby are ready."""
    return {role: wait_for(engine, role) for role in (Role.CORE, Role.STANDBY_CORE)}


@pytest.fixture
def guarded(shared_engine: EnginePool) -> Engine:
    """An engine of the null model whose core has a standby, as is the default."""
    started = shared_engine(*FLAGS)
    complete(started)
    return started


def test_standby_becomes_the_core(guarded: Engine) -> None:
    """It is the same process under a new epoch, and a new standby starts; repeated."""
    load = loaded(guarded, NUM_TOKENS)
    for _ in range(3):
        before = complete(guarded)
        os.kill(pid_of(before[Role.CORE]), signal.SIGKILL)
        core = wait_for(guarded, Role.CORE, before[Role.CORE].epoch)
        assert core.pid == before[Role.STANDBY_CORE].pid
        assert core.epoch > before[Role.STANDBY_CORE].epoch
        assert wait_for(guarded, Role.STANDBY_CORE, core.epoch).pid != core.pid
    load.check()
    check_zombies(guarded)


@pytest.mark.parametrize(
    "victims",
    [
        [Role.STANDBY_CORE],
        [Role.CORE, Role.STANDBY_CORE],
        [Role.STANDBY_CORE, Role.CORE],
        [Role.CORE, Role.WORKER, Role.STANDBY_CORE],
        [Role.WORKER, Role.CORE],
    ],
    ids="+".join,
)
def test_dead_processes_are_replaced_and_no_token_is_lost(
    guarded: Engine, victims: list[Role]
) -> None:
    """Processes die at once, in this order: the standby may be dead when it is promoted."""
    before = complete(guarded) | {Role.WORKER: wait_for(guarded, Role.WORKER)}
    load = loaded(guarded, NUM_TOKENS)
    kill_and_wait(guarded, [before[role] for role in victims])
    load.check()
    after = complete(guarded)
    if Role.CORE not in victims:
        assert after[Role.CORE].epoch == before[Role.CORE].epoch
    check_zombies(guarded)


def test_both_deaths_that_are_noticed_at_once(guarded: Engine) -> None:
    """The supervisor was stopped meanwhile; it does not promote the dead standby."""
    before = complete(guarded)
    supervisor = Path(f"/proc/{guarded.process.pid}/stat")
    guarded.process.send_signal(signal.SIGSTOP)
    eventually(lambda: supervisor.read_text().split()[2] == "T", "it is stopped")
    victims = [pid_of(row) for row in before.values()]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not any(map(is_alive, victims)), "both are dead")
    guarded.process.send_signal(signal.SIGCONT)
    wait_for(guarded, Role.CORE, before[Role.CORE].epoch)
    complete(guarded)
    assert "core died of SIGKILL" in guarded.log
    assert len(re.findall("core died of SIGKILL", guarded.log)) == 2


def test_standby_that_hangs_is_replaced(start_engine: EngineFactory) -> None:
    """It is detected while it waits, or at its promotion, and then a core starts without it."""
    engine = start_engine(*FLAGS, "--hang-timeout-s", "0.5")
    before = complete(engine)
    os.kill(pid_of(before[Role.STANDBY_CORE]), signal.SIGSTOP)
    standby = wait_for(engine, Role.STANDBY_CORE, before[Role.STANDBY_CORE].epoch)
    load = loaded(engine, NUM_TOKENS)
    os.kill(pid_of(standby), signal.SIGSTOP)
    os.kill(pid_of(before[Role.CORE]), signal.SIGKILL)
    load.check()
    assert complete(engine)[Role.CORE].pid != standby.pid
    check_zombies(engine)


def test_promoted_core_is_watched_and_knows_what_its_predecessor_died_of(
    start_engine: EngineFactory,
) -> None:
    """It keeps its progress page, and gets the entries of its predecessor's page."""
    engine = start_engine(*FLAGS, "--hang-timeout-s", "0.5")
    first = complete(engine)[Role.CORE]
    load = loaded(engine, 1500)
    os.kill(pid_of(first), signal.SIGSEGV)
    promoted = wait_for(engine, Role.CORE, first.epoch)
    assert re.search(rf"core of epoch {first.epoch} died: signal", engine.log)
    complete(engine)
    os.kill(pid_of(promoted), signal.SIGSTOP)
    last = wait_for(engine, Role.CORE, promoted.epoch)
    assert f"core of epoch {promoted.epoch} died: deadline" in engine.log
    assert last.pid != promoted.pid
    load.check()


def test_without_a_standby_the_core_is_started_anew(start_engine: EngineFactory) -> None:
    """Without a standby the core is started anew."""
    engine = start_engine(*FLAGS, "--standby-cores", "0")
    load = loaded(engine, NUM_TOKENS)
    engine.kill(Role.CORE)
    load.check()
    assert Role.STANDBY_CORE not in {row.role for row in engine.ready().processes}
