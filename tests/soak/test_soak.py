"""The soak: its verdict on made-up snapshots, its light client, and a short run."""

import asyncio
import json
import random
import signal
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from protocol.model_facts import ModelFacts
from tests.paths import ROOT
from tests.soak import clients
from tests.soak.__main__ import main
from tests.soak.clients import Lost, Place, SoakClient, read_reply
from tests.soak.http_connection import ConnectionBroken, HttpConnection, Reply
from tests.soak.injection import ROLES, draw_faults
from tests.soak.report import Tally, broken_bounds, counts_of, lives_of, theil_sen
from tests.soak.requests import SoakRequest, Way, Workload, problem_of
from tests.soak.resource_snapshot import ProcessSnapshot, ResourceSnapshot

MIB = 2**20
FACTS = ModelFacts("null", 1000, 512, 16, 64, [2])


def snapshot(
    num_requests: int = 0, *, rss: int = 100 * MIB, num_fds: int = 9, **counts: int
) -> ResourceSnapshot:
    """An engine with one process."""
    fields = dict.fromkeys(
        (
            "num_zombies",
            "num_sockets",
            "num_files",
            "num_strays",
            "num_held",
            "kv_usage_ppm",
            "num_unexpected_restarts",
        ),
        0,
    )
    process = ProcessSnapshot(7, "core", rss, rss, rss, num_fds, 4)
    gauges = {"sessions": counts.pop("num_sessions", 0)}
    return ResourceSnapshot(num_requests, 0.0, [process], **(fields | counts), gauges=gauges)


def test_theil_sen_ignores_outliers() -> None:
    """A third of outliers does not move the slope."""
    xs = [float(x) for x in range(30)]
    ys = [2.0 * x + (500.0 if x % 4 == 0 else 0.0) for x in xs]
    assert theil_sen(xs, ys) == pytest.approx(2.0)
    assert theil_sen([1.0, 1.0], [0.0, 5.0]) is None


@pytest.mark.parametrize(("growth_mib", "is_broken"), [(0.9, False), (1.2, True), (-3.0, False)])
def test_growth_past_the_bound_is_found(growth_mib: float, is_broken: bool) -> None:
    """Memory grows per 10,000 requests, with noise, and more in the warm-up."""
    rng = random.Random(1)
    snapshots = [snapshot(x, rss=50 * MIB + 20_000 * x) for x in range(0, 5000, 500)]
    snapshots += [
        snapshot(x, rss=round((200 + growth_mib * x / 10_000 + rng.gauss(0, 0.2)) * MIB))
        for x in range(5000, 40_000, 500)
    ]
    lives = lives_of(snapshots)
    assert lives[0].slope_mib == pytest.approx(growth_mib, abs=0.08)
    assert bool(broken_bounds(Tally(), lives, [])) is is_broken


def test_brief_lives_have_no_slope() -> None:
    """The memory of a process that is killed soon shows its warm-up only."""
    lives = lives_of([snapshot(x, rss=x * MIB) for x in range(0, 9500, 500)])
    assert lives[0].slope_mib is None
    assert not broken_bounds(Tally(), lives, [])


@pytest.mark.parametrize(
    "field",
    [
        "num_fds",
        "num_zombies",
        "num_sockets",
        "num_files",
        "num_strays",
        "num_held",
        "kv_usage_ppm",
        "num_sessions",
        "num_unexpected_restarts",
    ],
)
def test_counts_that_have_grown_are_found(field: str) -> None:
    """A count may fall, but not grow."""
    low, high = snapshot(**{field: 9}), snapshot(**{field: 10})
    assert len(broken_bounds(Tally(), [], counts_of(low, high))) == 1
    assert not broken_bounds(Tally(), [], counts_of(high, low))
    assert not broken_bounds(Tally(), [], counts_of(low, low))


def test_wrong_answers_are_found() -> None:
    """A changed, dropped or repeated token, an early end, a wrong prefix of an abandoned answer."""
    workload = Workload(1, FACTS, frozenset([1]), 0.5)
    request = SoakRequest(0, Way.WHOLE, [5, 6, 7, 8], 6, 0)
    right = workload.expected(request, 6)
    assert problem_of(workload, request, right, "length") is None
    for wrong in ([*right[:5], right[5] + 1], right[:5], [right[0], *right[:5]], right[1:]):
        assert problem_of(workload, request, wrong, "length") is not None
    assert problem_of(workload, request, right, None) is not None
    leaving = workload.request(1)
    assert leaving.way is Way.LEAVE
    assert problem_of(workload, leaving, workload.expected(leaving, 3), None) is None
    assert problem_of(workload, leaving, [3, 3, 3], None) is not None
    few = workload.expected(leaving, 3)
    assert problem_of(workload, leaving, few, "length") is not None, (
        "the stream claims to be complete"
    )


def chunk(token_id: int, finish_reason: str | None = None) -> bytes:
    choice = {"token_ids": [token_id], "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
STREAM = chunk(5) + chunk(6, "length") + DONE


def test_streams_are_read_to_one_end() -> None:
    """So are those of clients that mean to leave, unless they have left."""
    leaving = SoakRequest(0, Way.LEAVE, [5], 512, 9)
    for request in (leaving, SoakRequest(0, Way.STREAM, [5], 2, 0)):
        assert read_reply(request, Reply(200, STREAM)) == ([5, 6], "length")
        for wrong in (
            chunk(5) + chunk(6),
            STREAM + DONE,
            chunk(5) + DONE + chunk(6),
            chunk(5, "length") + chunk(6) + DONE,
            b"",
        ):
            with pytest.raises(Lost):
                read_reply(request, Reply(200, wrong))
    assert read_reply(leaving, Reply(200, chunk(5), has_left=True)) == ([5], None)


def test_usage_counts_the_tokens() -> None:
    request = SoakRequest(0, Way.WHOLE, [5], 2, 0)
    choice = {"token_ids": [5, 6], "finish_reason": "length"}
    for usage in ({"completion_tokens": 2}, {"completion_tokens": 1}, None):
        body = json.dumps({"choices": [choice], "usage": usage}).encode()
        if usage == {"completion_tokens": 2}:
            assert read_reply(request, Reply(200, body)) == ([5, 6], "length")
        else:
            with pytest.raises(Lost):
                read_reply(request, Reply(200, body))


@pytest.mark.parametrize(("pause_s", "is_lost"), [(0.0, False), (0.7, True)])
def test_only_a_race_with_an_idle_connection_is_sent_again(
    monkeypatch: pytest.MonkeyPatch, pause_s: float, is_lost: bool
) -> None:
    """A kept connection that is closed later is an error."""
    workload, tally = Workload(1, FACTS, frozenset(), 0.0), Tally()
    if not is_lost:
        monkeypatch.setattr(clients, "_RACE_S", 30.0)  # the machine may be slow

    def answer(body: bytes) -> bytes:
        asked = json.loads(body)
        request = SoakRequest(0, Way.WHOLE, asked["prompt"], asked["max_tokens"], 0)
        token_ids = workload.expected(request, request.max_tokens)
        choice = {"token_ids": token_ids, "finish_reason": "length"}
        usage = {"completion_tokens": len(token_ids)}
        data = json.dumps({"choices": [choice], "usage": usage}).encode()
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for is_first in (True, False):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            if is_first:
                writer.write(answer(body))
            else:
                await asyncio.sleep(pause_s)
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            place = Place(*server.sockets[0].getsockname(), "null", None)  # type: ignore[arg-type]
            client = SoakClient(place, workload, tally, array("f", [0.0] * 50))
            wholes = (n for n in range(50) if workload.request(n).way is Way.WHOLE)
            await client.send(next(wholes))
            await client.send(next(wholes))
            await client.close()

    asyncio.run(main())
    assert (tally.num_lost, tally.num_resent) == ((1, 0) if is_lost else (0, 1))
    assert tally.num_right == 2 - is_lost


def test_faults_hit_the_roles_in_turn() -> None:
    faults = draw_faults(random.Random(1), 10, 90, 5, 4)
    assert [fault.point for fault in faults] == sorted(fault.point for fault in faults)
    for number, count in ((signal.SIGKILL, 5), (signal.SIGSTOP, 4)):
        roles = [fault.role for fault in faults if fault.number is number]
        assert roles == [ROLES[i % len(ROLES)] for i in range(count)]


def test_requests_depend_on_seed_and_number_only() -> None:
    """They use every path to the engine."""
    one, same, other = (Workload(seed, FACTS, frozenset([3]), 0.25) for seed in (1, 1, 2))
    requests = [one.request(number) for number in range(50)]
    assert [same.request(number) for number in reversed(range(50))] == requests[::-1]
    assert [other.request(number) for number in range(50)] != requests
    assert {request.way for request in requests} == set(Way)


def exchange(answers: list[list[bytes]], **ask: int) -> list[Reply | Exception]:
    """Ask a server that sends each answer in these pieces and then closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for pieces in answers:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"Content-Length: 2" in head
            await reader.readexactly(2)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()

    async def main() -> list[Reply | Exception]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            connection = await HttpConnection.connect(*server.sockets[0].getsockname())
            found: list[Reply | Exception] = []
            for _ in answers:
                try:
                    found.append(await connection.ask("POST", "/", b"{}", timeout_s=5.0, **ask))
                except ConnectionBroken as broken:
                    found.append(broken)
            await connection.close()
            return found

    return asyncio.run(main())


WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b"9\r\ndata: 1\n\n\r\nc\r\ndata: 1234\n\n\r\n0\r\n\r\n"
)


def test_connection_is_kept_for_answers_in_any_pieces() -> None:
    """Both framings are read, byte by byte and at once."""
    answers = [[WHOLE], [CHUNKED], [bytes([byte]) for byte in CHUNKED], [WHOLE[:30], WHOLE[30:]]]
    body = b"data: 1\n\ndata: 1234\n\n"
    assert exchange(answers) == [
        Reply(200, b"hello"),
        Reply(200, body),
        Reply(200, body),
        Reply(200, b"hello"),
    ]


def test_broken_connection_reports_whether_an_answer_had_begun() -> None:
    """A request may be sent again only if no byte was answered."""
    for pieces, is_untouched in (([], True), ([CHUNKED[:70]], False), ([WHOLE[:-1]], False)):
        (broken,) = exchange([pieces])
        assert isinstance(broken, ConnectionBroken)
        assert broken.is_untouched is is_untouched


def test_client_leaves_in_the_middle() -> None:
    """It leaves after the first event, while the server continues."""
    (reply,) = exchange([[CHUNKED[:66], CHUNKED[66:]]], leave_after=1)
    assert isinstance(reply, Reply)
    assert reply.body.startswith(b"data: 1\n\n")
    assert reply.has_left
    (whole,) = exchange([[CHUNKED]], leave_after=5)
    assert isinstance(whole, Reply)
    assert not whole.has_left, "it ended before the client could leave"


def test_short_soak(tmp_path: Path) -> None:
    """Real processes, kills, disconnects: every answer is right, and no count grows."""
    report = tmp_path / "soak.json"
    command = [sys.executable, "-m", "tests.soak", "--json", str(report), "--concurrency", "16"]
    command += ["--requests", "500", "--kills", "3", "--stops", "1"]
    command += ["--disconnects", "20", "--", "--hang-timeout-s", "1"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all bounds hold" in done.stdout
    tally = json.loads(report.read_text())["outcome"]["tally"]
    assert tally["num_right"] == tally["num_ended"] == 500
    assert tally["num_kills"] == 3
    assert len(tally["stops_s"]) == 1
    assert tally["num_left"] >= 15


def test_scheduler_soak_prints_what_it_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scheduler", "--sequences", "40", "--jobs", "1", "--events", "5"]) == 0
    assert capsys.readouterr().out.startswith("40 sequences, ")
