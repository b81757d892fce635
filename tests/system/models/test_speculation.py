"""Streams for which a draft model guesses equal those without it, also if processes are killed."""

import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.lifecycle import Role
from scripts.bench.make_draft_model import make_draft
from scripts.supervisor.model_names import BUNDLED_MODELS
from scripts.testing import Engine, EngineFactory, eventually
from tests.system.readers import Reader, finish, finish_as, start, start_and_kill
from tests.system.recovery.test_resume import COMPLETION, PROMPT, SEEDED

FLAGS = ("--num-gpu-blocks-override", "512", "--num-threads", "1")
CASES: dict[str, dict[str, Any]] = {
    "greedy, logprobs": {**COMPLETION, "temperature": 0, "logprobs": 2},
    "seeded, top_p": {**COMPLETION, **SEEDED, "top_p": 0.9, "logprobs": 1},
    "n=2, penalties": {**COMPLETION, **SEEDED, "n": 2, "frequency_penalty": 0.4},
    "long prompt": {**COMPLETION, "prompt": PROMPT * 60, "temperature": 0.5, "seed": 3},
    "digits": {**COMPLETION, "temperature": 0, "guided_regex": "[0-9]+"},
}
KILL_AFTER = (8, 20)


@pytest.fixture(scope="module")
def module_engines() -> Iterator[EngineFactory]:
    """Starts engines that serve all tests of this module."""
    with EngineFactory() as factory:
        yield factory


@pytest.fixture(scope="module")
def expected(module_engines: EngineFactory) -> dict[str, Reader]:
    """The streams of an engine without speculation."""
    streams = start(module_engines(*FLAGS, model="demo"), CASES)
    finish(streams)
    return streams


@pytest.fixture(scope="module")
def engine(module_engines: EngineFactory, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine with a draft model that agrees with the model often, and not always."""
    draft = tmp_path_factory.mktemp("draft")
    make_draft(BUNDLED_MODELS["demo"], draft, None, 0.1)
    drafting = ("--speculative-model", str(draft), "--num-speculative-tokens", "3")
    started = module_engines(*FLAGS, *drafting, "--no-adaptive-speculation", model="demo")
    readiness = started.readiness()
    assert readiness["exact_resume"], readiness
    assert readiness["speculation"] == f"draft model {draft.name}, fixed, at most 3 tokens"
    return started


def num_drafts(engine: Engine) -> tuple[float, float]:
    """Return how many draft tokens the present core has seen verified, and accepted."""
    with urllib.request.urlopen(engine.url() + "/metrics", timeout=10) as response:
        text = response.read().decode()
    names = ("draft", "accepted")
    pattern = r"troika:spec_decode_num_%s_tokens_total{[^}]*} (\S+)"
    found = [re.search(pattern % name, text) for name in names]
    verified, accepted = (float(match[1]) if match else 0.0 for match in found)
    return verified, accepted


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "roles", [(), (Role.CORE, Role.WORKER)], ids=["undisturbed", "core-worker"]
)
def test_streams_equal_those_without_drafts(
    roles: tuple[Role, ...], engine: Engine, expected: dict[str, Reader]
) -> None:
    streams = start_and_kill(engine, CASES, roles, KILL_AFTER[: len(roles)], expected)
    finish_as(streams, expected)

    def some_were_right() -> bool:  # the core reports once a second
        verified, accepted = num_drafts(engine)
        return accepted > 100 and 0.3 * verified < accepted < verified

    eventually(some_were_right, "some drafts were right, and some wrong", 10)
