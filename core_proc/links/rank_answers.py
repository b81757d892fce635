"""Joins the answers of all ranks to one message: it is settled when each has answered."""

from collections.abc import Sequence

from protocol.core_worker import (
    AdapterLoaded,
    BlocksFound,
    BlocksLoaded,
    GrammarCompiled,
    RankAnswer,
)


class RankAnswers:
    """Answers, until that of the last rank to the same message has come."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._by_rank: dict[tuple[type[RankAnswer], int], dict[int, RankAnswer]] = {}
        """By the kind of the answers, and the number of what they are about."""

    def take(self, rank: int, answer: RankAnswer) -> list[RankAnswer] | None:
        """Take in an answer; returns those of all ranks, in order, or None while one is missing.

        A second answer of a rank replaces the first.
        """
        key = type(answer), _number(answer)
        answers = self._by_rank.setdefault(key, {})
        answers[rank] = answer
        if len(answers) < self._num_ranks:
            return None
        del self._by_rank[key]
        return [answers[rank] for rank in sorted(answers)]

    def clear(self) -> None:
        """Forget all answers: the ranks that have given them are gone."""
        self._by_rank.clear()


def _number(answer: RankAnswer) -> int:
    match answer:
        case GrammarCompiled():
            return answer.grammar_id
        case AdapterLoaded():
            return answer.adapter_id
    return answer.req_id


def joined(answers: Sequence[RankAnswer]) -> RankAnswer:
    """Return the answer of the whole group, which claims only what every rank's answer does.

    The error is that of the first rank with one, and a load took as long as at the slowest.
    """
    first = answers[0]
    match first:
        case BlocksLoaded():
            loads = [answer for answer in answers if isinstance(answer, BlocksLoaded)]
            return BlocksLoaded(
                first.req_id,
                min(load.num_blocks for load in loads),
                max(load.load_ns for load in loads),
                all(load.has_state for load in loads),
                max(load.num_remote_blocks for load in loads),
                max(load.remote_ns for load in loads),
                any(load.has_remote_state for load in loads),
            )
        case BlocksFound():
            found = [answer.are_there for answer in answers if isinstance(answer, BlocksFound)]
            return BlocksFound(first.req_id, bytes(map(min, zip(*found, strict=False))))
        case _:
            made = (a for a in answers if isinstance(a, GrammarCompiled | AdapterLoaded))
            return next((answer for answer in made if answer.error), first)
