"""Drafts change no token and no logprob of models with recurrent layers: their states roll back.

Nor does a preemption, whether their states are swapped or computed again.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from protocol.core_worker import SchedulerOutput, TokenLogprobs
from protocol.sampling import SamplingParams
from tests.worker.checkpoints import ARCHITECTURES, Architecture, build_checkpoint
from tests.worker.driving import Run, drive
from tests.worker.parity import make_runner
from tests.worker.recurrent_models import KINDS, RECURRENT
from tests.worker.test_speculation import Oracle
from worker_proc.drafting import repetitions
from worker_proc.drafting.draft_states import DraftStates
from worker_proc.errors import UnsupportedModel
from worker_proc.mirror import MirroredRequest
from worker_proc.model_runner import ModelRunner
from worker_proc.runner import LaunchedStep

NUM_DRAFTS = 4
ROOMY, TIGHT = 400, 40
SHARED = list(range(40, 61))
PROMPTS = [[*SHARED[: 3 * number], 5 + number, *range(70, 70 + number)] for number in range(8)]
PARAMS = [
    SamplingParams(
        temperature=0.9 * (number % 2), seed=number, max_tokens=40, ignore_eos=True, logprobs=0
    )
    for number in range(len(PROMPTS))
]
FEW_STATES: dict[str, object] = {
    "mamba_block_size": 8,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "max_steps_in_flight": 2,
}
PREEMPTING: dict[str, object] = {"scheduler_reserve_full_isl": False, "mamba_block_size": 16}
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
    assert sum(run.num_cached_tokens for run in runs) > 0
    if plain.facts.num_blocks_for(9):
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


def test_what_cannot_draft_is_refused(tmp_path: Path) -> None:
    model, draft = tmp_path / "model", tmp_path / "draft"
    build_checkpoint(model, ARCHITECTURES[0].config())
    build_checkpoint(draft, KINDS[0].config())
    with pytest.raises(UnsupportedModel, match=f"exclude speculative_model {draft}"):
        make_runner(model, ROOMY, "float32", 2, draft)
    mamba = next(one for one in RECURRENT if one.name == "mamba2")
    build_checkpoint(draft, mamba.config())
    with pytest.raises(UnsupportedModel, match="a model without attention has none"):
        make_runner(draft, None, "float32", 2, model)


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
