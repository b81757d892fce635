"""The offline checker: recorded streams against the golden run of the same requests.

A stream that was read to its end has no gap and no repeated or different token; text, logprobs,
finish reason and usage equal the golden run; it has no error and one end. A stream that broke, or
whose client left, is a prefix of the golden one, in which tokens, text and logprobs end together.
"""

import enum
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from tests.chaos.history import Choice, History
from tests.chaos.recording import End, Recording

BREAK_TIMEOUT_S = 5.0
"""The longest time from the death of a process until the clients of its connections notice it."""
_UNAVAILABLE = 503


class Harm(enum.StrEnum):
    """The kinds of damage to a stream."""

    LOST = "lost"
    """A token or the end is missing."""
    DUPLICATED = "duplicated"
    """A token or the end came twice."""
    MISMATCHED = "mismatched"
    """Any other difference."""
    FAILED = "failed"
    """An error event came, or the request was rejected."""


class Violation(msgspec.Struct, frozen=True):
    """One difference between a stream and what was expected."""

    harm: Harm
    stream: str
    detail: str


class Excuse(NamedTuple):
    """What the faults of a round permit."""

    deaths: Sequence[float] = ()
    """Monotonic times at which a process that holds connections was killed."""
    is_away: bool = False
    """The whole engine was killed: connections may be refused, and requests answered with 503."""


NO_EXCUSE = Excuse()
Found = Iterator[tuple[Harm, str]]


def check_stream(
    recording: Recording, golden: Recording, excuse: Excuse = NO_EXCUSE
) -> list[Violation]:
    """Compare one stream with the golden one.

    Args:
        recording: of the run with faults.
        golden: of the same request in a run without faults, read to its end.
        excuse: what the faults permit.
    """
    history, expected = History(recording), History(golden)
    found = [*_check_end(recording, excuse), *_check_whole(history, expected)]
    is_whole = recording.end is End.DONE
    for index in sorted(set(history.choices) | set(expected.choices)):
        actual = history.choices.get(index, Choice())
        wanted = expected.choices.get(index)
        if wanted is None:
            found.append((Harm.MISMATCHED, f"choice {index} is not in the golden run"))
            continue
        problems = check_choice(actual, wanted, is_whole=is_whole)
        found += [(harm, f"choice {index}: {detail}") for harm, detail in problems]
    harm = compare(history.vectors, expected.vectors, is_whole=is_whole)
    if harm is not None:
        detail = _first_difference(history.vectors, expected.vectors)
        found.append((harm, f"vectors {detail[:200]}"))
    found += _check_counts(history, expected, is_whole=is_whole)
    return [Violation(harm, recording.name, detail) for harm, detail in found]


def _check_end(recording: Recording, excuse: Excuse) -> Found:
    """Check how the stream ended, and whether its breaks and deferrals are permitted."""
    match recording.end:
        case End.DONE if recording.problem and not _may_break(recording, excuse):
            yield Harm.LOST, recording.problem
        case End.CUT if not _may_break(recording, excuse):
            harm = Harm.LOST if recording.accepted_at is not None else Harm.FAILED
            yield harm, f"cut: {recording.problem}"
        case End.TIMEOUT | End.UNREACHABLE | End.DECLINED:
            harm = Harm.LOST if recording.accepted_at is not None else Harm.FAILED
            yield harm, f"{recording.end}: {recording.problem}"
        case End.GARBLED:
            yield Harm.MISMATCHED, f"garbled: {recording.problem}"
    for moment in recording.breaks:
        if not _is_explained(recording, moment, excuse):
            yield Harm.LOST, "the connection broke without a death"
    if recording.refusals and not excuse.is_away:
        yield Harm.FAILED, f"{len(recording.refusals)} connections were refused"
    # A client that reconnects may have to wait until the journal is read.
    if _UNAVAILABLE in recording.deferrals and not (excuse.is_away or recording.breaks):
        yield Harm.FAILED, "rejected with 503 while the engine was only recovering"


def _may_break(recording: Recording, excuse: Excuse) -> bool:
    return _is_explained(recording, recording.ended_at, excuse)


def _is_explained(recording: Recording, moment: float, excuse: Excuse) -> bool:
    """Return whether a break follows the death of a process that held the connection.

    When the whole engine dies, the listening socket and its backlog outlive the first death a
    little.
    """
    opened_at = recording.opened_at if excuse.is_away else recording.opening_before(moment)
    return any(opened_at <= death <= moment <= death + BREAK_TIMEOUT_S for death in excuse.deaths)


def _check_whole(history: History, expected: History) -> Found:
    """Check what concerns the stream as a whole."""
    yield from ((Harm.FAILED, f"error event: {text}") for text in history.errors)
    if history.num_after_done:
        yield Harm.DUPLICATED, f"{history.num_after_done} events after [DONE]"
    if history.has_repeated_ids:
        yield Harm.DUPLICATED, "two events have the same id"
    if history.misplaced is not None and expected.misplaced is None:
        yield Harm.MISMATCHED, history.misplaced
    if len(history.answer_ids) > 1 and len(expected.answer_ids) == 1:
        yield Harm.MISMATCHED, f"events of several answers: {history.answer_ids}"


def _check_counts(history: History, expected: History, *, is_whole: bool) -> Found:
    """Check the token counts that the engine reports."""
    if history.errors:
        return
    wanted = expected.usages if is_whole else expected.usages[: len(history.usages)]
    if history.usages != wanted:
        yield Harm.MISMATCHED, f"usage {history.usages}, golden {expected.usages}"
    if is_whole and history.places != expected.places:
        yield Harm.MISMATCHED, f"the last id has {history.places}, golden {expected.places}"


def check_choice(actual: Choice, golden: Choice, *, is_whole: bool) -> list[tuple[Harm, str]]:
    """Compare one output sequence; only the first difference is returned.

    Args:
        actual: what was received.
        golden: what was expected.
        is_whole: whether the stream was read to its end. A finished choice is complete, too.
    """
    is_over = is_whole or bool(actual.finishes)
    columns: list[tuple[str, Sequence[Any], Sequence[Any]]] = [
        ("token ids", actual.token_ids, golden.token_ids),
        ("logprobs", actual.logprobs, golden.logprobs),
        ("text", actual.text, golden.text),
        ("reasoning", actual.reasoning, golden.reasoning),
        ("calls", actual.calls, golden.calls),
    ]
    if len(golden.roles) == 1:  # other servers repeat the role in every piece
        columns.append(("roles", actual.roles, golden.roles))
    for name, ours, theirs in columns:
        harm = compare(ours, theirs, is_whole=is_over)
        if harm is not None:
            return [(harm, f"{name} {_first_difference(ours, theirs)}")]
    if len(set(actual.call_ids)) < len(actual.call_ids):
        return [(Harm.DUPLICATED, f"two calls have the same id: {actual.call_ids}")]
    if actual.num_late_pieces or len(actual.finishes) > 1:
        return [(Harm.DUPLICATED, f"goes on after its end: {actual.finishes}")]
    if is_whole and not actual.finishes:
        return [(Harm.LOST, "no finish reason")]
    if actual.finishes and actual.finishes != golden.finishes:
        return [(Harm.MISMATCHED, f"finish {actual.finishes}, golden {golden.finishes}")]
    return [] if is_over else list(_check_together(actual, golden))


def _check_together(actual: Choice, golden: Choice) -> Found:
    """Check a stream that was not read to its end: tokens, text and logprobs end together."""
    num_tokens = len(actual.token_ids)
    if not golden.token_ids:
        return
    has_logprobs = len(golden.logprobs) == len(golden.token_ids)
    if has_logprobs and len(actual.logprobs) != num_tokens:
        yield Harm.LOST, f"{len(actual.logprobs)} logprobs of {num_tokens} tokens"
    fewest, most = golden.text_bounds(num_tokens)
    found = actual.num_characters
    if not fewest <= found <= most:
        detail = f"{found} characters of {num_tokens} tokens, golden {fewest} to {most}"
        yield Harm.LOST if found < fewest else Harm.MISMATCHED, detail


def compare(actual: Sequence[Any], golden: Sequence[Any], *, is_whole: bool) -> Harm | None:
    """Classify the difference between two sequences; None if there is none.

    Args:
        actual: what was received.
        golden: what was expected.
        is_whole: whether `actual` must be complete; otherwise any prefix is right.
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
