"""An encoder and a cross-encoder in an engine: their answers are the same over kill -9."""

import json
import math
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, AutoModelForSequenceClassification, BertConfig

from api_proc.llm import LLM, engines
from protocol.client.errors import InvalidRequest
from protocol.lifecycle import Role
from scripts.testing import Engine, EngineFactory, eventually
from tests.worker.sampling.pooling_checkpoints import (
    ENCODER,
    PoolingArchitecture,
    build,
    modules_of,
)

CLS, SEP, FIRST_WORD = 1, 2, 3
NUM_WORDS = 400
DOCUMENTS = [
    " ".join(f"w{(7 * number + i * i) % NUM_WORDS}" for i in range(1 + 5 * number % 190))
    for number in range(240)
]
QUERY = "w3 w1 w4"
FLAGS = ("--dtype", "float32", "--num-threads", "1", "--max-num-seqs", "4")
LOAD_TIMEOUT_S = 60.0


def write_tokenizer(directory: Path) -> None:
    """Write BERT's template around words."""
    words = ["[PAD]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(NUM_WORDS))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    made.save(str(directory / "tokenizer.json"))


def write_cross_encoder(directory: Path) -> None:
    config = BertConfig(**ENCODER, num_labels=1)
    build(directory, PoolingArchitecture("", AutoModelForSequenceClassification, lambda: config))
    write_tokenizer(directory)


class RunningProcesses:
    """Stands for the processes that an LLM starts: those of an engine that runs already."""

    def __init__(self, engine: Engine) -> None:
        self.run_dir = engine.run_dir
        self.addresses = [engine.address]
        self.is_fetching = False
        self.pidfd = os.pidfd_open(engine.process.pid)

    def check(self) -> None:
        """The engine's test notices its end."""

    def close(self) -> None:
        """The engine lives on."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.pidfd = -1


def check_program(llm: LLM, scores: list[float]) -> None:
    """Compare the results of a cross-encoder in a program with the scores over HTTP."""
    found = llm.score(QUERY, DOCUMENTS[: len(scores)], use_tqdm=False)
    assert [one.outputs.score for one in found] == scores
    [label] = llm.classify(DOCUMENTS[3], use_tqdm=False)
    assert 0.0 < label.outputs.probs[0] < 1.0
    assert llm.encode(DOCUMENTS[3], use_tqdm=False)[0].outputs.data == label.outputs.probs
    with pytest.raises(InvalidRequest, match="no vectors"):
        llm.embed(QUERY)
    with pytest.raises(InvalidRequest, match="must have one or the 2"):
        llm.score([QUERY] * 3, DOCUMENTS[:2])


def ids_of(text: str) -> list[int]:
    return [FIRST_WORD + int(word[1:]) for word in text.split()]


def killed(engine: Engine, path: str, **body: Any) -> Any:
    """Kill worker and core while a request is computed, and return its answer."""
    answers: list[Any] = []

    def ask() -> None:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(engine.url() + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=LOAD_TIMEOUT_S) as response:
            answers.append(json.loads(response.read()))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    for role in (Role.WORKER, Role.CORE):
        eventually(lambda: engine.get("/slots"), "the request is open")
        epoch = engine.row(role).epoch
        os.kill(engine.pid(role), signal.SIGKILL)
        eventually(lambda r=role, e=epoch: engine.row(r).epoch > e, "its successor serves")
        assert not answers, "killed in the middle"
    thread.join(timeout=LOAD_TIMEOUT_S)
    return answers[0]


def refusal(ask: Callable[[], Any]) -> str:
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask()
    with caught.value as error:
        assert error.code == 400
        return error.read().decode()


@pytest.mark.timeout(180)
@torch.inference_mode()
def test_a_cross_encoder_scores_the_same_over_kill_9(
    start_engine: EngineFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores come over HTTP; a program has the same results."""
    write_cross_encoder(tmp_path)
    engine = start_engine(*FLAGS, model=str(tmp_path))
    assert engine.readiness()["exact_resume"]
    undisturbed = engine.post("/v1/score", text_1=QUERY, text_2=DOCUMENTS)["data"]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    for number in (0, 1, 100, 239):
        query, document = ids_of(QUERY), ids_of(DOCUMENTS[number])
        ids = [CLS, *query, SEP, *document, SEP]
        types = [0] * (len(query) + 2) + [1] * (len(document) + 1)
        score = model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types]))
        want = 1 / (1 + math.exp(-float(score.logits)))
        assert undisturbed[number]["score"] == pytest.approx(want, rel=1e-3)
    again = killed(engine, "/v1/score", text_1=QUERY, text_2=DOCUMENTS * 4)
    scores = [item["score"] for item in undisturbed]
    assert [item["score"] for item in again["data"]] == scores * 4
    ranked = engine.post("/v2/rerank", query=QUERY, documents=DOCUMENTS, top_n=3)["results"]
    assert [item["relevance_score"] for item in ranked] == sorted(scores, reverse=True)[:3]
    assert "generates no text" in refusal(lambda: engine.post("/v1/completions", prompt="w1"))
    monkeypatch.setattr(engines, "EngineProcesses", lambda config: RunningProcesses(engine))
    with LLM(str(tmp_path), dtype="float32") as llm:
        check_program(llm, scores[:3])


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_cross_encoder_in_a_program_scores_as_over_http(
    start_engine: EngineFactory, tmp_path: Path
) -> None:
    write_cross_encoder(tmp_path)
    engine = start_engine(*FLAGS, model=str(tmp_path))
    engine.readiness()
    scores = engine.post("/v1/score", text_1=QUERY, text_2=DOCUMENTS[:3])["data"]
    engine.close()
    with LLM(str(tmp_path), dtype="float32", num_threads=1, standby_workers=0) as llm:
        check_program(llm, [item["score"] for item in scores])


@pytest.mark.slow
@pytest.mark.timeout(180)
@torch.inference_mode()
def test_an_encoder_embeds_the_same_over_kill_9(
    start_engine: EngineFactory, tmp_path: Path
) -> None:
    files = modules_of("mean", ("Normalize", "2_Normalize"))
    build(tmp_path, PoolingArchitecture("", AutoModel, lambda: BertConfig(**ENCODER), files))
    write_tokenizer(tmp_path)
    engine = start_engine(*FLAGS, "--max-num-batched-tokens", "64", model=str(tmp_path))
    engine.readiness()
    undisturbed = engine.post("/v1/embeddings", input=DOCUMENTS)["data"]
    model = AutoModel.from_pretrained(tmp_path).eval()
    for number in (0, 100, 239):
        ids = torch.tensor([[CLS, *ids_of(DOCUMENTS[number]), SEP]])
        mean = model(input_ids=ids).last_hidden_state[0].mean(0)
        got = torch.tensor(undisturbed[number]["embedding"])
        torch.testing.assert_close(got, mean / mean.norm(), rtol=1e-3, atol=1e-4)
    again = killed(engine, "/v1/embeddings", input=DOCUMENTS * 4)
    vectors = [item["embedding"] for item in undisturbed]
    assert [item["embedding"] for item in again["data"]] == vectors * 4
    longest = " ".join(["w1"] * 254)  # with two special tokens: all positions of the model
    assert engine.post("/v1/embeddings", input=longest)["usage"]["prompt_tokens"] == 256
    assert "must hold it" in refusal(lambda: engine.post("/v1/embeddings", input=longest + " w1"))
    assert "unsupported_model" in refusal(lambda: engine.post("/classify", input="w1"))
