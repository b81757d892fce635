"""Checks the golden run: a reference that is wrong itself would hide losses."""

from collections.abc import Iterator, Sequence

from tests.chaos.checker import check_stream
from tests.chaos.history import Choice, History
from tests.chaos.recording import End, Recording
from tests.chaos.workload import Body, ChaosRequest

_BAD_FINISHES = ("abort", "error")


def reference_problems(requests: Sequence[ChaosRequest], golden: Sequence[Recording]) -> list[str]:
    """Return the faults of a golden run, one line per stream; none if it is valid.

    Its streams must have ended well, with the requested numbers of choices, tokens and logprobs,
    and with matching usage.
    """
    found = []
    for request, recording in zip(requests, golden, strict=True):
        problem = next(_problems(request.body, recording), None)
        if problem is not None:
            found.append(f"golden run: {request.name} {problem}")
    return found


def _problems(body: Body, recording: Recording) -> Iterator[str]:
    if recording.end is not End.DONE:
        yield f"{recording.end}: {recording.problem}"
        return
    for violation in check_stream(recording, recording):
        yield violation.detail
    history = History(recording)
    if history.misplaced is not None:
        yield history.misplaced
    if len(history.answer_ids) > 1:
        yield f"events of several answers: {history.answer_ids}"
    if "input" in body:
        if len(history.vectors) != len(body["input"]) or len(history.usages) != 1:
            yield f"{len(history.vectors)} vectors, usage {history.usages}"
        return
    if sorted(history.choices) != list(range(body.get("n", 1))):
        yield f"choices {sorted(history.choices)}"
    for index, choice in sorted(history.choices.items()):
        yield from (f"choice {index}: {text}" for text in _problems_of_choice(body, choice))
    yield from _problems_of_usage(body, history)


def _problems_of_choice(body: Body, choice: Choice) -> Iterator[str]:
    num_tokens = len(choice.token_ids)
    if any(reason in _BAD_FINISHES for reason, _ in choice.finishes):
        yield f"finish {choice.finishes}"
    if body.get("return_token_ids") and not num_tokens:
        yield "no token ids"
    has_logprobs = body.get("logprobs") not in (None, False)
    if num_tokens and has_logprobs and len(choice.logprobs) != num_tokens:
        yield f"{len(choice.logprobs)} logprobs of {num_tokens} tokens"
    if not has_logprobs and choice.logprobs:
        yield "logprobs that were not requested"
    if body.get("tool_choice") == "required" and not (choice.calls or choice.reasoning):
        yield "neither a call nor reasoning before it"


def _problems_of_usage(body: Body, history: History) -> Iterator[str]:
    if len(history.usages) != 1:
        yield f"usage {history.usages}"
        return
    reported = history.usages[0].get("completion_tokens")
    come = sum(len(choice.token_ids) for choice in history.choices.values())
    if come and reported != come:
        yield f"usage has {reported} tokens, {come} were received"
    if history.places and sum(history.places) != reported:
        yield f"usage has {reported} tokens, the last id {history.places}"
    are_full = all(c.finishes[0][0] == "length" for c in history.choices.values())
    if are_full and reported != body["max_tokens"] * len(history.choices):
        yield f"usage has {reported} tokens, though all choices have their full length"
