"""Thinking budgets, repetitions, best_of and beam search are exact through kill -9."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from api_proc.text.tokenizer import FIRST_BYTE_ID
from protocol.lifecycle import Role
from scripts.testing import Engine, EngineFactory
from tests.system.readers import Choice, Reader, finish, finish_as, start, start_and_kill
from tests.system.recovery.test_resume import KILL_AFTER

BUDGET = 60
END = [FIRST_BYTE_ID + byte for byte in b"</think>"]
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 11, "return_token_ids": True}
CASES: dict[str, dict[str, Any]] = {
    "budget, open prompt": {
        **SEEDED,
        "prompt": "hello<think>\n",
        "thinking_token_budget": BUDGET,
        "n": 2,
    },
    "budget, grammar": {
        **SEEDED,
        "prompt": "hello<think>\n",
        "thinking_token_budget": BUDGET,
        "guided_regex": "[a-z</>]{200}",
    },
    "budget, no reasoning": {**SEEDED, "prompt": "hello", "thinking_token_budget": BUDGET},
    "repetition": {
        **SEEDED,
        "prompt": "hello",
        "guided_regex": "x{15}(ab){150}",
        "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 70},
    },
    "best_of, not streamed": {
        **SEEDED,
        "prompt": "hello",
        "n": 2,
        "best_of": 4,
        "stream": False,
        "logprobs": 1,
    },
    "beam search, not streamed": {
        "prompt": "hello",
        "return_token_ids": True,
        "use_beam_search": True,
        "n": 3,
        "max_tokens": 120,
        "stream": False,
    },
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with EngineFactory() as factory:
        flags = ("--reasoning-parser", "qwen3", "--max-num-batched-tokens", "512")
        started = factory("--null-step-ms", "5", "--num-speculative-tokens", "2", *flags)
        started.ready()
        yield started


def check(choices: dict[int, Choice], name: str) -> None:
    """Check what the option is for."""
    if name == "budget, open prompt":
        for choice in choices.values():
            assert choice.token_ids[BUDGET : BUDGET + len(END)] == END
            assert choice.finish_reason == "length"
    elif name == "budget, grammar":
        assert choices[0].token_ids[BUDGET : BUDGET + len(END)] == END
    elif name == "budget, no reasoning":
        assert choices[0].token_ids[BUDGET : BUDGET + len(END)] != END
    elif name == "repetition":
        assert choices[0].text == "x" * 15 + "ab" * 70
        assert choices[0].finish_reason == "repetition"
        assert choices[0].stop_reason == "repetition_detected"
    else:  # the tokens of the null model do not depend on the seed
        num_different = len({tuple(choice.token_ids) for choice in choices.values()})
        assert (len(choices), num_different) in ((2, 1), (3, 3))


@pytest.mark.timeout(180)
def test_killed_streams_equal_undisturbed_ones(engine: Engine) -> None:
    undisturbed = start(engine, CASES)
    finish(undisturbed)
    for name, reader in undisturbed.items():
        check(reader.choices, name)
    roles = Role.WORKER, Role.CORE
    streams = start_and_kill(engine, CASES, roles, KILL_AFTER, undisturbed)
    finish_as(streams, undisturbed)


def test_the_progress_of_a_long_prompt_is_reported(engine: Engine) -> None:
    """A part of the prompt is computed in each step; on a busy machine some are not reported."""
    seen: list[dict[str, int]] = []

    class Progress(Reader):
        def _take(self, data: bytes) -> None:
            super()._take(data)
            if b'"prompt_progress"' in data:
                seen.append(json.loads(data)["prompt_progress"])

    body = {"prompt": [5] * 3000, "max_tokens": 3, "return_progress": True}
    reader = Progress(engine.url(), "progress", body)
    reader.start()
    finish({"progress": reader})
    numbers = [progress["processed"] for progress in seen]
    assert numbers == sorted(set(numbers))
    assert {512, 1024, 1536, 2048, 2560, 3000}.issuperset(numbers)
    assert (len(numbers) > 2, numbers[-1]) == (True, 3000)
    assert {progress["total"] for progress in seen} == {3000}
    assert [p["time_ms"] for p in seen] == sorted(p["time_ms"] for p in seen)
