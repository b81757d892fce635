"""Proofs about a model from its load, stored for later starts on the same machine.

The key holds everything that a proof depends on: the files of the model and of the draft model, the
settings, this package's code, the libraries, the compiled kernels, the CPU, and the environment
variables that influence computation. A file counts as unchanged if its size, its inode and both of
its times are the same: the time of the inode's last change cannot be set back.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import transformers

import protocol
from protocol.config import EngineConfig
from protocol.process.model_files import weight_files
from worker_proc.loading.same_code import computed_type
from worker_proc.loading.start_cache import StartCache
from worker_proc.native.build import cpu_description
from worker_proc.native.kernels import NativeLibrary

_PACKAGES = (Path(__file__).parents[1], Path(protocol.__file__).parent)
_CPU_MODEL = ("vendor_id", "cpu family", "model", "stepping", "cache size", "CPU implementer")
"""Prefixes of lines in /proc/cpuinfo: libraries divide their work by more than instruction sets."""
_STEERING = (
    *("ATEN_", "DNNL_", "GOMP_", "KMP_", "LD_", "MKL", "OMP_", "ONEDNN_", "OPENBLAS_", "TORCH_"),
    *("GLIBC_", "TRANSFORMERS_"),
)
"""Prefixes of environment variables that change how libraries compute."""

T = TypeVar("T")


class Proofs:
    """The proofs about the configured checkpoint, without kernels and with a native library."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        self._key = [*_key(config), rank.to_bytes(4)]

    def without_kernels(self) -> StartCache:
        """Return proofs that are independent of the kernels."""
        return StartCache("proofs", self._key)

    def with_kernels(self, library: NativeLibrary | None) -> StartCache:
        """Return proofs for these kernels, or for torch's."""
        # The file name does not depend on the compiler.
        kernels = b"" if library is None else _state(library.path)
        return StartCache("proofs", [*self._key, kernels])


def find_proofs(config: EngineConfig, rank: int = 0) -> Proofs | None:
    """Return the proofs about the configured checkpoint, or a rank's part of it.

    Returns None if its files cannot be listed.
    """
    try:
        return Proofs(config, rank)
    except OSError:  # loading the checkpoint reports the error
        return None


def proven(proofs: StartCache | None, name: str, type_: type[T], prove: Callable[[], T]) -> T:
    """Return an earlier start's result, or prove it now and store it."""
    found = None if proofs is None else proofs.get(name, type_)
    if found is None:
        found = prove()
        if proofs is not None:
            proofs.put(name, found)
    return found


def with_proof(
    proofs: StartCache | None, name: str, type_: type[T], install: Callable[[T | None], T]
) -> T:
    """Install an earlier start's proof, or prove it now and store it.

    `install` takes the proof, or None if there is none yet, and returns it.
    """
    known = None if proofs is None else proofs.get(name, type_)
    found = install(known)
    if proofs is not None and known is None:
        proofs.put(name, found)
    return found


def _key(config: EngineConfig) -> Iterator[bytes]:
    # A successor is started with the block counts for which its predecessor found memory.
    cache = msgspec.structs.replace(
        config.cache,
        num_gpu_blocks_override=None,
        num_state_blocks_override=None,
        kv_cache_memory_bytes=None,
    )
    model = msgspec.structs.replace(
        config.model,
        given_model=None,
        default_chat_template_kwargs={},
        generation_config="auto",
        override_generation_config=None,
    )
    parallel = (config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size)
    settings = (model, cache, config.scheduler, parallel, config.worker)
    yield msgspec.msgpack.encode(settings)
    for name in filter(None, (config.model.model, config.model.speculative_model)):
        directory = Path(name).resolve()
        found = directory.iterdir() if directory.is_dir() else ()  # else loading reports the error
        for path in sorted(path for path in {*found, *weight_files(directory)} if path.is_file()):
            yield _state(path)
        for path in _modules_of(directory):
            yield _state(path)
    code = hashlib.blake2b()
    for package in _PACKAGES:
        for path in sorted(package.rglob("*.py")):
            code.update(path.read_bytes())
    yield code.digest()
    yield f"{sys.version} {torch.__version__} {transformers.__version__}".encode()
    for library in (torch, transformers):  # reinstalled, perhaps with other code
        yield _state(Path(library.__path__[0]) / "__init__.py")
    yield cpu_description().encode()
    yield _cpu_model().encode()
    steering = {name: value for name, value in os.environ.items() if name.startswith(_STEERING)}
    yield msgspec.msgpack.encode(sorted(steering.items()))


def _modules_of(checkpoint: Path) -> list[Path]:
    """Return the transformers files that compute a checkpoint; they may be edited in place."""
    package = Path(transformers.__path__[0])
    try:
        model_type = json.loads((checkpoint / "config.json").read_bytes())["model_type"]
        own = package / "models" / computed_type(str(model_type)).replace("-", "_")
        return sorted([*package.glob("*.py"), *own.glob("*.py")])
    except (OSError, ValueError, LookupError, TypeError):  # loading reports the error
        return []


def _state(path: Path) -> bytes:
    """Return bytes that change whenever a file changes."""
    stat = path.stat()
    return msgspec.msgpack.encode(
        (str(path), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    )


def _cpu_model() -> str:
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return ""
    return "\n".join(line for line in first.splitlines() if line.startswith(_CPU_MODEL))
