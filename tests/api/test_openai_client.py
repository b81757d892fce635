"""OpenAI's own client works by changing its base URL: answers, streams, usage, errors."""

from collections.abc import Iterator

import openai
import pytest

from tests.api.conftest import MakeServer
from tests.api.fake_engine import FakeClient, LiveServer
from tests.api.test_streaming import failing_after

MODEL = "null"


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        yield client


def test_the_client_reads_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="hi", max_tokens=9, logprobs=1)
    assert answer.choices[0].text == "The quick"
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None
    assert answer.usage.total_tokens == 11
    assert answer._request_id


def test_completion_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL,
        prompt=["a", "b"],
        max_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts = {0: "", 1: ""}
    usages = []
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        usages.append(chunk.usage)
    assert texts == {0: "The quick", 1: "The quick"}
    assert usages[-1] is not None
    assert usages[-1].completion_tokens == 18


def test_the_client_reads_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        max_completion_tokens=9,
        logprobs=True,
        top_logprobs=2,
        n=2,
        user="tenant",
        metadata={"a": "b"},
    )
    assert [choice.message.content for choice in answer.choices] == ["The quick"] * 2
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].token == "T"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def test_the_chat_stream_helper_accumulates_the_answer(client: openai.OpenAI) -> None:
    """The helper accumulates chunks more strictly than plain iteration."""
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        stop=" brown",
        stream_options={"include_usage": True},
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(pieces) == "The quick"
    assert final.choices[0].message.content == "The quick"
    assert final.choices[0].message.role == "assistant"
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None
    assert final.usage.completion_tokens == len("The quick brown")


def test_fields_of_vllm_are_honoured_in_extra_body(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=[5, 6],
        max_tokens=5,
        extra_body={"top_k": 5, "ignore_eos": True, "return_token_ids": True},
    )
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["prompt_token_ids"] == [5, 6]


def test_the_client_lists_the_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "troika"


def test_a_bad_request_raises_the_clients_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x" * 600)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert caught.value.request_id


def test_an_unknown_model_raises_the_clients_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-5", prompt="x")
    assert caught.value.code == "model_not_found"


def test_a_wrong_key_raises_the_clients_error(make_server: MakeServer) -> None:
    live = make_server(api_key="right")
    with openai.OpenAI(base_url=live.url + "/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        with client.with_options(api_key="right") as right:
            assert [model.id for model in right.models.list()] == [MODEL]


def test_starting_engine_is_retried(make_server: MakeServer) -> None:
    """Retry-After is understood: the second attempt finds the engine ready."""
    fake = FakeClient(facts=None)
    live = make_server(fake)
    live.loop.call_soon_threadsafe(live.loop.call_later, 0.3, become_ready, fake)
    with openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=2) as client:
        answer = client.completions.create(model=MODEL, prompt="x", max_tokens=3)
    assert answer.choices[0].text == "The"


def become_ready(fake: FakeClient) -> None:
    ready = FakeClient()
    fake.facts, fake.status = ready.facts, ready.status


def test_error_within_a_stream(make_server: MakeServer) -> None:
    live = make_server(FakeClient(script=failing_after(2)))
    with openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0) as client:
        stream = client.completions.create(model=MODEL, prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="ended the request"):
            list(stream)
