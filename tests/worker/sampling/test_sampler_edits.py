"""Properties of the sampler's score edits and logprobs, and its results for broken logits."""

import math
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from protocol.sampling import SamplingParams, ThinkingBudget
from tests.worker.sampling.rows import Row
from worker_proc.native.kernels import NativeLibrary
from worker_proc.sampling.logit_edits import edit_scores
from worker_proc.sampling.sampler import Sampler

EOS = (2, 5)
VOCAB = 64
NAN, INF = math.nan, math.inf
LIBRARY: NativeLibrary | None = None
"""Set for each test."""


@pytest.fixture(autouse=True)
def _choice(sampling_library: NativeLibrary | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with both ways to choose tokens."""
    monkeypatch.setattr(sys.modules[__name__], "LIBRARY", sampling_library)


def make_row(prompt: Sequence[int] = (1,), outputs: Sequence[int] = (), **kwargs: Any) -> Row:
    return Row(SamplingParams(**kwargs), [*prompt, *outputs], len(prompt))


def _sampler(vocab_size: int = VOCAB) -> Sampler:
    return Sampler(vocab_size, EOS, torch.device("cpu"), LIBRARY)


def _tokens(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    return _sampler(logits.shape[1]).sample(logits, rows).token_ids


def _edit(scores: list[float], row: Row) -> list[float]:
    """Return the edited scores of `row`, whose neighbours above and below must not leak into it."""
    above = make_row([0, 1], [2, 2], repetition_penalty=9.0, logit_bias={1: 50.0}, min_tokens=99)
    below = make_row([3], [0, 1], frequency_penalty=2.0, presence_penalty=2.0)
    tensor = torch.tensor([scores] * 3)
    edit_scores(tensor, [above, row, below], EOS)
    result: list[float] = tensor[1].tolist()
    return result


SCORES = [1.0, -1.0, 2.0, -2.0, 0.0, 4.0, 0.5, -0.5]


@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_budget_forces_only_what_a_grammar_allows(is_allowed: bool) -> None:
    row = make_row(outputs=[3, 3], thinking_budget=ThinkingBudget(2, [], [7]))
    scores, allowed = torch.tensor([SCORES]), torch.ones(1, len(SCORES), dtype=torch.bool)
    allowed[0, 7] = is_allowed
    edit_scores(scores, [row], EOS, allowed)
    assert scores.isfinite().sum().item() == (1 if is_allowed else len(SCORES))


def test_rows_without_edits_are_untouched() -> None:
    """Default parameters leave every score as it is, next to rows with all edits."""
    assert _edit(SCORES, make_row([0, 1], [2, 3])) == SCORES


def test_repetition_penalty_covers_prompt_and_outputs_once() -> None:
    """Positive scores are divided, others multiplied, once however often the token occurs."""
    edited = _edit(SCORES, make_row([0, 0, 1], [2, 2, 3], repetition_penalty=2.0))
    assert edited == [0.5, -2.0, 1.0, -4.0, 0.0, 4.0, 0.5, -0.5]


@pytest.mark.parametrize("kwargs", [{"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 4}, {}])
def test_the_least_repetition_penalty_allows_no_banned_token(kwargs: dict[str, Any]) -> None:
    """It makes the scores of known tokens huge, or 0, and leaves those at -inf there."""
    row = make_row([2, 5, 9, 10], repetition_penalty=5e-324, min_tokens=1, **kwargs)
    scores = torch.full((1, VOCAB), -1.0)
    scores[0, 9] = 1.0
    assert _tokens(scores, [row]) == [9]


def test_presence_penalty_covers_outputs_once() -> None:
    """Outputs lose the penalty once; the prompt's tokens lose nothing."""
    edited = _edit(SCORES, make_row([0, 1], [2, 2, 3], presence_penalty=0.5))
    assert edited == [1.0, -1.0, 1.5, -2.5, 0.0, 4.0, 0.5, -0.5]


def test_frequency_penalty_counts_outputs() -> None:
    """Outputs lose the penalty once per occurrence; the prompt's tokens lose nothing."""
    edited = _edit(SCORES, make_row([0, 1], [2, 2, 3], frequency_penalty=-0.5))
    assert edited == [1.0, -1.0, 3.0, -1.5, 0.0, 4.0, 0.5, -0.5]


def test_penalties_come_after_the_bias_and_add_up() -> None:
    """The bias is added, then repetition is applied, then frequency and presence."""
    row = make_row(
        [0],
        [2, 2],
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=0.125,
        logit_bias={0: -3.0, 2: 4.0},
    )
    assert _edit(SCORES, row)[:3] == [(1.0 - 3.0) * 2.0, -1.0, (2.0 + 4.0) / 2.0 - 0.5 - 0.125]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_bans_eos_and_stop_ids_until_reached(ignore_eos: bool) -> None:
    """EOS and stop ids are impossible below min_tokens, with ignore_eos too, then allowed."""
    for num_outputs in range(4):
        row = make_row(
            [1],
            [6] * num_outputs,
            min_tokens=2,
            stop_token_ids=[7, VOCAB + 5],
            ignore_eos=ignore_eos,
        )
        banned = [i for i, score in enumerate(_edit(SCORES, row)) if score == -INF]
        assert banned == ([2, 5, 7] if num_outputs < 2 else [])


def test_min_tokens_counts_outputs_not_prompt() -> None:
    """A long prompt does not lift the ban; sampled tokens respect it."""
    logits = torch.zeros(40, VOCAB)
    logits[:, EOS[0]] = 30.0
    rows = [make_row([1] * 50, [], min_tokens=1, seed=i) for i in range(40)]
    assert EOS[0] not in _tokens(logits, rows)
    rows = [make_row([1] * 50, [6], min_tokens=1, seed=i) for i in range(40)]
    assert set(_tokens(logits, rows)) == {EOS[0]}


def test_ignore_eos_leaves_eos_an_ordinary_token() -> None:
    """Without min_tokens, EOS is sampled like any token under ignore_eos."""
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS[0]] = 30.0
    assert _tokens(logits, [make_row(ignore_eos=True)]) == [EOS[0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logit_bias_forces_and_bans(temperature: float) -> None:
    """+100 forces a token, -100 bans the most likely one; ids outside the vocabulary pass."""
    logits = torch.zeros(30, VOCAB)
    logits[:, 9] = 5.0
    forced = [
        make_row(temperature=temperature, seed=i, logit_bias={33: 100.0, 10**6: 1.0})
        for i in range(30)
    ]
    assert _tokens(logits, forced) == [33] * 30
    banned = [make_row(temperature=temperature, seed=i, logit_bias={9: -100.0}) for i in range(30)]
    assert 9 not in _tokens(logits, banned)


def test_prompt_ids_outside_the_vocabulary_are_passed_over() -> None:
    """Penalties over ids that the logits have no column for change nothing and do not fail."""
    row = make_row([VOCAB + 3, 0], [VOCAB], repetition_penalty=2.0, presence_penalty=1.0)
    assert _edit(SCORES, row) == [0.5, *SCORES[1:]]


SHAPES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 2.0},
    {},
    {"top_p": 0.9},
    {"top_k": 4},
    {"top_k": 60, "min_p": 0.1},
    {"logprobs": 5},
]


@pytest.mark.parametrize("kwargs", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_that_are_not_finite_are_named(kwargs: dict[str, Any], dtype: torch.dtype) -> None:
    """One NaN or +inf suffices; the other rows get the same tokens as without these."""
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(2)).to(dtype)
    rows = [make_row(seed=i, **kwargs) for i in range(8)]
    expected = _tokens(logits, rows)
    logits[1], logits[2] = NAN, -INF
    logits[3, 40], logits[5, 7] = INF, NAN
    logits[6, 40], logits[6, 41] = INF, NAN
    result = _sampler().sample(logits, rows)
    assert result.not_finite == [1, 2, 3, 5, 6]
    for row in result.not_finite:
        expected[row] = 0
    assert result.token_ids == expected


@pytest.mark.parametrize("kwargs", SHAPES, ids=str)
def test_minus_infinity_is_a_token_that_is_never_chosen(kwargs: dict[str, Any]) -> None:
    """Masks and logit_bias make it: the row is finite as long as one token is left."""
    logits = torch.full((20, VOCAB), -INF)
    logits[:, 7] = 1.0
    result = _sampler().sample(logits, [make_row(seed=i, **kwargs) for i in range(20)])
    assert result.token_ids == [7] * 20
    assert result.not_finite == []


@pytest.mark.parametrize("kwargs", SHAPES, ids=str)
def test_all_banned_takes_the_raw_maximum(kwargs: dict[str, Any]) -> None:
    """Where edits ban every possible token, the most likely raw token is taken."""
    logits = torch.full((3, VOCAB), -INF)
    logits[:, EOS[0]], logits[:, EOS[1]] = 1.0, 2.0
    rows = [make_row(min_tokens=5, seed=i, **kwargs) for i in range(3)]
    assert _tokens(logits, rows) == [EOS[1]] * 3


@pytest.mark.parametrize("kwargs", SHAPES, ids=str)
def test_extreme_logits_do_not_overflow(kwargs: dict[str, Any]) -> None:
    """Largest floats, divided by a penalty under 1 and a low temperature, still give tokens."""
    largest = torch.finfo(torch.float32).max
    logits = torch.full((4, VOCAB), -largest)
    logits[:, 20] = largest
    rows = [
        make_row([20], [20], seed=i, **{"repetition_penalty": 0.01, "temperature": 1e-4, **kwargs})
        for i in range(4)
    ]
    assert _tokens(logits, rows) == [20] * 4


def test_no_rows_give_no_tokens() -> None:
    result = _sampler().sample(torch.empty(0, VOCAB), [])
    assert (result.token_ids, result.logprobs) == ([], [])


def test_logprobs_are_of_raw_logits() -> None:
    """Logprobs ignore temperature, bias and penalties; only rows that ask get them."""
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5)).bfloat16()
    rows = [
        make_row([4], logprobs=3, temperature=0.1, logit_bias={33: 100.0}),
        make_row(),
        make_row(logprobs=0, temperature=0.0),
    ]
    result = _sampler().sample(logits, rows)
    reference = logits.float().log_softmax(-1)
    first, second, third = result.logprobs
    assert first is not None
    assert second is None
    assert third is not None
    assert (first.token_id, len(first.top_ids)) == (33, 3)
    assert first.logprob == pytest.approx(float(reference[0, 33]))
    assert first.top_logprobs == pytest.approx(reference[0, first.top_ids].tolist())
    assert (third.rank, third.top_ids, third.top_logprobs) == (1, [], [])


def test_ranks_and_top_ids_follow_one_order() -> None:
    """Ranks count from 1; ranks and top lists break ties by lowest id."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, -INF]]).repeat(6, 1)
    entries = _sampler(6).prompt_logprobs(logits, list(range(6)), 6)
    assert [entry.rank for entry in entries] == [5, 1, 3, 2, 4, 6]
    assert all(entry.top_ids == [1, 3, 2, 4, 0, 5] for entry in entries)
    assert entries[5].logprob == entries[0].top_logprobs[5] == -9999.0


def test_prompt_logprobs_equal_logsoftmax_in_any_split() -> None:
    """Each position has one entry, in order, which is the same alone as together."""
    logits = torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(6)).bfloat16()
    ids = [(7 * i) % VOCAB for i in range(50)]
    entries = _sampler().prompt_logprobs(logits, ids, 4)
    reference = logits.float().log_softmax(-1)
    assert [e.token_id for e in entries] == ids
    assert [e.logprob for e in entries] == pytest.approx(reference[range(50), ids].tolist())
    singles = [
        _sampler().prompt_logprobs(logits[i : i + 1], ids[i : i + 1], 4)[0] for i in range(50)
    ]
    assert singles == entries


def test_logprobs_are_finite_whatever_the_logits() -> None:
    """Rows of NaN, of -inf, with +inf, and of extremes still give finite numbers."""
    logits = torch.zeros(4, VOCAB)
    logits[0], logits[1] = NAN, -INF
    logits[2, 3], logits[3, 3] = INF, -1e38
    for entry in _sampler().prompt_logprobs(logits, [3] * 4, 20):
        assert all(math.isfinite(x) for x in (entry.logprob, *entry.top_logprobs))
        assert 1 <= entry.rank <= VOCAB


def test_vocabulary_too_large_is_refused() -> None:
    """The error states the bound that keeps integer sums exact."""
    with pytest.raises(ValueError, match="vocab_size"):
        _sampler(2**22)


def test_a_bad_word_is_banned_where_its_beginning_ends_the_output() -> None:
    """The last token only, and not after a prompt that ends in the beginning."""
    words = [[3], [4, 5], [6, 7, 0]]
    for prompt, outputs, banned in (
        ([1], [], {3}),
        ([6, 7], [], {3}),
        ([6], [7], {3}),
        ([1], [4], {3, 5}),
        ([1], [6, 7], {3, 0}),
        ([1], [6, 7, 1], {3}),
    ):
        edited = _edit(SCORES, make_row(prompt, outputs, bad_words=words))
        assert {i for i, score in enumerate(edited) if score == -INF} == banned
        kept = set(range(len(SCORES))) - banned
        assert [edited[i] for i in kept] == [SCORES[i] for i in kept]


def test_only_allowed_tokens_remain() -> None:
    edited = _edit(
        SCORES, make_row(allowed_token_ids=[1, 6, VOCAB + 9], logit_bias={5: 9.0, 6: 1.0})
    )
    assert edited == [-INF, -1.0, -INF, -INF, -INF, -INF, 1.5, -INF]


@pytest.mark.parametrize("allowed", [[4, 3], [4, 3, 4]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_banned_allowed_token_is_better_than_any_other(
    temperature: float, allowed: list[int]
) -> None:
    """It is better even if it is repeated."""
    row = make_row(allowed_token_ids=allowed, bad_words=[[3], [4]], temperature=temperature)
    assert _tokens(torch.randn(1, VOCAB), [row]) == [4]


def test_chosen_candidates_have_their_logprobs() -> None:
    """They are in the order of the request, beside a row with the most likely ones."""
    logits = torch.tensor([SCORES] * 2)
    rows = [make_row(logprobs=2, logprob_token_ids=[3, 0, 5]), make_row(logprobs=2)]
    chosen, best = _sampler(len(SCORES)).sample(logits, rows).logprobs
    assert chosen is not None
    assert best is not None
    assert (chosen.top_ids, best.top_ids) == ([3, 0, 5], [5, 2])
    expected = logits[0].log_softmax(dim=-1)[[3, 0, 5]].tolist()
    assert chosen.top_logprobs == pytest.approx(expected)
