"""Adapters end to end: real processes, several adapters in a batch, kill -9, loads under load."""

import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from api_proc.llm import LLM, LoRARequest, SamplingParams
from protocol.adapters import CONFIG_FILE
from protocol.client.errors import InvalidRequest
from protocol.config.settings import configure
from protocol.lifecycle import Role
from scripts.inprocess import InprocEngine
from scripts.testing import LOAD_TIMEOUT_S, Engine, EngineFactory, eventually
from tests.system.models.lora_streams import NUM_TOKENS, TARGETS, demo_model, greedy, have
from tests.system.null_load import Stream
from tests.timing import within
from tests.worker.adapters.peft_adapters import merge, write_adapter

NUM_ADAPTERS = 8
LONG = 600


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Eight adapters for the demo model, of several ranks and targets."""
    scratch, model = tmp_path_factory.mktemp("adapters"), demo_model()
    return [
        write_adapter(
            scratch / f"a{number}",
            model,
            TARGETS if number % 2 else TARGETS[: 1 + number],
            rank=(4, 16, 7)[number % 3],
            seed=number,
            strength=0.5,
        )
        for number in range(NUM_ADAPTERS)
    ]


def assert_greedy(model: PreTrainedModel, stream: Stream) -> None:
    """Assert that each token is the most likely one after those before it."""
    prompt = stream._body["prompt"]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + stream.token_ids])).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == stream.token_ids


def test_eight_adapters_in_a_batch_of_32_survive_the_worker_and_the_core(
    start_engine: EngineFactory, adapters: list[Path]
) -> None:
    """Each stream is that of transformers with its adapter; those without are unchanged."""
    engine = start_engine(
        *("--dtype", "float32", "--enable-lora", "--max-loras", str(NUM_ADAPTERS)),
        *("--num-gpu-blocks-override", "2048", "--lora-modules"),
        *(f"{path.name}={path}" for path in adapters),
        model="demo",
    )
    engine.ready()
    assert engine.readiness()["exact_resume"] is True
    names = ["demo", *(path.name for path in adapters)]
    listed = engine.get("/v1/models")["data"]
    assert [(one["id"], one["parent"]) for one in listed] == [
        ("demo", None),
        *((name, "demo") for name in names[1:]),
    ]
    before = greedy(engine, "demo", 99).join().token_ids
    # Pairs of adapters have equal prompts, whose blocks must not be shared.
    streams = [greedy(engine, names[i % 9], i // 2 * 2) for i in range(36)]
    base = greedy(engine, "demo", 99)
    for num_tokens, role in ((5, Role.WORKER), (25, Role.CORE)):
        eventually(have(streams, num_tokens), f"{num_tokens} tokens have arrived")
        engine.kill(role)
    assert base.join().token_ids == before
    texts = set()
    for stream in streams:
        assert stream.join().error is None
        assert stream.finish_reason == "length"
        assert len(stream.token_ids) == NUM_TOKENS
        texts.add(tuple(stream.token_ids))
    assert len(texts) > 20, "adapters change texts"
    for number, name in enumerate(names):
        model = demo_model()
        model = model if number == 0 else merge(model, adapters[number - 1])
        for stream in streams:
            if stream._body["model"] == name:
                assert_greedy(model, stream)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "num_stages", "ranks"),
    [
        (2, 1, (1,)),
        (2, 1, (0,)),
        (1, 2, (0, 1)),
        (2, 2, (0, 1, 2, 3)),
    ],
)
def test_adapters_of_a_divided_model_survive_each_rank_and_the_core(
    num_ranks: int,
    num_stages: int,
    ranks: tuple[int, ...],
    start_engine: EngineFactory,
    adapters: list[Path],
) -> None:
    """One is loaded while requests run. Streams are those of transformers."""
    engine = start_engine(
        *("--dtype", "float32", "--enable-lora", "--enable-admin-routes", "--max-loras", "3"),
        *("--tensor-parallel-size", str(num_ranks), "--pipeline-parallel-size", str(num_stages)),
        *("--num-threads", "1", "--num-gpu-blocks-override", "512", "--lora-modules"),
        *(f"{path.name}={path}" for path in adapters[:2]),
        model="demo",
    )
    engine.ready()
    assert engine.readiness()["exact_resume"] is True
    names = ["demo", *(path.name for path in adapters[:3])]
    streams = [greedy(engine, name, 3) for name in names[:3]]
    assert load(engine, adapters[2]).status_code == 200
    streams += [greedy(engine, names[3], number) for number in (3, 4)]
    victims = [(Role.WORKER, rank) for rank in ranks]
    for count, (role, rank) in enumerate((*victims, (Role.CORE, 0)), start=1):
        num_tokens = 6 * count
        eventually(have(streams, num_tokens), f"{num_tokens} tokens have arrived", LOAD_TIMEOUT_S)
        engine.kill(role, rank)
    assert post(engine, "/v1/unload_lora_adapter", lora_name=names[3]).status_code == 200
    assert len({tuple(stream.join().token_ids) for stream in streams}) == 5
    for stream in streams:
        assert (stream.error, stream.finish_reason) == (None, "length")
        number = names.index(str(stream._body["model"]))
        model = demo_model()
        assert_greedy(model if number == 0 else merge(model, adapters[number - 1]), stream)


@pytest.fixture(scope="module")
def null() -> Iterator[Engine]:
    """An engine without a model, with two API processes."""
    with EngineFactory() as start:
        engine = start(
            *("--enable-lora", "--enable-admin-routes", "--api-server-count", "2"),
            *("--null-step-ms", "3", "--max-loras", "2"),
        )
        engine.ready()
        yield engine


def names_at_all(engine: Engine, *, count: int = 12) -> set[tuple[str, ...]]:
    """Return the lists of models that fresh connections get."""
    return {
        tuple(one["id"] for one in httpx.get(engine.url() + "/v1/models").json()["data"])
        for _ in range(count)
    }


def post(engine: Engine, path: str, **body: Any) -> httpx.Response:
    return httpx.post(engine.url() + path, json=body, timeout=60.0)


def load(engine: Engine, path: Path, name: str = "", **more: Any) -> httpx.Response:
    fields = {"lora_name": name or path.name, "lora_path": str(path), **more}
    return post(engine, "/v1/load_lora_adapter", **fields)


def test_all_api_processes_know_the_same_adapters(null: Engine, adapters: list[Path]) -> None:
    """So does one that is started again; the name is free after an unload."""
    assert load(null, adapters[0]).status_code == 200
    again = load(null, adapters[0])
    assert (again.status_code, again.json()["error"]["code"]) == (400, "already_loaded")
    assert load(null, adapters[1], adapters[0].name, load_inplace=True).status_code == 200
    assert names_at_all(null) == {("null", "a0")}
    for rank in (0, 1):
        null.kill(Role.API, rank)
    null.ready()
    assert names_at_all(null) == {("null", "a0")}
    with_adapter, without = (greedy(null, name, 3).join() for name in ("a0", "null"))
    assert with_adapter.token_ids != without.token_ids
    assert post(null, "/v1/unload_lora_adapter", lora_name="a0").status_code == 200
    assert post(null, "/v1/unload_lora_adapter", lora_name="a0").status_code == 404
    assert names_at_all(null) == {("null",)}
    assert (greedy(null, "a0").join().error or "").startswith("404")


def test_requests_of_an_unloaded_adapter_are_finished(null: Engine, adapters: list[Path]) -> None:
    """They are finished after the death of the worker and of the core, too."""
    assert load(null, adapters[0]).status_code == 200
    whole = greedy(null, "a0", num_tokens=LONG).join().token_ids
    streams = [greedy(null, "a0", num_tokens=LONG) for _ in range(4)]
    eventually(have(streams, 10), "10 tokens have arrived")
    assert post(null, "/v1/unload_lora_adapter", lora_name="a0").status_code == 200
    for num_tokens, role in ((40, Role.WORKER), (150, Role.CORE)):
        eventually(have(streams, num_tokens), f"{num_tokens} tokens have arrived")
        null.kill(role)
    assert [stream.join().token_ids for stream in streams] == [whole] * 4


def test_files_that_have_changed_end_their_requests_with_the_reason(
    null: Engine, adapters: list[Path], tmp_path: Path
) -> None:
    """A new worker does not go on with other weights; other requests continue."""
    for name in ("changed", "deleted"):
        shutil.copytree(adapters[0], tmp_path / name)
        load(null, tmp_path / name, name)
    shutil.copytree(adapters[1], tmp_path / "changed", dirs_exist_ok=True)
    shutil.copytree(adapters[2], tmp_path / "deleted", dirs_exist_ok=True)
    load(null, tmp_path / "changed", "changed", load_inplace=True)
    load(null, tmp_path / "deleted", "deleted", load_inplace=True)
    whole = greedy(null, "null", num_tokens=LONG).join().token_ids
    streams = {name: greedy(null, name, num_tokens=LONG) for name in ("changed", "deleted", "null")}
    eventually(have(list(streams.values()), 10), "10 tokens have arrived")
    config = tmp_path / "changed" / CONFIG_FILE
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 99}))
    shutil.rmtree(tmp_path / "deleted")
    null.kill(Role.WORKER)
    assert streams["null"].join().token_ids == whole
    for name, reason in (("changed", "has changed since it was loaded"), ("deleted", "not exist")):
        error = streams[name].join().error or ""
        assert f"adapter '{name}'" in error
        assert reason in error
        assert post(null, "/v1/unload_lora_adapter", lora_name=name).status_code == 200


@pytest.mark.slow
def test_a_load_does_not_stall_other_streams(start_engine: EngineFactory, tmp_path: Path) -> None:
    """Adapters of 57 MB are loaded while a client reads a stream; the gaps after that compare."""
    model = demo_model()
    paths = [
        write_adapter(tmp_path / f"large{i}", model, TARGETS, rank=512, seed=i) for i in range(2)
    ]
    engine = start_engine(
        *("--enable-lora", "--enable-admin-routes", "--max-lora-rank", "512"),
        *("--max-loras", "2", "--num-gpu-blocks-override", "1024"),
        model="demo",
    )
    engine.ready()

    def measure() -> dict[str, float]:
        stream = greedy(engine, "demo", num_tokens=1900)
        eventually(have([stream], 20), "20 tokens have arrived")
        began = time.monotonic()
        for path in paths:
            assert load(engine, path).status_code == 200
        ended = time.monotonic()
        eventually(lambda: time.monotonic() >= 2 * ended - began, "as much time has passed")
        for path in paths:
            assert post(engine, "/v1/unload_lora_adapter", lora_name=path.name).status_code == 200
        usual_s = stream.longest_gap_s(ended, math.inf)
        is_beside = stream.is_open
        stream.join()
        stall_s = stream.longest_gap_s(began, ended) - usual_s
        return {"stall_s": stall_s if is_beside else math.inf}

    within(6, measure, stall_s=0.05)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--lora-modules", "x=/nowhere/x"], "/nowhere/x does not exist"),
        pytest.param(
            ["--lora-modules", "x=DORA"],
            "use_dora is true: DoRA is not supported",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--lora-modules", "x=OTHER"],
            "lora_A.weight has shape [4, 64]",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: str(value)[-20:],
)
def test_an_adapter_in_error_ends_the_start_with_one_sentence(
    start_engine: EngineFactory, flags: list[str], reason: str, tmp_path: Path
) -> None:
    model = demo_model()
    write_adapter(tmp_path / "DORA", model, ("q_proj",), use_dora=True)
    write_adapter(tmp_path / "OTHER", torch.nn.ModuleDict(), ())
    other = torch.nn.Module()
    other.model = torch.nn.Module()
    other.model.layers = torch.nn.ModuleList([torch.nn.Module()])
    other.model.layers[0].self_attn = torch.nn.Module()
    other.model.layers[0].self_attn.q_proj = torch.nn.Linear(64, 256)
    write_adapter(tmp_path / "OTHER", other, ("q_proj",))
    flags = [flag.replace("DORA", str(tmp_path / "DORA")) for flag in flags]
    flags = [flag.replace("OTHER", str(tmp_path / "OTHER")) for flag in flags]
    engine = start_engine("--enable-lora", *flags, model="demo")
    eventually(lambda: reason in engine.log, "the reason is printed", LOAD_TIMEOUT_S)


def test_prompts_of_a_python_program_have_adapters(adapters: list[Path], tmp_path: Path) -> None:
    """The results are the same in the engine's own processes and in this one."""
    prompts, params = [[5, 6, 7]] * 3, SamplingParams(temperature=0, max_tokens=20)
    one, other = (LoRARequest(path.name, 1, str(path)) for path in adapters[:2])
    requests = [one, None, other]
    settings: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "log_level": "error"}
    found = []
    for engine in (None, InprocEngine(configure(model="null", **settings))):
        with LLM("null", engine=engine, **settings) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
            found.append([output.outputs[0].token_ids for output in outputs])
            vectors = llm.embed(prompts, use_tqdm=False, lora_request=requests)
            assert len(vectors) == 3
            missing = LoRARequest("none", 3, str(tmp_path / "none"))
            with pytest.raises(InvalidRequest, match=r"prompts\[1\].*none does not exist"):
                llm.generate(prompts, params, use_tqdm=False, lora_request=[None, missing, None])
            with pytest.raises(InvalidRequest, match="there are 1 for 3 prompts"):
                llm.generate(prompts, params, use_tqdm=False, lora_request=[one])
    assert found[0] == found[1]
    assert len(set(map(tuple, found[0]))) == 3
