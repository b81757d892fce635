"""Drafts change no token and no logprob of models with recurrent layers: their states roll back.

Nor does a preemption, whether their states are swapped or computed again. A draft model may have
such layers, too: where it is the model itself, each of its drafts is right.
"""

from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from protocol.core_worker import SchedulerOutput, StoreBlocks, TokenLogprobs
from protocol.sampling import SamplingParams
from tests.worker.checkpoints import ARCHITECTURES, Architecture, build_checkpoint
from tests.worker.drafting.oracle import Oracle
from tests.worker.drafting.recurrent_requests import (
    FEW_STATES,
    NUM_DRAFTS,
    PARAMS,
    PREEMPTING,
    PROMPTS,
)
from tests.worker.drafting.test_draft_model import Intermittent
from tests.worker.driving import Run, drive
from tests.worker.parity import make_runner
from tests.worker.recurrent_models import KINDS, RECURRENT
from tests.worker.runners import draft_model_of
from worker_proc.drafting import draft_model, repetitions
from worker_proc.drafting.draft_model_states import DraftModelStates
from worker_proc.drafting.draft_progress import DraftProgress
from worker_proc.drafting.draft_states import DraftStates
from worker_proc.errors import UnsupportedModel
from worker_proc.forward import state_pool_of
from worker_proc.inputs import StepInputs, pack_step
from worker_proc.model_runner import ModelRunner
from worker_proc.request import MirroredRequest, ScheduledRequest
from worker_proc.runner import LaunchedStep

BY_NAME = {architecture.name: architecture for architecture in RECURRENT}
WITHOUT_ATTENTION = ("falcon_mamba", "mamba", "mamba2", "rwkv")
ROOMY, TIGHT = 400, 40
OPTIONS: list[tuple[int, int | None, list[dict[str, object]]]] = [
    (ROOMY, 7, [FEW_STATES]),
    (
        TIGHT,
        None,
        [PREEMPTING | {"swap_cost_tokens": 0.0}, PREEMPTING | {"num_host_state_blocks": 0}],
    ),
]
"""Blocks, state blocks (None: enough), and what the scheduler does: it swaps, or does not."""


class Recording:
    """A runner whose logprobs are kept, by request."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.facts = runner.facts
        self.logprobs: dict[int, list[TokenLogprobs]] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        launched = self._runner.launch(step)
        for req_id, entries in launched.finish().logprobs.items():
            self.logprobs.setdefault(req_id, []).extend(entries)
        return launched


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize(
    ("architecture", "_backend", "dtype"),
    [
        (KINDS[0], "native", "bfloat16"),
        pytest.param(KINDS[0], "sdpa", "float32", marks=pytest.mark.slow),
        *(pytest.param(one, "native", "bfloat16", marks=pytest.mark.slow) for one in RECURRENT[1:]),
    ],
    ids=lambda value: getattr(value, "name", value),
    indirect=["_backend"],
)
def test_tokens_and_logprobs_are_those_without_drafts(
    architecture: Architecture, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_checkpoint(tmp_path, architecture.config())
    plain = Recording(make_runner(tmp_path, ROOMY, dtype))
    expected = drive(plain, PROMPTS, PARAMS).output_token_ids
    assert len(set(map(tuple, expected))) == len(PROMPTS)
    monkeypatch.setattr(repetitions, "NgramIndex", Oracle)
    texts = [prompt + output for prompt, output in zip(PROMPTS, expected, strict=True)]
    monkeypatch.setattr(Oracle, "texts", texts)
    runs: list[Run] = []
    for num_blocks, num_states, ways in OPTIONS:
        runner = make_runner(
            tmp_path,
            num_blocks,
            dtype,
            num_speculative_tokens=NUM_DRAFTS,
            num_state_blocks_override=num_states,
            swap_space_bytes=8 << 20,
        )
        for options in ways:
            recording = Recording(runner)
            settings = {"num_speculative_tokens": NUM_DRAFTS, "adaptive_speculation": False}
            run = drive(recording, PROMPTS, PARAMS, **settings, **options)
            assert run.output_token_ids == expected, options
            check_logprobs(recording, plain, is_exact=plain.facts.exact_resume)
            assert 0 < run.num_accepted_drafts < run.num_drafts
            runs.append(run)
        states = runner._mirror._draft_states
        runner.reset()
        assert states.num_free == len(states._ids) >= NUM_DRAFTS
    if architecture in KINDS:  # others may need fewer blocks, or evict other states
        assert sum(run.num_cached_tokens for run in runs) > 0
        assert runs[1].num_swaps > 0 == runs[2].num_swaps
        assert runs[2].num_preemptions > 0


def check_logprobs(one: Recording, other: Recording, *, is_exact: bool) -> None:
    """Compare the log-probabilities, bit for bit where rows do not depend on their step."""
    for req_id, params in enumerate(PARAMS):
        found, expected = (each.logprobs[req_id][: params.max_tokens] for each in (one, other))
        if is_exact:
            assert found == expected
        assert [entry.token_id for entry in found] == [entry.token_id for entry in expected]


@pytest.mark.slow
def test_a_draft_model_drafts_for_recurrent_layers(tmp_path: Path) -> None:
    model, draft = tmp_path / "model", tmp_path / "draft"
    build_checkpoint(model, KINDS[0].config())
    build_checkpoint(draft, ARCHITECTURES[0].config())
    expected = drive(make_runner(model, ROOMY), PROMPTS, PARAMS).output_token_ids
    runner = make_runner(model, ROOMY, "float32", 2, draft)
    settings = {"num_speculative_tokens": 2, "adaptive_speculation": False, "has_draft_model": True}
    run = drive(runner, PROMPTS, PARAMS, **settings)
    assert run.output_token_ids == expected
    assert run.num_drafts > 0


def test_a_model_without_attention_takes_no_draft_model(tmp_path: Path) -> None:
    model, draft = tmp_path / "model", tmp_path / "draft"
    build_checkpoint(model, BY_NAME["mamba2"].config())
    build_checkpoint(draft, ARCHITECTURES[0].config())
    with pytest.raises(UnsupportedModel, match="a model without attention has none"):
        make_runner(model, None, "float32", 2, draft)


# Draft models with recurrent layers ---------------------------------------------------------------

BY_MODEL: dict[str, object] = {
    "num_speculative_tokens": NUM_DRAFTS,
    "adaptive_speculation": False,
    "has_draft_model": True,
}
FEW_BLOCKS = 45
OFTEN: dict[str, object] = {"mamba_block_size": 8}
"""Snapshots: so often that every text has some."""
WAYS: dict[str, dict[str, object]] = {
    "chunked": OFTEN | {"max_num_batched_tokens": 16, "num_blocks": ROOMY},
    "prefix_cache": OFTEN | {"max_num_seqs": 2, "num_blocks": ROOMY},
    "uncached": {"enable_prefix_caching": False, "num_blocks": ROOMY},
    "preempted": OFTEN
    | {"scheduler_reserve_full_isl": False, "num_host_blocks": 0, "max_num_seqs": 5},
    "swapped": OFTEN | {"scheduler_reserve_full_isl": False, "swap_cost_tokens": 0.0},
}


def load(model: Path, draft: Path | None, dtype: str = "bfloat16", **cache: object) -> ModelRunner:
    num_drafts = NUM_DRAFTS if draft else 0
    settings = {"swap_space_bytes": 8 << 20, "mamba_block_size": 8} | cache
    return make_runner(model, ROOMY, dtype, num_drafts, draft, **settings)


def with_states(runner: ModelRunner, num_blocks: int | None) -> DraftModelStates:
    """Let a draft model have as many state blocks; None: those that it has."""
    draft = draft_model_of(runner)
    assert draft._states is not None
    if num_blocks is not None:
        draft._states = DraftModelStates(num_blocks, runner.facts.block_size, 8)
    return draft._states


@pytest.fixture
def num_computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return where a draft model adds how many tokens each of its forwards has computed."""
    counts: list[int] = []

    def count(parts: Sequence[ScheduledRequest], device: torch.device) -> StepInputs:
        counts.append(sum(part.num_tokens for part in parts))
        return pack_step(parts, device)

    monkeypatch.setattr(draft_model, "pack_step", count)
    return counts


def drive_few(runner: ModelRunner, options: dict[str, object]) -> tuple[Run, Recording]:
    """Drive a runner with few blocks, unless the options state another number."""
    recording = Recording(runner)
    return drive(recording, PROMPTS, PARAMS, **({"num_blocks": FEW_BLOCKS} | options)), recording


@pytest.mark.parametrize(
    ("architecture", "ways"),
    [
        (BY_NAME["qwen3_5_text"], ("preempted",)),
        *(
            pytest.param(one, tuple(WAYS), marks=pytest.mark.slow)
            for one in RECURRENT
            if one.name not in (*WITHOUT_ATTENTION, "recurrent_gemma")
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Architecture) else f"{len(value)} ways",
)
def test_every_draft_of_a_recurrent_model_itself_is_right(
    architecture: Architecture, ways: Sequence[str], tmp_path: Path
) -> None:
    """Preemptions and cached prefixes occur: one wrong state would make it draft others."""
    build_checkpoint(tmp_path, architecture.config())
    plain, guessing = load(tmp_path, None), load(tmp_path, tmp_path)
    expected, logprobs = drive_few(plain, WAYS["uncached"])
    happened = {"preempted": 0, "swapped": 0, "prefix_cache": 0}
    for way in ways:
        states = with_states(guessing, None if way == "chunked" else 24)
        run, recording = drive_few(guessing, BY_MODEL | WAYS[way])
        states.check_invariants()
        assert run.output_token_ids == expected.output_token_ids, way
        check_logprobs(recording, logprobs, is_exact=plain.facts.exact_resume)
        assert run.num_accepted_drafts == run.num_drafts > 100, way
        happened["preempted"] += run.num_preemptions
        happened["swapped"] += run.num_swaps
        happened["prefix_cache"] += run.num_cached_tokens
    assert happened["preempted"] > 0
    assert happened["prefix_cache"] > 0
    assert bool(happened["swapped"]) == ("swapped" in ways)
    guessing.reset()
    assert (states.num_free, states.num_snapshots) == (23, 0)


@pytest.mark.slow
@pytest.mark.parametrize("draft", [*WITHOUT_ATTENTION, "lfm2"])
def test_recurrent_models_draft_for_others(draft: str, tmp_path: Path) -> None:
    """Right and wrong drafts, also where nothing but a state is behind them."""
    build_checkpoint(tmp_path / "model", ARCHITECTURES[0].config())
    build_checkpoint(tmp_path / "draft", BY_NAME[draft].config())
    plain = load(tmp_path / "model", None)
    expected, logprobs = drive_few(plain, WAYS["uncached"])
    guessing = load(tmp_path / "model", tmp_path / "draft")
    for way in ("chunked", "preempted"):
        run, recording = drive_few(guessing, BY_MODEL | WAYS[way])
        assert run.output_token_ids == expected.output_token_ids
        check_logprobs(recording, logprobs, is_exact=True)
        assert run.num_accepted_drafts < run.num_drafts


@pytest.mark.slow
def test_a_recurrent_draft_model_begins_from_snapshots(
    tmp_path: Path, num_computed: list[int]
) -> None:
    """Without a snapshot it computes a text from its first token on, as its budget allows."""
    build_checkpoint(tmp_path, BY_NAME["lfm2"].config())
    guessing = load(tmp_path, tmp_path)
    prefix = list(range(20, 20 + 96))
    prompts = [[*prefix, 5 + number] for number in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    computed = {}
    for spacing in (8, None):
        draft = draft_model_of(guessing)
        draft._states = DraftModelStates(40, guessing.facts.block_size, spacing)
        num_computed.clear()
        run = drive(guessing, prompts, params, **BY_MODEL, **OFTEN, max_num_seqs=1)
        assert run.num_cached_tokens == 5 * len(prefix)
        assert run.num_accepted_drafts == run.num_drafts > 0
        computed[spacing] = sum(num_computed)
    assert computed[None] - computed[8] == 5 * len(prefix)


@pytest.mark.slow
def test_snapshots_are_kept_where_right_drafts_pass(tmp_path: Path) -> None:
    """A snapshot is kept at each multiple of the spacing, after drafts and after known tokens."""
    build_checkpoint(tmp_path, BY_NAME["lfm2"].config())
    guessing = load(tmp_path, tmp_path)
    states = with_states(guessing, 40)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    run = drive(guessing, [[5]], params, **BY_MODEL, **OFTEN)
    assert run.num_accepted_drafts == run.num_drafts > 40
    assert states.num_snapshots == 7


@pytest.mark.slow
def test_a_recurrent_draft_model_catches_up_within_the_budget_of_a_step(
    tmp_path: Path, num_computed: list[int]
) -> None:
    build_checkpoint(tmp_path, BY_NAME["lfm2"].config())
    guessing = load(tmp_path, tmp_path)
    draft = draft_model_of(guessing)
    draft._states, draft._max_tokens = DraftModelStates(40, 4, None), 20
    prompts = [[*range(20, 20 + 96), 5 + number] for number in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    run = drive(guessing, prompts, params, **BY_MODEL, max_num_seqs=1)
    assert max(num_computed) == 20
    assert run.num_accepted_drafts == run.num_drafts > 40


@pytest.mark.slow
def test_a_recurrent_draft_model_catches_up_when_drafts_are_wanted_again(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, BY_NAME["bamba"].config())
    expected = drive(load(tmp_path, None), PROMPTS, PARAMS).output_token_ids
    guessing = load(tmp_path, tmp_path)
    for max_num_seqs in (8, 2):
        states = with_states(guessing, 40)
        options = {"num_speculative_tokens": NUM_DRAFTS, "max_num_seqs": max_num_seqs}
        run = drive(Intermittent(guessing, 5, NUM_DRAFTS), PROMPTS, PARAMS, **options, **OFTEN)
        assert run.output_token_ids == expected
        assert run.num_accepted_drafts == run.num_drafts > 20
        states.check_invariants()


@pytest.mark.slow
def test_blocks_of_a_recurrent_draft_model_are_in_no_store(tmp_path: Path) -> None:
    """One that is read for the model counts as missing there, and so does the state at its end."""
    build_checkpoint(tmp_path, BY_NAME["lfm2"].config())
    runner = load(tmp_path, tmp_path, kv_offload_bytes=2**20)
    draft, drafts = draft_model_of(runner), runner.draft_blocks
    assert drafts is not None
    assert not drafts.are_kept
    prompt = list(range(20, 20 + 32))
    drive(runner, [prompt], PARAMS[0], **BY_MODEL, **OFTEN)
    states = with_states(runner, None)
    assert draft.holds(1)
    assert states.num_snapshots > 3
    assert drafts.beside(StoreBlocks([1], [bytes(36)])) == StoreBlocks([], [])
    for block_id in range(1, 9):
        drafts.note(block_id, is_filled=False)
    request = MirroredRequest(9, prompt, 32, PARAMS[0], [array("i", range(1, 9))] * 2, 31, 31)
    assert draft._progress(request).position == 0
    draft._record_computed(request, DraftProgress(0), 32)
    assert states.begin(9, range(1, 9)) == 0


@pytest.mark.slow
def test_states_are_taken_from_the_memory_of_the_cache(tmp_path: Path) -> None:
    """A draft model with recurrent layers has the null block, and some blocks for each request."""
    build_checkpoint(tmp_path, BY_NAME["qwen3_5_text"].config())
    blocks = {}
    for num_bytes in (2 << 20, 4 << 20):
        runner = make_runner(
            tmp_path, None, "bfloat16", NUM_DRAFTS, tmp_path, kv_cache_memory_bytes=num_bytes
        )
        draft = draft_model_of(runner)
        model, drafts = (state_pool_of(one) for one in (runner._model, draft._loaded.model))
        assert model is not None
        assert drafts is not None
        tensors = [*runner._pool.all_tensors, *draft._pool.all_tensors]
        tensors += [*model.all_tensors, *drafts.all_tensors]
        num_taken = sum(tensor.nbytes for tensor in tensors)
        assert 0.95 * num_bytes < num_taken <= num_bytes
        blocks[num_bytes] = len(drafts.all_tensors[0])
    assert 3 <= blocks[2 << 20] < blocks[4 << 20] <= 1 + (NUM_DRAFTS + 1) * 64


# Blocks for the states before drafts ------------------------------------------------------------


def requests(count: int) -> list[MirroredRequest]:
    return [MirroredRequest(i, [1], 1, SamplingParams(), [], 0, 0) for i in range(count)]


def test_drafts_are_limited_by_the_blocks_for_their_states() -> None:
    states = DraftStates(10, 5)
    one, other = requests(2)
    assert [states.reserve(request, 4) for request in (one, other)] == [4, 1]
    assert sorted(one.draft_states + other.draft_states) == [10, 11, 12, 13, 14]
    assert states.reserve(one, 0) == 0
    assert states.reserve(other, 4) == 4
    states.release(other)
    assert (other.draft_states, states.num_free) == ([], 5)


def test_the_state_that_a_request_begins_from_is_kept() -> None:
    states = DraftStates(10, 4)
    (request,) = requests(1)
    states.reserve(request, 4)
    begins_from = request.state_block = request.draft_states[2]
    for num_drafts in (2, 0):
        assert states.reserve(request, num_drafts) == num_drafts
        assert request.draft_states[:1] == [begins_from]
        assert states.num_free == 4 - max(num_drafts, 1)


def test_blocks_return_with_a_reset() -> None:
    states = DraftStates(10, 3)
    taken: Sequence[int] = [states.reserve(request, 1) for request in requests(4)]
    assert taken == [1, 1, 1, 0]
    states.clear()
    assert states.num_free == 3
