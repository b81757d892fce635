"""Every decision of the recorded workloads is repeated, record for record."""

import gzip
import json
from pathlib import Path

import pytest

from scripts.schedule_trace import Replay, TraceError, load_workload, main

TRACES = Path(__file__).parent / "traces"
NAMES = sorted(path.name.split(".")[0] for path in TRACES.glob("*.trace.json.gz"))


def _expected_lines(name: str) -> list[str]:
    return gzip.decompress((TRACES / f"{name}.expected.jsonl.gz").read_bytes()).decode().split()


def test_the_traces_are_there() -> None:
    assert len(NAMES) == 48


@pytest.mark.parametrize("name", NAMES)
def test_replay_equals_the_record(name: str) -> None:
    workload = load_workload(TRACES / f"{name}.trace.json.gz")
    expected = [json.loads(line) for line in _expected_lines(name)]
    for step, (want, got) in enumerate(zip(expected, Replay(workload).records(), strict=True)):
        assert want == got, f"step {step}"


def test_the_command_prints_the_record_byte_for_byte(capsys: pytest.CaptureFixture[str]) -> None:
    names = NAMES[:2]
    assert main([str(TRACES / f"{name}.trace.json.gz") for name in names]) == 0
    assert capsys.readouterr().out.split() == [x for name in names for x in _expected_lines(name)]


def test_an_uncompressed_workload_is_read_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = {"id": "a", "prompt_token_ids": [5, 6, 7], "max_tokens": 1}
    path = tmp_path / "one.trace.json"
    path.write_text(json.dumps({"name": "one", "config": {}, "requests": [request]}))
    assert main([str(path)]) == 0
    first, last = map(json.loads, capsys.readouterr().out.split())
    assert first["num_scheduled_tokens"] == [["a", 3]]
    assert first["finished"] == [["a", "length"]]
    assert last["finished_notice"] == ["a"]


@pytest.mark.parametrize(
    ("workload", "key"),
    [
        ({"config": {"max_seqs": 4}, "requests": []}, "max_seqs"),
        ({"requests": [{"id": "a", "prompt_token_ids": [1], "prio": 1}]}, "prio"),
        ({"requests": [{"id": "a", "prompt_token_ids": {"len": 3, "sed": 1}}]}, "sed"),
        ({"requests": [{"id": "a", "prompt_token_ids": {"len": 3}}]}, "seed"),
        ({"requests": [{"id": "a"}]}, "prompt_token_ids"),
        ({"requests": [], "steps": 3}, "steps"),
    ],
)
def test_an_unknown_or_missing_key_is_an_error_that_names_it(
    workload: dict[str, object], key: str
) -> None:
    with pytest.raises(TraceError, match=f"'{key}'"):
        Replay(workload)


def test_a_bad_file_ends_the_command_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.trace.json"
    path.write_text('{"config": {"block_sise": 4}, "requests": []}')
    assert main([str(path)]) == 1
    assert "block_sise" in capsys.readouterr().err
