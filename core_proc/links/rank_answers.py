"""Joins the answers of all ranks to one question: it is settled when each has answered."""


class RankAnswers:
    """Answers about things with numbers, such as grammars, until the last rank has answered."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._answers: dict[int, dict[int, str]] = {}
        """By number and rank; the text of an error, or nothing."""

    def take(self, number: int, rank: int, error: str) -> str | None:
        """Take in an answer; None: another rank has not answered. Returns the first rank's error.

        A second answer of a rank replaces the first.
        """
        answers = self._answers.setdefault(number, {})
        answers[rank] = error
        if len(answers) < self._num_ranks:
            return None
        del self._answers[number]
        return next((answers[rank] for rank in sorted(answers) if answers[rank]), "")

    def clear(self) -> None:
        """Forget all answers: the ranks that have given them are gone."""
        self._answers.clear()
