"""A worker imports only what it needs, and the rest can still be imported."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from tests.paths import ROOT
from worker_proc.native.build import build

_SCRIPT = """
import sys
is_later_start = sys.argv[1] == "later"
from protocol.config.settings import configure
from scripts.supervisor.checks import complete_config
from worker_proc.startup.start import make_runner
config = configure(model="demo", device="cpu", num_threads=1, num_gpu_blocks_override=256)
runner = make_runner(complete_config(config), lambda *_: None)
assert runner.facts.exact_resume, runner.facts.exact_resume_reason
unused = ["torch._dynamo.utils", "torch.distributed.tensor", "torch.distributed.fsdp"]
if is_later_start:
    unused += ["sympy", "torch._decomp", "torch._prims", "torch._refs"]
for name in unused:
    assert name not in sys.modules, name
import torch
from transformers import Qwen3Config  # not the model's own
if is_later_start:
    from torch._meta_registrations import register_meta  # loads them
indices = torch.zeros(3, dtype=torch.long, device="meta")
assert torch.ones(4, 2, device="meta")[indices].shape == (3, 2)
assert torch.distributed.is_available()
import torch._dynamo
torch._dynamo.reset()
assert "torch._dynamo.utils" in sys.modules
assert torch._dynamo.disable.__module__ == "torch._dynamo.decorators"
"""


def test_worker_loads_without_what_it_never_uses(tmp_path: Path) -> None:
    """Sharding and the compiler are not imported, and the compiler still can be.

    A later start builds no model without memory, and needs no rules for shapes. One that finds a
    part of the proofs, as after an interrupted start, proves the rest.
    """
    kernels = tmp_path / "troika"
    kernels.mkdir()
    shutil.copy(build(), kernels)
    for start in ("first", "later", "interrupted"):
        if start == "interrupted":
            removed = [*tmp_path.glob("**/fused"), *tmp_path.glob("**/calibration*")]
            assert len(removed) == 2
            for path in removed:
                path.unlink()
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, start],
            cwd=ROOT,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=100.0,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_trials_draw_the_same_numbers_after_lean_imports() -> None:
    """torch refuses to make a generator without a part that these leave out."""
    script = (
        "from worker_proc.startup.lean_import import lean_imports\n"
        "with lean_imports():\n"
        "    import torch\n"
        "    from worker_proc.loading.deferred_module import make_generator\n"
        "print(torch.rand(3, generator=make_generator(7)).tolist())\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", script]
    output = subprocess.check_output(command, cwd=ROOT, text=True, timeout=100.0)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(7)).tolist()
    assert output.strip() == str(expected)
