"""Which compiled kernels a worker uses: of a wheel's targets, or compiled on this machine."""

import os
import shutil
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protocol.config import Quantization
from tests.worker.bitwise import NUM_THREADS, compare, engine_config
from tests.worker.checkpoints import build_checkpoint
from tests.worker.odd_models import CONFIGS
from tests.worker.quantization.loads import quantized
from worker_proc.loading.proofs import find_proofs
from worker_proc.model_runner import ModelRunner
from worker_proc.native import build as module
from worker_proc.native import kernels
from worker_proc.native.build import (
    HEADERS,
    SOURCES,
    TARGETS,
    WIDE_MOVES,
    Target,
    best_target,
    build,
    build_all_targets,
    compiler,
    cpu_description,
    library_path,
    prebuilt_path,
    start_building,
)
from worker_proc.native.kernels import NativeLibrary, load_library
from worker_proc.startup import checks, prepare
from worker_proc.startup.load_runner import load_model_runner

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
V3 = (
    "fpu sse sse2 pni ssse3 fma cx16 sse4_1 sse4_2 movbe popcnt xsave avx f16c lahf_lm abm bmi1"
    " avx2 bmi2"
)
V4 = f"{V3} avx512f avx512dq avx512cd avx512bw avx512vl"
BF16 = f"{V4} avx512_bf16 avx512vbmi avx512_vbmi2"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"{BF16} amx_bf16 amx_tile amx_int8 avx512_fp16", "amx_bf16"),
        (f"{BF16} amx_tile amx_int8", "avx512_bf16"),  # AMX without its bfloat16
        (BF16, "avx512_bf16"),
        (f"{V4} avx512_bf16", "x86-64-v4"),  # without the permutations of bytes
        (f"{V4} avx512_vnni", "x86-64-v4"),
        (f"{V3} avx512f avx512cd avx512_bf16 amx_bf16 amx_tile", "x86-64-v3"),  # of AVX-512 a part
        (V3, "x86-64-v3"),
        (V3.replace(" fma", ""), None),
        ("fpu sse sse2 cx16 popcnt", None),
        ("", None),
    ],
)
def test_the_fastest_target_of_which_the_cpu_has_every_instruction(
    flags: str, expected: str | None
) -> None:
    target = best_target(f"flags\t\t: {flags}")
    assert (target and target.name) == expected


def test_another_architecture_has_no_target() -> None:
    assert best_target("Features\t: fp asimd evtstrm aes sha2 bf16 i8mm") is None
    assert best_target("") is None


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let a compiler that only writes its arguments make the libraries; a cache that is empty."""
    fake = tmp_path / "compiler"
    fake.write_text(
        f'#!/bin/sh\necho "$*" >>{tmp_path}/log\nfor last; do :; done\necho "$*" >"$last"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "log"


def compiled(log: Path) -> list[str]:
    """Return the commands of a log that compile or link, without those that only try flags."""
    return [line for line in log.read_text().splitlines() if " -E " not in line]


def with_prebuilt(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make libraries of all targets, as a wheel has them."""
    build_all_targets(directory)
    monkeypatch.setattr(module, "PREBUILT", directory)


def test_every_target_is_compiled_once_with_its_own_flags(
    compilations: Path, tmp_path: Path
) -> None:
    paths = build_all_targets(tmp_path / "prebuilt")
    assert len(set(paths)) == len(TARGETS)
    commands = [set(line.split()) for line in compiled(compilations)]
    assert len(commands) == len(TARGETS) * (len(SOURCES) + 1)
    for path, target in zip(paths, TARGETS, strict=True):
        assert path.name.startswith(f"{target.name}-")
        of_target, commands = commands[: len(SOURCES) + 1], commands[len(SOURCES) + 1 :]
        assert all(set(target.flags) < command for command in of_target)
        assert not any("-march=native" in command for command in of_target)
        assert ["-shared" in command for command in of_target] == [False] * len(SOURCES) + [True]
    num_compiled = len(compiled(compilations))
    assert build_all_targets(tmp_path / "prebuilt") == paths
    assert len(compiled(compilations)) == num_compiled


@pytest.mark.parametrize("has_flags", [True, False])
def test_only_libraries_without_avx512_copy_in_wide_moves_if_the_compiler_can(
    has_flags: bool, compilations: Path, tmp_path: Path
) -> None:
    if not has_flags:
        fake = tmp_path / "compiler"
        lines = fake.read_text().splitlines()
        lines.insert(1, 'case "$*" in *move-max*) exit 1;; esac')
        fake.write_text("\n".join(lines))
    build_all_targets(tmp_path / "prebuilt")
    commands = [set(line.split()) for line in compiled(compilations)]
    for number, target in enumerate(TARGETS):
        of_target = commands[number * (len(SOURCES) + 1) :][: len(SOURCES) + 1]
        expected = has_flags and "avx512f" not in target.needs
        assert {set(WIDE_MOVES) <= command for command in of_target} == {expected}


@needs_compiler
def test_of_processes_that_begin_together_one_compiles(compilations: Path) -> None:
    begin = threading.Barrier(3)

    def start() -> Path:
        begin.wait()
        return build()

    with ThreadPoolExecutor(3) as threads:
        paths = {each.result() for each in [threads.submit(start) for _ in range(3)]}
    assert paths == {library_path()}
    assert len(compiled(compilations)) == len(SOURCES) + 1


def test_a_compilation_that_does_not_end_is_not_waited_for_any_longer(
    compilations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMPILE_TIMEOUT_S", 0.1)
    library_path().parent.mkdir(parents=True)
    with (
        module._locked(library_path().parent),
        pytest.raises(RuntimeError, match="another process"),
    ):
        build()
    assert not compilations.exists()


def test_the_build_of_a_wheel_may_take_longer_than_a_compilation_of_a_start(
    compilations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMPILE_TIMEOUT_S", 0.0)
    with pytest.raises(RuntimeError, match=r"compiler takes longer than 0 s"):
        module._compile((), tmp_path / "library", set(), module.COMPILE_TIMEOUT_S)
    of_another_build = tmp_path / "prebuilt" / "compiling-for-an-hour"
    of_another_build.mkdir(parents=True)
    an_hour_ago = time.time() - 3600
    os.utime(of_another_build, (an_hour_ago, an_hour_ago))
    assert len(build_all_targets(tmp_path / "prebuilt")) == len(TARGETS)
    assert of_another_build.exists()


@needs_compiler
def test_an_error_of_the_compiler_is_reported_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "FLAGS", ("-no-such-flag",))
    with pytest.raises(RuntimeError, match="no-such-flag"):
        build()
    assert list((tmp_path / "cache" / "troika").iterdir()) == []


def test_what_a_killed_compilation_left_is_removed(
    compilations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache" / "troika"
    for name in ("compiling-old", "compiling-new"):
        (cache / name).mkdir(parents=True)
        (cache / name / "products-linear.cpp.o").touch()
    os.utime(cache / "compiling-old", (0, 0))
    assert build().is_file()
    assert {path.name for path in cache.iterdir()} == {"compiling-new", library_path().name}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_prebuilt_library_comes_before_a_compiler(
    target: Target, compilations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_prebuilt(tmp_path / "prebuilt", monkeypatch)
    monkeypatch.setattr(module, "cpu_description", lambda: f"flags : {' '.join(target.needs)}")
    num_compiled = len(compiled(compilations))
    path = prebuilt_path()
    assert path is not None
    assert path.name.startswith(f"{target.name}-")
    assert start_building() is None
    assert build() == path
    assert len(compiled(compilations)) == num_compiled


def test_a_cpu_without_a_target_compiles(
    compilations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_prebuilt(tmp_path / "prebuilt", monkeypatch)
    monkeypatch.setattr(module, "cpu_description", lambda: "flags : sse2")
    assert prebuilt_path() is None
    assert build() == library_path()
    assert "-march=native" in compiled(compilations)[-1]


def test_libraries_of_other_sources_are_not_used(
    compilations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_prebuilt(tmp_path / "prebuilt", monkeypatch)
    monkeypatch.setattr(module, "cpu_description", lambda: f"flags : {V3}")
    assert prebuilt_path() is not None
    monkeypatch.setattr(module, "SOURCES", module.SOURCES[1:])
    assert prebuilt_path() is None


def test_the_name_of_a_library_changes_with_the_name_and_the_content_of_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = tmp_path / "native"
    shutil.copytree(Path(module.__file__).parent, copied)
    monkeypatch.setattr(module, "_HERE", copied)
    files = sorted([*copied.rglob("*.cpp"), *copied.rglob("*.h")])
    names = {library_path().name}
    for file in files:
        file.write_text(file.read_text() + "\n")
        names.add(library_path().name)
    moved = "sampling/vec.h"
    (copied / "vec.h").rename(copied / moved)
    headers = tuple(moved if name == "vec.h" else name for name in module.HEADERS)
    monkeypatch.setattr(module, "HEADERS", headers)
    names.add(library_path().name)
    assert len(names) == len(files) + 2


def test_a_package_has_every_file() -> None:
    directory = Path(module.__file__).parent
    settings = tomllib.loads((directory.parents[1] / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["worker_proc.native"]
    packed = {path for pattern in patterns for path in directory.glob(pattern)}
    assert {directory / name for name in (*SOURCES, *HEADERS)} <= packed
    assert all("prebuilt" in path.parts or path.suffix in {".cpp", ".h"} for path in packed)


@needs_compiler
def test_a_prebuilt_library_that_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = build()
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"\x7fELF")
    monkeypatch.setattr(kernels, "prebuilt_path", lambda: damaged)
    library = load_library()
    assert library is not None
    assert library.path == compiled
    assert f"{damaged} cannot be loaded" in caplog.text


@needs_compiler
def test_proofs_of_one_library_do_not_hold_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two may have the same bytes."""
    compiled = NativeLibrary(build())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    prebuilt = NativeLibrary(Path(shutil.copy(compiled.path, tmp_path / "prebuilt.so")))
    build_checkpoint(tmp_path / "model", CONFIGS["llama"])
    found = find_proofs(engine_config(tmp_path / "model", "float32"))
    assert found is not None
    found.with_kernels(compiled).put("fused", 1)
    assert found.with_kernels(compiled).get("fused", int) == 1
    assert found.with_kernels(prebuilt).get("fused", int) is None


@pytest.fixture(scope="module")
def prebuilt(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The libraries of all targets; compiling them takes minutes."""
    paths = build_all_targets(tmp_path_factory.mktemp("prebuilt"))
    return {target.name: path for target, path in zip(TARGETS, paths, strict=True)}


def load(
    library: NativeLibrary, directory: Path, dtype: str, quantization: Quantization | None = None
) -> ModelRunner:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "load_library", lambda: library)
        patch.setattr(checks, "start_building", lambda: None)
        config = quantized(engine_config(directory, dtype), quantization)
        return load_model_runner(config, lambda *_: None)


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe"])
def test_every_target_is_proven_and_the_best_one_has_the_bits_of_one_compiled_here(
    name: str,
    dtype: str,
    prebuilt: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build_checkpoint(tmp_path, CONFIGS[name])
    compiled = load(NativeLibrary(build()), tmp_path, dtype)
    best = best_target(cpu_description())
    assert best is not None
    found = set(cpu_description().partition(":")[2].split())
    for target in TARGETS:
        if target.needs <= found:
            runner = load(NativeLibrary(prebuilt[target.name]), tmp_path, dtype)
            assert (runner.facts.decoder, runner.facts.exact_resume) == ("native", True)
            if target is best:
                compare([compiled, runner], monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("quantization", [None, *Quantization])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_logits_without_fused_multiply_adds_are_the_same_bits_in_every_schedule(
    name: str,
    quantization: Quantization | None,
    kernels_without_fma: NativeLibrary,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build_checkpoint(tmp_path, CONFIGS[name])
    runner = load(kernels_without_fma, tmp_path, "bfloat16", quantization)
    assert (runner.facts.decoder, runner.facts.exact_resume) == ("native", True)
    compare([runner] * len(NUM_THREADS), monkeypatch)
