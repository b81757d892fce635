"""Health, model list, metrics, tokenize and detokenize."""

import re
import threading
import time

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from api_proc.metrics.histogram import Histogram
from api_proc.metrics.names import VLLM_NAMES
from api_proc.state import STATUS_FRESH_S
from protocol.api_core import LOOP_BUCKETS_S, EngineState
from protocol.config.settings import configure
from protocol.lifecycle import HEALTH_HOLDS_S, REPEAT_S, Health
from protocol.process.version import version
from tests.api.conftest import MakeServer
from tests.api.fake_engine import (
    FACTS,
    QUEUE_TIME_S,
    FakeClient,
    LiveServer,
    ids_of,
    wait_until,
)


@pytest.mark.parametrize(
    ("state", "ready", "health"),
    [
        (EngineState.STARTING, 503, 503),
        (EngineState.READY, 200, 200),
        (EngineState.RECOVERING, 503, 200),
        (EngineState.DRAINING, 503, 200),
    ],
)
def test_health_follows_the_engine(
    make_server: MakeServer, state: EngineState, ready: int, health: int
) -> None:
    client = FakeClient()
    client.report(state)
    live = make_server(client)
    response = httpx.get(live.url + "/readyz")
    assert (response.status_code, response.json()["state"]) == (ready, state)
    assert httpx.get(live.url + "/health").status_code == health
    for method in ("GET", "POST"):
        assert httpx.request(method, live.url + "/ping").status_code == health
    assert httpx.get(live.url + "/livez").status_code == 200


def test_a_server_that_finishes_its_requests_is_draining_before_its_core(
    make_server: MakeServer,
) -> None:
    live = make_server()
    live.call(live.state.drain)
    answer = httpx.get(live.url + "/readyz")
    body = answer.json()
    assert (answer.status_code, body["state"], body["draining"]) == (503, "draining", True)


def test_silent_engine_is_not_healthy(make_server: MakeServer) -> None:
    client = FakeClient()
    client.silent_since = time.monotonic() - STATUS_FRESH_S - 1
    live = make_server(client)
    response = httpx.get(live.url + "/readyz")
    assert response.status_code == 503
    assert response.json()["status_age_s"] > STATUS_FRESH_S
    assert httpx.get(live.url + "/health").status_code == 503


@pytest.mark.parametrize("reason", ["", "plain matrix products for dtype float16"])
def test_readiness_reports_exact_resume(make_server: MakeServer, reason: str) -> None:
    facts = msgspec.structs.replace(FACTS, exact_resume=not reason, exact_resume_reason=reason)
    live = make_server(FakeClient(facts=facts))
    answer = httpx.get(live.url + "/readyz").json()
    assert (answer["exact_resume"], answer["exact_resume_reason"]) == (not reason, reason)


def test_unknown_engine_is_not_ready(make_server: MakeServer) -> None:
    live = make_server(FakeClient(facts=None))
    response = httpx.get(live.url + "/readyz")
    assert response.status_code == 503
    assert response.json() == {
        "ready": False,
        "state": "starting",
        "draining": False,
        "status_age_s": None,
        "journal": "off",
        "exact_resume": None,
        "exact_resume_reason": None,
        "decoder": None,
        "speculation": None,
        "quantization": None,
        "kv_cache_dtype": None,
        "api_servers": 1,
        "api_servers_ready": 0,
        "replicas": ["starting"],
        "other_models": [],
        "fingerprints": [""],
    }
    assert httpx.get(live.url + "/v1/models").json()["data"][0]["max_model_len"] is None


def test_draining_rejects_new_requests_and_finishes_old_ones(make_server: MakeServer) -> None:
    client = FakeClient()
    live = make_server(client)
    client.is_paused = True
    body = {"prompt": "hi", "stream": True, "max_tokens": 3}
    texts: list[str] = []

    def ask() -> None:
        texts.append(httpx.post(live.url + "/v1/completions", json=body).text)

    old = threading.Thread(target=ask)
    old.start()
    wait_until(lambda: len(client.requests) == 1)
    live.call(live.state.drain)
    assert httpx.get(live.url + "/readyz").status_code == 503
    refused = httpx.post(live.url + "/v1/completions", json=body)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert len(live.state.open_requests) == 1
    client.is_paused = False
    old.join(timeout=30)
    assert "[DONE]" in texts[0]
    wait_until(lambda: not len(live.state.open_requests))


def test_a_degraded_engine_rejects_requests_until_the_report_expires(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of its end may be lost; until then reports are repeated."""
    live = make_server(FakeClient())
    body = {"prompt": "hi", "max_tokens": 1}
    live.call(live.state.set_health, Health(True, 3.5))
    assert httpx.get(live.url + "/readyz").json()["state"] == "degraded"
    refused = httpx.post(live.url + "/v1/completions", json=body)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "4")
    assert refused.json()["error"]["code"] == "degraded"
    assert REPEAT_S < HEALTH_HOLDS_S / 2
    monkeypatch.setattr("api_proc.state.HEALTH_HOLDS_S", 0.0)
    assert httpx.get(live.url + "/readyz").json()["state"] == "ready"
    assert httpx.post(live.url + "/v1/completions", json=body).status_code == 200


def test_the_served_model_is_listed_and_others_are_not_found(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    [card] = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("null", "model", 512)
    assert http.get("/v1/models/null").json() == card
    assert http.get("/v1/models/org/other").json()["error"]["code"] == "model_not_found"


def test_the_version_is_that_of_the_package(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": version()}


def test_a_model_is_served_under_its_names(make_server: MakeServer) -> None:
    live = make_server(served_model_name="team/chat")
    assert httpx.get(live.url + "/v1/models/team/chat").status_code == 200
    for name, status in (("team/chat", 200), ("null", 200), ("other", 404)):
        body = {"model": name, "prompt": "x"}
        assert httpx.post(live.url + "/v1/completions", json=body).status_code == status


def test_the_root_of_a_model_is_what_was_asked_for() -> None:
    """It is not the directory of a cache that has the model. Clients may use that name, too."""
    name = "org/model:Q4_K_M"
    config = configure(model="null", served_model_name="chat")
    model = msgspec.structs.replace(config.model, given_model=name)
    with LiveServer(msgspec.structs.replace(config, model=model), FakeClient()) as live:
        [card] = httpx.get(live.url + "/v1/models").json()["data"]
        assert (card["id"], card["root"]) == ("chat", name)
        body = {"model": name, "prompt": "x"}
        assert httpx.post(live.url + "/v1/completions", json=body).json()["model"] == "chat"


def test_the_template_decides_on_the_roles_of_messages(http: httpx.Client) -> None:
    """Some templates have roles of their own, such as `document` or `ipython`."""
    messages = [{"role": "document 1", "content": "x"}, {"role": "user", "content": "y"}]
    answer = http.post("/apply-template", json={"messages": messages}).json()
    assert answer == {"prompt": "document 1: x\nuser: y\nassistant: "}
    assert http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    for role in ("", "x" * 65, 5, None):
        refused = http.post("/apply-template", json={"messages": [{"role": role, "content": "x"}]})
        assert refused.json()["error"]["param"] == "messages[0].role"


def test_an_empty_name_stands_for_the_model(http: httpx.Client) -> None:
    """As in vLLM: programs send it where no model is set."""
    body = {"model": "", "prompt": "x", "max_tokens": 1}
    named = {name: http.post("/v1/completions", json=body | {"model": name}) for name in ("", None)}
    assert named[""].status_code == 200
    assert named[""].json()["model"] == named[None].json()["model"]
    assert http.post("/tokenize", json={"model": "", "prompt": "x"}).status_code == 200


def test_detokenize_returns_the_text_that_was_tokenized(http: httpx.Client) -> None:
    body = {"prompt": "hi é", "return_token_strs": True}
    tokenized = http.post("/tokenize", json=body).json()
    assert tokenized["tokens"] == ids_of("hi é")
    assert tokenized["count"] == len(tokenized["token_strs"]) == 5
    assert tokenized["max_model_len"] == 512
    back = http.post("/detokenize", json={"tokens": tokenized["tokens"]}).json()
    assert back == {"prompt": "hi é"}
    messages = [{"role": "user", "content": "x"}]
    chat = http.post("/tokenize", json={"messages": messages}).json()
    assert chat["tokens"] == ids_of("user: x\nassistant: ")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("/detokenize", {"tokens": [1000]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [5] * 513}, "tokens"),
    ],
)
def test_bad_bodies_of_tokenize_are_rejected(
    http: httpx.Client, path: str, body: object, param: str
) -> None:
    response = http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_tokenizer_info_has_the_chat_template(http: httpx.Client) -> None:
    assert "chat_template" in http.get("/tokenizer_info").json()


def test_metrics_count_requests(make_server: MakeServer) -> None:
    client = FakeClient()
    live = make_server(client)
    body = {"prompt": "hello", "max_tokens": 10}
    httpx.post(live.url + "/v1/completions", json=body)
    httpx.post(live.url + "/v1/completions", json=body | {"stop": "quick", "n": 2})
    buckets = [0] * (len(LOOP_BUCKETS_S) + 1)
    buckets[0], buckets[-1] = 7, 1
    client.report(
        EngineState.READY,
        num_running_reqs=3,
        kv_cache_usage=0.5,
        num_preemptions=4,
        loop_seconds_buckets=buckets,
        loop_seconds_sum=0.25,
        step_tokens_buckets=[3, 2, *[0] * 11, 1],
        step_tokens_sum=20_010,
    )
    text = httpx.get(live.url + "/metrics").text
    values = {
        (sample.name.removeprefix("troika")[1:], *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }

    def value(name: str, **labels: str) -> float:
        return values[(name, *sorted({"model_name": "null", **labels}.items()))]

    assert value("num_requests_running") == 3
    assert value("kv_cache_usage_perc") == 0.5
    assert value("num_preemptions_total") == 4
    assert value("request_success_total", finished_reason="length") == 1
    assert value("request_success_total", finished_reason="stop") == 2
    assert value("time_to_first_token_seconds_count") == 3
    assert value("inter_token_latency_seconds_count") == 9 + 2 * 8
    assert value("request_generation_tokens_sum") == 10 + 2 * 9
    assert value("request_prompt_tokens_sum") == 10
    assert value("request_params_n_sum") == 3
    assert value("request_queue_time_seconds_sum") == 3 * QUEUE_TIME_S
    for part in ("prefill", "decode", "inference"):
        assert value(f"request_{part}_time_seconds_count") == 3
    assert value("request_prefill_kv_computed_tokens_sum") == 3 * 5
    assert value("request_max_num_generation_tokens_sum") == 10 + 9
    assert value("core_loop_seconds_count") == 8
    assert value("core_loop_seconds_bucket", le="0.0001") == 7
    assert value("core_loop_seconds_sum") == 0.25
    assert value("iteration_tokens_total_count") == 6
    assert value("iteration_tokens_total_bucket", le="8") == 5
    assert value("iteration_tokens_total_bucket", le="16384") == 5
    assert value("iteration_tokens_total_sum") == 20_010
    assert vllm_names(text) == VLLM_NAMES - {"lora_requests_info"}
    assert "# TYPE troika_engine_steps_total counter" in text
    [info] = [line for line in text.splitlines() if line.startswith("troika_engine_info{")]
    assert f'decoder="{FACTS.decoder}"' in info
    assert f'quantization="{FACTS.quantization}"' in info
    assert f'kv_cache_dtype="{FACTS.kv_cache_dtype}"' in info
    assert f'num_gpu_blocks="{FACTS.num_gpu_blocks}"' in info
    assert info.endswith(" 1.0")
    [cache] = [line for line in text.splitlines() if line.startswith("troika:cache_config_info{")]
    for label in ('block_size="16"', 'cache_dtype="auto"', 'enable_prefix_caching="True"'):
        assert label in cache
    assert f'num_gpu_blocks="{FACTS.num_gpu_blocks}"' in cache


def vllm_names(text: str) -> set[str]:
    """Return the names that vLLM has, too; those of counters without `_total`."""
    kinds = dict(re.findall(r"# TYPE troika:(\S+) (\S+)", text))
    counters = {name for name in kinds if kinds[name] == "counter"}
    return {name.removesuffix("_total") if name in counters else name for name in kinds}


def test_adapters_in_use_are_labels(make_server: MakeServer) -> None:
    client = FakeClient()
    live = make_server(client, enable_lora=True, max_loras=2)
    adapters = {"running_lora_adapters": ["a", "b"], "waiting_lora_adapters": ["b"]}
    client.report(EngineState.READY, **adapters)
    text = httpx.get(live.url + "/metrics").text
    assert vllm_names(text) == VLLM_NAMES
    [line] = [line for line in text.splitlines() if line.startswith("troika:lora_requests_info{")]
    labels, _, seconds = line.rpartition(" ")
    for label in (*('max_lora="2"', 'running_lora_adapters="a,b"', 'waiting_lora_adapters="b"'),):
        assert label in labels
    assert abs(float(seconds) - time.time()) < 60


def test_the_share_of_state_blocks_is_a_gauge_with_recurrent_layers(
    make_server: MakeServer,
) -> None:
    client = FakeClient()
    live = make_server(client)
    client.report(EngineState.READY)
    assert "state_cache" not in httpx.get(live.url + "/metrics").text
    client.report(EngineState.READY, state_cache_usage=0.25)
    gauge = 'troika_state_cache_usage_perc{model_name="null"} 0.25'
    assert gauge in httpx.get(live.url + "/metrics").text.splitlines()


def test_histogram_counts_by_upper_bound() -> None:
    histogram = Histogram("seconds", "Duration.", (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1", 2), ("2", 3), ("+Inf", 4)]
    assert histogram.sum == 12.0
