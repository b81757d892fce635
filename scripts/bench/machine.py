"""The machine and the versions that figures depend on."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from worker_proc.loading.host_limits import available_cpus

_FLAGS = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_bf16"),
    *("amx_int8", "asimd", "asimddp", "bf16", "i8mm", "sve"),
)
"""Instructions that kernels choose by, on x86 and ARM."""
_PACKAGES = ("troika", "torch", "transformers", "pyzmq", "uvloop")
_GIT_TIMEOUT_S = 10.0
_ROOT = Path(__file__).resolve().parents[2]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Hardware, versions, and how busy the machine was at the start."""

    cpu: str
    cpu_flags: list[str]
    """Those that choose kernels."""
    cores: int
    usable_cores: int
    """The cores that the affinity and the quota of this process permit."""
    memory_bytes: int
    gpus: list[str]
    kernel: str
    python: str
    versions: dict[str, str]
    """The versions of installed packages."""
    commit: str
    """Empty: there is no repository."""
    is_modified: bool
    """Whether tracked files differ from the commit."""
    load_average: list[float]
    started_at: str


def describe() -> Machine:
    """Describe this machine now."""
    fields = dict(_fields(Path("/proc/cpuinfo")))
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    memory_kib = dict(_fields(Path("/proc/meminfo"))).get("MemTotal", "0 kB").split()[0]
    return Machine(
        cpu=fields.get("model name") or platform.processor() or platform.machine(),
        cpu_flags=[flag for flag in _FLAGS if flag in flags],
        cores=os.cpu_count() or 0,
        usable_cores=available_cpus(),
        memory_bytes=int(memory_kib) * 1024,
        gpus=sorted(_gpus()),
        kernel=platform.release(),
        python=platform.python_version(),
        versions={name: version for name in _PACKAGES if (version := _version(name))},
        commit=_git("rev-parse", "HEAD"),
        is_modified=bool(_git("status", "--porcelain", "--untracked-files=no")),
        load_average=[round(load, 2) for load in os.getloadavg()],
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _fields(path: Path) -> Iterator[tuple[str, str]]:
    """Yield `name: value` of each line, the first processor's last, so that it prevails."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return
    for line in reversed(lines):
        name, _, value = line.partition(":")
        yield name.strip(), value.strip()


def _gpus() -> Iterator[str]:
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        yield dict(_fields(path)).get("Model", "unknown")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
