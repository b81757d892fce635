"""Servers and a tokenizer directory for the tests of the HTTP side."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from api_proc.text import processor
from api_proc.text.chat_template import ChatTemplate
from protocol.config.settings import configure
from tests.api.fake_engine import FakeClient, LiveServer

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "def main() -> None:\n    print('hello, world')\n",
    "Ünïcödé, 日本語のテキスト, emoji 🙂🎉👩‍👩‍👧 and more.",
] * 20


@pytest.fixture(scope="package", autouse=True)
def _one_ssl_context() -> Iterator[None]:
    """Read the web's authorities once: each client of httpx would take 20 ms to do it."""
    with pytest.MonkeyPatch.context() as patch:
        once = cache(httpx.create_ssl_context)
        patch.setattr("httpx._transports.default.create_ssl_context", once)
        yield


@pytest.fixture(scope="package", autouse=True)
def _one_null_template() -> Iterator[None]:
    """Compile the null model's template once: each server would take milliseconds to do it."""

    @cache
    def null_template() -> ChatTemplate:
        return ChatTemplate(processor._NULL_CHAT_TEMPLATE, {})

    def make(source: str, special_tokens: dict[str, str]) -> ChatTemplate:
        if source is processor._NULL_CHAT_TEMPLATE:
            return null_template()
        return ChatTemplate(source, special_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor, "ChatTemplate", make)
        yield


@pytest.fixture(scope="package")
def server() -> Iterator[LiveServer]:
    """A server with an engine that responds at once, for tests that do not change it."""
    with LiveServer(configure(model="null", max_body_bytes=300_000), FakeClient()) as live:
        yield live


@pytest.fixture(scope="package")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    """A client of `server`."""
    with httpx.Client(base_url=server.url, timeout=10) as client:
        yield client


MakeServer = Callable[..., LiveServer]


@pytest.fixture
def make_server() -> Iterator[MakeServer]:
    """Start servers for one test; keywords are settings."""
    with ExitStack() as stack:

        def make(
            client: FakeClient | None = None,
            *,
            keep_alive_interval_s: float = 15.0,
            **settings: Any,
        ) -> LiveServer:
            config = configure(**({"model": "null"} | settings))
            live = LiveServer(
                config, client or FakeClient(), keep_alive_interval_s=keep_alive_interval_s
            )
            return stack.enter_context(live)

        yield make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the text files of a checkpoint: byte-level BPE, BOS added, chat template."""
    directory = tmp_path_factory.mktemp("checkpoint")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "__type": "AddedToken"},
            "chat_template": CHAT_TEMPLATE,
        },
    )
    write_json(directory / "generation_config.json", {"temperature": 0.25, "top_k": 7})
    return directory


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
