"""Compiles the native kernels, and finds those that this CPU can use.

`python -m worker_proc.native.build` compiles them for this CPU, once per machine, into the user's
cache. A worker without them starts the same command in parallel, and uses the kernels if they exist
when its model is loaded: it never waits for a compiler, and needs none.

`python -m worker_proc.native.build --all-targets DIRECTORY` compiles them for every target, for a
wheel that needs no compiler (scripts/wheel). What a wheel brought comes before what is compiled.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).parent
SOURCES = tuple(sorted(str(path.relative_to(_HERE)) for path in _HERE.rglob("*.cpp")))
HEADERS = tuple(sorted(str(path.relative_to(_HERE)) for path in _HERE.rglob("*.h")))
"""Relative to this directory, as includes are."""
FLAGS = (
    *("-std=c++17", "-O3", "-fopenmp", "-fno-math-errno"),
    *("-ffp-contract=fast", "-fPIC"),
)
WIDE_MOVES = ("-mmove-max=256", "-mstore-max=256")
"""Flags without AVX-512, for compilers that have them (GCC 12): a vector of 16 floats is copied in
registers of 8. Otherwise GCC copies it in halves of what was stored, which waits for the store."""
NATIVE = ("-march=native",)
# PyTorch brings OpenMP's library; a machine without a compiler may have an older one of C++.
PORTABLE = ("-static-libstdc++", "-static-libgcc")
COMPILE_TIMEOUT_S = 600.0
"""Limit for compiling a whole library in the background of a start, in seconds."""
WHEEL_COMPILE_TIMEOUT_S = 7200.0
"""Limit for each library of a wheel, which may be built under emulation or on a slow machine."""
_LOCK_PAUSE_S = 0.05
_SCRATCH = "compiling-"
PREBUILT = _HERE / "prebuilt"
"""The directory in which a wheel has the libraries of all targets."""


class Target(NamedTuple):
    """A set of instructions that a library is compiled for."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]
    """The names of these instructions in /proc/cpuinfo."""


_X86_64_V3 = frozenset(
    (
        *("cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"),
        *("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"),
    )
)
_X86_64_V4 = _X86_64_V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AVX512_BF16 = _X86_64_V4 | {"avx512_bf16", "avx512vbmi", "avx512_vbmi2"}
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi", "-mavx512vbmi2")
TARGETS = (
    Target(
        "amx_bf16",
        (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16"),
        _AVX512_BF16 | {"amx_tile", "amx_bf16"},
    ),
    Target("avx512_bf16", _BF16_FLAGS, _AVX512_BF16),
    Target("x86-64-v4", ("-march=x86-64-v4",), _X86_64_V4),
    Target("x86-64-v3", ("-march=x86-64-v3",), _X86_64_V3),
)
"""The targets of a wheel, the fastest first. The kernels have separate code for the instructions of
each one."""


def best_target(description: str) -> Target | None:
    """Return the fastest target that a CPU supports, given its `cpu_description`."""
    found = set(description.partition(":")[2].split())
    return next((target for target in TARGETS if target.needs <= found), None)


def prebuilt_path() -> Path | None:
    """Return the best library for this CPU that came with the package, if one did."""
    if not PREBUILT.is_dir():
        return None
    target = best_target(cpu_description())
    path = None if target is None else PREBUILT / _file_name(target)
    return path if path is not None and path.is_file() else None


def library_path() -> Path:
    """Return the path of the library that is compiled here, for this CPU."""
    name = _digest((*FLAGS, *WIDE_MOVES, *NATIVE), cpu_description())
    return cache_directory() / f"native-{name}.so"


def _file_name(target: Target) -> str:
    """Return the name of a target's library, which changes with the sources."""
    return f"{target.name}-{_digest((*FLAGS, *WIDE_MOVES, *PORTABLE, *target.flags))}.so"


def _digest(flags: tuple[str, ...], cpu: str = "") -> str:
    """Return a digest of the names and contents of all files, the flags and the CPU."""
    digest = hashlib.blake2b(digest_size=10)
    for name in (*SOURCES, *HEADERS):
        content = (_HERE / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    digest.update("\0".join((" ".join(flags), cpu)).encode())
    return digest.hexdigest()


def cache_directory() -> Path:
    """Return where files for later starts are kept; RuntimeError: there is no home directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "troika"


def cpu_description() -> str:
    """Return the line of /proc/cpuinfo that names the instructions of this CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def start_building() -> subprocess.Popen[bytes] | None:
    """Start compiling in a new process, unless a library exists or there is no compiler."""
    try:
        if prebuilt_path() is not None or library_path().exists() or compiler() is None:
            return None
    except (OSError, RuntimeError):  # no home directory, or no permission
        return None
    null = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, __file__], stdin=null, stdout=null, stderr=null)


def why_cache_is_unusable() -> str | None:
    """Return why no library can be written to the user's cache, or None if that is possible."""
    try:
        directory = cache_directory()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except RuntimeError as error:  # no home directory
        return str(error)
    except OSError as error:
        return f"{directory}: {error.strerror}"


def compiler() -> str | None:
    """Return the C++ compiler's path, if there is one."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build() -> Path:
    """Compile the library for this CPU unless one exists; a RuntimeError has the reason.

    Where several processes begin at the same time, as ranks do, one of them compiles.
    """
    prebuilt = prebuilt_path()
    if prebuilt is not None:
        return prebuilt
    target = library_path()
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(target.parent):
            if not target.exists():
                _compile(NATIVE, target, set(cpu_description().split()), COMPILE_TIMEOUT_S)
    return target


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory; a RuntimeError: another process has it for too long."""
    deadline = time.monotonic() + COMPILE_TIMEOUT_S
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    text = f"another process compiles for more than {COMPILE_TIMEOUT_S:g} s"
                    raise RuntimeError(text) from None
                time.sleep(_LOCK_PAUSE_S)
        yield
    finally:
        os.close(fd)


def build_all_targets(directory: Path) -> list[Path]:
    """Compile a library for each target into a directory; a RuntimeError has the reason."""
    if platform.machine() != "x86_64":
        raise RuntimeError(f"there are targets for x86_64 only, and this is {platform.machine()}")
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, target in enumerate(TARGETS, 1):
        path = directory / _file_name(target)
        print(f"compiling {path.name}, {number} of {len(TARGETS)}", file=sys.stderr, flush=True)
        if not path.exists():
            flags = (*PORTABLE, *target.flags)
            _compile(flags, path, target.needs, WHEEL_COMPILE_TIMEOUT_S)
        paths.append(path)
    return paths


def _compile(flags: tuple[str, ...], path: Path, instructions: Set[str], timeout_s: float) -> None:
    """Compile the sources in parallel and link a library; a RuntimeError has the reason."""
    _remove_abandoned(path.parent, 2 * timeout_s)
    try:
        _compile_until(time.monotonic() + timeout_s, flags, path, instructions)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{compiler()} takes longer than {timeout_s:g} s") from None


def _compile_until(
    deadline: float, flags: tuple[str, ...], path: Path, instructions: Set[str]
) -> None:
    if "avx512f" not in instructions and _has_flags(WIDE_MOVES, deadline):
        flags = (*flags, *WIDE_MOVES)
    threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    # Renamed when complete, so that no process loads an incomplete library.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_SCRATCH) as scratch:
        objects = [str(Path(scratch) / name.replace("/", "-")) + ".o" for name in SOURCES]
        sources = [str(_HERE / name) for name in SOURCES]
        include = f"-I{_HERE}"
        try:
            compiled = [
                threads.submit(_run, deadline, *FLAGS, *flags, include, "-c", source, "-o", made)
                for source, made in zip(sources, objects, strict=True)
            ]
            for each in compiled:
                each.result()
        finally:
            threads.shutdown(cancel_futures=True)
        library = Path(scratch) / path.name
        _run(deadline, *FLAGS, *flags, "-shared", *objects, "-o", str(library))
        library.replace(path)


def _has_flags(flags: tuple[str, ...], deadline: float) -> bool:
    """Return whether the compiler has these flags."""
    try:
        _run(deadline, *flags, "-E", "-x", "c++", os.devnull)
    except RuntimeError:
        return False
    return True


def _run(deadline: float, *arguments: str) -> None:
    """Run the compiler; a RuntimeError has the reason why it failed.

    After the deadline a `subprocess.TimeoutExpired` is raised.
    """
    command = compiler()
    if command is None:
        raise RuntimeError("no C++ compiler: neither $CXX nor g++ is in PATH")
    done = subprocess.run(
        [command, *arguments],
        capture_output=True,
        text=True,
        timeout=deadline - time.monotonic(),
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command} failed: {done.stderr.strip()}")


def _remove_abandoned(directory: Path, min_age_s: float) -> None:
    """Remove what compilations have left that were killed at least `min_age_s` ago."""
    for scratch in directory.glob(f"{_SCRATCH}*"):
        try:
            is_abandoned = time.time() - scratch.stat().st_mtime > min_age_s
        except OSError:  # it has just been removed
            continue
        if is_abandoned:
            shutil.rmtree(scratch, ignore_errors=True)


def main() -> None:
    """Compile for this CPU, or for every target, and print the paths."""
    parser = argparse.ArgumentParser(
        prog="python -m worker_proc.native.build", description="Compiles the native kernels."
    )
    parser.add_argument(
        "--all-targets",
        metavar="DIRECTORY",
        type=Path,
        help="compile for every target of a wheel, into a directory",
    )
    directory = parser.parse_args().all_targets
    try:
        paths = [build()] if directory is None else build_all_targets(directory)
    except (OSError, RuntimeError) as error:
        sys.exit(f"the kernels are not compiled: {error}")
    print(*paths, sep="\n")


if __name__ == "__main__":
    main()
