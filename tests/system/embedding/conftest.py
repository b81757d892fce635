"""An engine of the null model that the tests of one file share."""

from collections.abc import Iterator

import pytest

from api_proc.llm import LLM
from tests.system.embedding.generation import SETTINGS


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("null", **SETTINGS) as started:
        yield started
