"""The files of a batch: what is skipped, cut and rejected, and how a server's answers are kept."""

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from scripts.batch import command, files
from scripts.batch.command import main
from scripts.batch.files import Answer, BatchError, Output, Request, Response, custom_ids
from scripts.batch.sender import Sender, Server

WANTED = {"a", "b", "c"}


def answer(custom_id: str) -> Answer:
    return Answer("x", custom_id, Response(200, "x", Raw(b'{"n":1}')), None)


def line(custom_id: str, **fields: Any) -> str:
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {}}
    return json.dumps(request | fields) + "\n"


@pytest.mark.parametrize("torn", ["", "{", '{"id":"x","custom_id":"b","resp', "y" * 200_000])
def test_torn_last_line_is_cut_and_the_rest_is_kept(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "out.jsonl"
    with closing(Output(path, WANTED)) as output:
        assert output.answered == set()
        output.write(answer("a"))
        output.write(answer("c"))
    whole = path.read_text()
    path.write_text(whole + torn)
    with closing(Output(path, WANTED)) as output:
        assert output.answered == {"a", "c"}
        output.write(answer("b"))
    assert path.read_text().startswith(whole)
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == ["a", "c", "b"]
    assert rows[0] == {
        "id": "x",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "x", "body": {"n": 1}},
        "error": None,
    }


def test_file_with_one_torn_line_only_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"id":')
    Output(path, WANTED).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            '{"custom_id":"z","response":null}\n',
            "line 1 answers 'z', which the input does not contain",
        ),
        ("notes\n", "line 1 is not an answer of a batch"),
        ("notes without an end", "line 1 is not an answer of a batch .it does not begin as one"),
        ('{"custom_id":"a","response":null}\n[]\n', "line 2 is not an answer of a batch"),
        ('{"custom_id":"a","response":null}\n[]\n{"id', "line 2 is not an answer of a batch"),
        (line("a") + line("b"), "line 1 is not an answer of a batch .response: the field is miss"),
        (line("a") + line("b").strip(), "line 1 is not an answer of a batch"),
        (line("a").strip(), "line 1 is not an answer of a batch"),
    ],
)
def test_file_that_is_not_the_output_of_this_input_stays_as_it_is(
    tmp_path: Path, content: str, text: str
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(BatchError, match=text):
        Output(path, WANTED)
    assert path.read_text() == content


def test_two_runs_cannot_share_an_output(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with closing(Output(path, WANTED)), pytest.raises(BatchError, match="in use by another run"):
        Output(path, WANTED)
    Output(path, WANTED).close()


def test_closed_output_takes_no_lines(tmp_path: Path) -> None:
    output = Output(tmp_path / "out.jsonl", WANTED)
    output.close()
    output.write(answer("a"))
    assert (tmp_path / "out.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (line("a") + "{\n", "line 2: is not valid JSON: Input data was truncated"),
        ("{}\n", "line 1: custom_id: the field is missing"),
        (line("a") + "\n" + line(""), "line 3: custom_id: must be a string of length >= 1"),
        (line("a") + line("b") + line("a"), "custom_id 'a' occurs twice"),
        ("[" * 100_000, "line 1: "),
        ('{"custom_id":"' + "a" * 5000 + '"}', "line 1: is longer than 4096 bytes"),
    ],
)
def test_broken_input_is_rejected_before_anything_is_computed(
    tmp_path: Path, content: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "4096" in text:
        monkeypatch.setattr(files, "MAX_LINE_BYTES", 4096)
    path = tmp_path / "in.jsonl"
    path.write_text(content)
    with pytest.raises(BatchError, match=text):
        custom_ids(path)


class Handler(BaseHTTPRequestHandler):
    """Answers with the next of the scripted responses.

    None breaks the connection before it, and a body that begins with "torn" in the middle of it.
    """

    script: list[tuple[int, str] | None]
    seen: list[tuple[str, str | None, str | None]]

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        headers = (self.headers["x-request-id"], self.headers["authorization"])
        self.seen.append((self.path, *headers))
        step = self.script.pop(0)
        if step is None:
            self.close_connection = True
            return
        status, body = step
        self.send_response(status)
        self.close_connection = body.startswith("torn")
        num_bytes = len(body.encode()) + 10 * self.close_connection
        self.send_header("content-length", str(num_bytes))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def handler() -> Iterator[type[Handler]]:
    class Scripted(Handler):
        script = []
        seen = []

    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        Scripted.url = f"http://127.0.0.1:{server.server_address[1]}/v1"  # type: ignore[attr-defined]
        yield Scripted
        server.shutdown()
        thread.join()


def sender(handler: Any, *, retry_timeout_s: float = 10.0, **options: Any) -> Sender:
    server = Server(
        handler.url, "key", request_timeout_s=10.0, retry_timeout_s=retry_timeout_s, **options
    )
    return Sender(server)


REQUEST = Request("a", "POST", "/v1/completions", Raw(b'{"prompt":"x"}'))


def test_request_is_sent_again_with_its_id_until_it_is_answered(handler: Any) -> None:
    handler.script += [None, (200, "torn"), (503, "{}"), (429, "{}"), (502, "<html>")]
    handler.script += [(200, '{\n"n":1}')]
    with closing(sender(handler)) as one:
        got = one.answer(REQUEST)
        assert got.response is not None
        assert (got.response.status_code, bytes(got.response.body)) == (200, b'{ "n":1}')
        assert one.num_retries == 5
    [first, *others] = handler.seen
    assert others == [first] * 5
    assert (first[0], first[2]) == ("/v1/completions", "Bearer key")


def test_errors_of_a_line_are_answers(handler: Any) -> None:
    handler.script += [(400, '{"error":{}}'), (500, '{"error":{}}'), (200, "no JSON")]
    with closing(sender(handler)) as one:
        for status in (400, 500):
            response = one.answer(REQUEST).response
            assert response is not None
            assert response.status_code == status
        error = one.answer(REQUEST).error
        assert error is not None
        assert error.code == "invalid_answer"
        for fields, code in (
            ({"method": "GET"}, "invalid_method"),
            ({"url": "/v1/files"}, "invalid_url"),
            ({"body": Raw(b"[1]")}, "invalid_body"),
            ({"body": Raw(b'{"stream":true}')}, "invalid_body"),
        ):
            error = one.answer(Request("a", **{"url": "/v1/completions"} | fields)).error
            assert error is not None
            assert error.code == code
    assert len(handler.seen) == 3


def test_server_that_stays_away_ends_the_run(handler: Any) -> None:
    handler.script += [(503, "{}")] * 99
    with (
        closing(sender(handler, retry_timeout_s=0.3)) as one,
        pytest.raises(BatchError, match=r"has not answered for 0.3 s: status 503; run the command"),
    ):
        one.answer(REQUEST)

    def check() -> None:
        raise BatchError("the engine has ended")

    with (
        closing(sender(handler, check=check)) as one,
        pytest.raises(BatchError, match="the engine has ended"),
    ):
        one.answer(REQUEST)


def run(tmp_path: Path, *flags: str) -> int:
    return main([f"{tmp_path}/in.jsonl", f"{tmp_path}/out.jsonl", *flags])


def test_second_run_sends_only_what_is_missing(
    tmp_path: Path, handler: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text("".join(map(line, "abcde")))
    handler.script += [(200, "{}"), (400, "{}"), (503, "{}")]
    flags = ("--base-url", handler.url, "--concurrency", "1", "--retry-timeout-s", "0.001")
    assert run(tmp_path, *flags) == 1
    assert "has not answered for 0.001 s" in capsys.readouterr().err
    handler.script += [(200, "{}")] * 3
    assert run(tmp_path, *flags) == 0
    assert "5 lines: 3 answered, 0 of these with an error, 2 answered before" in (
        capsys.readouterr().err
    )
    rows = [json.loads(row) for row in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == list("abcde")
    assert [row["response"]["status_code"] for row in rows] == [200, 400, 200, 200, 200]
    assert run(tmp_path, *flags) == 0
    assert len(handler.seen) == 6


def test_progress_without_a_terminal_is_printed_as_lines(
    tmp_path: Path,
    handler: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "_LINE_INTERVAL_S", 0.0)
    (tmp_path / "in.jsonl").write_text("".join(map(line, "abc")))
    handler.script += [(200, "{}")] * 3
    assert run(tmp_path, "--base-url", handler.url, "--concurrency", "1") == 0
    assert "3 of 3 lines answered\n" in capsys.readouterr().err


def test_files_may_be_named_by_options(
    tmp_path: Path, handler: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text(line("a"))
    handler.script += [(200, "{}")]
    files = ["-i", f"{tmp_path}/in.jsonl", "--output-file", f"{tmp_path}/out.jsonl"]
    assert main([*files, "--base-url", handler.url]) == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["custom_id"] == "a"
    for argv, text in (
        (["a", "b", "-o", "c"], "troika: OUT.jsonl is named twice\n"),
        (["-o", "c"], "troika: IN.jsonl is missing\n"),
        (["a"], "troika: OUT.jsonl is missing\n"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main(argv)
        assert capsys.readouterr().err == text


def test_flags_may_stand_between_the_files(tmp_path: Path, handler: Any) -> None:
    (tmp_path / "in.jsonl").write_text(line("a"))
    handler.script += [(200, "{}")]
    assert main([f"{tmp_path}/in.jsonl", "--base-url", handler.url, f"{tmp_path}/out.jsonl"]) == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["custom_id"] == "a"


@pytest.mark.parametrize("name", ["-in.jsonl", "-h", "--help"])
def test_names_after_two_dashes_are_files(
    tmp_path: Path, handler: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(line("a"))
    handler.script += [(200, "{}")]
    assert main(["--base-url", handler.url, "--", name, "-out.jsonl"]) == 0
    assert json.loads(Path("-out.jsonl").read_text())["custom_id"] == "a"


def test_a_missing_input_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path) == 1
    text = f": {tmp_path}/in.jsonl cannot be used: No such file or directory\n"
    assert capsys.readouterr().err.endswith(text)


@pytest.mark.parametrize(
    ("flags", "status", "text"),
    [
        (("--base-url", "localhost"), 1, "base_url 'localhost' must be like http"),
        (("--base-url", "http://h:99999"), 1, "base_url 'http://h:99999': Port out of range"),
        (("--base-url", "http://h", "--max-num-seqs", "1"), 2, "--max-num-seqs has no effect"),
        (("--concurrency", "0"), 2, "--concurrency and the timeouts must be greater than 0"),
        (("--model", "/nowhere"), 1, "model /nowhere "),
    ],
)
def test_bad_flag_is_named(
    tmp_path: Path,
    flags: tuple[str, ...],
    status: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "in.jsonl").write_text(line("a"))
    try:
        code: Any = run(tmp_path, *flags)
    except SystemExit as error:
        code = error.code
    assert code == status
    assert text in capsys.readouterr().err
    out = tmp_path / "out.jsonl"
    assert not out.exists() or out.read_bytes() == b""


def test_help_fits_on_a_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["in.jsonl", "--help"], "troika run-batch") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 45
    assert any("--concurrency" in line for line in lines)
