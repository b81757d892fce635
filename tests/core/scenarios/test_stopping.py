"""The ends of requests, and aborts."""

import pytest

from protocol.sampling import SamplingParams
from tests.core.harness import EOS, Harness


@pytest.mark.parametrize(
    ("tokens", "params", "kept", "reason", "stop_token_id"),
    [
        ([10, 42, 12], {"stop_token_ids": [42]}, 2, "stop", 42),
        ([10, 42], {"stop_token_ids": [42], "max_tokens": 2}, 2, "stop", 42),
        ([10, EOS, 12], {}, 2, "stop", None),
        ([10, EOS, 12], {"ignore_eos": True, "max_tokens": 3}, 3, "length", None),
        ([EOS, 5], {"ignore_eos": True, "stop_token_ids": [EOS]}, 1, "stop", EOS),
        ([EOS, EOS, EOS, EOS], {"min_tokens": 3}, 3, "stop", None),
        ([1, 1, 1], {"max_tokens": 2}, 2, "length", None),
    ],
)
def test_stop_tokens_come_before_the_length(
    tokens: list[int],
    params: dict[str, object],
    kept: int,
    reason: str,
    stop_token_id: int | None,
) -> None:
    """`min_tokens` counts the token that is being tested."""
    bench = Harness(script={"a": tokens})
    request = bench.add("a", 5, params=SamplingParams(**params))  # type: ignore[arg-type]
    bench.run()
    assert bench.outputs["a"] == tokens[:kept]
    assert bench.finished["a"] == reason
    assert request.stop_token_id == stop_token_id


@pytest.mark.parametrize(
    ("params", "kept", "stop_token_id"),
    [({}, 2, 7), ({"ignore_eos": True, "max_tokens": 3}, 3, None), ({"min_tokens": 3}, 3, None)],
)
def test_every_eos_token_but_the_first_is_the_stop_token(
    params: dict[str, object], kept: int, stop_token_id: int | None
) -> None:
    """Such as the end of a message that calls a tool; vLLM reports it, too."""
    tokens = [10, 7, EOS]
    bench = Harness(script={"a": tokens}, eos_token_ids=(EOS, 7))
    request = bench.add("a", 5, params=SamplingParams(**params))  # type: ignore[arg-type]
    bench.run()
    assert bench.outputs["a"] == tokens[:kept]
    assert request.stop_token_id == stop_token_id


def test_the_model_length_ends_a_request_with_its_last_token_delivered() -> None:
    bench = Harness(max_model_len=40)
    bench.add("a", 36)
    bench.run()
    assert len(bench.outputs["a"]) == 4
    assert bench.finished["a"] == "length"


def test_abort_ends_running_and_waiting_requests_and_ignores_unknown_ones() -> None:
    """The worker is notified once, and only of the request in its mirror; in vLLM of both."""
    bench = Harness(seqs=1)
    bench.add("run", 10)
    bench.step()
    bench.add("wait", 10)
    assert bench.abort("run")
    assert bench.abort("wait")
    assert bench.num_free == 255
    assert not bench.abort("run")
    assert bench.scheduler.abort_request(99) is None
    assert bench.step() == {}
    assert bench.notices == ["run"]
    assert bench.scheduler.schedule() is None
