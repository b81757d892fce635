"""Fixtures that several of the worker's tests share: checkpoints with outputs, and kernels."""

import copy
import json
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig

from tests.worker.checkpoints import ARCHITECTURES, Architecture, build_checkpoint
from tests.worker.parity import MAX_TOKENS, Serve, Served, generate_all, make_prompts
from worker_proc.attention.probe import ProbedModel, probe_model
from worker_proc.loading import inspection
from worker_proc.native import build as native_build
from worker_proc.native.build import build, compiler, cpu_description
from worker_proc.native.kernels import NativeLibrary
from worker_proc.startup import prepare

_PROBED: dict[tuple[type, str], ProbedModel] = {}
"""What was found of the configurations that this process has loaded, wherever they lie."""


@pytest.fixture(autouse=True, scope="session")
def _compiled() -> None:
    """Compile the kernels first: of two models, only the later one might have them otherwise."""
    if compiler() is not None:
        build()


@pytest.fixture(scope="session")
def llama_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama checkpoint, to be copied before it is changed."""
    directory = tmp_path_factory.mktemp("llama")
    build_checkpoint(directory, ARCHITECTURES[0].config())
    return directory


@pytest.fixture
def copied(llama_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the small Llama checkpoint, to be changed."""
    for file in llama_checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.fixture(autouse=True, scope="module")
def _probe_once() -> Iterator[None]:
    """Probe each configuration once: most checkpoints have the same few ones.

    A refusal is not kept, nor what another function than the usual one has found.
    """
    probe = inspection._probe

    def look_up(directory: str, config: PretrainedConfig) -> ProbedModel:
        if inspection.probe_model is not probe_model:
            return probe(directory, config)
        text = config.to_json_string(use_diff=False)
        key = (type(config), text.replace(json.dumps(directory), '""'))
        if key not in _PROBED:
            _PROBED[key] = probe(directory, config)
        return copy.deepcopy(_PROBED[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspection, "_probe", look_up)
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Compute with one thread, unless the test sets another number: its operations are small."""
    torch.set_num_threads(1)


@pytest.fixture
def two_threads() -> None:
    """For tests of kernels that divide the work of one call."""
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Return checkpoints with their expected outputs, each made once."""
    made: dict[str, Served] = {}

    def make(architecture: Architecture) -> Served:
        if architecture.name not in made:
            torch.set_num_threads(1)
            directory = tmp_path_factory.mktemp(architecture.name)
            model = build_checkpoint(directory, architecture.config())
            # The eager form is the one that every rule of every architecture is written in.
            model.set_attn_implementation("eager")
            prompts = make_prompts()
            expected = generate_all(model, prompts, MAX_TOKENS)
            made[architecture.name] = Served(directory, prompts, expected)
        return made[architecture.name]

    return make


@pytest.fixture(params=["sdpa", "native"])
def _backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with either way to attend on the CPU."""
    if request.param == "sdpa":
        monkeypatch.setattr(prepare, "load_library", lambda: None)
    elif compiler() is None:
        pytest.skip("no C++ compiler")
    else:
        build()


@pytest.fixture(scope="session")
def library() -> NativeLibrary:
    """The kernels, compiled now if they are not yet."""
    if compiler() is None:
        pytest.skip("no C++ compiler")
    return NativeLibrary(build())


@pytest.fixture(params=["torch", "native"])
def sampling_library(request: pytest.FixtureRequest) -> NativeLibrary | None:
    """Run the test with either way to choose tokens on the CPU; None: torch."""
    if request.param == "torch":
        return None
    if compiler() is None:
        pytest.skip("no C++ compiler")
    return NativeLibrary(build())


@pytest.fixture(scope="session")
def kernels_without_fma(tmp_path_factory: pytest.TempPathFactory) -> NativeLibrary:
    """The kernels for a processor that rounds twice in a multiply-add; compiling takes minutes."""
    if compiler() is None or platform.machine() != "x86_64":
        pytest.skip("no C++ compiler for x86-64")
    cache = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        cache = cache.parent  # of all processes of this run: one of them compiles
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache / "without_fma"))
        patch.setattr(native_build, "NATIVE", ("-march=x86-64-v2",))
        patch.setattr(native_build, "prebuilt_path", lambda: None)
        return NativeLibrary(build())


@pytest.fixture(
    scope="session",
    params=[
        *("tiles", "vectors", "floats"),
        pytest.param("without_fma", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> NativeLibrary:
    """The kernels with and without AMX, and with products by float32; each file is loaded once."""
    if request.param == "without_fma":
        library: NativeLibrary = request.getfixturevalue("kernels_without_fma")
        return library
    if request.param == "tiles":
        if "amx_tile" not in cpu_description().split():
            pytest.skip("without AMX the kernels are those of vectors or of floats")
        return NativeLibrary(build())
    copied = tmp_path_factory.mktemp("native") / "copied.so"
    shutil.copy(build(), copied)
    return NativeLibrary(copied, uses_tiles=False, uses_floats=request.param == "floats")
