"""POST /score, /rerank and /classify: forms of input, activations, bounds, and refusals."""

import asyncio
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from api_proc.text.label_config import LabelConfig, label_config
from api_proc.text.processor import TextProcessor
from api_proc.text.tokenizer import EncodeOptions, HfTokenizer, TooManyTokens
from protocol.config import ModelConfig
from protocol.config.settings import configure
from protocol.sampling import PoolingType
from tests.api.fake_engine import FACTS, FakeClient, LiveServer, embed, ids_of
from tests.api.scored_prompts import headed, labels, score

HTTP = httpx.Client(timeout=30, trust_env=False)


@pytest.fixture(scope="module", autouse=True)
def _closed_client() -> Iterator[None]:
    with HTTP:
        yield


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with LiveServer(configure(model="null"), FakeClient(facts=headed(1), script=score)) as live:
        yield live


@pytest.fixture(scope="module")
def embedding() -> Iterator[LiveServer]:
    with LiveServer(configure(model="null"), FakeClient(script=embed)) as live:
        yield live


def post(live: LiveServer, path: str, **body: Any) -> httpx.Response:
    return HTTP.post(live.url + path, json=body)


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    ("first", "second"),
    [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")],
)
def test_each_pair_gets_its_score(live: LiveServer, path: str, first: str, second: str) -> None:
    live.client.requests.clear()
    answer = post(live, path, **{first: "a", second: ["a", "b", "bbb"]}).json()
    assert [item["score"] for item in answer["data"]] == [sigmoid(2), sigmoid(0), sigmoid(-2)]
    assert [(item["index"], item["object"]) for item in answer["data"]] == [
        (number, "score") for number in range(3)
    ]
    assert answer["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
    assert (answer["object"], answer["model"]) == ("list", "null")
    poolings = [add.sampling_params.pooling for add in live.client.requests]
    assert {(one.type, one.normalize) for one in poolings if one} == {(PoolingType.CLS, False)}
    answer = post(live, path, **{first: ["a", "b"], second: ["a", "b"]}, use_activation=False)
    assert [item["score"] for item in answer.json()["data"]] == [2.0, -2.0]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_sorted_by_relevance(live: LiveServer, path: str) -> None:
    documents = ["b", {"text": "aa"}, "a", "aa"]
    answer = post(live, path, query="a", documents=documents).json()
    assert [item["index"] for item in answer["results"]] == [1, 3, 2, 0]
    best = answer["results"][0]
    assert (best["document"], best["relevance_score"]) == ({"text": "aa"}, sigmoid(3))
    assert answer["usage"]["total_tokens"] == 10
    answer = post(live, path, query="a", documents=documents, top_n=2, return_documents=False)
    assert answer.json()["results"] == [
        {"index": number, "relevance_score": sigmoid(3)} for number in (1, 3)
    ]


def test_variables_reach_the_template_of_pairs(checkpoint: Path, tmp_path: Path) -> None:
    template = tmp_path / "pair.jinja"
    contents = "{% for m in messages %}{{ m.content }}{% endfor %}"
    template.write_text("{{ instruction }}{{ x }}" + contents)
    config = configure(model=str(checkpoint), chat_template=str(template))
    pair = {"text_1": "b", "text_2": "c"}
    with LiveServer(config, FakeClient(facts=headed(1), script=score)) as live:
        assert post(live, "/score", **pair, instruction="a").status_code == 200
        kwargs = {"instruction": "k", "x": "x"}
        assert post(live, "/score", **pair, instruction="a", chat_template_kwargs=kwargs)
        prompts = [list(add.prompt_token_ids) for add in live.client.requests]
        found = [asyncio.run(live.text.decode(prompt)) for prompt in prompts]
        assert found == ["<s>abc", "<s>kxbc"]
        response = post(live, "/score", **pair, chat_template_kwargs={"messages": []})
        assert response.json()["error"]["param"] == "chat_template_kwargs.messages"


def test_fields_that_would_change_the_scores_are_refused(
    live: LiveServer, embedding: LiveServer
) -> None:
    """No template renders the pairs of these models."""
    pair = {"text_1": "a", "text_2": "b"}
    for server in (live, embedding):
        for fields in ({"instruction": "x"}, {"chat_template_kwargs": {"x": 1}}):
            response = post(server, "/score", **pair, **fields)
            assert response.status_code == 400
            assert response.json()["error"]["param"] in fields
    for name in ("max_tokens_per_doc", "max_tokens_per_query"):
        assert post(live, "/score", **pair, **{name: 0}).status_code == 200
        response = post(live, "/score", **pair, **{name: 5})
        assert response.json()["error"]["param"] == name
        assert "truncate_prompt_tokens" in response.json()["error"]["message"]


def test_an_embedding_model_scores_by_the_cosine(embedding: LiveServer) -> None:
    embedding.client.requests.clear()
    answer = post(embedding, "/score", text_1="a", text_2=["b", "cc"]).json()
    prompts = [add.prompt_token_ids for add in embedding.client.requests]
    assert prompts == [ids_of("a"), ids_of("b"), ids_of("cc")]
    vectors = [
        [float(ids[0]), float(len(ids)), *struct.unpack("<14f", struct.pack("<14f", *[0.1] * 14))]
        for ids in prompts
    ]
    want = [
        math.fsum(x * y for x, y in zip(vectors[0], other, strict=True)) for other in vectors[1:]
    ]
    assert [item["score"] for item in answer["data"]] == pytest.approx(want)


def test_labels_have_names_and_probabilities() -> None:
    with LiveServer(configure(model="null"), FakeClient(facts=headed(3), script=labels)) as live:
        answer = post(live, "/classify", input=["hi", "x"]).json()
        assert [item["label"] for item in answer["data"]] == ["LABEL_1", "LABEL_1"]
        assert [sum(item["probs"]) for item in answer["data"]] == pytest.approx([1.0, 1.0])
        assert answer["data"][0]["num_classes"] == 3
        raw = post(live, "/classify", input="hi", use_activation=False).json()
        assert raw["data"][0]["probs"] == [0.0, 2.0, -1.0]
        error = post(live, "/score", text_1="a", text_2="b").json()["error"]
        assert (error["code"], "3 labels" in error["message"]) == ("unsupported_model", True)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {}, "text_1"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": "a", "documents": "b"}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a", "text_2": ["a"] * 2049}, "text_2"),
        ("/score", {"text_1": "a", "text_2": ""}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "x" * 512}, "text_2"),
        ("/score", {"text_1": "x" * 512, "text_2": "a"}, "text_1"),
        ("/score", {"queries": ["x" * 512], "items": ["a"]}, "queries"),
        ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 0}, None),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": [{"text": ""}]}, "documents[0].text"),
        ("/rerank", {"query": "a", "documents": ["x" * 512]}, "documents"),
        ("/rerank", {"query": "x" * 512, "documents": ["a", "b"]}, "query"),
        ("/classify", {}, "input"),
        ("/classify", {"input": []}, "input"),
    ],
)
def test_bad_input_is_rejected_by_name(
    live: LiveServer, path: str, body: dict[str, Any], param: str | None
) -> None:
    response = HTTP.post(live.url + path, json=body)
    found = response.json()["error"]["param"]
    assert (response.status_code, found) == (400, param or "truncate_prompt_tokens")


@pytest.mark.parametrize("field", ["text_1", "text_2"])
def test_a_text_that_is_too_long_for_a_vector_is_named(embedding: LiveServer, field: str) -> None:
    body = {"text_1": "x" * 300, "text_2": ["y" * 300, "b"], field: "z" * 600}
    error = post(embedding, "/score", **body).json()["error"]
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")


def test_routes_refuse_models_of_other_kinds(live: LiveServer, embedding: LiveServer) -> None:
    for server, path, body in (
        (embedding, "/classify", {"input": "a"}),
        (live, "/v1/embeddings", {"input": "a"}),
    ):
        error = post(server, path, **body).json()["error"]
        assert error["code"] == "unsupported_model"


def test_a_model_without_output_layer_refuses_to_generate() -> None:
    client = FakeClient(facts=headed(1), script=score)
    with LiveServer(configure(model="null"), client) as live:
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/responses", {"input": "a"}),
        ):
            response = post(live, path, **body)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "unsupported_model")
            assert "generates no text" in error["message"]
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
        response = post(live, "/v1/messages", **body)
        assert response.status_code == 400
        assert "generates no text" in response.text
        assert HTTP.get(live.url + "/readyz").status_code == 200
        [card] = HTTP.get(live.url + "/v1/models").json()["data"]
        assert card["max_model_len"] == FACTS.max_model_len


def test_a_model_without_output_layer_refuses_chats_even_without_a_template() -> None:
    config = configure(model="null")
    text = TextProcessor.load(config.model, config.api.tokenizer_pool_size)
    text.template = text.template_with_tools = None
    messages = [{"role": "user", "content": "a"}]
    with LiveServer(config, FakeClient(facts=headed(1), script=score), text) as live:
        for path, body in (
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/responses", {"input": "a"}),
            ("/v1/messages", {"messages": messages, "max_tokens": 5}),
        ):
            response = post(live, path, **body)
            assert response.status_code == 400
            assert "generates no text" in response.text


@pytest.mark.parametrize(
    ("config", "scores", "want"),
    [
        ({}, [0.0], [0.5]),
        ({}, [0.0, 0.0], [0.5, 0.5]),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            [3.0],
            [3.0],
        ),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, [1.0], [math.tanh(1)]),
        ({"problem_type": "regression"}, [3.0], [3.0]),
        ({"problem_type": "multi_label_classification"}, [0.0, 0.0], [0.5, 0.5]),
        ({"problem_type": "single_label_classification"}, [800.0, 800.0], [0.5, 0.5]),
        ({}, [-900.0], [0.0]),
    ],
)
def test_the_checkpoint_names_the_activation(
    tmp_path: Path, config: dict[str, Any], scores: list[float], want: list[float]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config | {"id2label": {"0": "yes"}}))
    found = label_config(ModelConfig(model=str(tmp_path)))
    assert found.activate(scores) == pytest.approx(want)
    assert (found.name(0), LabelConfig().name(1)) == ("yes", "LABEL_1")


@pytest.fixture
def tokenizer(tmp_path: Path) -> HfTokenizer:
    """One token a word, as BERT's: [CLS] first [SEP] second [SEP]."""
    words = ["[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(20))]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    made.save(str(tmp_path / "tokenizer.json"))
    return HfTokenizer(tmp_path, {})


def test_pairs_have_types_and_are_cut_at_their_ends(tokenizer: HfTokenizer) -> None:
    first, second = "w0 w1 w2", "w3 w4 w5 w6 w7"
    whole = EncodeOptions(True, 99, None, 0)
    assert tokenizer.encode_pair(first, second, whole) == ([1, 3, 4, 5, 2, 6, 7, 8, 9, 10, 2], 5)
    cut = EncodeOptions(True, 99, 8, 0)
    assert tokenizer.encode_pair(first, second, cut) == ([1, 3, 4, 5, 2, 6, 7, 2], 5)
    assert tokenizer.encode_pair(second, first, cut) == ([1, 6, 7, 8, 2, 3, 4, 2], 5)
    with pytest.raises(TooManyTokens):
        tokenizer.encode_pair(first, second, EncodeOptions(True, 10, None, 0))
    assert tokenizer.encode(second, cut._replace(keep_last=4)) == [1, 9, 10, 2]
