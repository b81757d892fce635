"""Decode steps that are made from the one before compute what steps of their own would."""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, PretrainedConfig

from core_proc.request import Request
from core_proc.scheduler import Scheduler
from protocol.core_worker import BlockCopies, CachedRequestData, NewRequestData, SchedulerOutput
from protocol.message import pack_token_ids
from protocol.sampling import SamplingParams
from tests.combinations import in_turn
from tests.worker.bitwise import DTYPES, engine_config
from tests.worker.checkpoints import SHAPE, build_checkpoints
from tests.worker.driving import across_the_wire, make_scheduler
from worker_proc import model_runner
from worker_proc.attention.step_memory import SPARE_BLOCKS, StepMemory
from worker_proc.attention.work import SECTION
from worker_proc.errors import MirrorError
from worker_proc.inputs import SteadyDecode, StepInputs
from worker_proc.mirror import Mirror
from worker_proc.model_runner import ModelRunner
from worker_proc.native.build import build, compiler
from worker_proc.startup.load_runner import load_model_runner

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

NUM_REQUESTS = 14
MODEL_LEN = 2 * SECTION + 100
_SHAPE = SHAPE | {"max_position_embeddings": MODEL_LEN}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE),
    "gemma3": Gemma3TextConfig(
        **_SHAPE, sliding_window=21, layer_types=["sliding_attention", "full_attention"]
    ),
}
FEW_BLOCKS = {"llama": 24, "gemma3": 40}
"""With which not all requests can run at once; there is a table for each of Gemma's groups."""
PARAMS = (
    SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=40),
    SamplingParams(temperature=0.9, seed=5, ignore_eos=True, max_tokens=25, top_p=0.9),
    SamplingParams(temperature=0.0, max_tokens=30, repetition_penalty=1.3, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1),
)


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    build()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build_checkpoints(tmp_path_factory, CONFIGS)


def load(directory: Path, dtype: str = "float32", *, num_blocks: int = 900) -> ModelRunner:
    runner = load_once(directory, dtype, num_blocks)
    runner.reset()
    return runner


@functools.cache
def load_once(directory: Path, dtype: str, num_blocks: int) -> ModelRunner:
    config = engine_config(directory, dtype)
    cache = msgspec.structs.replace(
        config.cache, num_gpu_blocks_override=num_blocks, swap_space_bytes=1 << 20
    )
    return load_model_runner(msgspec.structs.replace(config, cache=cache), lambda *_: None)


@dataclass
class Found:
    """What a run has given."""

    tokens: list[list[int]] = field(default_factory=list)
    rows: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """Logits by request and position."""
    num_steady: int = 0
    """Steps that were made from the one before."""
    num_moved: int = 0
    """Those among them whose arrays were moved on in place."""
    num_steps: int = 0
    num_preemptions: int = 0


class Recording:
    """Records the logits of a runner's steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found = Found()
        self._compute = model_runner.compute_logits
        monkeypatch.setattr(model_runner, "compute_logits", self._record)
        monkeypatch.setattr(StepMemory, "move_on", self._moving())

    def _record(self, *args: Any) -> torch.Tensor:
        logits = self._compute(*args)
        inputs: StepInputs = args[2]
        self.found.num_steps += 1
        self.found.num_steady += inputs.begun_blocks is not None
        for part, row in zip(inputs.sampling, logits, strict=False):
            known = self.found.rows.setdefault((part.request.req_id, part.end), row.clone())
            assert torch.equal(known, row)  # also after a preemption
        return logits

    def _moving(self) -> Callable[..., bool]:
        move_on = StepMemory.move_on

        def moving(memory: StepMemory, *args: Any) -> bool:
            moved = move_on(memory, *args)
            self.found.num_moved += moved
            return moved

        return moving


def run(
    runner: ModelRunner,
    monkeypatch: pytest.MonkeyPatch,
    scenario: Callable[[], Iterator[tuple[Scheduler, Sequence[Request]]]],
    *,
    is_steady: bool,
) -> Found:
    """Drive a runner through the steps of a scenario, and to the ends of its requests."""
    with monkeypatch.context() as patch:
        if not is_steady:
            patch.setattr(SteadyDecode, "can_follow", lambda *_: False)
        recording = Recording(patch)
        runner.reset()
        known: Sequence[Request] = ()
        for scheduler, requests in scenario():
            known = requests
            step = scheduler.schedule()
            if step is not None:
                output = runner.execute(across_the_wire(step))
                scheduler.update_from_output(output)
            recording.found.num_preemptions = scheduler.num_preemptions
    found = recording.found
    found.tokens = [list(request.output_token_ids) for request in known]
    return found


def at_random(
    runner: ModelRunner, seed: int, **options: object
) -> Callable[[], Iterator[tuple[Scheduler, Sequence[Request]]]]:
    """Return a scenario of arrivals at random, in bursts, and requests that are aborted."""

    def scenario() -> Iterator[tuple[Scheduler, Sequence[Request]]]:
        rng = random.Random(seed)
        scheduler = make_scheduler(runner.facts, **options)
        vocab_size = runner.facts.vocab_size
        shared = [rng.randrange(3, vocab_size) for _ in range(96)]
        requests: list[Request] = []
        while len(requests) < NUM_REQUESTS or scheduler.has_unfinished:
            is_time = not scheduler.has_unfinished or rng.random() < 0.08
            if len(requests) < NUM_REQUESTS and is_time:
                for _ in range(rng.randint(1, 4)):
                    own = [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 70))]
                    prompt = shared[: rng.choice((0, 0, 64, 96))] + own * rng.choice((0, 1))
                    params = rng.choice(PARAMS)
                    requests.append(Request(len(requests), prompt or own, params))
                    scheduler.add_request(requests[-1])
            if rng.random() < 0.01 and requests:
                scheduler.abort_request(requests[-1].req_id)
            yield scheduler, requests

    return scenario


def assert_same(found: Found, expected: Found) -> None:
    assert found.tokens == expected.tokens
    assert found.rows.keys() == expected.rows.keys()
    assert all(torch.equal(row, expected.rows[key]) for key, row in found.rows.items())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("has_room", [True, False])
def test_random_steps_have_the_bits_of_newly_packed_steps(
    name: str,
    dtype: str,
    has_room: bool,
    checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks are few, so requests are preempted or swapped out."""
    num_blocks = 900 if has_room else FEW_BLOCKS[name]
    runner = load(checkpoints[name], dtype, num_blocks=num_blocks)
    num_preemptions = 0
    for seed in range(3):
        scenario = at_random(runner, seed, max_num_batched_tokens=64, max_num_seqs=8)
        found = run(runner, monkeypatch, scenario, is_steady=True)
        expected = run(runner, monkeypatch, scenario, is_steady=False)
        assert expected.num_steady == 0 < found.num_steady
        assert 0 < found.num_moved < found.num_steps
        assert_same(found, expected)
        num_preemptions += found.num_preemptions
    assert (num_preemptions > 0) is not has_room


def fixed(
    runner: ModelRunner, prompts: Sequence[list[int]], max_tokens: int
) -> Callable[[], Iterator[tuple[Scheduler, Sequence[Request]]]]:
    """Return a scenario of requests that arrive together."""

    def scenario() -> Iterator[tuple[Scheduler, Sequence[Request]]]:
        scheduler = make_scheduler(runner.facts, max_num_batched_tokens=4096)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
        requests = [Request(i, prompt, params) for i, prompt in enumerate(prompts)]
        for request in requests:
            scheduler.add_request(request)
        while scheduler.has_unfinished:
            yield scheduler, requests

    return scenario


@pytest.mark.parametrize(("num_threads", "name"), in_turn([1, 2, 3], CONFIGS))
def test_contexts_that_reach_another_section_are_shared_again(
    name: str,
    num_threads: int,
    checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several threads split a long context into its sections."""
    runner = load(checkpoints[name])
    vocab_size = runner.facts.vocab_size
    lengths = (2 * SECTION - 9, SECTION - 3, 5)
    prompts = [[(7 * i + n) % vocab_size for i in range(n)] for n in lengths]
    torch.set_num_threads(num_threads)
    scenario = fixed(runner, prompts, 40)
    found = run(runner, monkeypatch, scenario, is_steady=True)
    assert found.num_steps == 40
    assert found.num_steady == 38  # all but the prompts, and the decode after them
    assert_same(found, run(runner, monkeypatch, scenario, is_steady=False))


def test_tables_without_room_are_written_again(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(checkpoints["llama"])
    num_decodes = 3 * SPARE_BLOCKS * runner.facts.block_size
    prompts = [[3 + n] * n for n in (1, 15, 16, 17, 33)]
    scenario = fixed(runner, prompts, num_decodes)
    found = run(runner, monkeypatch, scenario, is_steady=True)
    assert found.num_steady - 4 <= found.num_moved < found.num_steady
    assert_same(found, run(runner, monkeypatch, scenario, is_steady=False))


def test_decodes_after_prompts_that_are_cached_whole_write_their_kv(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step before writes nothing: its slot is the null block's."""
    runner = load(checkpoints["llama"])
    prompt = list(range(3, 3 + 2 * runner.facts.block_size))

    def scenario() -> Iterator[tuple[Scheduler, Sequence[Request]]]:
        scheduler = make_scheduler(runner.facts, max_num_batched_tokens=4096)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20)
        requests = []
        for number in range(3):
            requests.append(Request(number, prompt, params))
            scheduler.add_request(requests[-1])
            while scheduler.has_unfinished:
                yield scheduler, requests

    found = run(runner, monkeypatch, scenario, is_steady=True)
    assert found.num_steady > 0
    assert found.tokens[0] == found.tokens[1] == found.tokens[2]
    assert_same(found, run(runner, monkeypatch, scenario, is_steady=False))


def new_request(req_id: int, length: int, blocks: list[int], **more: Any) -> NewRequestData:
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 9} | more))
    token_ids = pack_token_ids([3 + i for i in range(length)])
    return NewRequestData(req_id, token_ids, length, params, [blocks], 0, 0)


def test_a_slot_of_the_null_block_does_not_move_on(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step writes no KV, since its token has some."""
    runner = load(checkpoints["llama"])
    new = msgspec.structs.replace(
        new_request(1, 5, [7]), num_computed_tokens=4, num_cached_tokens=5
    )
    slots = []
    for step in (decode_step(0, 1, scheduled_new_reqs=[new]), decode_step(1, 1), decode_step(2, 1)):
        runner.execute(step)
        memory = runner._backend._memory
        slots.append(memory._groups[0].slots.tolist())
    assert slots == [[0], [7 * 16 + 5], [7 * 16 + 6]]


def decode_step(step_id: int, num_requests: int, **more: Any) -> SchedulerOutput:
    cached = CachedRequestData([], [])
    step = SchedulerOutput(step_id, [], cached, {}, num_requests, [], [])
    return msgspec.structs.replace(step, **more)


class Watched:
    """A runner of two requests that decode, and whether its steps were made from others."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
        self.runner = load(directory)
        self.is_steady = False
        compute = model_runner.compute_logits

        def watching(*args: Any) -> torch.Tensor:
            self.is_steady = args[2].begun_blocks is not None
            return compute(*args)

        monkeypatch.setattr(model_runner, "compute_logits", watching)
        news = [new_request(1, 5, [1, 2], **more), new_request(2, 9, [3, 4])]
        self.execute(decode_step(0, 14, scheduled_new_reqs=news, num_scheduled_tokens={1: 5, 2: 9}))
        self.next_step = 1

    def execute(self, step: SchedulerOutput) -> bool:
        """Execute a step; returns whether it was made from the one before."""
        self.is_steady = False
        self.runner.execute(step)
        self.next_step = step.step_id + 1
        return self.is_steady

    def decode(self, num_requests: int = 2, **more: Any) -> bool:
        return self.execute(decode_step(self.next_step, num_requests, **more))


def test_a_step_is_derived_only_from_one_that_decoded_all_requests(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(checkpoints["llama"], monkeypatch)
    assert not watched.decode()
    assert watched.decode()
    assert watched.decode()


CHANGES: dict[str, tuple[int, dict[str, Any]]] = {
    "arrival": (
        5,
        {"scheduled_new_reqs": [new_request(3, 3, [7])], "num_scheduled_tokens": {3: 3}},
    ),
    "arrival in place of a request that ends": (
        2,
        {"scheduled_new_reqs": [new_request(3, 1, [7])], "finished_req_ids": [1]},
    ),
    "arrival during a pause": (
        2,
        {"scheduled_new_reqs": [new_request(3, 1, [7])], "num_scheduled_tokens": {1: 0}},
    ),
    "finish": (1, {"finished_req_ids": [1]}),
    "preemption": (1, {"preempted_req_ids": [2]}),
    "pause": (1, {"num_scheduled_tokens": {1: 0}}),
    "swap out": (2, {"swap_out": BlockCopies([8], [0])}),
    "swap in": (2, {"swap_in": BlockCopies([8], [0])}),
    "limit of drafts": (2, {"draft_limits": {1: 0}}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_any_other_step_is_newly_packed(
    name: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens, change = CHANGES[name]
    watched = Watched(checkpoints["llama"], monkeypatch)
    watched.decode()
    assert watched.decode()
    assert not watched.decode(num_tokens, **change)


@pytest.mark.parametrize("grows", [False, True])
def test_a_request_without_room_for_its_token_is_an_error(
    grows: bool, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(checkpoints["llama"], monkeypatch)
    more = {"scheduled_cached_reqs": CachedRequestData([2], [[[9]]])} if grows else {}
    watched.decode(**more)
    for _ in range(2 * 16 - 9 - 1):  # up to the end of the second request's second block
        assert watched.decode()
    if grows:
        assert watched.decode()
        return
    with pytest.raises(MirrorError, match="no block 2"):
        watched.decode()


def test_a_step_that_comes_out_of_turn_is_an_error(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(checkpoints["llama"], monkeypatch)
    watched.decode()
    with pytest.raises(MirrorError, match="step_id"):
        watched.execute(decode_step(9, 2))


def test_a_wrong_number_of_tokens_is_an_error(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(checkpoints["llama"], monkeypatch)
    watched.decode()
    with pytest.raises(MirrorError, match="adds up to 2"):
        watched.decode(3)


@pytest.mark.parametrize("forget", ["reset", "sleep"])
def test_no_step_is_derived_from_one_before_a_reset_or_a_sleep(
    forget: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(checkpoints["llama"], monkeypatch)
    watched.decode()
    assert watched.runner._steady is not None
    if forget == "sleep":
        monkeypatch.setattr(Mirror, "check_empty", lambda _: None)
    getattr(watched.runner, forget)()
    assert watched.runner._steady is None
