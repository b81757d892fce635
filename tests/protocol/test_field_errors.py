"""Complaints of msgspec in the words of JSON."""

from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from protocol.config.field_errors import json_error_text, read_field_error

Name = Annotated[str, Meta(min_length=1)]


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    level: int


class Body(msgspec.Struct):
    n: Annotated[int, Meta(ge=1)] | None = None
    texts: str | list[Name] = ""
    bias: dict[int, Annotated[float, Meta(le=2)]] = {}
    pair: tuple[int, int] = (1, 1)
    code: Annotated[str, Meta(pattern="^a$")] = "a"
    even: Annotated[int, Meta(multiple_of=2)] = 2
    kind: Literal["x", "y"] = "x"
    flag: bool = False
    rows: list[Inner] = []


CASES: list[tuple[Any, str]] = [
    ({"n": "x"}, "n: must be an integer or null, got a string"),
    ({"n": 0}, "n: must be an integer >= 1"),
    ({"texts": 5}, "texts: must be a string or an array, got an integer"),
    ({"texts": ["a", ""]}, "texts[1]: must be a string of length >= 1"),
    ({"bias": {"x": 1}}, "bias: a name in it must be an integer, got a string"),
    ({"bias": {"1": 3}}, "bias: a value in it must be a number <= 2.0"),
    ({"pair": [1]}, "pair: must be an array of length 2"),
    ({"code": "b"}, "code: must be a string that matches '^a$'"),
    ({"even": 3}, "even: must be an integer that is a multiple of 2"),
    ({"kind": "z"}, "kind: invalid enum value 'z'"),
    ({"flag": 1}, "flag: must be a boolean, got an integer"),
    ({"rows": [{}]}, "rows[0].level: the field is missing"),
    ({"rows": [{"level": 1, "m": 2}]}, "rows[0].m: is not a known field"),
    ([], "must be an object, got an array"),
]


@pytest.mark.parametrize(("value", "line"), CASES)
def test_an_error_names_the_place_and_the_expected_type(value: Any, line: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(msgspec.json.encode(value), type=Body)
    assert json_error_text(caught.value) == line
    prefix = "" if line.startswith(("must", "[")) else "."
    assert json_error_text(caught.value, "body") == f"body{prefix or ': '}{line}"
    assert "`" not in line


def test_a_value_that_is_known_is_shown() -> None:
    text = "Expected `int | null`, got `str` - at `$.n`"
    assert read_field_error(text, "'x'").about("") == "n: must be an integer or null, got 'x'"
    assert (
        read_field_error("Expected `int` >= 1", "0").about("n")
        == "n: must be an integer >= 1, got 0"
    )
    assert len(read_field_error("Expected `int`, got `str`", "x" * 10**6).reason) < 200


def test_a_text_that_is_not_json_is_named() -> None:
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(b"{")
    assert (
        json_error_text(caught.value, "body") == "body: is not valid JSON: Input data was truncated"
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b'{"n": %b}' % (b"9" * 5000), "n: must be an integer of at most 4300 digits"),
        (
            b'{"bias": {"1": 1e400}}',
            "bias: a value in it must be a number from -1.8e308 to 1.8e308",
        ),
    ],
)
def test_the_error_for_a_number_that_no_field_can_hold_names_the_bound(
    text: bytes, line: str
) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(text, type=Body)
    assert read_field_error(str(caught.value)).about("") == line
