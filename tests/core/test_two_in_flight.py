"""Overlapping steps: placeholders, late tokens, loss of a worker, and random workloads.

The random workloads run at depth 1 too: whatever the budgets, the blocks, the policy, the depth and
the aborts, each request is delivered the same tokens, once and in order.
"""

import random
import zlib
from collections import deque

import pytest

from core_proc.invariants import check_invariants
from core_proc.options import SchedulerOptions
from core_proc.request import Request
from core_proc.scheduler import Scheduler
from protocol.core_worker import SchedulerOutput
from protocol.sampling import FinishReason, SamplingParams
from tests.core.fake_worker import FakeWorker
from tests.core.harness import EOS, PLAIN_TOKEN, Harness


def test_a_step_is_scheduled_before_the_last_one_returns() -> None:
    bench = Harness(depth=2)
    bench.add("a", 10)
    assert bench.schedule() == {"a": 10}
    assert bench.schedule() == {"a": 1}
    assert bench.schedule() == {}, "the pipe is full"
    assert bench.update() == {"a": PLAIN_TOKEN}
    assert bench.schedule() == {"a": 1}


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_a_length_stop_wastes_nothing(max_tokens: int) -> None:
    bench = Harness(depth=2)
    bench.add("a", 10, max_tokens)
    bench.schedule()
    while bench.scheduler.has_unfinished:
        bench.schedule()
        bench.update()
    assert bench.worker.total_scheduled == 10 + max_tokens - 1
    assert len(bench.outputs["a"]) == max_tokens


def test_the_model_length_wastes_nothing() -> None:
    bench = Harness(depth=2, max_model_len=40)
    bench.add("a", 36)
    bench.schedule()
    while bench.scheduler.has_unfinished:
        bench.schedule()
        bench.update()
    assert bench.worker.total_scheduled == 36 + 4 - 1
    assert len(bench.outputs["a"]) == 4


def test_a_stop_token_wastes_one_decode_and_its_output_is_dropped() -> None:
    bench = Harness(depth=2, script={"a": [7, EOS, 9]})
    bench.add("a", 10)
    bench.schedule()
    bench.schedule()
    bench.update()
    bench.schedule()
    assert bench.update() == {"a": EOS}
    assert bench.num_free == 1023
    assert bench.update() == {}
    assert bench.worker.total_scheduled == 10 + 2
    assert bench.outputs["a"] == [7, EOS]
    bench.step()
    assert bench.notices == ["a"]


def test_who_waits_for_its_last_token_is_named_with_zero() -> None:
    bench = Harness(depth=2)
    bench.add("a", 10, 1)
    bench.add("b", 10, 5)
    bench.schedule()
    assert bench.schedule() == {"b": 1}
    assert bench.sent[-1].num_scheduled_tokens == {0: 0}


def test_nothing_is_sent_while_all_wait_for_their_last_tokens() -> None:
    bench = Harness(depth=2)
    bench.add("a", 10, 1)
    bench.schedule()
    assert bench.scheduler.schedule() is None
    assert len(bench.scheduler.in_flight) == 1


def test_an_abort_frees_at_once_and_ignores_both_pending_tokens() -> None:
    bench = Harness(depth=2)
    bench.add("a", 10)
    bench.schedule()
    bench.schedule()
    assert bench.abort("a")
    assert bench.num_free == 1023
    assert bench.update() == {}
    assert bench.update() == {}
    bench.step()
    assert bench.notices == ["a"]
    assert bench.scheduler.schedule() is None


def test_a_chunk_in_flight_owes_a_preempted_request_nothing() -> None:
    bench = Harness(blocks=11, budget=100, depth=3)
    bench.add("a", 80)
    bench.add("b", 80)
    assert bench.schedule() == {"a": 80, "b": 20}
    assert bench.schedule() == {"a": 1}
    assert bench.preempted == ["b"]
    assert bench.requests["b"].num_late_tokens == 0
    bench.abort("a")
    assert bench.schedule() == {"b": 80}, "it comes back while its old chunk is in flight"
    assert [bench.update() for _ in range(3)] == [{}, {}, {"b": PLAIN_TOKEN}]


def test_a_preempted_request_waits_for_its_late_token() -> None:
    bench = Harness(blocks=8, depth=3, script={"b": [42, 43]})
    bench.add("a", 46, 20)
    bench.add("b", 46, 20)
    assert bench.schedule() == {"a": 46, "b": 46}
    assert bench.schedule() == {"a": 1, "b": 1}
    bench.update()
    assert bench.schedule() == {"a": 1, "b": 1}
    bench.update()
    assert bench.schedule() == {"a": 1}, "a takes the last block, b gives up its own"
    assert bench.preempted == ["b"]
    request = bench.requests["b"]
    assert request.num_late_tokens == 1
    bench.abort("a")
    assert bench.schedule() == {}, "b is owed a token"
    assert bench.update() == {"b": PLAIN_TOKEN}
    assert request.output_token_ids == [42, 43, PLAIN_TOKEN]
    assert bench.schedule() == {"b": 49}


def test_a_late_token_can_finish_a_preempted_request() -> None:
    bench = Harness(blocks=8, depth=2, script={"b": [42, 43, EOS]})
    bench.add("a", 46, 20)
    bench.add("b", 46, 20)
    bench.schedule()
    bench.schedule()
    bench.update()
    bench.schedule()
    bench.update()
    bench.schedule()
    assert bench.preempted == ["b"]
    bench.update()
    assert bench.finished == {"b": "stop"}
    assert bench.scheduler.num_waiting == 0
    bench.update()
    bench.schedule()
    assert bench.notices == [], "the worker has forgotten it already"


def test_a_block_is_cached_only_when_its_pending_token_is_known() -> None:
    bench = Harness(caching=True, depth=2)
    prompt = list(range(15))
    bench.add("a", prompt)
    bench.schedule()
    bench.schedule()
    assert bench.requests["a"].num_hashed_blocks == 0
    bench.update()
    bench.schedule()
    assert bench.requests["a"].num_hashed_blocks == 1
    bench.add("b", [*prompt, PLAIN_TOKEN, 5])
    bench.update()
    assert bench.schedule() == {"a": 1, "b": 1}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_block_whose_tokens_become_known_at_the_end_is_cached_at_the_end(depth: int) -> None:
    bench = Harness(caching=True, depth=depth)
    prompt = list(range(15))
    bench.add("a", prompt, 2)
    while bench.scheduler.has_unfinished:
        bench.schedule()
        bench.schedule()
        bench.update()
    bench.add("b", [*prompt, PLAIN_TOKEN, 5])
    assert bench.schedule() == {"b": 1}


def test_after_the_loss_of_a_worker_all_is_computed_again_in_the_old_order() -> None:
    bench = Harness(depth=2, seqs=2, caching=True)
    for name in "abc":
        bench.add(name, 20, 6)
    bench.schedule()
    bench.schedule()
    bench.update()
    assert bench.outputs == {"a": [PLAIN_TOKEN], "b": [PLAIN_TOKEN], "c": []}
    next_step_id = bench.scheduler.next_step_id

    bench.lose_worker()
    check_invariants(bench.scheduler)
    assert bench.num_free == 1023
    assert not bench.scheduler.in_flight
    assert bench.schedule() == {"a": 21, "b": 21}
    step = bench.sent[-1]
    assert step.step_id == next_step_id
    assert [new.num_prompt_tokens for new in step.scheduled_new_reqs] == [20, 20]
    bench.update()
    bench.run()
    assert bench.outputs == dict.fromkeys("abc", [PLAIN_TOKEN] * 6)


def test_a_lost_worker_owes_no_late_tokens() -> None:
    bench = Harness(blocks=8, depth=2)
    bench.add("a", 46, 20)
    bench.add("b", 46, 20)
    bench.schedule()
    bench.schedule()
    bench.update()
    bench.schedule()
    bench.update()
    bench.schedule()
    assert bench.preempted == ["b"]
    bench.lose_worker()
    assert bench.requests["b"].num_late_tokens == 0
    bench.run()
    assert {name: len(tokens) for name, tokens in bench.outputs.items()} == {"a": 20, "b": 20}


def _sample(req_id: int, position: int) -> int:
    """One token in 24 is EOS, one a frequent stop token."""
    value = zlib.crc32(f"{req_id}:{position}".encode()) % 24
    return EOS if value == 0 else 5 if value == 1 else 100 + value


def _expected(request: Request) -> tuple[list[int], FinishReason]:
    params = request.sampling_params
    tokens: list[int] = []
    while True:
        tokens.append(_sample(request.req_id, len(tokens)))
        stops = {5} & set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
        if tokens[-1] in stops and len(tokens) >= params.min_tokens:
            return tokens, FinishReason.STOP
        total = request.num_prompt_tokens + len(tokens)
        if len(tokens) == params.max_tokens or total >= request.max_num_tokens:
            return tokens, FinishReason.LENGTH


class Workload:
    """A random scheduler under random requests, aborts and losses of the worker."""

    def __init__(self, seed: int, depth: int) -> None:
        self.rng = rng = random.Random(seed)
        self.block_size = rng.choice([1, 2, 4, 16])
        self.num_blocks = rng.choice([8, 12, 40, 200])
        self.budget = rng.choice([3, 8, 20, 64])
        options = SchedulerOptions(
            max_num_seqs=rng.choice([1, 3, 8]),
            max_num_batched_tokens=self.budget,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=rng.choice([20, 60, 300]),
            policy=rng.choice(["fcfs", "priority"]),
            enable_prefix_caching=rng.random() < 0.7,
            long_prefill_token_threshold=rng.choice([0, 0, 1, 5]),
            long_prefill_token_threshold_adaptive=rng.random() < 0.3,
            watermark=rng.choice([0.0, 0.0, 0.1]),
            scheduler_reserve_full_isl=rng.random() < 0.5,
            enable_chunked_prefill=rng.random() < 0.8,
            eos_token_ids=(EOS,),
            max_steps_in_flight=depth,
        )
        self.scheduler = Scheduler(options)
        self.worker = FakeWorker(self.block_size, self.num_blocks, _sample)
        self.pipe: deque[SchedulerOutput] = deque()
        self.delivered: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.requests: dict[int, Request] = {}
        self.aborted: set[int] = set()
        self.prefixes = [[rng.randrange(50) for _ in range(40)] for _ in range(3)]

    def add(self, req_id: int) -> None:
        rng = self.rng
        length = rng.randint(1, 40)
        shared = rng.randint(0, length)
        prompt = rng.choice(self.prefixes)[:shared]
        prompt = prompt + [rng.randrange(50) for _ in range(length - len(prompt))]
        max_tokens = rng.randint(1, 30)
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=[5] if rng.random() < 0.5 else [],
            min_tokens=rng.choice([0, 0, min(4, max_tokens)]),
            prompt_logprobs=rng.choice([None, None, None, 0]),
        )
        request = Request(
            req_id,
            prompt,
            params,
            priority=rng.randrange(3),
            arrival_time=float(rng.randrange(5)),
            cache_salt=rng.choice(["", "", "salt"]),
        )
        try:
            self.scheduler.add_request(request)
        except ValueError:
            return
        self.requests[req_id] = request
        self.delivered[req_id] = []

    def act(self) -> None:
        """Schedule, bring back, abort or lose the worker, whatever the dice say."""
        dice = self.rng.random()
        if dice < 0.02 and self.requests:
            req_id = self.rng.choice(list(self.requests))
            if self.scheduler.abort_request(req_id):
                self.aborted.add(req_id)
        elif dice < 0.025:
            self.pipe.clear()
            self.scheduler.recompute_all()
            self.worker = FakeWorker(self.block_size, self.num_blocks, _sample)
        elif dice < 0.6:
            self.schedule()
        elif self.pipe:
            self.bring_back()
        check_invariants(self.scheduler)

    def schedule(self) -> bool:
        message = self.scheduler.schedule()
        if message is None:
            return False
        assert message.total_num_scheduled_tokens <= self.budget
        self.pipe.append(message)
        return True

    def bring_back(self) -> None:
        output = self.worker.execute(self.pipe.popleft())
        for result in self.scheduler.update_from_output(output):
            req_id = result.request.req_id
            assert req_id not in self.reasons
            self.delivered[req_id] += result.new_token_ids
            if result.finish_reason is not None:
                self.reasons[req_id] = result.finish_reason

    def drain(self) -> None:
        """Run to the end; every round schedules or brings something back, else it is stuck."""
        for _ in range(20_000):
            if self.schedule():
                continue
            if not self.pipe:
                break
            self.bring_back()
            check_invariants(self.scheduler)
        assert not self.scheduler.has_unfinished


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(60))
def test_every_request_is_delivered_its_tokens_once_and_in_order(seed: int, depth: int) -> None:
    load = Workload(seed, depth)
    for req_id in range(30):
        load.add(req_id)
        for _ in range(load.rng.randint(0, 12)):
            load.act()
    load.drain()
    for req_id, request in load.requests.items():
        tokens, reason = _expected(request)
        delivered = load.delivered[req_id]
        assert request.is_finished
        assert delivered == request.output_token_ids
        if req_id in load.aborted:
            assert delivered == tokens[: len(delivered)]
        else:
            assert (delivered, load.reasons[req_id]) == (tokens, reason)
    assert load.scheduler.kv.num_free_blocks == load.num_blocks - 1
    assert load.worker.mirror == {}
    assert load.scheduler.running == []
    assert load.scheduler.waiting.in_order() == []
