"""A worker imports only what it needs, and the rest can still be imported."""

import subprocess
import sys

from tests.system.conftest import ROOT

_SCRIPT = """
import sys
from protocol.config.settings import configure
from scripts.supervisor.startup import complete
from worker_proc.startup.start import make_runner
config = configure(model="demo", device="cpu", num_threads=1, num_gpu_blocks_override=256)
runner = make_runner(complete(config), lambda *_: None)
assert runner.facts.exact_resume, runner.facts.exact_resume_reason
for name in ("torch._dynamo.utils", "torch.distributed.tensor", "torch.distributed.fsdp"):
    assert name not in sys.modules, name
import torch
assert torch.distributed.is_available()
import torch._dynamo
torch._dynamo.reset()
assert "torch._dynamo.utils" in sys.modules
assert torch._dynamo.disable.__module__ == "torch._dynamo.decorators"
"""


def test_worker_loads_without_what_it_never_uses() -> None:
    """Sharding and the compiler are not imported, and the compiler still can be."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr
