"""Failpoints: orders, hits, actions in real processes, arming at run time, and their places."""

import ast
import errno
import os
import re
import signal
import subprocess
import sys
import threading
import timeit
from pathlib import Path

import pytest

from protocol.process import failpoints
from protocol.process.failpoints import (
    FAILPOINTS,
    LOG_FILE,
    REACHED_PREFIX,
    VARIABLE,
    FailpointDirectory,
    FailpointError,
    Order,
    arm,
    configured,
    disarm,
    parse_order,
    parse_orders,
    release,
)
from scripts.testing import TIMEOUT_S, eventually
from tests.paths import ROOT

NAME, OTHER = "worker.mid_step", "core.after_drain"
CALLS = {"failpoint", "failpoints.failpoint"}
PACKAGES = ("protocol", "api_proc", "core_proc", "worker_proc", "scripts")


def test_orders_are_read() -> None:
    assert parse_order("kill9@3") == Order("kill9", 0.0, 3)
    assert parse_order("pause:1500@2") == Order("pause", 1.5, 2)
    assert parse_order("delay:250@*") == Order("delay", 0.25, failpoints.EVERY_HIT)
    both = parse_orders(f"{NAME}=stop@1, {OTHER}=note@*,")
    assert both == {NAME: Order("stop", 0.0, 1), OTHER: Order("note", 0.0, 0)}


@pytest.mark.parametrize(
    "text", ["kill9", "kill9@0", "kill@1", "delay@1", "delay:x@1", "exc@-1", "exc@1x", ""]
)
def test_malformed_orders_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be ACTION@HIT"):
        parse_order(text)


def test_unknown_names_are_refused_with_a_list(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"'worker\.mid_stop' is not a failpoint; these are: super"
    ):
        configured("worker.mid_stop=exc@1")
    with pytest.raises(ValueError, match="is not a failpoint"):
        arm(tmp_path, "x", "exc@1")


def test_acts_at_its_hit_and_no_other() -> None:
    """Only what counts as a hit is counted."""
    failpoint = configured(f"{NAME}=exc@3")
    for when in (True, False, True, False):
        failpoint(NAME, when)
        failpoint(OTHER)
    with pytest.raises(FailpointError):
        failpoint(NAME)
    failpoint(NAME)


def test_a_star_stands_for_every_hit() -> None:
    failpoint = configured(f"{NAME}=enospc@*")
    for _ in range(3):
        with pytest.raises(OSError, match="No space left") as caught:
            failpoint(NAME)
        assert caught.value.errno == errno.ENOSPC


def test_failpoints_do_nothing_unless_configured() -> None:
    for value in (None, ""):
        failpoint = configured(value)
        for name in FAILPOINTS:
            failpoint(name)


SCRIPT = (
    f"from protocol.process.failpoints import failpoint; failpoint({NAME!r}); failpoint({NAME!r})"
)


def command(value: str) -> tuple[list[str], dict[str, str]]:
    """Run a process that reaches NAME twice."""
    return [sys.executable, "-c", SCRIPT], {**os.environ, VARIABLE: value, "PYTHONPATH": str(ROOT)}


def run(value: str) -> subprocess.CompletedProcess[str]:
    arguments, environ = command(value)
    return subprocess.run(
        arguments, env=environ, capture_output=True, text=True, timeout=60.0, check=False
    )


def test_kill9_kills_the_process_that_gets_there() -> None:
    assert run(f"{NAME}=kill9@2").returncode == -signal.SIGKILL
    assert run(f"{NAME}=kill9@3").returncode == 0


def test_stop_stops_it_until_it_is_continued() -> None:
    arguments, environ = command(f"{NAME}=stop@1")
    process = subprocess.Popen(arguments, env=environ)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    process.send_signal(signal.SIGCONT)
    assert process.wait(60.0) == 0


def test_wrong_value_ends_the_process_at_once() -> None:
    done = run("nonsense")
    assert done.returncode == 1
    assert "'nonsense' is not a failpoint" in done.stderr


def test_directory_counts_from_arming_and_fires_once(tmp_path: Path) -> None:
    """It counts from the arming, over all processes."""
    first, second = FailpointDirectory(tmp_path), FailpointDirectory(tmp_path)
    first.hit(NAME)
    first.hit(NAME)
    arm(tmp_path, NAME, "exc@2")
    first.hit(NAME)
    second.hit(NAME)
    with pytest.raises(FailpointError):
        first.hit(NAME)
    second.hit(NAME)
    assert not (tmp_path / NAME).exists()
    (line,) = (tmp_path / LOG_FILE).read_text().splitlines()
    assert line.split()[1:] == [NAME, str(os.getpid()), "exc"]
    arm(tmp_path, NAME, "exc@1")  # arming again restarts the counter
    with pytest.raises(FailpointError):
        first.hit(NAME)


def test_disarmed_failpoints_do_nothing(tmp_path: Path) -> None:
    reached = FailpointDirectory(tmp_path)
    arm(tmp_path, NAME, "exc@1")
    disarm(tmp_path)
    reached.hit(NAME)
    assert (tmp_path / f"{REACHED_PREFIX}{NAME}").exists()
    assert not (tmp_path / f"{REACHED_PREFIX}{OTHER}").exists()


@pytest.mark.parametrize("is_disarmed", [False, True])
def test_a_pause_lasts_until_its_release(is_disarmed: bool, tmp_path: Path) -> None:
    arm(tmp_path, NAME, "pause:600000@1")
    paused = threading.Thread(target=FailpointDirectory(tmp_path).hit, args=(NAME,), daemon=True)
    paused.start()
    log = tmp_path / LOG_FILE
    eventually(lambda: log.exists() and log.read_text().endswith(" pause\n"), "it is paused")
    paused.join(0.02)
    assert paused.is_alive()
    if is_disarmed:
        disarm(tmp_path)
    assert release(tmp_path, NAME, os.getpid()) != is_disarmed
    paused.join(TIMEOUT_S)
    assert not paused.is_alive()


def test_a_pause_that_has_ended_by_itself_cannot_be_released(tmp_path: Path) -> None:
    arm(tmp_path, NAME, "pause:1@1")
    FailpointDirectory(tmp_path).hit(NAME)
    assert not release(tmp_path, NAME, os.getpid())


def test_a_death_does_not_end_a_pause(tmp_path: Path) -> None:
    """The caller of `release` can see that a process was killed while it was paused."""
    arm(tmp_path, NAME, "pause:600000@1")
    arguments, environ = command(str(tmp_path))
    process = subprocess.Popen(arguments, env=environ)
    eventually((tmp_path / LOG_FILE).exists, "it is paused")
    process.kill()
    assert process.wait(TIMEOUT_S) == -signal.SIGKILL
    assert release(tmp_path, NAME, process.pid)


def test_who_dies_at_an_armed_failpoint_has_a_successor_that_lives(tmp_path: Path) -> None:
    arm(tmp_path, NAME, "kill9@1")
    assert [run(str(tmp_path)).returncode for _ in range(2)] == [-signal.SIGKILL, 0]


def test_each_failpoint_has_its_place_and_a_description() -> None:
    """Every name in the code is in the list, and the other way round."""
    placed = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if "failpoint(" not in (source := path.read_text()):
                continue
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS:
                    assert isinstance(node.args[0], ast.Constant), path
                    placed.append(node.args[0].value)
    assert set(placed) == set(FAILPOINTS)
    for name, text in FAILPOINTS.items():
        assert re.fullmatch(r"[a-z]+\.[a-z_]+", name)
        assert text.endswith(".")
        assert f"| `{name}` | " in (ROOT / "docs" / "chaos.md").read_text()


def test_costs_next_to_nothing_where_it_is_off() -> None:
    """A call of an empty function: 0.05 µs measured, and a turn of the core takes hundreds."""
    failpoint, number = configured(None), 100_000
    assert min(timeit.repeat(lambda: failpoint(NAME), number=number, repeat=3)) / number < 0.5e-6
