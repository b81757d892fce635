"""The core rejects what the API rejects: its client may be another front end."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from protocol.api_core import AddRequest, decode_from_client
from protocol.message import ProtocolError, encode
from protocol.model_facts import ModelFacts
from protocol.request_validation import validate_request
from protocol.sampling import SamplingParams
from tests.api.test_bad_input import COMPLETIONS, ROWS

FACTS = ModelFacts("null", 1000, 512, 16, 200, [2])
FIELDS = SamplingParams.__struct_fields__
PARAMS_PLACE = 3
"""The index of the parameters in an encoded request, after its tag."""


def bad_values() -> Iterator[tuple[str, Any]]:
    """The values of single parameters that the API rejects, as the wire would carry them."""
    for path, body, param, code in ROWS:
        name = param.partition("[")[0]
        if code == "context_length_exceeded":
            continue  # the core ends such a request at the end of the context
        if path == COMPLETIONS and name in FIELDS and len(body) == 2:
            value = body[name]
            is_map = isinstance(value, dict) and all(key.isdigit() for key in value)
            yield name, {int(key): item for key, item in value.items()} if is_map else value
    yield from (("allowed_token_ids", value) for value in ([], [1000], [-1], [5] * 4097))
    yield from (("bad_words", value) for value in ([[]], [[1000]], [[5]] * 321, ["x"]))
    yield from (("logprob_token_ids", value) for value in ([1000], [5] * 129))


@pytest.mark.parametrize(("name", "value"), list(bad_values()))
def test_values_out_of_bounds_are_rejected(name: str, value: Any) -> None:
    fields = msgspec.msgpack.decode(encode(AddRequest(1, [5], SamplingParams())))
    fields[PARAMS_PLACE][FIELDS.index(name)] = value
    try:
        frame = msgspec.msgpack.encode(fields)
    except OverflowError:
        return  # the wire has no such number
    try:
        add = decode_from_client(frame)
    except ProtocolError:
        return
    assert isinstance(add, AddRequest)
    error = validate_request(add, FACTS)
    assert error is not None
    assert error.param == name


def test_good_values_pass() -> None:
    params = SamplingParams(allowed_token_ids=[5], bad_words=[[5, 6]], logprob_token_ids=[7])
    add = AddRequest(1, [5], params)
    assert decode_from_client(encode(add)) == add
    assert validate_request(add, FACTS) is None


@pytest.mark.parametrize(
    ("outputs", "problem"),
    [
        ([1000], "token id 1000 is outside the vocabulary of 1000 tokens"),
        (
            [5] * 13,
            "output_token_ids has 13 tokens; the model's context of 512 tokens must hold them and"
            " the prompt of 500",
        ),
    ],
)
def test_errors_of_outputs_name_them(outputs: list[int], problem: str) -> None:
    add = AddRequest(1, [5] * 500, SamplingParams(), output_token_ids=outputs, resent=True)
    error = validate_request(add, FACTS)
    assert error is not None
    assert (error.param, error.message) == ("output_token_ids", problem)
