"""The soak: its judgement on made-up readings, its light client, and a short run of it all."""

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.core_worker import ModelFacts
from scripts.soak.census import ProcessReading, Reading
from scripts.soak.http_connection import ConnectionBroken, HttpConnection, Reply
from scripts.soak.report import Tally, broken_bounds, counts_of, lives_of, theil_sen
from scripts.soak.requests import SoakRequest, Way, Workload, problem_of

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
FACTS = ModelFacts("null", 1000, 512, 16, 64, [2])


def reading(
    num_requests: int = 0, *, rss: int = 100 * MIB, num_fds: int = 9, **counts: int
) -> Reading:
    """An engine with one process."""
    fields = dict.fromkeys(
        (
            "num_zombies",
            "num_sockets",
            "num_files",
            "num_strays",
            "num_held",
            "kv_usage_ppm",
            "num_unasked_restarts",
        ),
        0,
    )
    process = ProcessReading(7, "core", rss, rss, rss, num_fds, 4)
    gauges = {"sessions": counts.pop("num_sessions", 0)}
    return Reading(num_requests, 0.0, [process], **(fields | counts), gauges=gauges)


def test_theil_sen_ignores_outliers() -> None:
    """A third of wild values does not move it."""
    xs = [float(x) for x in range(30)]
    ys = [2.0 * x + (500.0 if x % 4 == 0 else 0.0) for x in xs]
    assert theil_sen(xs, ys) == pytest.approx(2.0)
    assert theil_sen([1.0, 1.0], [0.0, 5.0]) is None


@pytest.mark.parametrize(("growth_mib", "is_broken"), [(0.9, False), (1.2, True), (-3.0, False)])
def test_growth_past_the_bound_is_found(growth_mib: float, is_broken: bool) -> None:
    """Per 10,000 requests, behind noise, and with a warm-up that grows more."""
    rng = random.Random(1)
    readings = [reading(x, rss=50 * MIB + 20_000 * x) for x in range(0, 5000, 500)]
    readings += [
        reading(x, rss=round((200 + growth_mib * x / 10_000 + rng.gauss(0, 0.2)) * MIB))
        for x in range(5000, 40_000, 500)
    ]
    lives = lives_of(readings)
    assert lives[0].slope_mib == pytest.approx(growth_mib, abs=0.08)
    assert bool(broken_bounds(Tally(), lives, [])) is is_broken


def test_brief_lives_have_no_slope() -> None:
    """A process that is killed soon has shown its warm-up and nothing else."""
    lives = lives_of([reading(x, rss=x * MIB) for x in range(0, 9500, 500)])
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
        "num_unasked_restarts",
    ],
)
def test_counts_that_do_not_come_back_are_found(field: str) -> None:
    """One more of anything is one too many; fewer are welcome."""
    low, high = reading(**{field: 9}), reading(**{field: 10})
    assert len(broken_bounds(Tally(), [], counts_of(low, high))) == 1
    assert not broken_bounds(Tally(), [], counts_of(high, low))
    assert not broken_bounds(Tally(), [], counts_of(low, low))


def test_wrong_answers_are_found() -> None:
    """A token changed, dropped or repeated; an early end; a wrong beginning for one that left."""
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


def test_requests_depend_on_seed_and_number_only() -> None:
    """And use every way."""
    one, same, other = (Workload(seed, FACTS, frozenset([3]), 0.25) for seed in (1, 1, 2))
    requests = [one.request(number) for number in range(50)]
    assert [same.request(number) for number in reversed(range(50))] == requests[::-1]
    assert [other.request(number) for number in range(50)] != requests
    assert {request.way for request in requests} == set(Way)


def exchange(answers: list[list[bytes]], **ask: int) -> list[Reply | Exception]:
    """Ask a server once per answer, which it gives in these pieces; then it hangs up."""

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
    """Both framings, byte by byte and at once."""
    answers = [[WHOLE], [CHUNKED], [bytes([byte]) for byte in CHUNKED], [WHOLE[:30], WHOLE[30:]]]
    body = b"data: 1\n\ndata: 1234\n\n"
    assert exchange(answers) == [
        Reply(200, b"hello"),
        Reply(200, body),
        Reply(200, body),
        Reply(200, b"hello"),
    ]


def test_connection_that_breaks_says_whether_an_answer_had_begun() -> None:
    """Only an untouched one may be repeated."""
    for pieces, is_untouched in (([], True), ([CHUNKED[:70]], False), ([WHOLE[:-1]], False)):
        (broken,) = exchange([pieces])
        assert isinstance(broken, ConnectionBroken)
        assert broken.is_untouched is is_untouched


def test_client_leaves_in_the_middle() -> None:
    """After the first event, though the server goes on."""
    (reply,) = exchange([[CHUNKED[:66], CHUNKED[66:]]], leave_after=1)
    assert isinstance(reply, Reply)
    assert reply.body.startswith(b"data: 1\n\n")


def test_short_soak(tmp_path: Path) -> None:
    """Real processes, kills, disconnects: everything is right, and everything comes back."""
    report = tmp_path / "soak.json"
    command = [sys.executable, "-m", "scripts.soak", "--json", str(report), "--concurrency", "16"]
    command += ["--requests", "500", "--kills", "3", "--disconnects", "20"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all bounds hold" in done.stdout
    tally = json.loads(report.read_text())["outcome"]["tally"]
    assert tally["num_right"] == tally["num_ended"] == 500
    assert tally["num_kills"] == 3
    assert tally["num_left"] >= 15
