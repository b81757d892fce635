"""Servers for the tests of /v1/responses."""

from collections.abc import Iterator

import pytest

from protocol.config.settings import configure
from protocol.model_facts import ModelFacts
from tests.api.fake_engine import EOS_ID, FakeClient, LiveServer
from tests.api.responses.tool_model import answering


@pytest.fixture(scope="package")
def live() -> Iterator[LiveServer]:
    """A server whose model reasons and calls two tools in every answer."""
    config = configure(model="null", reasoning_parser="qwen3", max_body_bytes=2_000_000)
    with LiveServer(config, answering(per_output=5)) as server:
        yield server


@pytest.fixture(scope="package")
def plain() -> Iterator[LiveServer]:
    """A server whose model writes text, without reasoning."""
    client = FakeClient(ModelFacts("null", 1000, 1_000_000, 16, 70_000, [EOS_ID]))
    with LiveServer(configure(model="null"), client) as server:
        yield server
