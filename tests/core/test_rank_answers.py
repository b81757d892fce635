"""The answers of several ranks become one."""

from core_proc.links.rank_answers import RankAnswers, joined
from protocol.core_worker import AdapterLoaded, BlocksFound, BlocksLoaded, GrammarCompiled


def test_a_question_is_settled_when_every_rank_has_answered() -> None:
    answers = RankAnswers(3)
    assert answers.take(2, GrammarCompiled(7)) is None
    assert answers.take(0, GrammarCompiled(8)) is None
    assert answers.take(0, GrammarCompiled(7)) is None
    assert answers.take(0, GrammarCompiled(7, "too long")) is None  # again
    assert answers.take(1, AdapterLoaded(7)) is None  # of another kind
    seven = [GrammarCompiled(7, "too long"), GrammarCompiled(7), GrammarCompiled(7)]
    assert answers.take(1, GrammarCompiled(7)) == seven
    assert answers.take(1, GrammarCompiled(7)) is None  # another question with this number
    assert answers.take(2, GrammarCompiled(8, "too large")) is None
    eight = answers.take(1, GrammarCompiled(8, "out of memory"))
    assert eight is not None
    assert joined(eight) == GrammarCompiled(8, "out of memory"), "the first error"


def test_answers_of_ranks_that_are_gone_do_not_count() -> None:
    answers = RankAnswers(2)
    assert answers.take(0, AdapterLoaded(7, "gone")) is None
    answers.clear()
    assert answers.take(1, AdapterLoaded(7)) is None
    assert answers.take(0, AdapterLoaded(7)) == [AdapterLoaded(7), AdapterLoaded(7)]


def test_one_rank_settles_it_alone() -> None:
    assert RankAnswers(1).take(0, AdapterLoaded(7)) == [AdapterLoaded(7)]


def test_a_group_has_what_every_rank_has() -> None:
    loads = [BlocksLoaded(7, 5, 30, True, 1, 9), BlocksLoaded(7, 4, 40, False, 2, 8)]
    assert joined(loads) == BlocksLoaded(7, 4, 40, False, 2, 9)
    found = [BlocksFound(7, bytes([1, 1, 0])), BlocksFound(7, bytes([1, 0, 0]))]
    assert joined(found) == BlocksFound(7, bytes([1, 0, 0]))
    assert joined([*found, BlocksFound(7, b"")]) == BlocksFound(7, b""), "one got no answer"
