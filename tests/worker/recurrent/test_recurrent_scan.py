"""Convolutions and scans give a row the same bits however its text is cut, moved and computed."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional
from transformers.models.mamba import modeling_mamba

from protocol.core_worker import NULL_BLOCK
from protocol.sampling import SamplingParams
from tests.combinations import in_turn
from worker_proc.errors import MirrorError, UnsupportedModel
from worker_proc.inputs import BegunBlock
from worker_proc.native.build import build, compiler
from worker_proc.native.kernels import NativeLibrary
from worker_proc.recurrent.convolution import CausalConvolution
from worker_proc.recurrent.delta_rule import DeltaRule
from worker_proc.recurrent.gated_recurrence import GatedRecurrence
from worker_proc.recurrent.mamba2 import Mamba2Scan
from worker_proc.recurrent.selective_scan import SelectiveScan
from worker_proc.recurrent.state_pool import StatePool
from worker_proc.recurrent.state_spec import RecurrentSpec, StateSpec
from worker_proc.recurrent.step_texts import NO_STATE, StepTexts, Text
from worker_proc.recurrent.weighted_average import WeightedAverage
from worker_proc.request import MirroredRequest

LENGTHS = (37, 9, 1, 20)
NUM_BLOCKS = 40
KEY_HEADS, HEADS, KEYS, VALUES = 2, 4, 19, 37
"""Neither keys nor values fill whole vectors."""
CHANNELS, TAPS = 75, 4


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Tokens:
    """What the tokens of all texts bring to operations, and the parameters of these."""

    def __init__(self, dtype: torch.dtype) -> None:
        total = sum(LENGTHS)
        self.dtype = dtype
        self.queries, self.keys = (
            rows(1, total, KEY_HEADS, KEYS, seed=n).to(dtype) for n in (1, 2)
        )
        self.values = rows(1, total, HEADS, VALUES, seed=3).to(dtype)
        self.rates = torch.sigmoid(rows(1, total, HEADS, seed=4)).to(dtype)
        self.log_decays = -functional.softplus(rows(1, total, HEADS, KEYS, seed=5))
        self.weight = rows(CHANNELS, TAPS, seed=6).to(dtype)
        self.bias = rows(CHANNELS, seed=7).to(dtype)
        self.channels = rows(1, total, CHANNELS, seed=8).to(dtype)
        self.decay, self.skip = -rows(HEADS, seed=9).exp(), rows(HEADS, seed=10)
        self.gates, self.steps = (rows(1, total, CHANNELS, seed=n).to(dtype) for n in (11, 12))
        self.channel_decays = -rows(CHANNELS, KEYS, seed=13).exp()
        self.decay_speeds = rows(CHANNELS, seed=14)


def averages(tokens: Tokens, op: Any, at: torch.Tensor) -> torch.Tensor:
    logs_of_weights = (tokens.channels[:, at].float() * 8.0).to(tokens.dtype)
    wider = torch.cat([tokens.gates[:, at], tokens.channels[:, at]], dim=2)  # a merged product's
    out, _ = op(tokens.decay_speeds, tokens.bias.float(), logs_of_weights, wider[..., :CHANNELS])
    return out[0]


def convolved(tokens: Tokens, op: Any, at: torch.Tensor) -> torch.Tensor:
    part = tokens.channels[:, at].transpose(1, 2)
    return op(part, tokens.weight, tokens.bias, activation="silu").transpose(1, 2)[0]


def by_delta_rule(tokens: Tokens, op: Any, at: torch.Tensor) -> torch.Tensor:
    heads = tokens.queries[:, at], tokens.keys[:, at]
    return with_log_decays(tokens, op, at, heads, tokens.log_decays[:, at, :, 0])


def by_delta_rule_with_key_decays(tokens: Tokens, op: Any, at: torch.Tensor) -> torch.Tensor:
    heads = [
        values[:, at].repeat_interleave(HEADS // KEY_HEADS, 2)
        for values in (tokens.queries, tokens.keys)
    ]
    return with_log_decays(tokens, op, at, heads, tokens.log_decays[:, at])


def with_log_decays(
    tokens: Tokens, op: Any, at: torch.Tensor, heads: Sequence[torch.Tensor], logs: torch.Tensor
) -> torch.Tensor:
    """Call a delta rule; `heads` are its queries and keys."""
    out, _ = op(
        *(*heads, tokens.values[:, at]),
        g=logs,
        beta=tokens.rates[:, at],
        use_qk_l2norm_in_kernel=True,
    )
    return out[0]


def by_gates(tokens: Tokens, op: Any, at: torch.Tensor) -> torch.Tensor:
    gates = torch.sigmoid(tokens.steps.float())
    out: torch.Tensor = op(tokens.channels[0, at].float(), gates[0, at])
    return out


def by_mamba2(tokens: Tokens, op: Any, at: torch.Tensor) -> torch.Tensor:
    return op(
        *(tokens.values[:, at], tokens.rates[:, at], tokens.decay),
        *(tokens.keys[:, at], tokens.queries[:, at]),
        chunk_size=8,
        D=tokens.skip,
        dt_bias=tokens.skip,
        dt_softplus=True,
    )[0]


def by_selective_scan(tokens: Tokens, op: Any, at: torch.Tensor) -> torch.Tensor:
    # steps of no time to long ones, as a softplus makes of large numbers
    inputs = (tokens.channels, tokens.steps * 20.0, tokens.gates)
    channels, steps, gates = (values[:, at].transpose(1, 2) for values in inputs)
    keys, queries = (heads[:, at, 0].transpose(1, 2) for heads in (tokens.keys, tokens.queries))
    return op(
        *(channels, steps, tokens.channel_decays, keys, queries),
        D=tokens.weight[:, 0],
        z=gates,
        delta_bias=tokens.bias,
        delta_softplus=True,
    ).transpose(1, 2)[0]


class Kind(NamedTuple):
    """A kind of operation, the shape of its state, and how it is called for some tokens."""

    type: Callable[..., Any]
    shape: tuple[int, ...]
    compute: Callable[[Tokens, Any, torch.Tensor], torch.Tensor]


HEAD_STATES = (HEADS, -(-VALUES // 16), KEYS, 16)
KINDS = {
    "average": Kind(WeightedAverage, (3, CHANNELS), averages),
    "convolution": Kind(CausalConvolution, (TAPS - 1, CHANNELS), convolved),
    "delta": Kind(DeltaRule, HEAD_STATES, by_delta_rule),
    "gated": Kind(GatedRecurrence, (CHANNELS,), by_gates),
    "key_decays": Kind(DeltaRule, HEAD_STATES, by_delta_rule_with_key_decays),
    "mamba2": Kind(Mamba2Scan, HEAD_STATES, by_mamba2),
    "selective": Kind(SelectiveScan, (-(-CHANNELS // 16), KEYS, 16), by_selective_scan),
}


class Case:
    """One kind of operation over the tokens of all texts."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32) -> None:
        self.type, shape, self._compute = KINDS[kind]
        self._tokens = Tokens(dtype)
        self.spec = StateSpec("", shape, is_window=kind == "convolution")

    def compute(self, op: Any, at: torch.Tensor) -> torch.Tensor:
        """Compute the tokens `at` of all texts by an operation: `[T, ...]`."""
        return self._compute(self._tokens, op, at)

    def pool(self) -> StatePool:
        return StatePool([RecurrentSpec("m", 1, (self.spec,))], NUM_BLOCKS, 4, self._tokens.dtype)


def computed(
    case: Case,
    steps: Sequence[Sequence[int]],
    library: NativeLibrary | None,
    *,
    in_place: bool = True,
    garbage: float = 0.0,
) -> list[torch.Tensor]:
    """Return the rows of each text, computed in steps: the number of tokens of each text.

    In place, a text has one block; else its state goes to a new one in each step.
    """
    pool = case.pool()
    pool.tensors["m"][0].fill_(garbage)
    op = case.type(pool, pool.tensors["m"][0], library)
    firsts = [sum(LENGTHS[:text]) for text in range(len(LENGTHS))]
    done, blocks = [0] * len(LENGTHS), [NO_STATE] * len(LENGTHS)
    free = iter(range(1, NUM_BLOCKS))
    found: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    for counts in steps:
        texts, places, row = [], [], 0
        for text, count in enumerate(counts):
            if count == 0:
                continue
            target = next(free) if blocks[text] == NO_STATE or not in_place else blocks[text]
            texts.append(Text(row, count, blocks[text], {target: count}))
            blocks[text] = target
            places.append(torch.arange(count) + firsts[text] + done[text])
            done[text] += count
            row += count
        pool.texts = StepTexts(texts)
        out = case.compute(op, torch.cat(places))
        numbers = [text for text, count in enumerate(counts) if count]
        for text, part in zip(numbers, out.split([len(p) for p in places]), strict=True):
            found[text].append(part)
    assert done == list(LENGTHS)
    return [torch.cat(parts) for parts in found]


WHOLE = [LENGTHS]
ALONE = [
    [length if text == number else 0 for text, length in enumerate(LENGTHS)] for number in range(4)
]
CHUNKS = [(16, 2, 1, 1), (1, 3, 0, 1), (2, 1, 0, 1), (17, 0, 0, 16), (1, 3, 0, 1)]


@pytest.fixture
def native() -> NativeLibrary:
    if compiler() is None:
        pytest.skip("no C++ compiler")
    return NativeLibrary(build())


@pytest.fixture
def library(sampling_library: NativeLibrary | None) -> NativeLibrary | None:
    """Run the test with PyTorch, and with the kernels."""
    return sampling_library


@pytest.mark.parametrize(
    ("kind", "dtype"), in_turn(KINDS, [torch.float32, torch.bfloat16]), ids=str
)
def test_rows_have_the_same_bits_in_all_steps(
    kind: str, dtype: torch.dtype, library: NativeLibrary | None
) -> None:
    case = Case(kind, dtype)
    whole = computed(case, WHOLE, library)
    assert all(bool(rows.isfinite().all()) for rows in whole)
    for steps in (ALONE, CHUNKS):
        for in_place in (True, False):
            found = computed(case, steps, library, in_place=in_place)
            assert all(torch.equal(one, other) for one, other in zip(whole, found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_no_bit(kind: str, native: NativeLibrary) -> None:
    case = Case(kind)
    found = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        found.append(computed(case, CHUNKS, native))
    torch.set_num_threads(1)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_agree_with_torch(kind: str, native: NativeLibrary) -> None:
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        case = Case(kind, dtype)
        pairs = zip(computed(case, CHUNKS, native), computed(case, CHUNKS, None), strict=True)
        for kernel, plain in pairs:
            assert (kernel - plain).norm() <= bound * plain.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_text_reads_nothing_of_its_blocks(kind: str, library: NativeLibrary | None) -> None:
    case = Case(kind)
    clean = computed(case, CHUNKS, library)
    spoiled = computed(case, CHUNKS, library, garbage=torch.nan)
    assert all(torch.equal(one, other) for one, other in zip(clean, spoiled, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_after_any_row_can_be_saved(kind: str, library: NativeLibrary | None) -> None:
    """It can be saved twice after one row, and over the state that the text begins from."""
    case, start, count = Case(kind), 4, 5
    pool = case.pool()
    states = pool.tensors["m"][0]
    op = case.type(pool, states, library)

    def compute(first: int, num_rows: int, source: int, cuts: dict[int, int]) -> None:
        pool.texts = StepTexts([Text(0, num_rows, source, cuts)])
        case.compute(op, torch.arange(first, first + num_rows))

    compute(0, start, NO_STATE, {1: start})
    for row in range(count):  # block 11 + n: after n more rows
        source = 10 + row if row else 1
        compute(start + row, 1, source, {11 + row: 1})
    compute(start, count, 1, {2: 1, 1: 2, 3: 2, 4: 4, 5: 5})
    for block, num_rows in {2: 1, 1: 2, 3: 2, 4: 4, 5: 5}.items():
        assert torch.equal(states[block], states[10 + num_rows])


def test_a_convolution_takes_rows_of_the_type_of_its_windows_only() -> None:
    case = Case("convolution", torch.bfloat16)
    pool = StatePool([RecurrentSpec("m", 1, (case.spec,))], NUM_BLOCKS, 4, torch.float32)
    op = case.type(pool, pool.tensors["m"][0], None)
    pool.texts = StepTexts([Text(0, 3, NO_STATE, {1: 3})])
    with pytest.raises(RuntimeError, match=r"rows in torch.bfloat16 for windows in torch.float32"):
        case.compute(op, torch.arange(3))


def test_a_step_does_not_move_on_to_the_null_block() -> None:
    texts = StepTexts([Text(0, 1, 3, {3: 1})])
    request = MirroredRequest(7, [1, 2], 1, SamplingParams(), [array("i", [3, NULL_BLOCK])], 1, 1)
    with pytest.raises(MirrorError, match="request 7 has no state block 1"):
        texts.move_on([BegunBlock(0, 1, request)])


def test_a_selective_scan_equals_that_of_transformers(library: NativeLibrary | None) -> None:
    case = Case("selective")
    found = torch.cat(computed(case, WHOLE, library))

    def own(*args: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = modeling_mamba.mamba_selective_scan(*args, **kwargs)
        return out

    firsts = [sum(LENGTHS[:text]) for text in range(len(LENGTHS))]
    places = [torch.arange(n) + first for n, first in zip(LENGTHS, firsts, strict=True)]
    expected = torch.cat([case.compute(own, at) for at in places])  # type: ignore[arg-type]
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.max()) < 1e-5


@pytest.mark.parametrize("more", [{"delta_softplus": False}, {"return_last_state": True}])
def test_another_selective_scan_is_refused(more: dict[str, bool]) -> None:
    channels, keys = (torch.empty(1, size, 3, device="meta") for size in (CHANNELS, KEYS))
    decays = torch.empty(CHANNELS, KEYS, device="meta")
    options = {"delta_softplus": True} | more
    with pytest.raises(UnsupportedModel, match=r"is called with delta_softplus=.* not with True"):
        SelectiveScan.describe(channels, channels, decays, keys, keys, **options)
