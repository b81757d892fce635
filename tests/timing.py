"""For tests that measure time on a machine that others use too."""

from collections.abc import Callable, Mapping


def within(num_attempts: int, measure: Callable[[], Mapping[str, float]], **bounds: float) -> None:
    """Assert that all figures of at least one measurement are within their bounds.

    Other load can spoil any measurement, but it never turns a bad property into a good figure.
    Only figures are compared again: an assertion that fails inside `measure` fails the test at
    once, so correctness is asserted there and never retried.
    """
    attempts: list[Mapping[str, float]] = []
    for _ in range(num_attempts):
        figures = measure()
        assert figures.keys() == bounds.keys(), "each figure has a bound"
        if all(figures[name] <= bound for name, bound in bounds.items()):
            return
        attempts.append(figures)
    raise AssertionError(f"bounds {bounds}, measured {attempts}")
