"""The access log: one line per request, bounded in rate and memory, without the request's text."""

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from api_proc.http.access_log import (
    MAX_WAITING_LINES,
    NUM_EACH_SECOND,
    SAMPLE_EVERY,
    AccessLogger,
)
from protocol.config import AccessLog, LogFormat
from protocol.config.settings import configure
from tests.api.fake_engine import (
    FACTS,
    QUEUE_TIME_S,
    FakeClient,
    LiveServer,
    emitting,
    ids_of,
    wait_until,
)

SECRET = "attack-at-dawn"
BODY = {"prompt": SECRET, "max_tokens": 6}


class Log:
    """A file with the lines of one logger."""

    def __init__(self, path: Path, mode: AccessLog, form: LogFormat) -> None:
        self._path = path
        self.fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o600)
        self.logger = AccessLogger(mode, form, self.fd)

    def wait_for(self, number: int) -> list[str]:
        """Return the lines once there are that many."""
        wait_until(lambda: len(self._path.read_text().splitlines()) >= number, 5.0)
        lines = self._path.read_text().splitlines()
        assert len(lines) == number
        return lines


@pytest.fixture(params=LogFormat)
def log(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Log]:
    log = Log(tmp_path / "log", AccessLog.ALL, request.param)
    yield log
    os.close(log.fd)


def test_lines_have_status_tokens_times_and_id_but_no_text(log: Log) -> None:
    config = configure(model="null", api_key="the-key")
    with LiveServer(config, FakeClient(), access_logger=log.logger) as live:
        headers = {"authorization": "Bearer the-key", "x-request-id": "trace-1"}
        with httpx.Client(base_url=live.url, headers=headers) as client:
            client.post("/v1/completions", json=BODY)
            client.post("/v1/completions?debug=" + SECRET, json={**BODY, "stream": True})
            client.post("/v1/completions", json={**BODY, "n": 2})
            client.post("/v1/completions", json={**BODY, "max_tokens": -1})
            client.get("/v1/models", headers={"authorization": "Bearer " + SECRET})
            client.get("/v1/models/%0aforged%1b[2J" + "x" * 5000)
            client.post("/v1/completions", json={**BODY, "max_tokens": 0, "echo": True})
        lines = log.wait_for(7)
    assert SECRET not in "".join(lines)
    assert "the-key" not in "".join(lines)
    assert all("trace-1" in line and line.isprintable() and len(line) < 500 for line in lines)
    if lines[0].startswith("{"):
        first = json.loads(lines[0])
        assert (first["path"], first["status"]) == ("/v1/completions", 200)
        assert first["output_tokens"] == 6
        assert first["queue_time_s"] == QUEUE_TIME_S
        assert 0 <= first["time_to_first_token_s"] <= first["duration_s"] < 5
        assert [json.loads(line)["status"] for line in lines] == [200, 200, 200, 400, 401, 404, 200]
        assert json.loads(lines[2])["output_tokens"] == 12
        assert "output_tokens" not in json.loads(lines[4])
        assert json.loads(lines[6])["output_tokens"] == 0
    else:
        shape = (
            r"\S+ \[api\] POST /v1/completions 200 prompt \d+ output 6"
            r" queue 250 ms first \d+ ms total \d+"
        )
        assert re.match(shape, lines[0]), lines[0]
        assert re.match(shape, lines[1])
        assert " output 12 " in lines[2]
        assert " 401 total " in lines[4]
        assert " output 0 " in lines[6]


def test_a_client_that_leaves_is_logged_with_what_it_has_got(log: Log) -> None:
    facts = msgspec.structs.replace(FACTS, max_model_len=2**20, num_gpu_blocks=2**17)
    live_client = FakeClient(facts, emitting(ids_of("x") * 100_000))
    with LiveServer(configure(model="null"), live_client, access_logger=log.logger) as live:
        body = {**BODY, "max_tokens": 100_000, "ignore_eos": True, "stream": True}
        with (
            httpx.Client(base_url=live.url) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            next(response.iter_lines())
        (line,) = log.wait_for(1)
    assert re.search(r'"status":200|completions 200 ', line)
    assert ('"finished":false' if line.startswith("{") else " unfinished ") in line


def test_a_request_that_is_refused_is_not_called_unfinished(log: Log) -> None:
    """Its client has the whole answer, an error."""
    with (
        LiveServer(configure(model="null"), FakeClient(), access_logger=log.logger) as live,
        httpx.Client(base_url=live.url) as client,
    ):
        client.post("/v1/completions", json={**BODY, "max_tokens": 5000})
        (line,) = log.wait_for(1)
    assert re.search(r'"status":400|completions 400 ', line)
    assert " unfinished " not in line
    assert '"finished"' not in line


def test_above_a_rate_requests_are_sampled_and_the_rest_is_counted(tmp_path: Path) -> None:
    """The next second is logged in full again."""
    log = Log(tmp_path / "log", AccessLog.SAMPLED, LogFormat.TEXT)
    second = 1_000_000.0
    notes: list[str] = []
    log.logger.write = notes.append  # type: ignore[method-assign]
    number = NUM_EACH_SECOND + 5 * SAMPLE_EVERY
    wanted = [log.logger.wants("/v1/completions", 200, second) for _ in range(number)]
    assert all(wanted[:NUM_EACH_SECOND])
    assert sum(wanted) == NUM_EACH_SECOND + 5
    assert log.logger.wants("/v1/completions", 200, second + 1)
    skipped = number - NUM_EACH_SECOND - 5
    (note,) = notes
    assert f"{skipped} of the {number} requests of that second are not logged" in note
    os.close(log.fd)


def test_of_probes_changes_of_the_status_are_logged(tmp_path: Path) -> None:
    """A load of minutes with a probe each second has one line, and its end another one."""
    log = Log(tmp_path / "log", AccessLog.SAMPLED, LogFormat.TEXT)
    answers = [("/livez", 200), ("/readyz", 503), ("/livez", 200), ("/readyz", 503)]
    answers += [("/readyz", 200), ("/readyz", 200), ("/metrics", 200), ("/metrics", 401)]
    answers += [("/metrics", 401), ("/readyz", 503)]
    wanted = [answer for answer in answers if log.logger.wants(*answer, 1_000_000.0)]
    assert wanted == [
        *(("/readyz", 503), ("/readyz", 200), ("/metrics", 401), ("/metrics", 401)),
        ("/readyz", 503),
    ]
    os.close(log.fd)


def test_a_log_that_is_not_read_delays_no_request_and_takes_bounded_memory() -> None:
    """Its pipe is full: lines beyond the bound are dropped and counted."""
    reader, writer = os.pipe()
    logger = AccessLogger(AccessLog.ALL, LogFormat.TEXT, writer)
    with LiveServer(configure(model="null"), FakeClient(), access_logger=logger) as live:
        live.call(lambda: [logger.write("x" * 99 + "\n") for _ in range(2000)])
        wait_until(logger._writing.locked, 5.0)  # it waits for the reader
        live.call(lambda: [logger.write("y" * 99 + "\n") for _ in range(2 * MAX_WAITING_LINES)])
        assert len(logger._lines) == MAX_WAITING_LINES
        started = time.monotonic()
        assert httpx.get(live.url + "/livez").status_code == 200
        assert time.monotonic() - started < 2.0
        received = b""
        while b"lines were dropped" not in received:
            received += os.read(reader, 2**16)
        assert b"lines were dropped: the log is too slow" in received
    os.close(reader)
    os.close(writer)
