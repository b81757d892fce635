"""The demo model end to end: real processes, real tokens, the official client, kill -9."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from protocol.lifecycle import Role
from scripts.testing import Engine, EngineFactory
from tests.paths import DEMO_MODEL

PROMPT = "def __init__(self, "


@pytest.fixture
def demo(start_engine: EngineFactory) -> Engine:
    """A ready engine with the demo model."""
    started = start_engine("--num-gpu-blocks-override", "512", model="demo")
    started.ready()
    return started


@pytest.fixture
def client(demo: Engine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo.url() + "/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, **options: object) -> str:
    answer = client.completions.create(model="demo", prompt=PROMPT, temperature=0, **options)  # type: ignore[call-overload]
    return str(answer.choices[0].text)


def test_official_client_against_the_real_engine(client: openai.OpenAI) -> None:
    """Completions and chat, streamed or not: texts are equal, errors map to their classes."""
    assert [model.id for model in client.models.list()] == ["demo"]
    text = complete(client, max_tokens=24)
    assert ":" in text
    assert "self" in text
    streamed = client.completions.create(
        model="demo",
        prompt=PROMPT,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(streamed)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    messages = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(
        model="demo",
        messages=messages,
        max_tokens=8,
        temperature=0,  # type: ignore[arg-type]
    )
    deltas = client.chat.completions.create(
        model="demo",
        messages=messages,
        max_tokens=8,
        temperature=0,
        stream=True,  # type: ignore[arg-type]
    )
    parts = [chunk.choices[0].delta.content or "" for chunk in deltas]
    assert "".join(parts) == chat.choices[0].message.content
    batch = client.embeddings.create(model="demo", input=["a text", PROMPT]).data
    [alone] = client.embeddings.create(model="demo", input=PROMPT).data
    assert alone.embedding == batch[1].embedding != batch[0].embedding
    assert sum(x * x for x in alone.embedding) == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="demo", input=PROMPT, dimensions=8)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="demo", prompt=PROMPT, temperature=9)
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt=PROMPT)


@pytest.mark.parametrize("role", [Role.WORKER, Role.CORE])
def test_stream_continues_after_kill_9(demo: Engine, client: openai.OpenAI, role: Role) -> None:
    """With a seed and penalties, the stream equals one without a kill, token for token."""
    pid = demo.pid(role)
    options = {"max_tokens": 300, "seed": 7, "temperature": 0.8, "frequency_penalty": 0.5}
    undisturbed = client.completions.create(
        model="demo",
        prompt=PROMPT,
        extra_body={"ignore_eos": True},
        **options,  # type: ignore[arg-type]
    )
    stream = client.completions.create(
        model="demo",
        prompt=PROMPT,
        stream=True,
        extra_body={"ignore_eos": True},
        **options,  # type: ignore[arg-type]
    )
    parts = []
    for num_chunks, chunk in enumerate(stream):
        if num_chunks == 20:
            os.kill(pid, signal.SIGKILL)
        parts.append(chunk.choices[0].text)
    assert "".join(parts) == undisturbed.choices[0].text
    assert demo.row(role).epoch > 3


@pytest.mark.parametrize(
    "rounding",
    [
        pytest.param({"quantization": "w8a16"}, marks=pytest.mark.slow),
        {"quantization": "w4a16", "kv_cache_dtype": "int8"},
        {"quantization": "w8a8"},
        pytest.param({"kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param({"kv_cache_dtype": "fp8"}, marks=pytest.mark.slow),
    ],
    ids=lambda rounding: "-".join(rounding.values()),
)
def test_stream_of_rounded_numbers_continues_after_kill_9(
    start_engine: EngineFactory, rounding: dict[str, str]
) -> None:
    """The worker dies, then the core: the stream equals one without a kill."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in rounding.items()]
    engine = start_engine(*flags, model="demo")
    engine.ready()
    readiness = httpx.get(engine.url() + "/readyz").json()
    assert readiness["exact_resume"] is True
    assert {name: readiness[name] for name in rounding} == rounding
    with openai.OpenAI(base_url=engine.url() + "/v1", api_key="none", max_retries=0) as client:
        kills = {20: Role.WORKER, 300: Role.CORE}
        options: dict[str, Any] = {"max_tokens": 600, "extra_body": {"ignore_eos": True}}
        options |= {"temperature": 0.8, "seed": 5}
        fields: dict[str, Any] = {"model": "demo", "prompt": PROMPT, **options}
        undisturbed = client.completions.create(**fields)
        parts = []
        for num_chunks, chunk in enumerate(client.completions.create(**fields, stream=True)):
            if num_chunks in kills:
                os.kill(engine.pid(kills[num_chunks]), signal.SIGKILL)
            parts.append(chunk.choices[0].text)
        assert "".join(parts) == undisturbed.choices[0].text


def test_many_clients_share_the_engine(client: openai.OpenAI) -> None:
    """Sixteen concurrent threads get the outputs that each would get alone."""
    alone = complete(client, max_tokens=16)
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda: answers.append(complete(client, max_tokens=16)))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert answers == [alone] * 16


def test_prefix_cache_is_seen_in_usage(client: openai.OpenAI) -> None:
    """The second of two equal long prompts hits its full blocks."""
    prompt = "import os\n" * 60
    cached = []
    for _ in range(2):
        usage = client.completions.create(model="demo", prompt=prompt, max_tokens=1).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert cached[1] is not None
    assert cached[1] >= 16


def test_demo_model_has_its_size_and_a_description() -> None:
    directory = DEMO_MODEL
    assert (directory / "model.safetensors").stat().st_size <= 16_000_000
    text = (directory / "README.md").read_text().lower()
    for word in ("licence", "loss", "standard library"):
        assert word in text
