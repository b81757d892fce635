"""Every step that the scheduler can send fits into a frame."""

import msgspec
import pytest

from core_proc.invariants import check_invariants
from core_proc.options import SchedulerOptions
from core_proc.request import Request
from core_proc.scheduler import Scheduler
from core_proc.scheduling.step import longest_sequence
from protocol.api_core import AddRequest, decode_from_client
from protocol.config.settings import configure
from protocol.core_worker import (
    MAX_DRAFTS,
    ModelRunnerOutput,
    PromptLogprobs,
    SchedulerOutput,
    TokenLogprobs,
)
from protocol.message import encode
from protocol.model_facts import KVGroup, ModelFacts
from protocol.sampling import (
    MAX_EMBEDDING_SIZE,
    MAX_GRAMMAR_CHARS,
    MAX_MARKER_TOKENS,
    MAX_SPACE_TOKENS,
    Grammar,
    GrammarKind,
    Pooling,
    SamplingParams,
    ThinkingBudget,
    pooling_params,
)
from protocol.transport.channel import MAX_FRAME_BYTES
from tests.core.harness import Harness

WIDE_ID = 2**31 - 1
"""An id of the largest encoded size, five bytes."""
WIDE_PARAMS = SamplingParams(
    max_tokens=2**31 - 1,
    temperature=0.1,
    top_p=0.1,
    top_k=WIDE_ID,
    min_p=0.1,
    seed=-(2**63),
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=0.1,
    min_tokens=WIDE_ID,
    stop_token_ids=[WIDE_ID] * 128,
    logit_bias={WIDE_ID - i: 0.1 for i in range(1024)},
    logprobs=20,
)

MARKER = [WIDE_ID] * MAX_MARKER_TOKENS
WIDEST_PARAMS = msgspec.structs.replace(
    WIDE_PARAMS,
    grammar=Grammar(GrammarKind.REGEX, "😀" * MAX_GRAMMAR_CHARS),
    allowed_token_ids=[WIDE_ID] * 4096,
    bad_words=[[WIDE_ID] * 1024] * 320,
    logprob_token_ids=[WIDE_ID] * 128,
    thinking_budget=ThinkingBudget(WIDE_ID, MARKER, MARKER, MARKER, [WIDE_ID] * MAX_SPACE_TOKENS),
)
"""The largest values that the wire allows."""


def make_scheduler(num_blocks: int, block_size: int, **settings: object) -> Scheduler:
    options = SchedulerOptions(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=2**31 - 1,
        enable_prefix_caching=False,
        **settings,  # type: ignore[arg-type]
    )
    return Scheduler(options)


def scheduled(scheduler: Scheduler) -> SchedulerOutput:
    step = scheduler.schedule()
    assert step is not None
    return step


def steps_of_admissions(scheduler: Scheduler) -> list[SchedulerOutput]:
    """Schedule and answer steps until no request waits; return them."""
    steps = []
    while scheduler.num_waiting:
        step = scheduled(scheduler)
        num_sampled = len(scheduler.in_flight[0][1])
        scheduler.update_from_output(ModelRunnerOutput(step.step_id, [7] * num_sampled))
        steps.append(step)
    return steps


def wide_request(req_id: int, num_tokens: int) -> Request:
    return Request(2**52 + req_id, [WIDE_ID] * num_tokens, WIDE_PARAMS)


@pytest.mark.parametrize("block_size", [1, 16])
def test_the_longest_request_is_introduced_within_half_a_frame(block_size: int) -> None:
    longest = longest_sequence(block_size)
    num_blocks = longest // block_size + 2
    scheduler = make_scheduler(num_blocks, block_size, max_num_batched_tokens=2**21)
    scheduler.add_request(wide_request(0, longest - 1))
    step = scheduled(scheduler)
    assert len(step.scheduled_new_reqs) == 1
    assert len(encode(step)) <= MAX_FRAME_BYTES // 2
    with pytest.raises(ValueError, match="leave no token"):
        scheduler.add_request(wide_request(1, longest))


def test_newcomers_wait_for_the_next_step_when_a_frame_holds_no_more() -> None:
    options = {"max_num_batched_tokens": 2**20, "long_prefill_token_threshold": 1000}
    scheduler = make_scheduler(600_000, 16, max_num_seqs=64, **options)
    for req_id in range(40):
        scheduler.add_request(wide_request(req_id, 100_000))
    steps = steps_of_admissions(scheduler)
    assert len(steps) > 1
    assert max(len(encode(step)) for step in steps) <= MAX_FRAME_BYTES
    assert max(len(step.scheduled_new_reqs) for step in steps) < 16


def test_the_largest_parameters_are_on_the_wire() -> None:
    body = encode(AddRequest(1, [], WIDEST_PARAMS))
    message = decode_from_client(body)
    assert isinstance(message, AddRequest)
    assert message.sampling_params == WIDEST_PARAMS


@pytest.mark.parametrize("field", ["grammar", "allowed_token_ids", "bad_words", "thinking_budget"])
def test_requests_with_large_parameters_are_introduced_in_several_steps(field: str) -> None:
    value = getattr(WIDEST_PARAMS, field)
    params = msgspec.structs.replace(SamplingParams(max_tokens=4), **{field: value})
    num_seqs = 5 * MAX_FRAME_BYTES // 4 // len(encode(AddRequest(1, [], params)))
    scheduler = make_scheduler(2**16, 16, max_num_seqs=num_seqs, max_num_batched_tokens=2**16)
    for req_id in range(num_seqs):
        scheduler.add_request(Request(2**52 + req_id, [WIDE_ID], params))
    assert max(len(encode(step)) for step in steps_of_admissions(scheduler)) <= MAX_FRAME_BYTES


def test_the_longest_request_with_the_largest_parameters_is_introduced_alone() -> None:
    longest = longest_sequence(16)
    scheduler = make_scheduler(longest // 8, 16, max_num_batched_tokens=2**21)
    for req_id in range(2):
        num_tokens = longest - 1 if req_id == 0 else 1
        request = Request(2**52 + req_id, [WIDE_ID] * num_tokens, WIDEST_PARAMS)
        scheduler.add_request(request)
    steps = steps_of_admissions(scheduler)
    assert [len(step.scheduled_new_reqs) for step in steps] == [1, 1]
    assert len(encode(steps[0])) <= MAX_FRAME_BYTES * 3 // 4


def test_prompt_logprobs_of_one_step_fit_into_its_answer() -> None:
    """This holds for any budget and any number of requests."""
    num_seqs = 256
    scheduler = make_scheduler(2**18, 16, max_num_batched_tokens=2**20, max_num_seqs=num_seqs)
    params = SamplingParams(max_tokens=8, prompt_logprobs=20, logprobs=20)
    for req_id in range(num_seqs):
        scheduler.add_request(Request(req_id, [5] * 1000, params))
    step = scheduled(scheduler)
    counts = step.num_scheduled_tokens
    row = TokenLogprobs(WIDE_ID, 0.1, WIDE_ID, [WIDE_ID] * 20, [0.1] * 20)
    scored = [
        PromptLogprobs(new.req_id, 1, [row] * counts.get(new.req_id, 1))
        for new in step.scheduled_new_reqs
    ]
    assert len(scored) == num_seqs
    assert 16_384 <= sum(len(part.entries) for part in scored) <= 16_384 + num_seqs
    answer = ModelRunnerOutput(step.step_id, [], prompt_logprobs=scored)
    most_others = (2 * 16_384 - num_seqs) * len(encode(row))
    assert len(encode(answer)) + most_others <= MAX_FRAME_BYTES


def test_requests_with_prompt_logprobs_run_to_their_ends() -> None:
    bench = Harness(blocks=4096, budget=2**16, max_model_len=2**14)
    for name in "abcd":
        bench.add(name, 12_000, params=SamplingParams(max_tokens=3, prompt_logprobs=0))
    assert bench.step() == {"a": 12_000, "b": 4384, "c": 1, "d": 1}
    bench.run()
    assert set(bench.finished) == set("abcd")


@pytest.mark.parametrize("num_drafts", [0, MAX_DRAFTS])
def test_logprobs_of_one_step_fit_into_its_answer(num_drafts: int) -> None:
    """This holds for any number of requests and of drafts that are right."""
    num_seqs, max_tokens = 4000, 6 if num_drafts else 2
    options = {"num_speculative_tokens": num_drafts, "max_num_batched_tokens": 2**15}
    scheduler = make_scheduler(2**15, 16, max_num_seqs=num_seqs, **options)
    params = SamplingParams(max_tokens=max_tokens, logprobs=20, logprob_token_ids=[WIDE_ID] * 128)
    for req_id in range(num_seqs):
        scheduler.add_request(Request(2**52 + req_id, [WIDE_ID], params))
    row = TokenLogprobs(WIDE_ID, 0.1, WIDE_ID, [WIDE_ID] * 128, [0.1] * 128)
    row_size, largest = len(encode(row)), 0
    while (step := scheduler.schedule()) is not None:
        sampling = scheduler.in_flight[0][1]
        counts = [1 + request.num_drafts_in_flight for request in sampling]
        answer = ModelRunnerOutput(
            step.step_id,
            [WIDE_ID] * sum(counts),
            counts if num_drafts else [],
            [num_drafts] * len(counts) if num_drafts else [],
            {request.req_id: [] for request in sampling},
        )
        largest = max(largest, len(encode(answer)) + sum(counts) * row_size)
        scheduler.update_from_output(answer)
        assert scheduler.next_step_id < 100
        if scheduler.next_step_id == 1:
            check_invariants(scheduler)
    check_invariants(scheduler)
    assert MAX_FRAME_BYTES // 3 < largest <= MAX_FRAME_BYTES
    assert scheduler.num_generation_tokens == max_tokens * num_seqs


@pytest.mark.parametrize("order", ["sampled, scored, pooled", "sampled, pooled, scored"])
def test_logprobs_and_vectors_of_one_step_fit_into_its_answer(order: str) -> None:
    """Each kind alone would fit; all requests come to their ends."""
    scheduler = make_scheduler(2**15, 16, max_num_seqs=2**12, max_num_batched_tokens=2**15)
    sampled = SamplingParams(max_tokens=3, logprobs=20, logprob_token_ids=[WIDE_ID] * 128)
    scored = SamplingParams(max_tokens=1, prompt_logprobs=20)
    kinds = {
        "sampled": (3000, 1, sampled),
        "scored": (4, 8192, scored),
        "pooled": (95, 1, pooling_params(Pooling())),
    }
    for kind in order.split(", "):
        number, num_tokens, params = kinds[kind]
        for _ in range(number):
            req_id = 2**52 + scheduler.num_accepted
            scheduler.add_request(Request(req_id, [WIDE_ID] * num_tokens, params))
    row = len(encode(TokenLogprobs(WIDE_ID, 0.1, WIDE_ID, [WIDE_ID] * 128, [0.1] * 128)))
    scored_row = len(encode(TokenLogprobs(WIDE_ID, 0.1, WIDE_ID, [WIDE_ID] * 20, [0.1] * 20)))
    sizes = []
    while (step := scheduler.schedule()) is not None:
        sampling = [request.sampling_params for request in scheduler.in_flight[0][1]]
        num_rows = sum(params is sampled for params in sampling)
        num_vectors = sum(params.pooling is not None for params in sampling)
        num_scored = step.total_num_scheduled_tokens - num_rows - num_vectors
        vectors = num_vectors * 4 * MAX_EMBEDDING_SIZE
        sizes.append(num_rows * row + num_scored * scored_row + vectors)
        scheduler.update_from_output(ModelRunnerOutput(step.step_id, [WIDE_ID] * len(sampling)))
        assert scheduler.next_step_id < 100
    assert MAX_FRAME_BYTES // 2 < max(sizes) <= MAX_FRAME_BYTES * 3 // 4
    assert scheduler.num_ended == scheduler.num_accepted


@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("block_size", [1, 16])
def test_block_tables_that_grow_in_one_step_fit_into_its_message(
    block_size: int, num_groups: int
) -> None:
    """This holds for the largest budget."""
    config = configure(block_size=block_size, max_num_batched_tokens=2**20)
    groups = [KVGroup() for _ in range(num_groups)]
    facts = ModelFacts("m", 9, 2**20, block_size, 2**24, [], kv_groups=groups)
    options = SchedulerOptions.combine(config, facts, 0.0)
    num_ids = options.token_budget * num_groups // block_size
    assert 5 * num_ids <= MAX_FRAME_BYTES // 8
    assert options.token_budget == (2**20 if block_size == 16 else 2**18 // num_groups)
