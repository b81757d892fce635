"""Parameters of tests: combinations of values, of which the default run takes a part."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def in_turn(*columns: Iterable[Any]) -> list[Any]:
    """Return all combinations of values; those without the mark `slow` contain each value.

    Each value of the first column runs once by default, with the values of the others in turn.
    """
    first, *others = (list(column) for column in columns)
    if not all(others):
        return []
    rest = list(itertools.product(*others))
    seen: list[list[Any]] = [[] for _ in others]
    parameters = []
    for place, value in enumerate(first):
        chosen = [
            column[(place + number * (place // len(column))) % len(column)]
            for number, column in enumerate(others)
        ]
        for column, one in zip(seen, chosen, strict=True):
            column.append(one)
        by_default = rest.index(tuple(chosen))
        parameters += [
            pytest.param(value, *values, marks=() if number == by_default else pytest.mark.slow)
            for number, values in enumerate(rest)
        ]
    for column, used in zip(others, seen, strict=True):
        assert all(value in used for value in column), "the first column has too few values"
    return parameters
