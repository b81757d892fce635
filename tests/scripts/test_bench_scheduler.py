"""The scheduler's benchmark with tiny sizes: the form of its output, and what it refuses."""

import json

import pytest

from scripts.bench.commands.scheduler import main
from scripts.bench.scheduler_figures import Plan

TINY = (
    "--running 2 16 --waiting-behind 4 --waiting 50 --leaving 20"
    " --admissions 2 --steps 16 --repeats 2"
)


@pytest.fixture(autouse=True)
def _frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no measurement collect the objects of the other tests' libraries."""
    monkeypatch.setattr("gc.unfreeze", lambda: None)


def test_the_report_is_one_json_object_with_every_figure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*TINY.split(), "--steps-in-flight", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["running"] for row in report["steady_decode"]] == [2, 16]
    assert [row["vllm_total_us"] for row in report["steady_decode"]] == [None, 212.0]
    assert [row["case"] for row in report["admission"]] == ["caching_off", "miss", "full_hit"]
    for row in report["steady_decode"] + report["admission"]:
        assert row["schedule_us"] > 0
        assert row["update_us"] > 0
        assert row["total_us"] > max(row["schedule_us"], row["update_us"])
    assert [row["running"] for row in report["marks"]] == [2, 16]
    assert all(row["change_us"] > 0 for row in report["marks"])
    cost = report["waiting_cost"]
    assert (cost["running"], cost["waiting"]) == (4, 50)
    assert min(cost["without_us"], cost["with_us"]) > 0
    cases = ["refused", "refused_windowed", "refused_by_priority", "paused"]
    assert [row["case"] for row in report["front_cost"]] == cases
    assert report["departure"]["requests"] == 20
    assert report["departure"]["total_ms"] > 0
    memory = report["waiting_memory"]
    assert memory["requests"] == 50
    assert memory["wire_bytes"] > memory["bare_bytes"] > 100
    assert report["plan"]["repeats"] == 2


def test_the_table_compares_with_vllm_where_there_is_a_figure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(TINY.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    few = next(line for line in lines if line.split()[:1] == ["2"])
    compared = next(line for line in lines if line.split()[:1] == ["16"])
    assert few.split()[-2:] == ["-", "-"]
    assert compared.split()[-2] == "212"
    assert sum(line.endswith("x") for line in lines) == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [("steps", 24), ("repeats", 0), ("waiting", 0), ("running", (16, 0))],
)
def test_a_plan_that_measures_nothing_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        Plan(**{field: value})  # type: ignore[arg-type]
