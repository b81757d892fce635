"""The plugins and settings of all tests."""

import os

from hypothesis import HealthCheck, settings

from protocol.config.gpu_defaults import GPU_NODES

pytest_plugins = [
    "tests.plugins.file_order",
    "tests.plugins.forking",
    "tests.plugins.garbage",
    "tests.plugins.hangs",
    "tests.plugins.slow_variants",
]

# As in a worker: a thread of OpenMP that waits soon leaves the processor to other processes.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

# Without a GPU, Triton's kernels are interpreted; it reads this when any library imports it.
if not any(map(os.path.exists, GPU_NODES)):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples on every machine, however busy it is.
settings.register_profile(
    "troika", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("troika")
