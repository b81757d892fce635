"""Joins the answers of all ranks to one question: it is settled when each has answered."""

from typing import Generic, TypeVar

T = TypeVar("T")


class RankAnswers(Generic[T]):
    """Answers about things with numbers, such as grammars, until the last rank has answered."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._answers: dict[int, dict[int, T]] = {}
        """By number and rank."""

    def take(self, number: int, rank: int, answer: T) -> list[T] | None:
        """Take in an answer; returns those of all ranks, in order, or None while one is missing.

        A second answer of a rank replaces the first.
        """
        answers = self._answers.setdefault(number, {})
        answers[rank] = answer
        if len(answers) < self._num_ranks:
            return None
        del self._answers[number]
        return [answers[rank] for rank in sorted(answers)]

    def clear(self) -> None:
        """Forget all answers: the ranks that have given them are gone."""
        self._answers.clear()
