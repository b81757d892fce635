"""Drives a runner with the real scheduler, as the core would, for the worker's tests."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from core_proc.options import SchedulerOptions
from core_proc.request import Request
from core_proc.scheduler import Scheduler
from protocol.core_worker import CoreToWorker, SchedulerOutput, TokenLogprobs, decode_from_core
from protocol.message import encode
from protocol.model_facts import ModelFacts
from protocol.sampling import SamplingParams
from worker_proc.runner import ComputedStep, LaunchedStep, Runner

MAX_STEPS = 10_000


@dataclass(slots=True)
class Run:
    """The result of driving some requests to their ends."""

    output_token_ids: list[list[int]]
    num_steps: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_cached_tokens: int = 0
    num_drafts: int = 0
    num_accepted_drafts: int = 0
    num_ahead: int = 0
    """Steps that were launched while the tokens of the step before were not known."""
    longest_step: int = 0
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """The logprobs of each request that asks for them, at each of its outputs."""


def make_scheduler(facts: ModelFacts, **options: object) -> Scheduler:
    """Return a scheduler for the pool and limits of a worker."""
    settings: dict[str, object] = {
        "num_blocks": facts.num_gpu_blocks,
        "block_size": facts.block_size,
        "max_model_len": facts.max_model_len,
        "eos_token_ids": tuple(facts.eos_token_ids),
        "kv_groups": tuple(facts.kv_groups),
        "num_host_blocks": facts.num_host_blocks,
        "num_state_blocks": facts.num_state_blocks,
        "num_host_state_blocks": facts.num_host_state_blocks,
        "state_swap_blocks": facts.state_swap_blocks,
    }
    return Scheduler(SchedulerOptions(**(settings | options)))  # type: ignore[arg-type]


def drive(
    runner: Runner,
    prompts: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    outputs: Sequence[Sequence[int]] = (),
    adapter_ids: Sequence[int] = (),
    **options: object,
) -> Run:
    """Run `prompts` to their ends through a new scheduler; every step crosses the wire.

    As many steps are scheduled ahead of the runner as `max_steps_in_flight` allows; it launches one
    before it finishes the one before. `outputs` are those of an earlier life of each request,
    `adapter_ids` the adapters of the requests, 0 for none.
    """
    scheduler = make_scheduler(runner.facts, **options)
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    before = outputs or [()] * len(prompts)
    adapters = adapter_ids or [0] * len(prompts)
    requests = [
        Request(i, prompt, one, outputs=known, adapter_id=adapter_id)
        for i, (prompt, one, known, adapter_id) in enumerate(
            zip(prompts, each, before, adapters, strict=True)
        )
    ]
    for request in requests:
        scheduler.add_request(request)
    runner.reset()
    run = Run([])
    pipe: deque[SchedulerOutput] = deque()
    launched: deque[LaunchedStep] = deque()
    while scheduler.has_unfinished:
        while (step := scheduler.schedule()) is not None:
            pipe.append(step)
        if pipe:
            step = pipe.popleft()
            run.num_steps += 1
            assert run.num_steps < MAX_STEPS
            run.longest_step = max(run.longest_step, step.total_num_scheduled_tokens)
            launched.append(runner.launch(across_the_wire(step)))
            run.num_ahead += len(launched) > 1 and not isinstance(launched[0], ComputedStep)
        if len(launched) > 1 or not pipe:
            output = launched.popleft().finish()
            scheduler.update_from_output(output)
            for req_id, entries in output.logprobs.items():
                run.logprobs.setdefault(req_id, []).extend(entries)
    run.output_token_ids = [list(request.output_token_ids) for request in requests]
    run.num_preemptions = scheduler.num_preemptions
    run.num_swaps = scheduler.swapper.num_swapped_out
    run.num_cached_tokens = scheduler.num_prefix_hits
    run.num_drafts = scheduler.speculation.num_draft_tokens
    run.num_accepted_drafts = scheduler.speculation.num_accepted_tokens
    return run


def across_the_wire(step: SchedulerOutput) -> SchedulerOutput:
    """Encode and decode a step, as the link would."""
    received: CoreToWorker = decode_from_core(encode(step))
    assert isinstance(received, SchedulerOutput)
    return received


def sampled_with_penalty(num: int) -> list[SamplingParams]:
    """Return the parameters of requests whose tokens depend on all before them."""
    params = SamplingParams(
        max_tokens=8, temperature=1.3, presence_penalty=0.5, logprobs=2, ignore_eos=True
    )
    return [msgspec.structs.replace(params, seed=seed) for seed in range(num)]


def check_schedules(
    drive: Callable[..., Run],
    prompts: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    expected: list[list[int]],
) -> None:
    """Check the tokens of requests one by one, of prompts in chunks, and after a restart."""
    began = [tokens[:3] for tokens in expected]
    for way in ({"max_num_seqs": 1}, {"max_num_batched_tokens": 7}, {"outputs": began}):
        assert drive(prompts, params, **way).output_token_ids == expected, way


def drive_with_errors(
    runner: Runner, prompts: list[list[int]], params: SamplingParams, num_drafts: int
) -> tuple[list[list[int]], dict[int, str]]:
    """Return the outputs of each request and the errors of those that failed."""
    runner.reset()
    scheduler = make_scheduler(runner.facts, num_speculative_tokens=num_drafts)
    requests = [Request(i, prompt, params) for i, prompt in enumerate(prompts)]
    for request in requests:
        scheduler.add_request(request)
    errors: dict[int, str] = {}
    steps = []
    while scheduler.has_unfinished:
        while (step := scheduler.schedule()) is not None:
            steps.append(step)
        output = runner.execute(across_the_wire(steps.pop(0)))
        for req_id, error in output.request_errors.items():
            errors[req_id] = error
            scheduler.fail_request(req_id, error)
        scheduler.update_from_output(output)
    return [list(request.output_token_ids) for request in requests], errors
