"""The answers of several ranks become one."""

from core_proc.links.rank_answers import RankAnswers


def test_a_question_is_settled_when_every_rank_has_answered() -> None:
    answers: RankAnswers[str] = RankAnswers(3)
    assert answers.take(7, 2, "") is None
    assert answers.take(8, 0, "") is None
    assert answers.take(7, 0, "") is None
    assert answers.take(7, 0, "too long") is None  # again
    assert answers.take(7, 1, "") == ["too long", "", ""]
    assert answers.take(7, 1, "") is None  # another question with this number
    assert answers.take(8, 2, "too large") is None
    assert answers.take(8, 1, "out of memory") == ["", "out of memory", "too large"]


def test_answers_of_ranks_that_are_gone_do_not_count() -> None:
    answers: RankAnswers[int] = RankAnswers(2)
    assert answers.take(7, 0, 1) is None
    answers.clear()
    assert answers.take(7, 1, 2) is None
    assert answers.take(7, 0, 3) == [3, 2]


def test_one_rank_settles_it_alone() -> None:
    answers: RankAnswers[int] = RankAnswers(1)
    assert answers.take(7, 0, 5) == [5]
