"""Blocks of another machine that are larger than one answer: all parts fit together, or none count.

A server whose answers are spoiled on their way stands for a wire and a machine that do anything.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from protocol.core_worker import BlocksLoaded, LoadBlocks, StoreBlocks
from protocol.message import encode
from protocol.stores.block_link import (
    MAX_WINDOW,
    WINDOW_BYTES,
    BlockContent,
    BlocksHad,
    FromBlockServer,
    HaveBlocks,
    decode_from_server,
)
from protocol.transport.channel import RouterChannel
from protocol.transport.curve import make_keys
from scripts.block_server import server as server_module
from scripts.block_server import stored_blocks
from scripts.testing import eventually
from tests.worker.offload.bench import Bench, key, state_key
from tests.worker.offload.machines import LAYOUT, Machine, Reader
from worker_proc.offload import block_reader, peers
from worker_proc.offload.block_file import Unpacking, file_header
from worker_proc.offload.block_reader import BlockReader, Outcome, Wanted, _Ahead, _part_sizes
from worker_proc.offload.service import MAX_READERS

PART_BYTES = 48
"""A block's file has 150 bytes, four parts, and that of a state 32, one."""
NUM_PARTS = 4
NUMBERS = [1, 2, 3]


class Wire:
    """Passes the answers of a server on, spoiled as planned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plan: dict[int, str] = {}
        """What happens to an answer of a block, by its number on its connection."""
        self.num_answers = 0
        self._held: dict[bytes, bytes] = {}
        """The answer of each peer that the next one overtakes."""
        self._send = RouterChannel.send

        def send(channel: RouterChannel, peer: bytes, epoch: int, body: bytes) -> bool:
            return self._pass(channel, peer, epoch, body)

        monkeypatch.setattr(RouterChannel, "send", send)

    def begin(self, plan: dict[int, str]) -> None:
        self.plan, self.num_answers = plan, 0

    def _pass(self, channel: RouterChannel, peer: bytes, epoch: int, body: bytes) -> bool:
        answer = decode_from_server(body)
        bodies = [body]
        if isinstance(answer, BlockContent):
            bodies = self._spoiled(peer, answer, body)
            self.num_answers += 1
        sent = [self._send(channel, peer, epoch, each) for each in bodies]
        return all(sent)

    def _spoiled(self, peer: bytes, answer: BlockContent, body: bytes) -> list[bytes]:
        action, content = self.plan.get(answer.number, ""), bytes(answer.content)
        changed: dict[str, Callable[[], FromBlockServer]] = {
            "cut": lambda: _with(answer, content[:-1]),
            "empty": lambda: _with(answer, b""),
            "longer": lambda: _with(answer, content + b"\0"),
            "flipped": lambda: _with(answer, bytes([*content[:-1], content[-1] ^ 8])),
            "other size": lambda: BlockContent(answer.number, answer.content, 7),
        }
        held = self._held.pop(peer, None)
        if action == "swapped":
            self._held[peer] = body
            return [held] if held else []
        new = [encode(changed[action]())] if action in changed and content else [body]
        if action == "lost":
            new = []
        if action == "twice":
            new *= 2
        return new + ([held] if held else [])


def _with(answer: BlockContent, content: bytes) -> BlockContent:
    return BlockContent(answer.number, memoryview(content), answer.num_bytes)


ACTIONS = ["cut", "empty", "longer", "flipped", "other size", "swapped", "lost", "twice"]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_reader, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(stored_blocks, "PART_BYTES", PART_BYTES)


class Two:
    """A machine with blocks, and a reader of them."""

    def __init__(self, path: Path) -> None:
        make_keys(path / "keys", ["api"])
        (path / "there").mkdir()
        self.there = Machine(path / "there", path / "keys")
        self.source = Bench([self.there.directory])
        self.reader = Reader(path, path / "keys")
        self.bench = self.reader.bench

    def fill(self) -> None:
        """Store blocks, a state, and what the draft model has beside two of them, there."""
        self.source.draft_kv.filled = {1, 3}
        self.source.service.store(StoreBlocks(NUMBERS, [key(n) for n in NUMBERS], [4], [STATE]))
        names = [self.source.drafts.name(key(n)) or b"" for n in (1, 3)]
        index = self.source.stores[0].index
        written = [*(key(n) for n in NUMBERS), *names, STATE]
        eventually(lambda: all(name in index for name in written), "written")

    def load(self) -> BlocksLoaded:
        """Read the state to block 5, and the others to 6, 7 and 8, over a new connection."""
        for connection in self.reader.peers._idle:
            connection.close()
        self.reader.peers._idle.clear()
        for tensor in (*self.bench.tensors, *self.bench.states, *self.bench.draft_tensors):
            tensor.zero_()
        self.bench.draft_kv.filled = {6, 7, 8}
        message = LoadBlocks(5, [6, 7, 8], [key(n) for n in NUMBERS], 5, STATE, self.there.address)
        return self.reader.service.load(message) or self.bench.answer()

    def check(self, answer: BlocksLoaded) -> None:
        """What was answered is what was written there, and nothing else has come."""
        num_blocks = answer.num_blocks
        assert answer.num_remote_blocks == num_blocks
        assert answer.has_remote_state == answer.has_state
        assert answer.has_state or not num_blocks
        for number, block_id in zip(NUMBERS[:num_blocks], (6, 7, 8), strict=False):
            assert self.bench.content(block_id) == self.source.content(number)
        for block_id in range(6 + num_blocks, 9):
            assert not any(self.bench.content(block_id))
        state, drafts = self.bench.states[0], self.bench.draft_tensors[0]
        assert torch.equal(state[5], self.source.states[0][4] if answer.has_state else state[0])
        for number, block_id in zip(NUMBERS, (6, 7, 8), strict=True):
            is_filled = block_id in self.bench.draft_kv.filled and block_id < 6 + num_blocks
            expected = self.source.draft_tensors[0][number] if is_filled else drafts[0]
            assert torch.equal(drafts[block_id], expected)
        assert len(self.reader.service._reader_slots) == MAX_READERS

    def close(self) -> None:
        self.reader.peers.close()
        self.there.close()


STATE = state_key(4)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    made.fill()
    yield made
    made.close()


def test_blocks_states_and_drafts_come_in_parts(two: Two) -> None:
    answer = two.load()
    assert (answer.num_blocks, answer.has_remote_state) == (3, True)
    assert two.bench.draft_kv.filled == {6, 8}
    two.check(answer)


def test_more_parts_come_than_the_queues_hold(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (block_reader, stored_blocks):
        monkeypatch.setattr(module, "PART_BYTES", 2)
    two.check(answer := two.load())
    assert (answer.num_blocks, answer.has_state) == (3, True)


def test_of_a_block_that_is_missing_no_further_parts_are_asked_for(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_reader, "WINDOW_BYTES", 2 * PART_BYTES)
    asked: list[bytes] = []
    ask_for = BlockReader._ask_for

    def counted(reader: BlockReader, name: bytes, start: int) -> None:
        asked.append(name)
        ask_for(reader, name, start)

    monkeypatch.setattr(BlockReader, "_ask_for", counted)
    block = two.bench.memory.parts(0)
    with two.reader.peers.reader(two.there.address) as connection:
        wanted = [Wanted(key(number), block) for number in (8, 1, 9)]
        outcomes = list(connection.read(wanted, time.monotonic() + 10))
        assert connection.is_at_rest
    assert outcomes == [Outcome.NOT_THERE, Outcome.READ, Outcome.NOT_THERE]
    assert [asked.count(key(number)) for number in (8, 1, 9)] == [2, NUM_PARTS, 2]


def test_whatever_happens_to_the_parts_no_wrong_byte_counts(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next load, over a wire without losses, brings everything."""
    wire = Wire(monkeypatch)
    monkeypatch.setattr(block_reader, "ANSWER_TIMEOUT_S", 0.1)
    monkeypatch.setattr(peers, "PAUSE_S", 0.0)
    num_answers = 1 + 3 * (NUM_PARTS + 1)
    plans = st.dictionaries(
        st.integers(0, num_answers - 1), st.sampled_from(ACTIONS), min_size=1, max_size=3
    )

    @settings(phases=[Phase.generate], max_examples=25, deadline=None)
    @given(plan=plans)
    def check(plan: dict[int, str]) -> None:
        wire.begin(plan)
        two.check(two.load())
        wire.begin({})
        monkeypatch.setattr(block_reader, "ANSWER_TIMEOUT_S", 2.0)
        answer = two.load()
        monkeypatch.setattr(block_reader, "ANSWER_TIMEOUT_S", 0.1)
        two.check(answer)
        assert (answer.num_blocks, answer.has_state) == (3, True)

    check()


def test_a_spoiled_part_ends_the_load_before_its_block(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are those of the state, of four parts, and of the draft model's block."""
    wire = Wire(monkeypatch)
    monkeypatch.setattr(peers, "PAUSE_S", 0.0)
    for number, action in itertools.product((0, 1, NUM_PARTS, NUM_PARTS + 1), ACTIONS):
        wire.begin({number: action})
        answer = two.load()
        two.check(answer)
        assert answer.has_state == (number > 0 or action == "twice")
        if number <= NUM_PARTS:
            assert answer.num_blocks == (number == NUM_PARTS and action == "twice")


def test_other_questions_are_answered_between_the_parts(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_DRAIN_LIMIT", 1)
    wire = Wire(monkeypatch)
    with two.reader.peers.reader(two.there.address) as other:
        two.there.is_silent = True
        loading = threading.Thread(target=lambda: answers.append(two.load()))
        answers: list[BlocksLoaded] = []
        loading.start()
        eventually(lambda: len(two.reader.service._loads) > 0, "a load is under way")
        other._send(HaveBlocks(next(other._numbers), LAYOUT, 0, [key(2), key(9)]))
        two.there.is_silent, two.there.delay_s = False, 0.02
        answer = other._receive(time.monotonic() + 10)
        assert wire.num_answers < 1 + 3 * (NUM_PARTS + 1), "parts are still to come"
    assert answer == BlocksHad(0, b"\1\0")
    loading.join()
    two.check(answers[0])
    assert answers[0].num_blocks == 3


def test_what_has_come_from_a_machine_that_dies_is_let_go(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot is free again, and no connection is kept."""
    wire = Wire(monkeypatch)
    wire.begin(dict.fromkeys(range(3, 99), "lost"))
    message = LoadBlocks(5, [6], [key(1)], 5, STATE, two.there.address)
    assert two.reader.service.load(message) is None
    eventually(lambda: wire.num_answers > 3, "some parts have come")
    began = time.monotonic()
    two.there.close()
    answer = two.bench.answer()
    assert answer.num_blocks == 0
    assert time.monotonic() - began < block_reader.ANSWER_TIMEOUT_S + 0.5
    assert len(two.reader.service._reader_slots) == MAX_READERS
    assert not two.reader.peers._idle


@example(sizes=[3 * 2**20] * 6, part=2**20)
@given(sizes=st.lists(st.integers(0, 3 * 2**20), max_size=40), part=st.sampled_from([48, 2**20]))
@settings(max_examples=30, deadline=None)
def test_parts_are_asked_for_in_order_and_within_bounds(sizes: list[int], part: int) -> None:
    sizes = sizes if part > PART_BYTES else [size % 1000 for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_reader, "PART_BYTES", part)
        blocks = [Wanted(key(n), [memoryview(bytearray(size))]) for n, size in enumerate(sizes)]
        expected = [
            (each.key, number * part, size)
            for each in blocks
            for number, size in enumerate(_part_sizes(Unpacking(*each).num_bytes))
        ]
        ahead, asked = _Ahead(blocks), 0
        for answered, (_, _, size) in enumerate(expected):
            for place in ahead.take():
                assert place == expected[asked][:2]
                asked += 1
            on_their_way = [each[2] for each in expected[answered:asked]]
            assert 0 < len(on_their_way) <= MAX_WINDOW
            assert sum(on_their_way) <= WINDOW_BYTES
            assert max(on_their_way) <= part
            ahead.answered(size)
        assert asked == len(expected)


@given(cuts=st.sets(st.integers(0, 150), max_size=9))
@settings(max_examples=30, deadline=None)
def test_a_file_comes_in_any_pieces(cuts: set[int]) -> None:
    sizes = (120, 0, 14)
    whole = [memoryview(bytearray(range(size))) for size in sizes]
    header = file_header(key(1), whole)
    content = memoryview(header + b"".join(whole))
    block = [memoryview(bytearray(size)) for size in sizes]
    unpacking = Unpacking(key(1), block)
    for start, end in itertools.pairwise([0, *sorted(cuts), len(content)]):
        assert not unpacking.is_intact or start == len(content)
        unpacking.add(content[start:end])
    assert unpacking.is_intact
    assert block == whole
    with pytest.raises(ValueError, match="only 150 bytes"):
        unpacking.add(memoryview(b"x"))
