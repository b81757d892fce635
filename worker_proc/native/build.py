"""Compiles the native kernels once per machine, into the user's cache.

`python -m worker_proc.native.build` compiles them now. A worker without them starts the same
command in parallel, and uses the kernels if they exist when its model is loaded: it never waits for
a compiler, and needs none.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = ("attention.cpp", "decoder.cpp", "linear.cpp", "pointwise.cpp", "sampling.cpp")
HEADERS = (
    *("attention.h", "attention_pairs.h", "choice.h", "edits.h", "exact_sums.h", "experts.h"),
    *("pointwise.h", "products.h", "team.h", "vec.h", "weights.h"),
)
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno"),
    *("-ffp-contract=fast", "-shared", "-fPIC"),
)
COMPILE_TIMEOUT_S = 300.0


def library_path() -> Path:
    """Return the path of the library for these sources, flags and this CPU."""
    parts = [(Path(__file__).parent / name).read_bytes() for name in (*SOURCES, *HEADERS)]
    parts += [" ".join(FLAGS).encode(), cpu_description().encode()]
    digest = hashlib.blake2b(b"".join(parts), digest_size=10)
    return cache_directory() / f"native-{digest.hexdigest()}.so"


def cache_directory() -> Path:
    """Return where files for later starts are kept; RuntimeError: there is no home directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "troika"


def cpu_description() -> str:
    """Return what instructions this CPU has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def start_building() -> subprocess.Popen[bytes] | None:
    """Start compiling in a new process, unless the library exists or there is no compiler."""
    try:
        if library_path().exists() or compiler() is None:
            return None
    except (OSError, RuntimeError):  # no home directory, or no permission
        return None
    null = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, __file__], stdin=null, stdout=null, stderr=null)


def compiler() -> str | None:
    """Return the C++ compiler's path, if there is one."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build() -> Path:
    """Compile the library unless it exists, and return its path; a RuntimeError has the reason."""
    target = library_path()
    if target.exists():
        return target
    command = compiler()
    if command is None:
        raise RuntimeError("no C++ compiler: neither $CXX nor g++ is in PATH")
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    sources = [str(Path(__file__).parent / name) for name in SOURCES]
    # Renamed when complete, so that no process loads an incomplete library.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        try:
            done = subprocess.run(
                [command, *FLAGS, *sources, "-o", str(made)],
                capture_output=True,
                text=True,
                timeout=COMPILE_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            message = f"{command} takes longer than {COMPILE_TIMEOUT_S:g} s"
            raise RuntimeError(message) from None
        if done.returncode != 0:
            raise RuntimeError(f"{command} failed: {done.stderr.strip()}")
        made.replace(target)
    return target


if __name__ == "__main__":
    print(build())
