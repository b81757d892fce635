"""The offline checker: recorded streams against the golden run of the same requests.

What must hold of a stream that was read to its end: no gap, no token twice, no other token; text,
logprobs, finish reason and usage as in the golden run; no error; one end. Of a stream that broke,
or was left: a prefix of the golden one.
"""

import enum
from collections.abc import Sequence
from typing import Any

import msgspec

from scripts.chaos.history import Choice, History
from scripts.chaos.recording import End, Recording


class Harm(enum.StrEnum):
    """What became of a stream that should not have."""

    LOST = "lost"
    """A token is missing, or the end."""
    DUPLICATED = "duplicated"
    """A token came twice, or an end."""
    MISMATCHED = "mismatched"
    """Something differs otherwise."""
    FAILED = "failed"
    """An error came, or the request was turned away."""


class Violation(msgspec.Struct, frozen=True):
    """One promise that was broken."""

    harm: Harm
    stream: str
    detail: str


def check_stream(
    recording: Recording, golden: Recording, *, may_break: bool = False
) -> list[Violation]:
    """Compare one stream with the golden one.

    Args:
        recording: of the run with faults.
        golden: of the same request in a run without, read to its end.
        may_break: whether the connection was allowed to break.
    """
    found: list[tuple[Harm, str]] = []
    history, expected = History(recording), History(golden)
    found += [(Harm.FAILED, f"error event: {text}") for text in history.errors]
    ids = [event.id for event in recording.events if event.id]
    if len(set(ids)) < len(ids):
        found.append((Harm.DUPLICATED, "two events have the same id"))
    is_whole = recording.end is End.DONE
    if not is_whole and recording.end is not End.LEFT and not may_break:
        harm = Harm.LOST if recording.accepted_at is not None else Harm.FAILED
        found.append((harm, f"{recording.end}: {recording.problem}"))
    for index in sorted(set(history.choices) | set(expected.choices)):
        actual = history.choices.get(index, Choice())
        wanted = expected.choices.get(index)
        if wanted is None:
            found.append((Harm.MISMATCHED, f"choice {index} is not in the golden run"))
            continue
        problems = check_choice(actual, wanted, is_whole=is_whole)
        found += [(harm, f"choice {index}: {detail}") for harm, detail in problems]
    if is_whole and not history.errors and history.usages != expected.usages:
        detail = f"usage {history.usages}, golden {expected.usages}"
        found.append((Harm.MISMATCHED, detail))
    return [Violation(harm, recording.name, detail) for harm, detail in found]


def check_choice(actual: Choice, golden: Choice, *, is_whole: bool) -> list[tuple[Harm, str]]:
    """Compare one output sequence; what follows from a difference found before is not told."""
    columns: list[tuple[str, Sequence[Any], Sequence[Any]]] = [
        ("token ids", actual.token_ids, golden.token_ids),
        ("logprobs", actual.logprobs, golden.logprobs),
        ("text", actual.text, golden.text),
    ]
    for name, ours, theirs in columns:
        harm = compare(ours, theirs, is_whole=is_whole)
        if harm is not None:
            return [(harm, f"{name} {_first_difference(ours, theirs)}")]
    if actual.num_late_pieces or len(actual.finishes) > 1:
        return [(Harm.DUPLICATED, f"goes on after its end: {actual.finishes}")]
    if is_whole and not actual.finishes:
        return [(Harm.LOST, "no finish reason")]
    if actual.finishes and actual.finishes != golden.finishes:
        return [(Harm.MISMATCHED, f"finish {actual.finishes}, golden {golden.finishes}")]
    return []


def compare(actual: Sequence[Any], golden: Sequence[Any], *, is_whole: bool) -> Harm | None:
    """Say what happened to a sequence; None if it is as it should be.

    Args:
        actual: what came.
        golden: what should have come.
        is_whole: whether all of it should have come, or any beginning of it.
    """
    num_equal = _num_equal(actual, golden)
    if num_equal == len(actual):
        return Harm.LOST if is_whole and num_equal < len(golden) else None
    rest = actual[num_equal:]
    for length in range(1, min(num_equal, len(rest)) + 1):
        again = golden[num_equal - length : num_equal]
        if rest[:length] == again and _continues(rest[length:], golden[num_equal:]):
            return Harm.DUPLICATED
    for length in range(1, len(golden) - num_equal):
        if _continues(rest, golden[num_equal + length :]):
            return Harm.LOST
    return Harm.MISMATCHED


def _continues(rest: Sequence[Any], golden: Sequence[Any]) -> bool:
    return len(rest) <= len(golden) and golden[: len(rest)] == rest


def _num_equal(actual: Sequence[Any], golden: Sequence[Any]) -> int:
    pairs = enumerate(zip(actual, golden, strict=False))
    differing = (index for index, (ours, theirs) in pairs if ours != theirs)
    return next(differing, min(len(actual), len(golden)))


def _first_difference(actual: Sequence[Any], golden: Sequence[Any]) -> str:
    at = _num_equal(actual, golden)
    ours, theirs = actual[at : at + 3], golden[at : at + 3]
    return f"differ at {at} of {len(golden)} ({len(actual)} came): {ours!r}, golden {theirs!r}"
