"""Streams of every stateful feature equal undisturbed ones if processes are killed meanwhile.

The same holds with a draft model. Real processes with the demo model. Compared are: text, token
ids, log-probabilities (bit for bit, as they were sent), finish reason and usage, for every choice
of every stream.
"""

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

PROMPT = "class Reader:\n    def __init__(self, path):\n"
FLAGS = ("--num-gpu-blocks-override", "512", "--num-threads", "1")
MAX_TOKENS = 140
KILL_AFTER = (8, 20)
"""Events that every open stream has received before each kill, long before its end."""
KILL_DRAFTS_AFTER = (6, 14)
"""An event has the tokens of several drafts."""
STOP_TOKEN_ID = 5
"""A likely stop token, banned at first, so that min_tokens decides the end."""
MIN_TOKENS = 110

COMPLETION: dict[str, Any] = {"prompt": PROMPT, "return_token_ids": True, "max_tokens": MAX_TOKENS}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 11}
CASES: dict[str, dict[str, Any]] = {
    "greedy, logprobs": {**COMPLETION, "temperature": 0, "logprobs": 2},
    "seeded, top_p, top_k": {**COMPLETION, **SEEDED, "top_p": 0.9, "top_k": 40, "logprobs": 0},
    "n=2, logprobs": {**COMPLETION, **SEEDED, "n": 2, "logprobs": 3},
    "penalties": {
        **COMPLETION,
        **SEEDED,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "min_p": 0.01,
        "logprobs": 1,
    },
    "logit_bias, echo": {
        **COMPLETION,
        **SEEDED,
        "logit_bias": {"77": 2.0, "90": -5.0},
        "echo": True,
        "logprobs": 1,
    },
    "bad_words, allowed_token_ids, logprob_token_ids": {
        **COMPLETION,
        **SEEDED,
        "bad_words": ["self", "return", "\n\n"],
        "allowed_token_ids": list(range(3, 600)),
        "logprob_token_ids": [77, 5, 90],
        "logprobs": 0,
    },
    "min_tokens, stop token": {
        **COMPLETION,
        "temperature": 0,
        "logit_bias": {str(STOP_TOKEN_ID): 100.0},
        "stop_token_ids": [STOP_TOKEN_ID],
        "min_tokens": MIN_TOKENS,
    },
    "prompt_logprobs, not streamed": {
        **COMPLETION,
        **SEEDED,
        "prompt_logprobs": 2,
        "stream": False,
    },
    "long prompt": {**COMPLETION, "prompt": PROMPT * 60, "temperature": 0.5, "seed": 3},
    "digits": {**COMPLETION, "temperature": 0, "guided_regex": "[0-9]+"},
    "chat, n=2, top_logprobs": {
        "messages": [{"role": "user", "content": "read a file"}],
        "max_tokens": MAX_TOKENS,
        **SEEDED,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "presence_penalty": 0.5,
    },
}


@pytest.fixture(scope="module")
def module_engines() -> Iterator[EngineFactory]:
    """Starts engines that serve all tests of this module."""
    with EngineFactory() as factory:
        yield factory


@pytest.fixture(scope="module")
def engine_and_undisturbed(
    module_engines: EngineFactory,
) -> tuple[Engine, dict[str, dict[str, Any]], dict[str, Reader]]:
    """An engine with the demo model, the cases, and their streams without faults."""
    engine = module_engines(*FLAGS, model="demo")
    readiness = engine.readiness()
    assert readiness["exact_resume"], readiness
    cases = dict(CASES)
    first = start(engine, {"to be stopped": {**COMPLETION, **SEEDED}})
    finish(first)
    stop = late_string(first["to be stopped"].choices[0].text)
    cases["stop string"] = {**COMPLETION, **SEEDED, "stop": [stop, "never"]}
    undisturbed = start(engine, cases)
    finish(undisturbed)
    check_features(undisturbed)
    return engine, cases, undisturbed


def late_string(text: str) -> str:
    """Return a string that first occurs in the last quarter of a text."""
    first = len(text) * 3 // 4
    found = (text[place : place + 6] for place in range(first, len(text) - 6))
    return next(part for part in found if part not in text[: first + 5])


def check_features(streams: dict[str, Reader]) -> None:
    """Assert that the compared streams exercise every feature."""
    ends = {name: stream.choices[0].finish_reason for name, stream in streams.items()}
    stopped = {"stop string", "min_tokens, stop token"}
    assert ends == {name: "stop" if name in stopped else "length" for name in streams}
    assert len(streams["min_tokens, stop token"].choices[0].token_ids) == MIN_TOKENS + 1
    assert streams["logit_bias, echo"].choices[0].text.startswith(PROMPT)
    assert streams["prompt_logprobs, not streamed"].choices[0].prompt_logprobs
    for name in ("n=2, logprobs", "chat, n=2, top_logprobs"):
        one, two = streams[name].choices.values()
        assert one.text != two.text
        assert any(one.logprobs.values())
    for name, stream in streams.items():
        assert stream.usage["completion_tokens"] > MAX_TOKENS // 2, name


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "roles",
    [(Role.WORKER, Role.WORKER), (Role.CORE, Role.WORKER)],
    ids=["worker-worker", "core-worker"],
)
def test_killed_streams_equal_undisturbed_ones(
    roles: tuple[Role, Role],
    engine_and_undisturbed: tuple[Engine, dict[str, dict[str, Any]], dict[str, Reader]],
) -> None:
    engine, cases, undisturbed = engine_and_undisturbed
    streams = start_and_kill(engine, cases, roles, KILL_AFTER, undisturbed)
    finish_as(streams, undisturbed)


@pytest.fixture(scope="module")
def drafting(module_engines: EngineFactory, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine with a draft model that agrees with the model often, and not always."""
    draft = tmp_path_factory.mktemp("draft")
    make_draft(BUNDLED_MODELS["demo"], draft, None, 0.1)
    flags = ("--speculative-model", str(draft), "--num-speculative-tokens", "3")
    started = module_engines(*FLAGS, *flags, "--no-adaptive-speculation", model="demo")
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
    "roles",
    [pytest.param((), marks=pytest.mark.slow), (Role.CORE, Role.WORKER)],
    ids=["undisturbed", "core-worker"],
)
def test_streams_with_a_draft_model_equal_those_without(
    roles: tuple[Role, ...],
    drafting: Engine,
    engine_and_undisturbed: tuple[Engine, dict[str, dict[str, Any]], dict[str, Reader]],
) -> None:
    _, cases, expected = engine_and_undisturbed
    streams = start_and_kill(drafting, cases, roles, KILL_DRAFTS_AFTER[: len(roles)], expected)
    finish_as(streams, expected)

    def some_were_right() -> bool:  # the core reports once a second
        verified, accepted = num_drafts(drafting)
        return accepted > 100 and 0.3 * verified < accepted < verified

    eventually(some_were_right, "some drafts were right, and some wrong", 10)
