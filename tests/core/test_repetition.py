"""Outputs that repeat a pattern: found at the token that completes it, and never elsewhere."""

import random
import time
from array import array

import pytest

from core_proc.request import RequestStatus
from core_proc.scheduling.repetition import ends_in_repetition, first_length
from protocol.api_core import AddRequest
from protocol.model_facts import ModelFacts
from protocol.request_validation import validate_request
from protocol.sampling import MAX_REPEATED_TOKENS, RepetitionDetection, SamplingParams
from tests.core.harness import EOS, Harness

FACTS = ModelFacts("null", 1000, 4096, 16, 4096, [2])


def is_repeated(outputs: list[int], detection: RepetitionDetection) -> bool:
    """The definition, pattern size by pattern size."""
    for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
        num_tokens = size * detection.min_count
        if num_tokens <= len(outputs):
            pattern = outputs[-size:]
            if outputs[-num_tokens:] == pattern * detection.min_count:
                return True
    return False


def text_with_repetitions(chance: random.Random, length: int, alphabet: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < length:
        if chance.random() < 0.5 and tokens:
            size = chance.randint(1, min(12, len(tokens)))
            tokens += tokens[-size:] * chance.randint(1, 4)
        else:
            tokens += [chance.randrange(alphabet) for _ in range(chance.randint(1, 5))]
    return tokens[:length]


@pytest.mark.parametrize("scale", [1, 0x01010101])
def test_the_search_agrees_with_the_definition(scale: int) -> None:
    """The bytes of one token may equal those between two others."""
    num_found = num_checked = 0
    for seed in range(300):
        chance = random.Random(seed)
        tokens = [t * scale for t in text_with_repetitions(chance, 60, chance.choice([1, 2, 5]))]
        smallest = chance.randint(1, 8)
        largest, count = smallest + chance.randint(0, 8), chance.randint(2, 6)
        detection = RepetitionDetection(largest, smallest, count)
        for end in range(len(tokens) + 1):
            expected = is_repeated(tokens[:end], detection)
            with_prompt = array("I", [tokens[0]] * 9 + tokens[:end])
            assert ends_in_repetition(with_prompt, end, detection) == expected, (seed, end)
            num_found += expected
            num_checked += 1
            if end < first_length(detection):
                assert not expected
    assert num_found > 100
    assert num_checked - num_found > 100


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(
    ("tokens", "params", "kept", "reason"),
    [
        ([1, 4, 1, 4, 1, 4, 9], {}, 6, "repetition"),
        ([5, 1, 4, 1, 4, 1, 4, 9], {}, 7, "repetition"),
        ([1, 4, 1, 4, 1, 4, 9], {"min_tokens": 7, "max_tokens": 7}, 7, "length"),
        ([1, 4, 1, 4, 1, EOS], {}, 6, "stop"),
        ([1, 4, 1, 4, 1, 4], {"stop_token_ids": [4]}, 2, "stop"),
        ([1, 4, 1, 4, 1, 4], {"max_tokens": 6}, 6, "length"),
        ([3, 4, 5, 3, 4, 5, 3, 4], {"max_tokens": 8}, 8, "length"),
    ],
)
def test_a_request_ends_with_the_token_that_completes_the_repetition(
    tokens: list[int], params: dict[str, object], kept: int, reason: str, drafts: int
) -> None:
    """Stop tokens and the length come first; `min_tokens` holds."""
    bench = Harness(script={"a": tokens}, num_speculative_tokens=drafts)
    detection = RepetitionDetection(2, 1, 3)
    fields: dict[str, object] = {"max_tokens": 20, "repetition_detection": detection, **params}
    request = bench.add("a", 5, params=SamplingParams(**fields))  # type: ignore[arg-type]
    bench.add("b", 5, 20)
    bench.run()
    assert bench.outputs["a"] == tokens[:kept]
    assert bench.finished == {"a": reason, "b": "length"}
    if reason == "repetition":
        assert request.status is RequestStatus.FINISHED_REPETITION
        assert request.stop_token_id is None


def test_a_preempted_request_and_one_of_an_earlier_life_end_at_the_same_token() -> None:
    tokens = [9, 8, 7] + [4, 5, 6] * 4
    params = SamplingParams(max_tokens=30, repetition_detection=RepetitionDetection(3, 3, 4))
    bench = Harness(script={"a": tokens, "b": tokens})
    first = bench.add("a", 5, params=params)
    bench.steps(6)
    bench.scheduler.preempt(first)
    bench.run()
    assert (bench.outputs["a"], bench.finished["a"]) == (tokens, "repetition")
    bench.add("b", 5, params=params, outputs=tokens[:10])
    bench.run()
    assert (bench.outputs["b"], bench.finished["b"]) == (tokens[10:], "repetition")


def test_the_costliest_texts_take_less_than_200_microseconds_a_token() -> None:
    """Each pattern size is possible until almost all tokens are compared."""
    for smallest, count in ((33, 16), (33, 2), (1, 16)):
        detection = RepetitionDetection(64, smallest, count)
        assert detection.max_pattern_size * count <= MAX_REPEATED_TOKENS
        num_same = smallest * count - 1
        others = range(100, 100 + 64 * count - num_same)
        best = min(_seconds(array("I", [*others, *[7] * num_same]), detection) for _ in range(20))
        assert best < 2e-4


def _seconds(tokens: "array[int]", detection: RepetitionDetection) -> float:
    began = time.perf_counter()
    assert not ends_in_repetition(tokens, len(tokens), detection)
    return time.perf_counter() - began


@pytest.mark.parametrize(
    "detection", [RepetitionDetection(3, 4, 2), RepetitionDetection(64, 1, 17)]
)
def test_contradictions_are_refused_by_name(detection: RepetitionDetection) -> None:
    add = AddRequest(1, [5], SamplingParams(repetition_detection=detection))
    error = validate_request(add, FACTS)
    assert error is not None
    assert error.param == "repetition_detection"
