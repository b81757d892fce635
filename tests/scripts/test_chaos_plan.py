"""Chaos runs: requests and plans from a seed, places of faults, stalls, the table."""

import json
import os
import random
import subprocess
import sys
from itertools import islice

import pytest

from protocol import failpoints
from scripts.chaos import processes, report
from scripts.chaos.checker import Harm, Violation
from scripts.chaos.faults import Cell, Fault, Phase, cells, place, places_again, plan
from scripts.chaos.injection import Kill
from scripts.chaos.recording import Event, Recording
from scripts.chaos.rounds import RoundResult, stall_s
from scripts.chaos.workload import make_requests

PAIRS = cells(Fault, Phase)


def test_requests_are_a_function_of_the_seed_and_of_every_kind() -> None:
    """The salt changes nothing else."""
    one, again, other = (make_requests(seed, 32, "m") for seed in (1, 1, 2))
    assert one == again
    assert one != other
    salted = make_requests(1, 32, "m", salt="7")
    for plain, request in zip(one, salted, strict=True):
        assert {**plain.body, "cache_salt": "7"} == request.body
    kinds = {request.name.rpartition("-")[0] for request in one}
    assert kinds == {
        *("greedy", "seeded", "penalties", "n2", "stop", "logprobs", "chat", "chat-logprobs"),
        "long",
    }
    assert 0 < sum(request.disconnect_after is not None for request in one) < 8
    assert {request.body["return_token_ids"] for request in one} == {True, False}


def test_without_extensions_only_fields_of_openai_remain() -> None:
    for request in make_requests(1, 32, "m", with_extensions=False):
        assert not request.body.keys() & {"ignore_eos", "cache_salt", "return_token_ids"}


def test_plan_is_a_function_of_the_seed_and_holds_every_cell() -> None:
    for is_shuffled in (False, True):
        one, again, other = (
            list(islice(plan(PAIRS, seed, is_shuffled=is_shuffled), 2 * len(PAIRS)))
            for seed in (1, 1, 2)
        )
        assert one == again
        assert one != other
        for part in (one[: len(PAIRS)], one[len(PAIRS) :]):
            assert {(cell.fault, cell.phase) for cell in part} == set(PAIRS)
    in_order = islice(plan(PAIRS, 1, is_shuffled=False), len(PAIRS))
    assert [(cell.fault, cell.phase) for cell in in_order] == PAIRS


@pytest.mark.parametrize(("fault", "phase"), PAIRS)
def test_every_cell_is_placed_at_failpoints_that_exist(fault: Fault, phase: Phase) -> None:
    """Nobody kills itself but a victim."""
    for seed in range(20):
        cell = Cell(1, fault, phase, seed)
        where = place(cell, random.Random(seed))
        again = places_again(cell)
        for found in [*([] if where is None else [where]), *again]:
            assert found.failpoint in failpoints.FAILPOINTS
            role = found.failpoint.partition(".")[0]
            assert not found.by_itself or role in fault.roles
        assert bool(again) == (phase in (Phase.LOAD, Phase.RECOVERY))


def recording(*times: float) -> Recording:
    return Recording("s", 0.0, events=[Event(time, "x") for time in times])


def test_stall_is_the_longest_silence_around_the_kills() -> None:
    assert stall_s(recording(1.0, 2.0, 2.1, 4.0), [2.5]) == pytest.approx(1.9)
    assert stall_s(recording(0.0, 5.0, 5.1, 5.4, 5.5), [5.2]) == pytest.approx(0.3)
    assert stall_s(recording(1.0, 1.2, 1.3, 1.9, 2.0), [1.1, 1.5]) == pytest.approx(0.6)


def test_no_stall_without_an_event_before_and_after_a_kill() -> None:
    assert stall_s(recording(1.0, 2.0), []) is None
    assert stall_s(recording(), [1.5]) is None
    assert stall_s(recording(1.0, 2.0), [2.5]) is None
    assert stall_s(recording(3.0, 4.0), [2.5]) is None


def result(number: int, **more: object) -> RoundResult:
    kills = [Kill(1.0, "core", 5, "outside")]
    return RoundResult(number, "core", "decode", 3, kills=kills, num_streams=32, **more)  # type: ignore[arg-type]


def test_table_and_document() -> None:
    """A stream counts once for each harm; everything is in the document."""
    bad = [Violation(Harm.LOST, "greedy-1", "end"), Violation(Harm.LOST, "greedy-1", "no finish")]
    results = [result(1, stalls_s=[0.25, 0.5]), result(2, violations=bad)]
    lines = report.table(results).splitlines()
    names = ["fault", "phase", "kills", "streams", "broken", "lost", "duplicated", "mismatched"]
    assert lines[0].split() == [*names, "failed", "stall", "p50", "p99", "max"]
    row = ["2", "64", "0", "1", "0", "0", "0", "0.500", "0.500", "0.500"]
    assert lines[1].split() == ["core", "decode", *row]
    assert lines[2].split() == ["all", *row]
    assert "round 2 (core decode): lost greedy-1: end" in report.violations(results)
    document = json.loads(report.document(results, seed=3))
    assert (document["seed"], document["violations"], len(document["rounds"])) == (3, 2, 2)


def test_table_is_in_reading_order_whatever_the_plan() -> None:
    rounds = [("core", "idle"), ("worker", "flush"), ("none", ""), ("worker", "idle")]
    results = [RoundResult(i, fault, phase, 0) for i, (fault, phase) in enumerate(rounds)]
    rows = [line.split()[:2] for line in report.table(results).splitlines()[1:]]
    order = [["none", "0"], ["worker", "idle"], ["worker", "flush"], ["core", "idle"], ["all", "0"]]
    assert rows == order


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 3), (0.99, 4), (1.0, 4)])
def test_quantiles(share: float, value: int) -> None:
    assert report.quantile([3, 1, 4, 2], share) == value
    assert report.quantile([], share) is None


def test_processes_are_found_and_killed_from_outside() -> None:
    """By their environment and by their command line; the dead are nobody."""
    script = "print(1, flush=True); import time; time.sleep(60)  # marked-for-this-test"
    environ = {**os.environ, "CHAOS_MARK": str(os.getpid())}
    command = [sys.executable, "-c", script]
    child = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "1\n"
    try:
        assert child.pid in processes.matching("marked-for-this-test")
        assert processes.living_with("CHAOS_MARK", str(os.getpid())) == {child.pid}
        assert processes.kill(child.pid) is not None
    finally:
        child.kill()
        child.communicate(timeout=10.0)
    assert not processes.is_alive(child.pid)
    assert processes.kill(child.pid) is None
    assert not processes.living_with("CHAOS_MARK", str(os.getpid()))
