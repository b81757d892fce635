"""Checkpoints as gptqmodel, auto-round and compressed-tensors write them.

Those beside this file were written by tests/tools/library_checkpoints.py. Where a library is
installed, it writes another one.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.sampling import SamplingParams
from tests.tools.library_checkpoints import EXPECTED, NUM_TOKENS, PROMPTS, WRITERS, digest, write
from tests.worker.driving import drive
from tests.worker.parity import make_runner
from tests.worker.quantization.coded_models import coded_formats, open_files
from worker_proc.native.build import compiler
from worker_proc.native.packed_weights import Format

STORED = Path(__file__).with_name("library_checkpoints")


def check(directory: Path) -> None:
    """Weights have the library's bits, stay codes, and give transformers' tokens in float32."""
    expected: dict[str, Any] = json.loads((directory / EXPECTED).read_text())
    files = open_files(directory)
    found = {name: one.read().dequantize(torch.float32) for name, one in files.weights.items()}
    assert {name: digest(weight) for name, weight in found.items()} == expected["weights"]
    if compiler() is None:
        return
    runner = make_runner(directory, 200)
    assert coded_formats(runner) == {Format.GROUPED_INT4}
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    prompts = [list(prompt) for prompt in PROMPTS]
    run = drive(runner, prompts, params, max_num_seqs=len(prompts))
    assert run.output_token_ids == expected["tokens"]
    assert len(set(map(tuple, expected["tokens"]))) == len(prompts)


@pytest.mark.parametrize("name", WRITERS)
def test_a_library_s_checkpoint_is_served(name: str) -> None:
    check(STORED / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_the_installed_library_s_checkpoint_is_served(name: str, tmp_path: Path) -> None:
    for library in WRITERS[name][0]:
        pytest.importorskip(library)
    write(name, tmp_path)
    check(tmp_path)
