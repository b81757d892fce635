"""Chaos runs: requests and plans from a seed, failpoints of faults, stalls, the table."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterable
from itertools import islice
from pathlib import Path
from typing import cast

import pytest

from protocol.process import failpoints
from scripts.testing import TIMEOUT_S, eventually, is_alive
from tests.chaos import processes, report
from tests.chaos.checker import Harm, Violation
from tests.chaos.engine import Engine, Firing
from tests.chaos.faults import PARTS, Cell, Fault, Phase, Place, cells, place, plan, sequel
from tests.chaos.injection import DETECTION, Injection, Kill
from tests.chaos.members import Member
from tests.chaos.recording import End, Event, Recording
from tests.chaos.rounds import RoundResult
from tests.chaos.session import Session, SessionOptions
from tests.chaos.stalls import detections_s, stall_s, wait_s
from tests.chaos.timing import phase_problem
from tests.chaos.workload import FOREIGN_KINDS, KINDS, make_requests

PAIRS = cells(Fault, Phase)


def test_requests_are_a_function_of_the_seed_and_of_every_kind() -> None:
    """Only the salt differs."""
    one, again, other = (make_requests(seed, 32, "m") for seed in (1, 1, 2))
    assert one == again
    assert one != other
    salted = make_requests(1, 32, "m", salt="7")
    for plain, request in zip(one, salted, strict=True):
        assert {**plain.body, "cache_salt": "7"} == request.body
    kinds = {request.name.rpartition("-")[0] for request in one}
    assert kinds == set(KINDS)
    assert kinds > {"grammar", "schema", "chat-tools", "chat-reasoning", "embedding"}
    assert kinds > set(FOREIGN_KINDS)
    assert 0 < sum(request.disconnect_after is not None for request in one) < 8
    streams = [request.body for request in one if "stream" in request.body]
    assert {body["return_token_ids"] for body in streams} == {True, False}
    few = make_requests(1, 4, "m", kinds=("greedy", "embedding"))
    assert [request.name for request in few] == [
        *("greedy-0", "embedding-1", "greedy-2", "embedding-3")
    ]


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
    """Only a victim, or a process that is to become one, kills itself."""
    for seed in range(20):
        cell = Cell(1, fault, phase, seed)
        where, second = place(cell, random.Random(seed)), sequel(cell)
        again = () if second is None else second.places
        for found in [*([] if where is None else [where]), *again]:
            assert found.failpoint in failpoints.FAILPOINTS
            role = found.failpoint.partition(".")[0]
            is_born_there = (fault, found.failpoint) == (Fault.STANDBY, "worker.load")
            assert not found.by_itself or role in fault.roles or is_born_there
        assert (second is not None) == (phase in (Phase.LOAD, Phase.RECOVERY))
        if (fault, phase) == (Fault.API, Phase.RECOVERY):
            journaled = sequel(cell, has_journal=True)
            assert journaled is not None
            assert journaled.first == ("api",)
        if second is not None:
            assert set(second.first) <= {
                *("worker", "core", "standby", "standby_core", "zygote", "api", "replica")
            }


def test_places_are_reached_with_any_number_of_streams() -> None:
    """Half of the streams run, so no more than that are accepted before the others wait."""
    for num_streams in (4, 8, 16, 32, 64):
        for seed in range(50):
            where = place(Cell(1, Fault.CORE, Phase.QUEUED, 1), random.Random(seed), num_streams)
            assert where is not None
            assert num_streams // 2 < where.hit <= num_streams


def test_the_matrix_has_every_process_in_every_phase() -> None:
    victims = ("worker", "core", "both", "standby", "standby_core", "zygote", "api", "supervisor")
    phases = ("idle", "queued", "first_chunk", "middle_chunk", "decode", "flush", "abort")
    phases = (*phases, "preemption", "load", "recovery", "thrice")
    assert {(v, p) for v in victims for p in phases} <= set(PAIRS)


def test_each_phase_is_in_one_part() -> None:
    assert [phase for part in PARTS.values() for phase in part] == list(Phase)


def test_a_replica_that_is_lost_for_good_has_no_successor_to_kill() -> None:
    phases = {phase for fault, phase in PAIRS if fault is Fault.LOST}
    assert phases == set(Phase) - {Phase.LOAD, Phase.RECOVERY, Phase.THRICE}


def test_a_worker_of_a_chosen_rank_is_killed_from_outside_only() -> None:
    """The process that reaches the failpoint first may be of another rank."""
    for seed in range(20):
        for phase in Phase:
            cell = Cell(1, Fault.WORKER, phase, seed, rank=1)
            second = sequel(cell)
            places = (place(cell, random.Random(seed)), *(() if second is None else second.places))
            assert not any(each.by_itself for each in places if each is not None)


def test_victims_are_of_one_replica_and_rank() -> None:
    members = [
        Member("worker", replica, rank, 10 * replica + rank)
        for replica in range(2)
        for rank in range(2)
    ]

    def victims(role: str, rank: int | None, seed: int, replica: int | None = 1) -> list[int]:
        cell = Cell(1, Fault.WORKER, Phase.RANDOM, seed, rank)
        injection = Injection(cast(Engine, None), cell, 1.0, 8)
        injection._replica = replica
        found = [each._replace(role=role) for each in members]
        return [each.pid for each in injection._victims(role, found)]

    assert [victims("worker", rank, 0) for rank in range(2)] == [[10], [11]]
    assert [victims("worker", None, seed) for seed in range(2)] == [[10], [11]]
    assert victims("standby", None, 0) == [10, 11]
    assert victims("worker", 1, 0, replica=0) == [1]


class FakeEngine:
    """The processes of one replica, and how each of them receives signals."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, roles: Iterable[str]) -> None:
        """Have one process of each role, with the pids 100, 101, ..."""
        self.signals: list[tuple[str, signal.Signals]] = []
        self.ended: set[str] = set()
        self._members = [Member(role, 1, 0, pid) for pid, role in enumerate(roles, 100)]
        monkeypatch.setattr(processes, "kill", self._kill)

    async def replica(self, number: int) -> list[Member]:
        assert number == 1
        return self._members

    async def ready(self, timeout_s: float, *, without: Collection[int]) -> None:
        pass

    def _kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> float | None:
        [role] = [member.role for member in self._members if member.pid == pid]
        self.signals.append((role, number))
        return None if role in self.ended else float(len(self.signals))


def test_a_kill_is_a_hit_if_the_process_at_the_failpoint_is_still_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may have come there long ago; the next kill would be too late."""
    # No stall of the test itself ends the pause.
    monkeypatch.setattr("tests.chaos.injection.MAX_PAUSE_MS", 600_000)
    engine = Engine(tmp_path, [])
    where, name = Place("worker.load", 1, by_itself=False), "worker.load"
    injection = Injection(engine, Cell(1, Fault.WORKER, Phase.LOAD, 0), 1.0, 8)
    injection._arm(where)
    hit = failpoints.FailpointDirectory(engine.failpoints).hit
    paused = threading.Thread(target=hit, args=(name,), daemon=True)
    paused.start()
    eventually(lambda: engine.firings(0.0), "it is paused")
    fired = Firing(0.0, name, os.getpid(), "pause")
    injection._end_pause(where, fired, has_killed=True)
    assert injection.missed is None
    paused.join(TIMEOUT_S)
    injection._end_pause(where, fired, has_killed=True)
    assert injection.missed == "killed more than 600000 ms after worker.load, too late"


def test_a_death_that_is_noticed_during_the_kill_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another supervisor reaps one that was paused at the same failpoint."""
    monkeypatch.setattr("tests.chaos.injection.MAX_PAUSE_MS", 600_000)
    engine = Engine(tmp_path, [])
    injection = Injection(engine, Cell(1, Fault.REPLICA, Phase.RECOVERY, 0), 1.0, 8)
    injection._known = {"replica": [Member("replica", None, 0, 100)]}
    where = Place(DETECTION, 1, by_itself=False)
    injection._arm(where)
    hit = failpoints.FailpointDirectory(engine.failpoints).hit
    threading.Thread(target=hit, args=(DETECTION,), daemon=True).start()

    def kill(pid: int, number: signal.Signals) -> float:
        failpoints.FailpointDirectory(engine.failpoints).hit(DETECTION)
        return 1.0

    monkeypatch.setattr(processes, "kill", kill)
    asyncio.run(injection._kill_at(where, lambda: False))
    assert [firing.action for firing in engine.firings(0.0)] == ["pause", "note"]


LOST = Cell(1, Fault.LOST, Phase.RANDOM, 0)


def lose(engine: FakeEngine) -> Injection:
    """Return an injection that has killed the replica."""
    injection = Injection(cast(Engine, engine), LOST, 1.0, 8)
    injection._replica = 1
    asyncio.run(injection._kill(LOST.fault.roles, "outside"))
    return injection


def test_the_supervisor_of_a_lost_replica_is_stopped_before_the_first_kill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It continues after the streams; if it has ended, the replica was not lost for good."""
    roles = ("supervisor", "standby", "worker", "zygote", "core")
    for ended, missed in ((set(), None), ({"supervisor"}, "the lost replica was replaced")):
        engine = FakeEngine(monkeypatch, roles)
        injection = lose(engine)
        assert engine.signals == [
            ("supervisor", signal.SIGSTOP),
            *((role, signal.SIGKILL) for role in ("worker", "core", "standby", "zygote")),
        ]
        assert [kill.role for kill in injection.kills] == ["worker", "core", "standby", "zygote"]
        engine.ended |= ended
        asyncio.run(injection.wait_return(1.0))
        assert engine.signals[-1] == ("supervisor", signal.SIGCONT)
        assert (injection.missed or "").startswith(missed or "")
        assert bool(injection.missed) == bool(missed)


def test_no_process_of_a_replica_is_killed_while_its_supervisor_can_replace_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The supervisor gives no answer, or has ended."""
    for roles in ((), ("supervisor", "worker")):
        engine = FakeEngine(monkeypatch, roles)
        engine.ended.add("supervisor")
        assert lose(engine).kills == []
        assert signal.SIGKILL not in {number for _, number in engine.signals}


def options_of(*faults: Fault, num_replicas: int = 1) -> SessionOptions:
    return SessionOptions(
        model="null",
        seed=0,
        num_streams=8,
        num_kills=None,
        duration_s=None,
        is_matrix=True,
        only_round=None,
        faults=faults,
        phases=(Phase.DECODE,),
        stream_timeout_s=60.0,
        engine_flags=(),
        num_replicas=num_replicas,
    )


def test_a_stopped_supervisor_is_not_replaced_while_streams_are_open() -> None:
    """It would be taken for a process that hangs."""
    hang_s = ("--api-hang-timeout-s", "60")
    for num_replicas, expected in ((1, ()), (2, ("--data-parallel-size", "2", *hang_s))):
        session = Session(options_of(Fault.LOST, num_replicas=num_replicas), Path(), print)
        assert session._replica_flags() == expected


def test_a_matrix_kills_each_rank_and_reports_those_that_were_missed() -> None:
    options = options_of(Fault.WORKER, Fault.CORE)
    session = Session(options, Path(), print)
    pairs = cells(options.faults, options.phases)
    assert [session._ranks(fault, 2) for fault, _ in pairs] == [range(2), (None,)]
    assert [session._ranks(fault, 1) for fault, _ in pairs] == [(None,), (None,)]
    session.results = [RoundResult(1, Fault.WORKER, Phase.DECODE, 0, rank=0)]
    assert session._unhit(pairs, 2) == ["worker decode of rank 1", "core decode"]


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


def test_silence_that_begins_before_the_recovery_is_a_stall() -> None:
    """The time since the kill makes no difference."""
    late = recording(0.0, 0.9, 1.1, 2.2, 60.0, 60.1)
    assert stall_s(late, [1.0]) == pytest.approx(1.1)
    assert stall_s(late, [1.0], 2.5) == pytest.approx(57.8)


def test_wait_is_for_the_first_event_of_streams_that_had_not_begun() -> None:
    assert wait_s(recording(3.0, 4.0), [1.0, 2.5]) == pytest.approx(0.5)
    assert wait_s(recording(2.0, 4.0), [1.0, 2.5]) is None
    assert wait_s(recording(), [2.5]) is None
    assert wait_s(Recording("s", 2.6, events=[Event(3.0, "x")]), [2.5]) is None
    assert wait_s(recording(3.0), []) is None


def test_each_notice_belongs_to_one_death() -> None:
    kills = [Kill(time, "core", 5, "outside") for time in (1.0, 1.001, 2.0, 3.0)]
    found = detections_s(kills, [0.5, 1.01, 1.02, 2.5])
    assert found == [pytest.approx(0.01), pytest.approx(0.019), pytest.approx(0.5), None]


def stream(opened_at: float, *times: float, end: End = End.DONE) -> Recording:
    ended_at = times[-1] if times else 9.0
    events = [Event(time, "x") for time in times]
    return Recording("s", opened_at, events=events, end=end, ended_at=ended_at)


@pytest.mark.parametrize(
    ("phase", "right", "wrong"),
    [
        (Phase.IDLE, stream(6.0, 7.0), stream(1.0, 7.0)),
        (Phase.QUEUED, stream(1.0, 7.0), stream(1.0, 2.0, 7.0)),
        (Phase.FIRST_CHUNK, stream(1.0, 7.0), stream(1.0, 4.0, 7.0)),
        (Phase.MIDDLE_CHUNK, stream(1.0, 7.0), stream(1.0, 4.0, 7.0)),
        (Phase.DECODE, stream(1.0, 4.0, 7.0), stream(1.0, 3.0, 4.0)),
        (Phase.FLUSH, stream(1.0, 4.0, 7.0), stream(1.0, 6.0, 7.0)),
        (Phase.ABORT, stream(1.0, 4.0, end=End.LEFT), stream(1.0, 4.0)),
        (Phase.ABORT, stream(1.0, 4.0, end=End.LEFT), stream(1.0, 6.0, end=End.LEFT)),
    ],
)
def test_a_kill_in_another_phase_is_found(phase: Phase, right: Recording, wrong: Recording) -> None:
    """The events of the streams until the kill decide the phase."""
    assert phase_problem(phase, [5.0, 8.0], [right]) is None
    assert phase_problem(phase, [5.0, 8.0], [wrong]) is not None
    assert phase_problem(phase, [], [wrong]) is None


def result(number: int, **more: object) -> RoundResult:
    kills = [Kill(1.0, "core", 5, "outside")]
    return RoundResult(number, "core", "decode", 3, kills=kills, num_streams=32, **more)  # type: ignore[arg-type]


def test_the_table_counts_a_stream_once_for_each_kind_of_damage() -> None:
    """A stream counts once for each kind of damage; the document has all results."""
    bad = [Violation(Harm.LOST, "greedy-1", "end"), Violation(Harm.LOST, "greedy-1", "no finish")]
    results = [result(1, stalls_s=[0.25, 0.5]), result(2, violations=bad)]
    lines = report.table(results).splitlines()
    names = ["fault", "phase", "kills", "streams", "broken", "resumed"]
    harms = ["lost", "duplicated", "mismatched", "failed"]
    assert lines[0].split() == [*names, *harms, "stall", "p50", "p99", "max"]
    row = ["2", "64", "0", "0", "1", "0", "0", "0", "0.500", "0.500", "0.500"]
    assert lines[1].split() == ["core", "decode", *row]
    assert lines[2].split() == ["all", *row]
    assert "round 2 (core decode): lost greedy-1: end" in report.violations(results)
    document = json.loads(report.document(results, seed=3))
    assert (document["seed"], document["violations"], len(document["rounds"])) == (3, 2, 2)


def test_figures_of_a_fault_exclude_kills_during_a_recovery() -> None:
    kills = [Kill(1.0, "core", 5, "outside"), Kill(2.0, "core", 6, "outside")]
    results = [result(1, stalls_s=[0.25]), result(2, stalls_s=[7.0]), result(3, stalls_s=[9.0])]
    results[1].kills = kills
    results[2].missed = "no process was there to kill"
    (line,) = report.singles(results)
    assert line.startswith("core, 1 kills")
    assert "1 streams stalled 0.250 / 0.250 / 0.250 s" in line


def test_table_is_in_reading_order_whatever_the_plan() -> None:
    rounds = [("core", "idle"), ("worker", "flush"), ("none", ""), ("worker", "idle")]
    results = [RoundResult(i, fault, phase, 0) for i, (fault, phase) in enumerate(rounds)]
    rows = [line.split()[:2] for line in report.table(results).splitlines()[1:]]
    order = [["none", "0"], ["worker", "idle"], ["worker", "flush"], ["core", "idle"], ["all", "0"]]
    assert rows == order


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 3), (0.99, 4), (1.0, 4)])
def test_a_quantile_is_one_of_the_values(share: float, value: int) -> None:
    assert report.quantile([3, 1, 4, 2], share) == value
    assert report.quantile([], share) is None


def test_processes_are_found_and_killed_from_outside() -> None:
    """Processes are found by their environment and their command line, and dead ones are not."""
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
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert processes.kill(child.pid) is None, "a zombie is already dead"
    finally:
        child.kill()
        child.communicate(timeout=10.0)
    assert not is_alive(child.pid)
    assert processes.kill(child.pid) is None
    assert not processes.living_with("CHAOS_MARK", str(os.getpid()))
