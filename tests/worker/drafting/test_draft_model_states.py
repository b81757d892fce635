"""State blocks of a draft model: every part begins from the state of exactly the tokens before it.

The tests write to blocks what a draft model would: the tokens that a state stands for. KV blocks
have 4 tokens.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from worker_proc.drafting.draft_model_states import DraftModelStates
from worker_proc.drafting.draft_progress import DraftProgress

SIZE, SPACING = 4, 8
NUM_DRAFTS = 3


def make(num_blocks: int, *, spacing: int | None = SPACING) -> DraftModelStates:
    return DraftModelStates(1 + num_blocks, SIZE, spacing)


@dataclass
class Text:
    """A request of the test."""

    req_id: int
    tokens: list[int]
    num_prompt_tokens: int
    position: int = 0
    """Up to which it is computed."""
    num_slots: int = 0
    """Positions for which it has KV blocks."""
    drafts: list[int] = field(default_factory=list)


class Bench:
    """Requests whose states are in blocks, and what these blocks hold."""

    def __init__(self, num_blocks: int) -> None:
        self.states = make(num_blocks)
        self.contents: dict[int, list[int]] = {}
        self.kv_blocks: dict[tuple[int, ...], int] = {}
        """The blocks by the tokens up to their ends: texts that begin alike share blocks."""
        self.num_begun_from_snapshots = 0

    def kv_block(self, text: Text, end: int) -> int:
        return self.kv_blocks.setdefault(tuple(text.tokens[:end]), len(self.kv_blocks))

    def begin(self, text: Text) -> None:
        ends = range(SIZE, len(text.tokens), SIZE)
        table = [self.kv_block(text, end) for end in ends]
        text.position = self.states.begin(text.req_id, table)
        self.num_begun_from_snapshots += text.position > 0

    def step(self, parts: list[tuple[Text, int, int]]) -> int:
        """Compute parts: texts with stops and drafts; returns how many had blocks."""
        states, read, taken = self.states, set[int](), []
        for text, stop, num_drafts in parts:
            start = text.position
            path = states.take(text.req_id, start, stop, text.num_slots, num_drafts)
            if path is not None:
                assert path.num_drafts <= num_drafts
                if start:
                    assert self.contents[path.source] == text.tokens[:start]
                    read.add(path.source)
                taken.append((text, stop, path))
        written: list[int] = []
        for text, stop, path in taken:
            text.drafts = [1000 + number for number in range(path.num_drafts)]
            for end in self.ends_of_snapshots(text, text.position, stop):
                block_id = states.keep(text.req_id, self.kv_block(text, end), end)
                if block_id is not None:
                    path.blocks[end] = block_id
            assert not (read - {path.source}).intersection(path.blocks.values())
            written += path.blocks.values()
        assert len(set(written)) == len(written)  # texts are computed in any order
        for text, stop, path in taken:
            for position, block_id in path.blocks.items():
                self.contents[block_id] = (text.tokens + text.drafts)[:position]
            text.position = min(stop, text.num_slots)
        states.end_step()
        states.check_invariants()
        return len(taken)

    def ends_of_snapshots(self, text: Text, start: int, stop: int) -> Iterator[int]:
        end = min(stop, text.num_slots)
        return self.states.ends_of_snapshots(start, end, text.num_prompt_tokens)

    def settle(self, text: Text, num_right: int) -> None:
        """Let the first drafts be right, and a token follow, if the text was computed."""
        right = text.drafts[:num_right]
        before, known = text.position, len(text.tokens)
        if text.drafts:
            text.tokens += [*right, 7]
        if before == known:  # the last draft has no state
            text.position += min(len(right), len(text.drafts) - 1, text.num_slots - known)
        for end in self.ends_of_snapshots(text, before, text.position):
            assert self.states.keep(text.req_id, self.kv_block(text, end), end) is None
        self.states.settle(text.req_id, text.position)
        text.drafts = []


@pytest.mark.parametrize("num_blocks", [2, 5, 9, 40])
def test_a_part_begins_from_the_state_of_the_tokens_before_it(num_blocks: int) -> None:
    """Orders are random, prefixes common, drafts right and wrong, and blocks few."""
    num_begun_from_snapshots = num_computed = 0
    for seed in range(30):
        rng = random.Random(seed)
        bench, running = Bench(num_blocks), list[Text]()
        for number in range(40):
            if len(running) < 4 and rng.random() < 0.4:
                tokens = [*range(rng.choice((0, 9, 17, 30))), *([number] * rng.randrange(1, 9))]
                running.append(Text(number, tokens, len(tokens)))
                bench.begin(running[-1])
            parts = []
            for text in running:
                known = len(text.tokens)
                if rng.random() < 0.8:
                    stop = rng.choice((known, rng.randrange(text.position + 1, known + 1)))
                    parts.append((text, stop, NUM_DRAFTS * (stop == known)))
                    # The table may end before the last known token, or behind some drafts.
                    num_tokens = known + rng.randrange(-1, NUM_DRAFTS)
                    text.num_slots = max(text.num_slots, -(-num_tokens // SIZE) * SIZE)
            num_computed += bench.step(parts)
            for text in list(running):
                bench.settle(text, rng.randrange(NUM_DRAFTS + 1))
                if rng.random() < 0.1 or len(text.tokens) > 60:
                    bench.states.release(text.req_id)
                    running.remove(text)
        num_begun_from_snapshots += bench.num_begun_from_snapshots
        for text in running:
            bench.states.release(text.req_id)
        bench.states.check_invariants()
        assert bench.states.num_free + bench.states.num_snapshots >= num_blocks
    assert num_begun_from_snapshots > 5
    assert num_computed > 150


def test_a_request_takes_over_the_block_that_it_alone_holds() -> None:
    states = make(2)
    assert states.begin(1, []) == 0
    first = states.take(1, 0, 3, 4, 0)
    assert first is not None
    states.settle(1, 3)
    path = states.take(1, 3, 4, 4, 2)
    assert path is not None
    assert path.source == path.blocks[4] == first.blocks[3]
    assert path.num_drafts == 2


def test_a_snapshot_is_read_and_not_written() -> None:
    states = make(3)
    states.begin(1, [])
    assert states.take(1, 0, 8, 8, 0) is not None
    assert states.keep(1, 5, 8) is None  # the block of the request is that of the snapshot
    for req_id in (1, 2):
        if req_id == 2:
            assert states.begin(2, [4, 5, 6]) == 8
        path = states.take(req_id, 8, 9, 12, 1)
        assert path is not None
        assert path.source not in path.blocks.values()
    assert states.begin(3, [4, 6]) == 0


def test_where_kv_ends_a_state_is_kept() -> None:
    """A token in a spare block is computed again, so the state before it must stay."""
    states = make(5)
    states.begin(1, [])
    assert states.take(1, 0, 8, 8, 0) is not None
    path = states.take(1, 8, 9, 8, 3)
    assert path is not None
    assert sorted(path.blocks) == [9, 10, 11]
    states.settle(1, 8)
    again = states.take(1, 8, 10, 12, 1)
    assert again is not None
    assert again.source == path.source


def test_with_too_few_blocks_there_are_fewer_drafts_and_then_none() -> None:
    states = make(3)
    for req_id, num_drafts in ((1, 2), (2, 1)):
        states.begin(req_id, [])
        path = states.take(req_id, 0, 5, 8, 2)
        assert path is not None
        assert path.num_drafts == num_drafts
    states.begin(3, [])
    assert states.take(3, 0, 5, 8, 2) is None
    states.settle(1, 5)
    assert states.take(3, 0, 5, 8, 2) is not None
    states.check_invariants()


def test_requests_come_before_snapshots_of_which_the_oldest_is_given_up() -> None:
    states = make(3)
    states.begin(1, [])
    path = states.take(1, 0, 24, 24, 0)
    assert path is not None
    assert [states.keep(1, kv_block, end) is None for kv_block, end in ((3, 24), (2, 16))] == [
        True,
        False,
    ]
    assert states.keep(1, 1, 8) is not None
    assert states.keep(1, 0, 4) is None  # there is no block left
    states.end_step()
    states.settle(1, 24)
    states.begin(2, [])
    assert states.take(2, 0, 4, 8, 0) is not None
    assert states.num_snapshots == 2
    assert states.begin(3, [0, 1, 2]) == 4 * 2
    states.check_invariants()


def test_snapshots_are_kept_at_multiples_and_at_the_end_of_the_prompt() -> None:
    assert list(make(9).ends_of_snapshots(3, 25, 23)) == [24, 20, 16, 8]
    assert list(make(9).ends_of_snapshots(20, 24, 23)) == [24]
    assert list(make(9, spacing=None).ends_of_snapshots(0, 25, 23)) == []


def test_the_last_token_is_not_counted_as_computed() -> None:
    """A draft that was right and not verified may be the last known token."""
    progress = DraftProgress(3, ahead=[7, 8, 9])
    progress.settle([1, 2, 3, 7, 8])
    assert progress.position == 4
    assert progress.ahead == []
