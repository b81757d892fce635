"""Sessions in the journal: slow and broken disks, and a successor's recovery."""

import asyncio
import errno
import json
import os
import threading
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest

from api_proc.errors import ApiError
from api_proc.resumption import journal as journal_module
from api_proc.resumption import journaling as journaling_module
from api_proc.resumption import sessions as sessions_module
from api_proc.resumption.journal import Journal
from api_proc.resumption.journal_segments import DiskCalls
from api_proc.resumption.session import Session
from api_proc.resumption.session_log import Replay
from api_proc.text.output_sequence import Prompt
from protocol.api_core import ErrorCode
from protocol.message import encode
from protocol.sampling import SamplingParams
from tests.api.fake_engine import FACTS
from tests.api.session_server import OUTPUT_IDS, PATH, RAW, Server, play, read, submit_all, until


class SlowDisk:
    """Writes with a bounded throughput."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self.num_bytes = 0

    def write(self, fd: int, data: memoryview) -> int:
        time.sleep(len(data) / self._bytes_per_s)
        self.num_bytes += len(data)
        return os.write(fd, data)


async def leave_behind(directory: Path, *names: str) -> None:
    """Leave a journal with these requests."""
    server = await Server(directory).written()
    for name in names:
        await server.accept(name)
    server.sessions.close()


@play
async def test_a_snapshot_may_be_larger_than_the_queue(tmp_path: Path) -> None:
    """It waits for a disk that is slow, not broken."""
    server = await Server(tmp_path).written()
    for i in range(60):
        body = json.dumps({"user": f"{i}" * 5000}).encode()
        await server.accept(f"r{i}", body, max_tokens=2)
    server.sessions.close()
    disk = SlowDisk(4e6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_module, "MAX_QUEUED_BYTES", 200_000)
        patch.setattr(journaling_module, "_SNAPSHOT_QUEUE_BYTES", 50_000)
        patch.setattr(journaling_module, "_SNAPSHOT_BYTES", 10_000)
        server = await Server(
            tmp_path, partial(Journal, disk=DiskCalls(write=disk.write))
        ).written()
        assert disk.num_bytes > 2 * 200_000
        assert server.sessions.journaling.num_failures == 0
        assert len(server.sessions) == 60
        server.sessions.close()


@pytest.mark.parametrize("num_tokens", [500, 8000])
@play
async def test_many_sequences_of_one_long_prompt_are_a_small_record(
    tmp_path: Path, num_tokens: int
) -> None:
    """As a list or packed, a sequence takes 130 bytes, and as many for its outputs."""
    prompt = [7] * num_tokens
    max_bytes = 60_000 + 4 * num_tokens
    server = await Server(tmp_path).written()
    server.client.facts = msgspec.structs.replace(FACTS, max_model_len=9000, num_gpu_blocks=10**4)
    before = server.sessions.journaling.num_bytes
    with server.generation("r", n=200) as generation:
        generation.begin_session(PATH, RAW, [Prompt([], None)])
        submit_all(generation, prompt, SamplingParams(max_tokens=5, seed=1))
        await generation.accepted()
        session = server.find("r")
    assert session is not None
    await until(lambda: session.is_ended)
    assert server.sessions.journaling.num_bytes - before < max_bytes
    server.sessions.close()
    successor = await Server(tmp_path).written()
    assert successor.sessions.journaling.num_bytes < max_bytes
    found = successor.find("r")
    assert found is not None
    assert [add.unpacked_prompt for add in found.accepted.adds] == [prompt] * 200
    assert [list(history.token_ids) for history in found.histories] == [OUTPUT_IDS[:5]] * 200
    successor.sessions.close()


@play
async def test_outputs_that_arrive_during_the_submission_are_written(tmp_path: Path) -> None:
    """A request enters the journal as soon as it is complete, and not before."""
    server = await Server(tmp_path).written()
    with server.generation("r", n=3) as generation:
        generation.begin_session(PATH, RAW, [Prompt([5, 6], None)])
        submitting = generation.submit([5, 6], [5, 6], SamplingParams(max_tokens=5, seed=1))
        next(submitting)
        session = server.sessions._by_id["r"]
        await until(lambda: session.is_ended)
        assert not session.submitted.is_set()
        assert list(server.sessions._snapshot()) == []
        assert len(list(submitting)) == 2
        await generation.accepted()
        assert session.submitted.is_set()
        generation.cancel()
    await until(lambda: session.is_ended)
    server.sessions.close()
    successor = await Server(tmp_path).written()
    found = successor.find("r")
    assert found is not None
    assert [list(history.token_ids) for history in found.histories] == [OUTPUT_IDS[:5]] * 3
    assert not successor.client.requests, "nothing is computed again"
    successor.sessions.close()


@play
async def test_large_parameters_are_written_once_for_all_sequences(tmp_path: Path) -> None:
    """Also those of several prompts; after a restart the sequences share them again."""
    server = await Server(tmp_path).written()
    before = server.sessions.journaling.num_bytes
    params = [
        SamplingParams(max_tokens=5, seed=1, allowed_token_ids=[*range(100, 199)] * 40),
        SamplingParams(max_tokens=5, seed=9, logit_bias={100: 1.0}),
    ]
    with server.generation("r", n=20) as generation:
        generation.begin_session(PATH, RAW, [Prompt([], None)] * 2)
        for each in params:
            submit_all(generation, [7] * 5, each)
        await generation.accepted()
        session = server.find("r")
    assert session is not None
    await until(lambda: session.is_ended)
    assert server.sessions.journaling.num_bytes - before < 30_000
    wanted = [add.sampling_params for add in session.accepted.adds]
    server.sessions.close()
    successor = await Server(tmp_path).written()
    found = successor.find("r")
    assert found is not None
    restored = [add.sampling_params for add in found.accepted.adds]
    assert restored == wanted
    assert len({id(one.allowed_token_ids) for one in restored[:20]}) == 1
    successor.sessions.close()


@play
async def test_a_failed_read_is_retried(tmp_path: Path) -> None:
    """Until then nothing is deleted, and no client gets a 404."""
    await leave_behind(tmp_path, "r")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journaling_module, "_FIRST_RETRY_S", 0.05)
        with pytest.MonkeyPatch.context() as broken:

            def fail(path: Path) -> bytes:
                raise OSError(errno.EIO, "broken")

            broken.setattr(Path, "read_bytes", fail)
            server = Server(tmp_path)
            await server.sessions.journaling.wait_read()
        assert server.sessions.journaling.num_failures == 1
        with pytest.raises(ApiError) as caught:
            server.find("r", last="r.1")
        assert (caught.value.status, caught.value.code) == (503, "recovering")
        assert dict(caught.value.headers)[b"retry-after"] == b"1"
        assert server.sessions.journaling.is_failed
        await server.written()
        assert server.find("r", last="r.1") is not None
        server.sessions.close()


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Reads of the disk block until this is set."""
    may_go_on = threading.Event()
    really_read = Path.read_bytes

    def hang(path: Path) -> bytes:
        assert may_go_on.wait(10.0)
        return really_read(path)

    monkeypatch.setattr(Path, "read_bytes", hang)
    monkeypatch.setattr(journaling_module, "READ_TIMEOUT_S", 0.05)
    monkeypatch.setattr(journal_module, "_CLOSE_TIMEOUT_S", 0.05)
    return may_go_on


@play
async def test_a_disk_that_hangs_during_recovery_does_not_delay_requests(
    tmp_path: Path, reading: threading.Event
) -> None:
    """The server starts without its journal, whose requests continue later."""
    reading.set()
    await leave_behind(tmp_path, "r")
    reading.clear()
    server = Server(tmp_path)
    await server.sessions.journaling.wait_read()
    await server.accept("s")
    with pytest.raises(ApiError, match="not been read yet"):
        server.find("r", last="r.1")
    reading.set()
    await server.written()
    assert {"r", "s"} == set(server.sessions._by_id)
    server.sessions.close()


@play
async def test_a_closed_server_restores_nothing(tmp_path: Path, reading: threading.Event) -> None:
    """Its disk responds late, when its successor needs the directory."""
    reading.set()
    await leave_behind(tmp_path, "r")
    reading.clear()
    closed = Server(tmp_path)
    closed.sessions.close()
    successor = Server(tmp_path)
    await successor.sessions.journaling.wait_read()
    assert not successor.sessions.journaling.is_recovered
    reading.set()
    await successor.written()
    assert successor.find("r") is not None
    assert len(closed.sessions) == 0
    successor.sessions.close()


@play
async def test_a_large_journal_is_restored_in_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop runs in between, and no client gets a 404 before the end."""
    monkeypatch.setattr(sessions_module, "_SLICE_S", 0.0)
    await leave_behind(tmp_path, *(f"r{number}" for number in range(20)))
    server = Server(tmp_path)
    num_turns = 0
    while not server.sessions.journaling.is_recovered:
        await asyncio.sleep(0)
        num_turns += 0 < len(server.sessions) < 20
        if server.find("r19") is None:
            with pytest.raises(ApiError, match="not been read yet"):
                server.find("r19", last="r19.1")
    assert num_turns >= 19
    assert server.find("r19") is not None
    server.sessions.close()


@play
async def test_a_failed_restoration_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any error the server serves, and does not overwrite the journal."""
    await leave_behind(tmp_path, "r")
    monkeypatch.setattr(journaling_module, "_FIRST_RETRY_S", 0.05)
    with monkeypatch.context() as broken:
        broken.setattr(Replay, "open_requests", lambda replay: 1 // 0)
        server = Server(tmp_path)
        await server.sessions.journaling.wait_read()
        with pytest.raises(ApiError, match="not been read yet"):
            server.find("r", last="r.1")
        await server.accept("s")
    await server.written()
    assert {"r", "s"} == set(server.sessions._by_id)
    server.sessions.close()


@play
async def test_a_second_server_waits_for_the_journal_of_the_first(tmp_path: Path) -> None:
    """The second serves without a journal, reports that, and recovers it from the first."""
    first = await Server(tmp_path).written()
    await first.accept("r")
    second = Server(tmp_path)
    await second.accept("s")
    assert second.sessions.journaling.is_failed
    with pytest.raises(ApiError, match="not been read yet"):
        second.find("r", last="r.1")
    first.sessions.close()
    await second.written()
    assert {"r", "s"} == set(second.sessions._by_id)
    second.sessions.close()


@play
async def test_requests_that_cannot_be_decoded_are_skipped(tmp_path: Path) -> None:
    """They do not count against the budget, and the others continue."""
    server = await Server(tmp_path).written()
    await server.accept("bad", b"[")  # `decode` raises
    await server.accept("good")
    server.sessions.close()
    successor = await Server(tmp_path, max_open_requests=1).written()
    assert set(successor.sessions._by_id) == {"good"}
    successor.sessions.close()


@play
async def test_the_directory_stays_small_and_complete(tmp_path: Path) -> None:
    """Segments are replaced under load; each contains every open request."""
    most = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journaling_module, "SEGMENT_BYTES", 20_000)
        server = await Server(tmp_path).written()
        kept = await server.accept("kept", b'{"seed": 7}')
        for i in range(60):
            other = await server.accept(f"r{i}")
            await until(lambda other=other: other.is_ended)
            server.sessions.remove(other)
            await until(lambda: not server.sessions.journaling._is_rotating)
            most = max(most, sum(path.stat().st_size for path in tmp_path.iterdir()))
        assert server.sessions.journaling.num_bytes > 5 * 20_000
        assert server.sessions.journaling.num_failures == 0
        server.sessions.close()
    assert most < 4 * 20_000 + 64 * 1024  # with the probe of a new one
    successor = await Server(tmp_path).written()
    found = successor.find("kept", b'{"seed": 7}')
    assert found is not None
    assert len(successor.sessions) == 1
    assert found.histories[0].whole().token_ids == OUTPUT_IDS
    assert found.accepted == kept.accepted
    successor.sessions.close()


async def accept_with_deadline(server: Server, timeout_s: float) -> Session:
    """Accept a request whose engine does nothing, and lose the connection."""
    server.client.is_paused = True
    raw = json.dumps({"timeout": timeout_s}).encode()
    with server.generation("r", timeout=timeout_s) as generation:
        generation.begin_session(PATH, raw, [Prompt([5, 6], None)])
        submit_all(generation, [5, 6], SamplingParams(max_tokens=900, seed=1))
        await generation.accepted()
        generation.cancel()
    session = server.find("r", raw)
    assert session is not None
    return session


@play
async def test_a_deadline_outlives_the_connection(tmp_path: Path) -> None:
    server = await Server(tmp_path).written()
    began = time.monotonic()
    session = await accept_with_deadline(server, 0.3)
    [history] = session.histories
    await until(lambda: history.error is not None)
    assert time.monotonic() - began >= 0.3
    assert history.error is not None
    assert history.error.error.code is ErrorCode.DEADLINE
    assert server.client.cancelled == [1]
    server.sessions.close()


@play
async def test_a_deadline_outlives_the_process(tmp_path: Path) -> None:
    """A successor keeps the time that is left, also if none is."""
    server = await Server(tmp_path).written()
    began = time.time()
    session = await accept_with_deadline(server, 2.0)
    deadline = session.accepted.deadline
    assert deadline is not None
    assert began + 1.9 <= deadline <= time.time() + 2.1
    server.sessions.close()
    for is_late in (False, True):
        if is_late:
            await until(lambda: time.time() > deadline)
        successor = Server(tmp_path)
        successor.client.is_paused = True
        await successor.written()
        found = successor.find("r", session.accepted.raw)
        assert found is not None
        assert found.accepted.deadline == deadline
        [history] = found.histories
        assert (history.error is None) or is_late
        if is_late:
            await until(lambda: history.error is not None)  # noqa: B023
            assert history.error is not None
            assert history.error.error.code is ErrorCode.DEADLINE
        successor.sessions.close()


@play
async def test_a_request_that_ends_in_time_keeps_its_end(tmp_path: Path) -> None:
    server = await Server(tmp_path).written()
    with server.generation("r", timeout=0.2) as generation:
        generation.begin_session(PATH, RAW, [Prompt([5, 6], None)])
        submit_all(generation, [5, 6], SamplingParams(max_tokens=9, seed=1))
        await generation.accepted()
        assert await read(generation, 9) == OUTPUT_IDS[:9]
        session = server.find("r")
    assert session is not None
    await until(lambda: time.time() > session.accepted.deadline)
    await asyncio.sleep(0.01)
    assert session.histories[0].error is None
    server.sessions.close()


async def paused_server(directory: Path) -> Server:
    """Start a server whose engine computes nothing."""
    server = Server(directory)
    server.client.is_paused = True
    return await server.written()


@pytest.mark.parametrize("has_snapshot", [False, True])
@play
async def test_engine_that_continues_a_request_is_known_after_a_restart(
    tmp_path: Path, has_snapshot: bool
) -> None:
    server = await paused_server(tmp_path)
    session = await server.accept("r")
    session.histories[0].rebind("first", is_exact=True)
    session.histories[0].rebind("second", is_exact=False)
    for _ in range(1 + has_snapshot):  # every start begins with a snapshot
        server.sessions.close()
        server = await paused_server(tmp_path)
        [history] = server.sessions._by_id["r"].histories
        assert history.resumed_inexactly
        [add] = server.client.requests
        assert add.fingerprint == "second"
    server.sessions.close()


@play
async def test_the_engine_is_known_from_a_snapshot_that_was_cut_short(tmp_path: Path) -> None:
    """Then the segment before it is read as well, in which the request has another engine."""
    server = await paused_server(tmp_path)
    session, replay = await server.accept("r"), Replay()
    for fingerprint in ("first", "second"):
        session.histories[0].rebind(fingerprint, is_exact=True)
        for record in session.records():
            replay.apply(encode(record))
    [request] = replay.open_requests()
    assert request.accepted.adds[0].fingerprint == "second"
    server.sessions.close()


@pytest.mark.parametrize("has_snapshot", [False, True])
@play
async def test_the_place_of_the_kv_blocks_is_known_after_a_restart(
    tmp_path: Path, has_snapshot: bool
) -> None:
    server = await paused_server(tmp_path)
    session = await server.accept("r")
    session.histories[0].stored_at("tcp://10.0.0.2:7300")
    session.histories[0].stored_at("tcp://10.0.0.3:7300")
    for _ in range(1 + has_snapshot):  # every start begins with a snapshot
        server.sessions.close()
        server = await paused_server(tmp_path)
        [add] = server.client.requests
        assert add.blocks_at == "tcp://10.0.0.3:7300"
    server.sessions.close()
