"""Errors of grammars in the answer to a step."""

from types import SimpleNamespace
from typing import cast

import pytest

from protocol.core_worker import ModelRunnerOutput
from protocol.message import MAX_TEXT, encode
from worker_proc.grammar.following import follow
from worker_proc.request import ScheduledRequest


def failing(req_id: int, text: str) -> ScheduledRequest:
    """A request whose grammar has failed with this text."""
    state = SimpleNamespace(error=text, advance=lambda token_ids: None)
    request = SimpleNamespace(req_id=req_id, token_ids=[1], grammar_state=state)
    return cast(ScheduledRequest, SimpleNamespace(request=request, samples=True))


@pytest.mark.parametrize("number", [1, 64, 16_384])
def test_the_errors_of_a_step_take_a_small_part_of_a_frame(number: int) -> None:
    errors = follow([failing(2**52 + i, "\U0001f600" * MAX_TEXT) for i in range(number)])
    assert len(errors) == number
    assert all(error.startswith("grammar: ") and len(error) > 10 for error in errors.values())
    assert len(encode(ModelRunnerOutput(1, [], request_errors=errors))) < 2**21
    if number == 1:
        assert len(errors[2**52]) == MAX_TEXT
