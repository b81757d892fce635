"""A model that is computed by one call has the bits of its modules around the native layers."""

from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from protocol.config import EngineConfig, Quantization
from protocol.sampling import SamplingParams
from tests.worker.bitwise import DTYPES, engine_config
from tests.worker.checkpoints import SHAPE, build_checkpoint
from tests.worker.decoder.test_decoder import BY_NAME, NATIVE
from tests.worker.quantization.loads import load as load_quantized
from worker_proc.attention.interface import AttentionBackend
from worker_proc.calibration.self_check import num_blocks_needed, trial_requests
from worker_proc.decoder import angles, ends
from worker_proc.decoder.angles import AngleTable
from worker_proc.decoder.install import decoding
from worker_proc.decoder.layers import LayerSettings
from worker_proc.decoder.proof import is_whole_exact
from worker_proc.forward import attach_cache, compute_logits
from worker_proc.inputs import pack_step
from worker_proc.modules.packed_linear import PackedLinear
from worker_proc.native.build import build, compiler
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.structures import ProgramArgs, RunArgs
from worker_proc.request import MirroredRequest, ScheduledRequest
from worker_proc.sampling.pooling import captured_hidden_states
from worker_proc.startup.calibrate import calibrate
from worker_proc.startup.load_runner import build_runner
from worker_proc.startup.parts import make_layout
from worker_proc.startup.prepare import prepare_model

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

LENGTHS = (3, 40, 1, 97)
"""The lengths of the texts; the longest ends past a chunk of angles."""
CHUNK = 32
KEPT_OF = 20
"""Tokens of a text of which some rows get logits."""


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    build()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tables of angles grow during the texts."""
    monkeypatch.setattr(angles, "CHUNK", CHUNK)


class Model:
    """A model with its modules, and the settings of its layers."""

    def __init__(self, directory: Path, dtype: str) -> None:
        self.config: EngineConfig = engine_config(directory, dtype)
        self.prepared = prepare_model(self.config, lambda *_: None)
        self.calibration = calibrate(self.prepared, self.config, lambda *_: None)
        self.runner = build_runner(self.prepared, self.config, self.calibration, lambda *_: None)
        self.model: Any = self.prepared.loaded.model
        self.backend: AttentionBackend = self.runner._backend

    @property
    def settings(self) -> tuple[LayerSettings, ...]:
        return self.calibration.decoder

    def logits(self, *, is_whole: bool) -> list[torch.Tensor]:
        """Return the logits of some texts, in steps of chunks and decodes."""
        layout = make_layout(self.prepared.loaded, self.config)
        vocab_size = self.prepared.loaded.vocab_size
        texts = [[(7 * i + 13 * n) % vocab_size for i in range(n)] for n in LENGTHS]
        requests = trial_requests(layout, texts)
        with decoding(self.prepared, self.settings, is_whole=is_whole):
            assert ("forward" in self.model.__dict__) is is_whole
            return list(self._steps(requests))

    def logits_of(self, rows: list[int]) -> torch.Tensor:
        """Return the logits of some rows of a text of KEPT_OF tokens, computed in one step."""
        layout = make_layout(self.prepared.loaded, self.config)
        (request,) = trial_requests(layout, [list(range(1, KEPT_OF + 1))])
        inputs = pack_step([ScheduledRequest(request, 0, KEPT_OF, True)], torch.device("cpu"))
        inputs = replace(inputs, logits_indices=torch.tensor(rows, dtype=torch.long))
        vocab_size = self.prepared.loaded.vocab_size
        return compute_logits(self.model, self.backend, inputs, vocab_size).clone()

    def _steps(self, requests: list[MirroredRequest]) -> Iterator[torch.Tensor]:
        done = dict.fromkeys((request.req_id for request in requests), 0)
        for size in (30, 1, 1, 2, 60, 1, 1, 1):
            parts = []
            for request in requests:
                start, known = done[request.req_id], len(request.token_ids)
                if start < known:
                    end = min(start + size, known)
                    parts.append(ScheduledRequest(request, start, end - start, end == known))
                    done[request.req_id] = end
            inputs = pack_step(parts, torch.device("cpu"))
            vocab_size = self.prepared.loaded.vocab_size
            yield compute_logits(self.model, self.backend, inputs, vocab_size).clone()


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NATIVE)
def test_one_call_has_the_bits_of_the_modules(
    name: str, dtype: str, tmp_path: Path, small_chunks: None
) -> None:
    build_checkpoint(tmp_path, BY_NAME[name].config())
    model = Model(tmp_path, dtype)
    assert model.calibration.is_whole
    assert same(model.logits(is_whole=True), model.logits(is_whole=False))


def test_instructions_that_are_executed_one_by_one_have_the_bits_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_checkpoint(tmp_path, BY_NAME["llama"].config())
    model = Model(tmp_path, "bfloat16")
    at_once = model.logits(is_whole=True)
    execute = NativeLibrary.execute
    num_single = 0

    def execute_each(library: NativeLibrary, program: ProgramArgs, run: RunArgs) -> int:
        nonlocal num_single
        for index in range(program.num_instructions):
            single = program.only(index)
            assert single.num_done + 1 + single.num_later == program.num_instructions
            assert execute(library, single, run) == index + 1
            num_single += 1
        return int(program.num_instructions)

    monkeypatch.setattr(NativeLibrary, "execute", execute_each)
    for is_whole in (True, False):  # a part without the embedding shows if any is executed twice
        num_single = 0
        assert same(model.logits(is_whole=is_whole), at_once)
        assert num_single


@pytest.mark.parametrize("name", ["llama", "olmo2", "qwen3_moe"])
def test_rows_have_their_logits_in_any_order(name: str, tmp_path: Path) -> None:
    build_checkpoint(tmp_path, BY_NAME[name].config())
    model = Model(tmp_path, "bfloat16")
    with decoding(model.prepared, model.settings, is_whole=True):
        every = model.logits_of(list(range(KEPT_OF)))
        for kept in ([], [KEPT_OF - 1], [5, 0, KEPT_OF - 1, 3], [0, 1, 2]):
            assert torch.equal(model.logits_of(kept), every[kept])


@pytest.mark.parametrize("quantization", [Quantization.W8A16, Quantization.W8A8])
def test_coded_output_layers_are_computed_too(quantization: Quantization, tmp_path: Path) -> None:
    build_checkpoint(tmp_path, BY_NAME["llama"].config())
    runner = load_quantized(tmp_path, quantization, "bfloat16")
    assert "forward" in runner._model.__dict__


def test_a_step_of_one_call_calls_no_module(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, BY_NAME["llama"].config())
    model = Model(tmp_path, "float32")
    called: list[nn.Module] = []
    for module in model.model.modules():
        if module is not model.model and module is not model.model.base_model:
            module.register_forward_pre_hook(lambda module, _: called.append(module))
    model.logits(is_whole=True)
    assert [module for module in called if isinstance(module, PackedLinear)] == []
    model.logits(is_whole=False)
    assert [module for module in called if isinstance(module, PackedLinear)]


def test_modules_compute_a_step_whose_hidden_states_are_captured(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, BY_NAME["qwen3"].config())
    model = Model(tmp_path, "bfloat16")
    expected = model.logits(is_whole=True)
    with captured_hidden_states(model.model) as hidden:
        found = model.logits(is_whole=True)
    assert hidden.rows is not None
    assert same(found, expected)


@pytest.mark.parametrize(
    ("owner", "name"), [(ends, "_factor"), (ends.LogitEdit, "apply")], ids=["factor", "cap"]
)
def test_other_bits_leave_the_modules_in_place(
    owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma-2 scales its embedding and caps its logits."""
    config = BY_NAME["gemma2"].config()
    config.final_logit_softcapping = 3.0
    build_checkpoint(tmp_path, config)
    model = Model(tmp_path, "float32")
    layout = make_layout(model.prepared.loaded, model.config)
    attach_cache(model.prepared.loaded, model.backend, layout, num_blocks_needed(layout))

    def is_exact() -> bool:
        return is_whole_exact(model.prepared, model.backend, layout, model.settings)

    assert is_exact()
    wrong: dict[str, Any] = {"_factor": lambda *_: 1.0, "apply": lambda *_: None}
    monkeypatch.setattr(owner, name, wrong[name])
    assert not is_exact()


def test_angles_that_depend_on_the_longest_text_are_left_to_their_module(tmp_path: Path) -> None:
    config = LlamaConfig(**SHAPE)
    build_checkpoint(tmp_path, config)
    model = Model(tmp_path, "float32")
    rotary = model.model.model.rotary_emb
    compute = rotary.forward

    def dynamic(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        cosines, sines = compute(x, position_ids=position_ids)
        return cosines * (1.0 + position_ids.max() / 1000), sines

    rotary.forward = dynamic
    layers = list(model.model.model.layers)
    assert ends.read_ends(model.prepared.loaded, layers) is None
    rotary.forward = compute
    assert ends.read_ends(model.prepared.loaded, layers) is not None


def test_a_table_has_the_angles_of_every_position_up_to_its_limit(small_chunks: None) -> None:
    asked: list[list[int]] = []

    def make(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(positions[0].tolist())
        rows = positions.unsqueeze(-1).float().expand(1, -1, 4)
        return rows, -rows

    table = AngleTable(make, 2 * CHUNK + 5)
    assert table.num_positions == CHUNK
    table.reach(CHUNK)
    table.reach(CHUNK + 1)
    table.reach(2 * CHUNK + 5)
    assert asked == [
        list(range(CHUNK)),
        list(range(CHUNK, 2 * CHUNK)),
        list(range(2 * CHUNK, 2 * CHUNK + 5)),
    ]
    assert table.cosines[:, 0].tolist() == list(range(2 * CHUNK + 5))
    assert torch.equal(table.sines, -table.cosines)
    with pytest.raises(ValueError, match="positions"):
        table.reach(2 * CHUNK + 6)


def test_an_id_past_the_vocabulary_gets_logits_that_are_not_finite(tmp_path: Path) -> None:
    """Its row is not read from outside of the table; the other rows keep their bits."""
    build_checkpoint(tmp_path, BY_NAME["llama"].config())
    model = Model(tmp_path, "float32")
    table = array("i", [1])
    good, bad = ([5, 6, 7], [5, 6, 10**6])
    found = []
    with decoding(model.prepared, model.settings, is_whole=True):
        for text in (good, bad):
            request = MirroredRequest(1, text, 3, SamplingParams(), [table], 0, 0)
            other = MirroredRequest(2, good, 3, SamplingParams(), [array("i", [2])], 0, 0)
            parts = [ScheduledRequest(one, 0, 3, True) for one in (request, other)]
            inputs = pack_step(parts, torch.device("cpu"))
            found.append(compute_logits(model.model, model.backend, inputs, 64).clone())
    assert found[0].isfinite().all()
    assert not found[1][0].isfinite().any()
    assert torch.equal(found[0][1], found[1][1])
