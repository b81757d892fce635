"""The status command with supervisors that answer as a test states."""

import pytest

from protocol.lifecycle import StatusReply
from protocol.message import ProtocolError
from scripts import status


def test_an_engine_whose_answer_cannot_be_read_is_one_of_the_choices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def query(run_dir: str, timeout_s: float) -> StatusReply:
        if run_dir == "/run/other":
            raise ProtocolError("version 0 instead of 1")
        return StatusReply([], True, "http://127.0.0.1:8000")

    monkeypatch.setattr(status, "live_run_dirs", lambda: ["/run/other", "/run/own"])
    monkeypatch.setattr(status, "_query", query)
    assert status.main([]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "troika: several engines are running; choose one:",
        "  --run-dir /run/other",
        "  --run-dir /run/own   (http://127.0.0.1:8000/v1)",
    ]
