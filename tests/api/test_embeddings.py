"""POST /v1/embeddings: forms of input, encodings, bounds, and ends."""

import asyncio
import base64
import json
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from api_proc.errors import ApiError
from api_proc.text.embedding_config import EmbeddingConfig, embedding_config
from protocol.api_core import ErrorCode, RequestError
from protocol.client.errors import RequestFailed
from protocol.config import ModelConfig
from protocol.config.settings import configure
from protocol.sampling import Pooling, PoolingType
from tests.api.conftest import MakeServer
from tests.api.fake_engine import FACTS, FakeClient, LiveServer, embed, ids_of, wait_until

PATH = "/v1/embeddings"
HTTP = httpx.Client(timeout=30, trust_env=False)
"""Shared: each client of httpx takes a tenth of a second to make."""


@pytest.fixture(scope="module", autouse=True)
def _closed_client() -> Iterator[None]:
    with HTTP:
        yield


@pytest.fixture(scope="module")
def module_server() -> Iterator[LiveServer]:
    with LiveServer(configure(model="null"), FakeClient(script=embed)) as live:
        yield live


@pytest.fixture
def live(module_server: LiveServer) -> LiveServer:
    module_server.client.requests.clear()
    return module_server


def write(directory: Path, files: dict[str, Any]) -> str:
    """Write files as JSON, and return the directory."""
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(json.dumps(content))
    return str(directory)


def post(live: LiveServer, **body: Any) -> httpx.Response:
    return HTTP.post(live.url + PATH, json=body)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("hello", [ids_of("hello")]),
        (["hello", "you"], [ids_of("hello"), ids_of("you")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_every_form_of_input_gets_a_vector_each_in_order(
    live: LiveServer, given: Any, prompts: list[list[int]]
) -> None:
    answer = post(live, input=given, user="gold").json()
    assert [add.prompt_token_ids for add in live.client.requests] == prompts
    assert {add.tenant for add in live.client.requests} == {"gold"}
    assert {add.sampling_params.max_tokens for add in live.client.requests} == {1}
    assert [item["index"] for item in answer["data"]] == list(range(len(prompts)))
    heads = [item["embedding"][:2] for item in answer["data"]]
    assert heads == [[prompt[0], len(prompt)] for prompt in prompts]
    num_tokens = sum(map(len, prompts))
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (answer["object"], answer["model"]) == ("list", "null")
    assert answer["data"][0]["object"] == "embedding"


def test_base64_holds_the_same_numbers(live: LiveServer) -> None:
    plain = post(live, input=["a", "b"]).json()["data"]
    packed = post(live, input=["a", "b"], encoding_format="base64").json()["data"]
    for one, other in zip(plain, packed, strict=True):
        raw = base64.b64decode(other["embedding"])
        assert list(struct.unpack("<16f", raw)) == one["embedding"]


def test_official_client_reads_the_vectors(live: LiveServer) -> None:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="null", input=["hello", "you"], dimensions=3)
        vectors = [item.embedding for item in answer.data]
        assert [[round(x, 3) for x in vector] for vector in vectors] == [
            [ids_of("h")[0], 5, 0.1],
            [ids_of("y")[0], 3, 0.1],
        ]
        assert answer.usage.prompt_tokens == 8


def test_fields_reach_the_engine(live: LiveServer) -> None:
    post(
        live,
        input="hello",
        pooling="mean",
        normalize=False,
        dimensions=4,
        truncate_prompt_tokens=2,
        priority=3,
        cache_salt="salt",
    )
    [add] = live.client.requests
    assert add.sampling_params.pooling == Pooling(PoolingType.MEAN, 4, False)
    assert add.prompt_token_ids == ids_of("lo")
    assert (add.priority, add.cache_salt) == (3, "salt")
    post(live, input="hello")
    assert live.client.requests[-1].sampling_params.pooling == Pooling()
    post(live, input="hello", use_activation=False)
    assert live.client.requests[-1].sampling_params.pooling == Pooling(normalize=False)


@pytest.mark.parametrize(
    ("name", "same", "other"),
    [
        ("embed_dtype", "float32", "float16"),
        ("endianness", "native", "big"),
        ("endianness", "little", "big"),
        ("padding", "do_not_pad", "max_length"),
        ("truncation_side", "left", "right"),
    ],
)
def test_a_field_of_another_server_that_would_change_the_vectors_is_refused(
    live: LiveServer, name: str, same: str, other: str
) -> None:
    """Not if it asks for what happens anyway."""
    assert post(live, input="a", **{name: same}).status_code == 200
    response = post(live, input="a", **{name: other})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


def test_a_chat_beside_the_input_is_refused(live: LiveServer) -> None:
    """It would not be in the vector."""
    response = post(live, input="a", messages=[{"role": "user", "content": "b"}])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": ""}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [[]]}, "input[0]", "invalid_value"),
        ({"input": ["a", 1]}, "input", "invalid_value"),
        ({"input": [1, [2]]}, "input", "invalid_value"),
        ({"input": [1000]}, "input", "invalid_value"),
        ({"input": ["a"] * 2049}, "input", "invalid_value"),
        ({"input": "x" * 513}, "input", "context_length_exceeded"),
        ({"input": [5] * 513}, "input", "context_length_exceeded"),
        ({"input": "a", "dimensions": 0}, "dimensions", "invalid_value"),
        ({"input": "a", "dimensions": 17}, "dimensions", "invalid_value"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "invalid_value"),
        ({"input": "a", "pooling": "first"}, "pooling", "invalid_value"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    ],
)
def test_bad_input_is_rejected_by_name(
    live: LiveServer, body: dict[str, Any], param: str, code: str
) -> None:
    response = HTTP.post(live.url + PATH, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)


def test_a_response_has_a_bound(make_server: MakeServer) -> None:
    facts = msgspec.structs.replace(FACTS, embedding_size=2**14)
    live = make_server(FakeClient(facts=facts, script=embed))
    response = post(live, input=[[5]] * 94)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input")
    assert "at most 93 vectors of 16384 numbers as float" in response.text
    assert not live.client.requests
    few = make_server(FakeClient(facts=facts, script=embed), max_open_bytes=1024)
    assert post(few, input=[[5]]).status_code == 429
    wait_until(lambda: few.state.budget.num_bytes == 0)


def test_a_request_that_waits_for_its_tokens_holds_what_its_answer_takes(
    make_server: MakeServer,
) -> None:
    """So two that do not fit together are not both begun."""
    num_bytes = 90 * 2**14 * 22
    facts = msgspec.structs.replace(FACTS, embedding_size=2**14)
    live = make_server(FakeClient(facts=facts, script=embed), max_open_bytes=3 * num_bytes // 2)
    encode, is_released, waiting = live.text.encode, threading.Event(), []

    async def encode_later(*args: Any, **options: Any) -> list[list[int]]:
        waiting.append(args)
        while not is_released.is_set():
            await asyncio.sleep(0.001)
        return await encode(*args, **options)

    live.text.encode = encode_later  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(post, live, input=["x"] * 90)
        wait_until(lambda: len(waiting) == 1)
        assert live.state.budget.num_bytes >= num_bytes
        second = pool.submit(post, live, input=["y"] * 90)
        wait_until(lambda: second.done() or len(waiting) == 2)
        is_released.set()
        assert [first.result().status_code, second.result().status_code] == [200, 429]
    wait_until(lambda: live.state.budget.num_bytes == 0)


def test_many_values_in_a_body_are_counted(make_server: MakeServer) -> None:
    live = make_server(FakeClient(script=embed), max_open_bytes=100_000)
    assert post(live, input=[[5]] * 2000, dimensions=1).status_code == 429
    wait_until(lambda: live.state.budget.num_bytes == 0)


def test_a_model_without_hidden_states_is_named(make_server: MakeServer) -> None:
    facts = msgspec.structs.replace(FACTS, embedding_size=0)
    response = post(make_server(FakeClient(facts=facts)), input="a")
    assert response.json()["error"]["code"] == "unsupported_model"


def test_checkpoint_decides_pooling_and_dimensions(tmp_path: Path) -> None:
    def config_of(name: str, pooling: Any, config: Any) -> EmbeddingConfig:
        files = {"config.json": config}
        if pooling:
            files["1_Pooling/config.json"] = pooling
        return embedding_config(ModelConfig(model=write(tmp_path / name, files)))

    assert config_of("plain", {}, {}) == EmbeddingConfig()
    mean = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    found = config_of("trained", mean, {"matryoshka_dimensions": [8, 16]})
    assert (found.modules.pooling, found.can_shorten, found.dimensions) == (
        PoolingType.MEAN,
        True,
        (8, 16),
    )
    assert config_of("any", {}, {"is_matryoshka": True}).can_shorten


def test_checkpoint_decides_prompts_case_and_length_of_vectors(tmp_path: Path) -> None:
    files = {
        "config.json": {},
        "modules.json": [
            {"type": "sentence_transformers.models.Transformer", "path": ""},
            {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
        ],
        "1_Pooling/config.json": {"pooling_mode": "cls"},
        "sentence_bert_config.json": {"max_seq_length": 40, "do_lower_case": True},
        "config_sentence_transformers.json": {
            "prompts": {"query": "Find: ", "document": ""},
            "default_prompt_name": "document",
        },
    }
    config = embedding_config(ModelConfig(model=write(tmp_path / "one", files)))
    assert (config.modules.pooling, config.modules.normalize) == (PoolingType.CLS, False)
    assert config.texts(["A b"], "query") == ["find: a b"]
    assert config.texts(["A b"], None) == config.texts(["A b"], "") == ["a b"]
    with pytest.raises(ApiError, match=r"no prompt 'other'; it has 'query', 'document'"):
        config.texts(["A"], "other")
    files["1_Pooling/config.json"] = {"pooling_mode": "cls", "include_prompt": False}
    config = embedding_config(ModelConfig(model=write(tmp_path / "two", files)))
    with pytest.raises(ApiError, match="leaves prompts out"):
        config.texts(["A"], "query")
    assert config.texts(["A"], "document") == ["a"]


def test_a_prompt_is_for_texts_of_a_checkpoint_that_has_it(live: LiveServer) -> None:
    for body in ({"input": "a", "prompt_name": "query"}, {"input": [5], "prompt_name": "query"}):
        error = post(live, **body).json()["error"]
        assert (error["param"], error["code"]) == ("prompt_name", "invalid_value")


def test_a_text_may_fill_the_context(live: LiveServer) -> None:
    """No output token follows it."""
    for text in ("x" * FACTS.max_model_len, [5] * FACTS.max_model_len):
        assert post(live, input=text).status_code == 200
    message = post(live, input="x" * (FACTS.max_model_len + 1)).json()["error"]["message"]
    assert message.endswith(f"context of {FACTS.max_model_len} tokens must hold it")


def test_a_failed_vector_fails_the_request(make_server: MakeServer) -> None:
    client = FakeClient(script=embed)
    live = make_server(client)
    client.is_paused = True
    error = RequestError(ErrorCode.COMPUTATION_FAILED, "not finite")
    responses: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: responses.append(post(live, input=["a", "b"])))
    thread.start()
    wait_until(lambda: len(client.requests) == 2)
    live.call(client.receivers[2].fail, RequestFailed(error))
    live.call(client._scripts.pop, 2)
    client.is_paused = False
    thread.join(timeout=30)
    assert responses[0].status_code == 500
    assert responses[0].json()["error"]["code"] == error.code
    assert live.call(len, live.state.open_requests) == 0


def test_a_client_that_disconnects_aborts_its_vectors(make_server: MakeServer) -> None:
    client = FakeClient(script=embed)
    live = make_server(client)
    client.is_paused = True
    with pytest.raises(httpx.ReadTimeout):
        HTTP.post(live.url + PATH, json={"input": ["a", "b"]}, timeout=0.3)
    wait_until(lambda: client.cancelled == [1, 2])
    wait_until(lambda: not len(live.state.open_requests))
    wait_until(lambda: live.state.budget.num_bytes == 0)
    assert live.state.metrics.num_finished["abort"] == 2


def test_abort_by_id_ends_requests_and_their_sequences(make_server: MakeServer) -> None:
    """Embeddings, a whole response, and a stream that has not begun."""
    client = FakeClient()
    live = make_server(client)
    client.is_paused = True
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "one": (PATH, {"input": ["a", "b"]}),
        "two": ("/v1/completions", {"prompt": "hi", "n": 2}),
        "three": ("/v1/completions", {"prompt": "hi", "stream": True}),
        "four": ("/v1/completions", {"prompt": "hi"}),
    }
    responses: dict[str, httpx.Response] = {}

    def ask(name: str) -> None:
        path, body = bodies[name]
        headers = {"x-request-id": name}
        responses[name] = HTTP.post(live.url + path, json=body, headers=headers, timeout=30)

    threads = [threading.Thread(target=ask, args=(name,)) for name in bodies]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(client.requests) == 6)
    slots = HTTP.get(live.url + "/slots").json()
    assert sorted(slot["path"] for slot in slots) == [*["/v1/completions"] * 3, PATH]
    assert {slot["state"] for slot in slots} == {"waiting"}
    assert sum(slot["num_sequences"] for slot in slots) == 6
    assert not any("request_id" in slot for slot in slots)
    assert HTTP.get(live.url + "/load").json()["server_load"] == 4
    names = ["one", "cmpl-two", "cmpl-three", "five"]
    answer = HTTP.post(live.url + "/abort_requests", json={"request_ids": names}).json()
    assert sorted(answer["aborted"]) == ["cmpl-three", "cmpl-two", "one"]
    for thread in threads[:3]:
        thread.join(timeout=30)
    ended = [responses[name] for name in ("one", "two", "three")]
    assert [response.status_code for response in ended] == [409] * 3
    assert {response.json()["error"]["code"] for response in ended} == {"request_aborted"}
    assert len(client.cancelled) == 5
    client.is_paused = False
    threads[3].join(timeout=30)
    assert responses["four"].status_code == 200
    assert HTTP.get(live.url + "/slots").json() == []


def test_abort_of_a_stream_that_has_begun_ends_it_with_an_error(make_server: MakeServer) -> None:
    client = FakeClient()
    live = make_server(client, keep_alive_interval_s=0.02)
    client.is_paused = True
    body = {"prompt": "hi", "stream": True}
    url = live.url + "/v1/completions"
    with httpx.stream("POST", url, json=body, headers={"x-request-id": "mine"}) as response:
        lines = response.iter_lines()
        assert next(lines) == ": keep-alive"
        HTTP.post(live.url + "/abort_requests", json={"request_ids": ["mine"]})
        events = [line for line in lines if line.startswith("data: ")]
    assert len(events) == 2
    assert '"code":"request_aborted"' in events[0]
    assert events[1] == "data: [DONE]"


def test_admins_see_the_ids(make_server: MakeServer) -> None:
    client = FakeClient()
    live = make_server(client, enable_admin_routes=True)
    client.is_paused = True
    headers = {"x-request-id": "mine"}
    body = {"prompt": "hi", "max_tokens": 1}
    thread = threading.Thread(
        target=lambda: HTTP.post(live.url + "/v1/completions", json=body, headers=headers)
    )
    thread.start()
    wait_until(lambda: len(client.requests) == 1)
    [slot] = HTTP.get(live.url + "/slots").json()
    assert slot["request_id"] == "mine"
    assert (slot["num_prompt_tokens"], slot["num_output_tokens"]) == (2, 0)
    client.is_paused = False
    thread.join(timeout=30)


def test_many_vectors_come_in_pieces(live: LiveServer) -> None:
    prompts = [[5 + n % 900, *[7] * (n % 3)] for n in range(100)]
    data = post(live, input=prompts).json()["data"]
    assert [item["embedding"][:2] for item in data] == [[p[0], len(p)] for p in prompts]
