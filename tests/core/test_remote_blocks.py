"""Blocks of the machine from which a request comes: asked for once, and read where that pays."""

import pytest

from core_proc.kv.load_costs import LoadCosts
from core_proc.kv.offload import MAX_LOADS, MIN_LOAD_TOKENS, Offload
from core_proc.request import Request, RequestStatus
from protocol.core_worker import (
    BlocksFound,
    BlocksLoaded,
    FindBlocks,
    LoadBlocks,
    ModelRunnerOutput,
    StoreBlocks,
)
from protocol.model_facts import KVGroup
from protocol.sampling import SamplingParams
from tests.core.fake_store import FakeStore
from tests.core.harness import Harness
from tests.core.kept_states import ALL_GROUPS, SPACING, fill
from tests.core.kept_states import PROMPT as LONG_PROMPT
from tests.core.state_bench import STATES
from tests.core.store_bench import BLOCK, PROMPT, filled_store

THERE = "tcp://10.0.0.2:7300"
HERE = "tcp://10.0.0.1:7300"


class Bench(Harness):
    """A scheduler with an empty store, whose requests come from a machine with a full one."""

    def __init__(self, there: FakeStore | None = None, **config: object):
        self.here, self.there = FakeStore(), there or FakeStore()
        self.offload = Offload([self.here.index], reads_machines=True, server_here=HERE)
        super().__init__(caching=True, offload=self.offload, **config)  # type: ignore[arg-type]
        self.questions: list[FindBlocks] = []
        self.loads: list[LoadBlocks] = []

    def come(self, name: str, prompt: list[int] = PROMPT, blocks_at: str = THERE) -> Request:
        """Add a request that was at another machine before."""
        self.add(name, prompt, 2)
        self.requests[name].blocks_at = blocks_at
        return self.requests[name]

    def transfer(self) -> None:
        for message in self.scheduler.take_transfers():
            match message:
                case StoreBlocks():
                    self.here.write(self.worker, message)
                case LoadBlocks():
                    self.loads.append(message)
                case FindBlocks():
                    self.questions.append(message)

    def answer(self, are_there: bytes | None = None) -> None:
        """Answer the oldest question: with the truth, or something else."""
        question = self.questions.pop(0)
        truth = bytes(key in self.there.index for key in question.keys)
        found = truth if are_there is None else are_there
        self.scheduler.blocks_found(BlocksFound(question.req_id, found))

    def end_load(self, most: int = 1000, load_ns: int = 1000, num_remote: int = 1000) -> None:
        load = self.loads.pop(0)
        is_here = load.state_key in self.here.index
        has_state = most > 0 and self.here.read_state(self.worker, load, self.there)
        if load.state_key and not has_state:
            most = 0
        num_blocks = self.here.read(self.worker, load, most, self.there)
        answer = BlocksLoaded(
            load.req_id,
            num_blocks,
            load_ns,
            has_state,
            num_remote_blocks=min(num_remote, num_blocks),
            remote_ns=load_ns,
            has_remote_state=has_state and not is_here,
        )
        self.scheduler.blocks_loaded(answer)


@pytest.fixture
def filled() -> FakeStore:
    return filled_store()


def test_a_request_waits_for_the_answer_and_for_its_blocks_and_computes_the_rest(
    filled: FakeStore,
) -> None:
    bench = Bench(filled)
    request = bench.come("a")
    assert bench.step() == {}
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KV
    assert not request.block_tables
    bench.transfer()
    assert bench.questions == [FindBlocks(request.req_id, THERE, request.block_hashes)]
    bench.answer()
    assert bench.step() == {}
    bench.transfer()
    (load,) = bench.loads
    assert (load.source, load.keys) == (THERE, request.block_hashes)
    bench.end_load()
    assert bench.step() == {"a": 3}
    assert bench.offload.num_loaded_tokens == bench.offload.num_remote_tokens == 6 * BLOCK
    bench.run()
    bench.transfer()
    assert filled.index <= bench.here.index, "what came from there is stored here"


def test_a_request_that_returns_to_its_machine_asks_no_server(filled: FakeStore) -> None:
    bench = Bench(filled)
    bench.come("a", blocks_at=HERE)
    assert bench.step() == {"a": len(PROMPT)}
    bench.transfer()
    assert not bench.questions


@pytest.mark.parametrize("are_there", [b"", b"\1", bytes(6), b"\0" + bytes([1]) * 5])
def test_without_a_useful_answer_the_request_is_computed_and_asks_no_more(
    filled: FakeStore, are_there: bytes
) -> None:
    bench = Bench(filled)
    bench.come("a")
    bench.step()
    bench.transfer()
    bench.answer(are_there)
    assert bench.step() == {"a": len(PROMPT)}
    bench.run()
    bench.transfer()
    assert bench.questions == bench.loads == []


@pytest.mark.parametrize("most", [0, 1, 5])
def test_blocks_that_do_not_come_are_computed(filled: FakeStore, most: int) -> None:
    bench = Bench(filled)
    bench.come("a")
    bench.step()
    bench.transfer()
    bench.answer()
    bench.step()
    bench.transfer()
    bench.end_load(most)
    assert bench.step() == {"a": len(PROMPT) - most * BLOCK}
    bench.run()


def test_only_what_no_store_here_has_is_asked_for(filled: FakeStore) -> None:
    bench = Bench(filled)
    bench.add("head", PROMPT[: 2 * BLOCK + 1], 2)
    bench.step()
    bench.transfer()
    request = bench.come("a")
    bench.step()
    bench.transfer()
    assert bench.questions[0].keys == request.block_hashes[2:]
    bench.answer()
    bench.step()
    bench.transfer()
    assert bench.loads[0].keys == request.block_hashes[2:]
    bench.end_load()
    assert bench.step()["a"] == 3
    bench.run()


def test_others_are_not_delayed_and_few_tokens_are_computed_at_once(filled: FakeStore) -> None:
    bench = Bench(filled)
    bench.come("a")
    bench.add("b", 20, 2)
    bench.come("short", PROMPT[: MIN_LOAD_TOKENS - 1])
    assert bench.step() == {"b": 20, "short": MIN_LOAD_TOKENS - 1}


def test_many_questions_are_asked_at_a_time_and_loads_wait_for_places(filled: FakeStore) -> None:
    num = MAX_LOADS + 2
    bench = Bench(filled, seqs=2 * num)
    for number in range(num):
        bench.come(str(number))
    bench.step()
    bench.transfer()
    assert len(bench.questions) == num
    for _ in range(num):
        bench.answer()
    bench.step()
    bench.transfer()
    assert len(bench.loads) == MAX_LOADS
    while bench.loads:
        bench.end_load()
        bench.step()
        bench.transfer()
    bench.run()
    assert len(bench.finished) == num


@pytest.mark.parametrize("when", ["asking", "loading"])
def test_a_lost_worker_asks_or_reads_again_and_late_answers_are_ignored(
    filled: FakeStore, when: str
) -> None:
    bench = Bench(filled)
    request = bench.come("a")
    bench.step()
    bench.transfer()
    if when == "loading":
        bench.answer()
        bench.step()
        bench.transfer()
    bench.lose_worker()
    bench.scheduler.blocks_found(BlocksFound(request.req_id, bytes(6)))
    bench.scheduler.blocks_loaded(BlocksLoaded(request.req_id, 6, 1))
    bench.loads.clear()
    bench.questions.clear()
    bench.step()
    bench.transfer()
    if when == "asking":
        bench.answer()
        bench.step()
        bench.transfer()
    bench.end_load()
    assert bench.step() == {"a": 3}
    bench.run()


@pytest.mark.parametrize("when", ["asking", "waiting", "loading"])
def test_a_request_may_end_at_any_time(filled: FakeStore, when: str) -> None:
    bench = Bench(filled)
    request = bench.come("a")
    bench.step()
    bench.transfer()
    if when != "asking":
        bench.answer()
    if when == "loading":
        bench.step()
        bench.transfer()
    bench.abort("a")
    if when == "loading":
        bench.end_load()
    bench.scheduler.blocks_found(BlocksFound(request.req_id, bytes([1]) * 6))
    assert bench.step() == {}
    bench.transfer()
    assert bench.loads == []
    remote = bench.offload.remote
    assert not remote.has_any(request)
    assert remote.may_ask(request), "nothing is kept of it"


def test_a_reset_of_the_prefix_cache_reads_nothing_from_there(filled: FakeStore) -> None:
    bench = Bench(filled)
    bench.come("a")
    bench.step()
    bench.transfer()
    bench.offload.clear()
    bench.answer()
    assert bench.step() == {"a": len(PROMPT)}


def test_workers_without_keys_are_asked_for_nothing(filled: FakeStore) -> None:
    bench = Bench(filled)
    bench.offload.remote = type(bench.offload.remote)(is_on=False, here="")
    bench.come("a")
    assert bench.step() == {"a": len(PROMPT)}


def test_prompts_whose_tokens_are_wanted_are_computed(filled: FakeStore) -> None:
    bench = Bench(filled)
    bench.add("a", PROMPT, 2, params=SamplingParams(prompt_logprobs=1, max_tokens=2))
    bench.requests["a"].blocks_at = THERE
    assert bench.step() == {"a": len(PROMPT)}


def costs_of(computed_ns: int) -> LoadCosts:
    costs = LoadCosts()
    costs.sent(100, 100)
    costs.step_ended(ModelRunnerOutput(0, [], forward_ns=100 * computed_ns))
    return costs


def test_blocks_that_were_found_are_not_read_once_it_is_known_not_to_pay(
    filled: FakeStore,
) -> None:
    bench = Bench(filled)
    bench.come("a")
    bench.step()
    bench.transfer()
    bench.offload.costs = costs_of(1000)
    bench.offload.costs.loaded(1, 10**9, THERE)
    bench.answer()
    assert bench.step() == {"a": len(PROMPT)}
    bench.run()


def test_each_machine_has_its_own_cost() -> None:
    costs = costs_of(1000)
    costs.loaded(100, 100 * 5000, THERE)
    assert not costs.try_load(THERE)
    assert costs.try_load("tcp://10.0.0.3:7300")
    assert costs.try_load()
    costs.loaded(100, 100 * 5000)
    assert not costs.try_load()


def test_a_machine_that_becomes_quicker_is_found_by_a_few_trials() -> None:
    costs = costs_of(1000)
    costs.loaded(1, 10**9, THERE)
    assert [costs.try_load(THERE) for _ in range(32)].count(True) == 2
    for _ in range(2):
        costs.loaded(100, 100 * 100, THERE)
    assert costs.try_load(THERE)


def test_what_a_trial_has_found_is_read(filled: FakeStore) -> None:
    costs = costs_of(1000)
    costs.loaded(1, 10**9, THERE)
    num_loads = 0
    for _ in range(40):
        bench = Bench(filled)
        bench.offload.costs = costs
        bench.come("a")
        bench.step()
        bench.transfer()
        if bench.questions:
            bench.answer()
            bench.step()
            bench.transfer()
            num_loads += len(bench.loads)
    assert num_loads == 2


def test_refused_loads_of_one_machine_make_no_trial_of_another() -> None:
    costs = costs_of(1000)
    for source in ("", THERE):
        costs.loaded(1, 10**9, source)
    tried = [source for _ in range(32) for source in ("", THERE) if costs.try_load(source)]
    assert sorted(tried) == ["", "", THERE, THERE]


def test_a_load_may_take_as_long_as_computing() -> None:
    assert LoadCosts().limit_ms(1000) == 0
    assert costs_of(1_000_000).limit_ms(2000) == 2000
    assert costs_of(1_000_000).limit_ms(10) == 1000
    assert costs_of(1_000_000).limit_ms(10**6) == 10_000


def test_a_load_that_reaches_its_limit_counts_as_slow(filled: FakeStore) -> None:
    bench = Bench(filled)
    bench.offload.costs = costs_of(1_000_000)
    bench.come("a")
    bench.step()
    bench.transfer()
    bench.answer()
    bench.step()
    bench.transfer()
    assert bench.loads[0].limit_ms == 1000
    bench.end_load(most=0, load_ns=1_100_000_000)
    bench.run()
    bench.come("b", [5000 + i for i in range(len(PROMPT))])
    assert bench.step() == {"b": len(PROMPT)}


def test_memory_of_costs_is_bounded() -> None:
    costs = costs_of(1000)
    costs.loaded(100, 100 * 5000)
    for number in range(1000):
        costs.loaded(100, 100 * 5000, f"tcp://10.0.0.2:{number}")
    assert len(costs._loaded_ns) <= 256
    assert not costs.try_load()


def states_bench(
    groups: tuple[KVGroup, ...], there: FakeStore | None = None, num_states: int = 8
) -> Bench:
    """Return a bench with recurrent layers, whose requests come from a machine with LONG_PROMPT."""
    return Bench(
        there or fill(groups),
        kv_groups=(*groups, STATES),
        num_state_blocks=num_states + 1,
        mamba_block_size=SPACING,
    )


@pytest.mark.parametrize("groups", ALL_GROUPS, ids=len)
def test_a_state_comes_from_there_with_the_kv_up_to_it(groups: tuple[KVGroup, ...]) -> None:
    """The fake worker checks the state. It is stored here, as the KV is."""
    bench = states_bench(groups)
    bench.come("a", LONG_PROMPT)
    assert bench.step() == {}
    bench.transfer()
    bench.answer()
    assert bench.step() == {}
    bench.transfer()
    (load,) = bench.loads
    assert load.source == THERE
    assert load.state_key in bench.there.index
    bench.end_load()
    assert bench.step() == {"a": 3}
    assert bench.offload.num_loaded_states == 1
    assert bench.offload.num_remote_tokens == bench.offload.num_loaded_tokens == 10 * BLOCK
    bench.transfer()
    assert {load.state_key, *load.keys} <= bench.here.index
    bench.run()


@pytest.mark.parametrize("groups", ALL_GROUPS, ids=len)
def test_without_its_state_from_there_the_prompt_is_computed(groups: tuple[KVGroup, ...]) -> None:
    """A load that brings nothing does not measure what reading costs."""
    bench = states_bench(groups)
    bench.come("a", LONG_PROMPT)
    bench.step()
    bench.transfer()
    bench.answer()
    bench.step()
    bench.transfer()
    bench.end_load(most=0, load_ns=10**12)
    assert bench.step() == {"a": len(LONG_PROMPT)}
    assert bench.offload.num_remote_tokens == bench.offload.num_loaded_states == 0
    assert THERE not in bench.offload.costs._loaded_ns
    bench.run()
    assert bench.loads == bench.questions == []


def test_only_states_after_the_local_ones_are_requested() -> None:
    there = fill()
    bench = states_bench(ALL_GROUPS[0], there)
    bench.add("head", LONG_PROMPT[: SPACING + 1], 2)
    bench.run()
    bench.transfer()
    request = bench.come("a", LONG_PROMPT)
    bench.step()
    bench.transfer()
    (question,) = bench.questions
    first = SPACING // BLOCK
    assert question.keys[::2] == request.block_hashes[first:]
    bench.answer()
    bench.step()
    bench.transfer()
    assert bench.loads[0].keys == request.block_hashes[first:]
    bench.end_load()
    assert bench.step() == {"a": 3}
    assert bench.offload.num_remote_tokens == (10 - first) * BLOCK
    bench.run()


def test_a_load_of_a_state_alone_may_take_as_long_as_its_tokens() -> None:
    bench = states_bench(ALL_GROUPS[0], num_states=1)
    bench.add("first", LONG_PROMPT, 2)
    bench.run()
    bench.transfer()  # its KV is cached here, and no state of it
    bench.offload.costs._computed_ns = 20e6
    bench.come("a", LONG_PROMPT)
    bench.step()
    bench.transfer()
    bench.answer()
    bench.step()
    bench.transfer()
    assert not bench.loads[0].keys
    assert bench.loads[0].limit_ms == 10 * BLOCK * 20
