"""The benchmark tool with tiny sizes and the null model: its figures, comparisons and refusals."""

import asyncio
import contextlib
import itertools
import json
import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.bench import __main__ as tool
from scripts.bench import machine, plots, report, workloads
from scripts.bench.client import BenchError, Outcome, Reply
from scripts.bench.commands import sampler
from scripts.bench.commands.steps import Parts
from scripts.bench.load import Run
from scripts.testing import EngineFactory
from tests.scripts.bench_peer import ERROR_TEXT, peer
from tests.timing import within
from worker_proc.native.build import build, compiler

FIGURES = {
    *("seconds", "requests", "prompt_tokens", "output_tokens", "tokens_per_s", "requests_per_s"),
    *("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "load_us", "load_busy_percent"),
}
IDS = workloads.token_ids(4096)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of an engine with the null model."""
    with EngineFactory() as factory:
        engine = factory()
        engine.readiness()
        yield engine.url()


@pytest.fixture
def result(tmp_path: Path) -> Path:
    return tmp_path / "result.json"


def test_serving_compares_with_a_peer_in_turn_and_every_figure_is_in_the_json(
    url: str, result: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with peer() as other:
        command = (
            f"serving --base {url} --against other={other.url} --work w2 w4 w6 --repeats 2"
            f" --requests 4 --rate 200 --lengths 50 --pause-s 0 --seed 7 --json {result}"
        )
        assert tool.main(command.split()) == 0
    assert len(set(other.prompts)) == len(other.prompts) == 3 * (1 + 4 + 1)  # with the warm-up
    printed = capsys.readouterr().out
    content: dict[str, Any] = json.loads(result.read_bytes())
    runs = content["runs"]
    order = [(run["repeat"], run["workload"], run["server"]) for run in runs]
    names = ("w2", "w4", "w6-50")
    assert order == [(r, w, s) for r in (0, 1) for w in names for s in ("base", "other")]
    assert {run["seed"] for run in runs} == {7, 8}
    for run in runs:
        assert run["figures"].keys() == FIGURES
        assert min(run["figures"].values()) >= 0  # events that wait together have no gap
        assert run["figures"]["tokens_per_s"] > 0
        assert run["figures"]["ttft_p99_ms"] >= run["figures"]["ttft_p50_ms"]
    assert content["command"][3:] == command.split()
    assert content["engine"]["model"] == "null"
    found = content["machine"]
    assert min(found["cores"], found["usable_cores"], found["memory_bytes"]) >= 1
    assert found["versions"].keys() >= {"torch", "transformers"}
    assert len(found["load_average"]) == 3
    assert tool.main(["table", str(result)]) == 0
    assert capsys.readouterr().out == printed
    assert "base / other" in printed


def test_tokens_without_text_arrive_if_their_ids_are_asked_for(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with peer("no text") as other:
        command = f"serving --base {url} --against o={other.url} --work w2 --repeats 1 --pause-s 0"
        assert tool.main(command.split()) == 1
        assert "in 0 pieces" in capsys.readouterr().err
        assert tool.main([*command.split(), "--return-token-ids"]) == 0
        assert "Requests ask for the ids of tokens" in capsys.readouterr().out


def test_a_peer_without_usage_is_counted_by_its_chunks(url: str) -> None:
    with peer("no usage") as other:
        command = f"serving --base {url} --against o={other.url} --work w2 --repeats 1 --pause-s 0"
        assert tool.main(command.split()) == 0


@pytest.mark.parametrize(
    ("fault", "texts"),
    [
        ("status", ["503", ERROR_TEXT]),
        ("event", [ERROR_TEXT]),
        ("short", ["a request for 128 tokens ended after 127"]),
    ],
)
def test_a_peer_that_fails_ends_the_run_with_its_text(
    fault: str, texts: list[str], url: str, result: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with peer(fault) as other:
        command = f"serving --base {url} --against bad={other.url} --work w2 --pause-s 0"
        command += f" --json {result}"
        assert tool.main(command.split()) == 1
    printed = capsys.readouterr().err
    assert "bad, w2: " in printed
    assert all(text in printed for text in texts)
    assert not result.exists()


def test_offline_gives_every_figure_and_the_parts_of_a_step(result: Path) -> None:
    command = f"offline --model null --work w2 --repeats 1 --profile --json {result}"
    assert tool.main(command.split()) == 0
    record = report.load(result)
    assert [run.workload for run in record.runs] == ["w2"]
    assert all(run.figures.keys() == FIGURES for run in record.runs)
    assert record.engine["max_model_len"] == 8192
    kinds = [(row.workload, row.kind, row.steps) for row in record.profile]
    assert kinds == [("w2", "steps with prompts", 1), ("w2", "decode steps", 127)]
    parts = {"schedule", "wire", "mirror", "rest of the worker", "output", "detokenize"}
    assert all(row.parts_us.keys() >= parts for row in record.profile)
    assert all(value > 0 for row in record.profile for value in row.parts_us.values())


@pytest.mark.slow
def test_the_profile_of_a_model_has_the_parts_of_its_forward_pass(result: Path) -> None:
    """Kinds of instructions are there only with the native decoder, which needs a compiler."""
    command = f"offline --work w2 --repeats 1 --profile --json {result}"
    assert tool.main(command.split()) == 0
    parts = {"input preparation", "forward: all else", "sample"}
    assert all(row.parts_us.keys() >= parts for row in report.load(result).profile)


def test_control_gives_the_processor_time_of_each_process(result: Path) -> None:
    command = f"control --sequences 8 --repeats 1 --pause-s 0 --json {result}"
    assert tool.main(command.split()) == 0
    http, embedded = report.load(result).runs
    assert (http.server, embedded.server) == ("troika", "embedded")
    roles = {"api_us", "core_us", "worker_us"}
    for run in (http, embedded):
        assert run.figures.keys() == FIGURES | roles | {"other_us", "core_tokens_per_s"}
    assert min(http.figures[role] for role in roles) > 0
    assert embedded.figures["api_us"] < http.figures["api_us"]


def test_startup_measures_each_start(result: Path) -> None:
    assert tool.main(f"startup --model null --repeats 1 --json {result}".split()) == 0
    runs = report.load(result).runs
    assert [run.workload for run in runs] == ["first", "second"]
    assert all(0 < run.figures["ready_s"] < run.figures["first_token_s"] for run in runs)


def test_growth_measures_each_point_and_leaves_out_what_does_not_fit(
    result: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = (
        "growth --running 2 4 --context 40 200 --waiting 0 5 --behind 2 --steps 3 --repeats 2"
        f" --json {result} -- --max-model-len 256"
    )
    assert tool.main(command.split()) == 0
    record = report.load(result)
    points = ["running-2", "running-4", "context-40", "waiting-0", "waiting-5"]
    assert list(record.workloads) == points
    for point in points:
        runs = [run.figures for run in record.runs if run.workload == point]
        assert len(runs) == 2
        for figures in runs:
            whole = figures.pop("step_us")
            assert min(figures.values()) > 0
            assert sum(figures.values()) == pytest.approx(whole)
    assert "context of 200, as max_model_len is 256" in capsys.readouterr().out


def test_growth_takes_processor_time_where_asked(
    result: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of a step add up what the processor's clock shows: here one second a look."""
    seconds = itertools.count()
    monkeypatch.setattr("time.process_time_ns", lambda: next(seconds) * 10**9)
    command = f"growth --running 2 --context --waiting --steps 3 --repeats 1 --json {result}"
    assert tool.main([*command.split(), "--processor-time"]) == 0
    record = report.load(result)
    assert record.notes == ["Processor time of all threads, not wall clock."]
    assert all(run.figures["step_us"] >= 10**6 for run in record.runs)


def test_the_scheduler_has_its_own_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main(["scheduler", "--steps", "24"])
    assert "steps 24" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("offline --repeats 0", "--repeats"),
        ("offline --work w4", "--work"),
        ("serving --against http://127.0.0.1:1", "--against"),
        ("serving --against troika=http://127.0.0.1:1", "--against"),
        ("serving --base https://example.com", "--base"),
        ("serving --rate 0", "--rate"),
        ("serving --base http://127.0.0.1:1 -- --max-num-seqs 4", "--max-num-seqs"),
        ("control --sequences 0", "--sequences"),
        ("control --load-processes none", "--load-processes"),
        ("growth --waiting -1", "--waiting"),
        ("startup --timeout-s nan", "--timeout-s"),
        ("serving --pause-s -1", "--pause-s"),
    ],
)
def test_a_refused_argument_is_named(
    command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        tool.main(command.split())
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert name in line


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("serving --base http://127.0.0.1:1", "http://127.0.0.1:1/v1/models does not answer"),
        ("growth --model /missing", "model /missing does not exist"),
        ("table /missing.json", "cannot read /missing.json"),
        (f"table {__file__}", "is not a result of this tool"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    command: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(command.split()) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert text in line


def record_of(ours: list[float], theirs: list[float]) -> report.Record:
    runs = [
        report.RunRecord("w1", server, repeat, repeat, {"tokens_per_s": value})
        for repeat, pair in enumerate(zip(ours, theirs, strict=True))
        for server, value in zip(("troika", "other"), pair, strict=True)
    ]
    return report.Record(
        benchmark="serving",
        command=[],
        machine=machine.describe(),
        settings={},
        servers={"troika": "a", "other": "b"},
        peers=["other"],
        workloads={"w1": "W1"},
        runs=runs,
    )


def test_ratios_are_of_pairs_and_not_of_medians() -> None:
    """All pairs agree, though the machine's speed changes: the medians alone would differ more."""
    record = record_of([100.0, 10.0, 1000.0], [50.0, 5.0, 500.0])
    assert report.ratios(record, "w1", "other", "tokens_per_s") == [2.0, 2.0, 2.0]
    crossed = record_of([1.0, 2.0, 9.0], [4.0, 1.0, 3.0])
    found = report.ratios(crossed, "w1", "other", "tokens_per_s")
    assert found == [0.25, 2.0, 3.0]
    assert statistics.median(found) == 2.0  # of medians: 2 / 3
    assert "2.00 [0.25–3.00]" in report.table(crossed)  # noqa: RUF001 - a range


def test_a_run_has_gaps_between_tokens_however_its_tokens_are_joined() -> None:
    """The gaps are 0 if all tokens come in one piece; a single token has none."""
    found = [
        Run(
            [workloads.Request([5], num_tokens)], [Outcome(times, num_tokens)], 0.0, [0.0]
        ).figures()
        for num_tokens, times in [(3, [1.0, 1.25, 1.75]), (3, [1.0, 1.5]), (3, [1.0]), (1, [1.0])]
    ]
    assert [figures.keys() == FIGURES for figures in found] == [True, True, True, False]
    assert [figures["itl_p99_ms"] for figures in found[:3]] == [500, 500, 0]
    assert "itl_p50_ms" not in found[3]


def test_prompts_are_new_for_each_seed_and_equal_for_all_servers() -> None:
    for workload in (*workloads.OFFLINE.values(), workloads.poisson(5.0, 8)):
        assert workload.requests(3, IDS) == workload.requests(3, IDS)
        first = {tuple(request.prompt) for request in workload.requests(3, IDS)}
        assert first.isdisjoint(tuple(request.prompt) for request in workload.requests(4, IDS))


def test_workloads_have_their_shapes() -> None:
    mixed = workloads.W1.requests(0, IDS)
    assert len(mixed) == 64
    assert all(32 <= len(item.prompt) <= 256 and 32 <= item.num_tokens <= 128 for item in mixed)
    assert [(len(r.prompt), r.num_tokens) for r in workloads.W2.requests(0, IDS)] == [(128, 128)]
    sharing = workloads.W3.requests(0, IDS)
    assert len({tuple(item.prompt[:512]) for item in sharing}) == 1
    assert len({tuple(item.prompt[512:]) for item in sharing}) == 64
    assert {(len(item.prompt), item.num_tokens) for item in sharing} == {(544, 32)}
    many = workloads.concurrent(5).requests(0, IDS)
    assert [(len(item.prompt), item.num_tokens) for item in many] == [(32, 128)] * 5
    times = [item.at_s for item in workloads.poisson(4.0, 400).requests(0, IDS)]
    assert times == sorted(times)
    assert times[-1] / 400 == pytest.approx(1 / 4.0, rel=0.2)
    assert all(i in IDS for item in mixed for i in item.prompt)


EVENTS = [
    b'data: {"choices":[{"text":"a\\n"}]}\n\n',
    b": a comment\n\n",
    b'data: {"choices":[{"text":""}],"usage":null}\n\n',
    b'data: {"choices":[],"usage":{"completion_tokens":7}}\n\ndata: [DONE]\n\n',
]


@pytest.mark.parametrize("is_chunked", [True, False])
@given(cuts=st.lists(st.integers(0, 400), max_size=8), per_chunk=st.integers(1, 40))
def test_a_reply_is_the_same_however_it_is_cut(
    is_chunked: bool, cuts: list[int], per_chunk: int
) -> None:
    body = b"".join(EVENTS)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    if is_chunked:
        head += b"Transfer-Encoding: Chunked\r\n"
        parts = [body[i : i + per_chunk] for i in range(0, len(body), per_chunk)]
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    raw = head + b"\r\n" + body
    loop = asyncio.new_event_loop()
    with contextlib.closing(loop):
        reply = Reply(b"", loop.create_future())
        ends = [0, *sorted(cuts), len(raw)]
        for start, end in pairwise(ends):
            reply.data_received(raw[start:end])
    outcome = reply.outcome()
    assert (outcome.num_tokens, len(outcome.times), outcome.error) == (7, 2, "")
    assert outcome.times == sorted(outcome.times)


def test_the_time_of_an_inner_part_counts_once() -> None:
    parts = Parts()
    inner = parts.timed("inner")(lambda: sum(range(200_000)))
    outer = parts.timed("outer")(inner)
    assert outer() == sum(range(200_000))
    taken = parts.take()
    assert 0 < taken["outer"] < taken["inner"]
    assert parts.take() == {}


def test_plots_are_drawn_for_every_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    [path] = plots.plot(record_of([1.0, 2.0], [2.0, 2.0]), tmp_path / "plots")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_plot_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert tool.main(["offline", "--model", "/missing", "--plot", str(tmp_path)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line == "troika: --plot needs matplotlib: pip install matplotlib"


def test_a_file_of_another_tool_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"benchmark": "offline"}')
    with pytest.raises(BenchError, match="`command`"):
        report.load(path)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_the_sampler_is_measured_with_every_set_of_parameters(result: Path) -> None:
    build()
    command = f"sampler --rows 3 --vocab-size 600 --repeats 2 --torch --json {result}"
    assert tool.main(command.split()) == 0
    found = report.load(result)
    servers = {"native, bf16", "native, fp32", "torch, bf16"}
    expected = {(name, server, n) for name in sampler.WORK for server in servers for n in (0, 1)}
    assert {(run.workload, run.server, run.repeat) for run in found.runs} == expected
    assert all(run.figures["choice_ms"] > 0 for run in found.runs)


def test_routing_compares_policies_on_the_same_conversations(result: Path) -> None:
    """What is in a cache when a request arrives depends on times, and so on other load."""
    command = (
        "routing --repeats 1 --replicas 2 --conversations 12 --turns 3 --systems 3 --begin-s 0.2"
        f" --pause-s 0.05 --step-ms 0 --token-ms 0.01 --json {result}"
    )

    def measure() -> dict[str, float]:
        assert tool.main([*command.split(), "--work", "prefix_aware", "round_robin"]) == 0
        found = {run.server: run.figures for run in report.load(result).runs}
        for figures in found.values():
            assert 0 < figures["hit_percent"] < 100
            assert 0 < figures["ttft_p50_ms"] <= figures["ttft_p99_ms"]
            assert 1 <= figures["imbalance"] <= 2
        hits = [found[policy]["hit_percent"] for policy in ("round_robin", "prefix_aware")]
        return {"share_of_hits": hits[0] / hits[1]}

    within(3, measure, share_of_hits=0.95)


def test_prefill_compares_roles_of_replicas_at_the_same_rates(result: Path) -> None:
    command = (
        "prefill --repeats 1 --replicas 2 --seconds 1 --chats-per-s 10 --long-per-s 5 --step-ms 5"
        f" --token-ms 0.02 --json {result}"
    )
    assert tool.main(command.split()) == 0
    found = {run.server: run.figures for run in report.load(result).runs}
    assert found["all alike"]["handed_over"] == 0
    assert found["1 for prompts"]["handed_over"] > 0
    for figures in found.values():
        assert 0 < figures["itl_p50_ms"] <= figures["itl_p99_ms"]
        assert 0 < figures["chat_ttft_p50_ms"] <= figures["chat_ttft_p99_ms"]
