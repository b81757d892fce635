"""Rows over drafts have the ids that they would have if these were known tokens."""

from protocol.sampling import SamplingParams
from worker_proc.request import MirroredRequest, ScheduledRequest
from worker_proc.sampling.logit_edits import SamplingRow, banned_words
from worker_proc.sampling.verification import rows_to_sample

IDS, DRAFTS = [5, 6, 7, 8], [11, 12, 13]


def _rows(params: SamplingParams) -> list[tuple[list[int], SamplingRow]]:
    """Return the ids that each row of a drafting request stands for, and the row."""
    request = MirroredRequest(1, list(IDS), 2, params, [], 3, 0, draft_token_ids=list(DRAFTS))
    rows = rows_to_sample([ScheduledRequest(request, 3, 1 + len(DRAFTS), True)])
    return [(IDS + DRAFTS[:place], row) for place, row in enumerate(rows)]


def test_a_row_has_the_ids_after_any_position() -> None:
    """Only some of the drafts may be left of them."""
    rows = _rows(SamplingParams())
    assert len(rows) == 1 + len(DRAFTS)
    for ids, row in rows:
        assert (row.token_ids, row.num_tokens) == (ids, len(ids))
        for place in range(len(ids) + 1):
            assert row.token_ids_after(place) == ids[place:]


def test_bad_words_end_in_drafts() -> None:
    """The other tokens of the row are known ones, a part of the drafts, or both."""
    words = [[8, 21], [11, 22], [12, 23], [13, 24], [12, 13, 25], [8, 11, 12, 26], [5, 6, 7, 8, 27]]
    rows = _rows(SamplingParams(bad_words=words))
    assert [banned_words(row) for _, row in rows] == [[21], [22], [23, 26], [24, 25]]
