"""What a start reports: capacity, attention path, a missing compiler; and what it refuses."""

import sys
from pathlib import Path

import msgspec
import pytest
import torch

from protocol.model_facts import KVGroup, ModelFacts
from worker_proc.cuda.device import resolve_device
from worker_proc.errors import InsufficientMemory, UnsupportedModel
from worker_proc.loading.inspection import check_room
from worker_proc.runner import PORTABLE_ATTENTION
from worker_proc.startup import announcement as module
from worker_proc.startup.announcement import announcement

FACTS = ModelFacts(
    model="/m",
    vocab_size=100,
    max_model_len=2049,
    block_size=16,
    num_gpu_blocks=641,
    eos_token_ids=[0],
    dtype="bfloat16",
    device="cpu",
    exact_resume=True,
    decoder="native",
)
COST = (
    "attention is slower, and an interrupted request may continue with other tokens"
    " (docs/first_hour.md)"
)


def test_capacity_is_that_of_requests_of_full_length() -> None:
    """The last token of a request needs no slot: 2,049 tokens take 128 blocks."""
    lines = list(announcement(FACTS, "native kernel"))
    assert lines == [
        "context 2,049 tokens; KV cache 10,245 tokens (5.0 requests of full length)",
        "layers: native decoder; attention: native kernel, bfloat16 on the CPU",
    ]


def test_an_encoder_has_no_cache() -> None:
    facts = msgspec.structs.replace(FACTS, computes_whole_prompts=True)
    (line, _) = announcement(facts, "native kernel")
    assert line == "context 2,049 tokens; no KV cache"


def test_rounded_weights_are_named() -> None:
    (_, line) = announcement(msgspec.structs.replace(FACTS, quantization="w8a16"), "native kernel")
    assert line.endswith("native kernel, bfloat16 with weights w8a16 on the CPU")


def test_codes_of_the_cache_are_named() -> None:
    ends = {"": " with KV int8", "w8a16": " with weights w8a16 and KV int8"}
    for quantization, parts in ends.items():
        facts = msgspec.structs.replace(FACTS, quantization=quantization, kv_cache_dtype="int8")
        (_, line) = announcement(facts, "native kernel")
        assert line.endswith(f"native kernel, bfloat16{parts} on the CPU")


def test_a_window_leaves_room_for_more() -> None:
    groups = [KVGroup(), KVGroup(max_blocks=32)]
    (line, _) = announcement(msgspec.structs.replace(FACTS, kv_groups=groups), "native kernel")
    assert line.endswith("(4.0 requests of full length)")


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (None, f"no C++ compiler: {COST}; install g++ and start again"),
        (
            "/usr/bin/g++",
            f"the native kernels are not in use: {COST};"
            " the next start uses them if they are compiled",
        ),
    ],
)
def test_a_missing_kernel_is_named_with_its_cost(
    monkeypatch: pytest.MonkeyPatch, found: str | None, sentence: str
) -> None:
    monkeypatch.setattr(module, "compiler", lambda: found)
    inexact = msgspec.structs.replace(FACTS, exact_resume=False, exact_resume_reason="x")
    lines = list(announcement(inexact, PORTABLE_ATTENTION))
    assert lines[1].endswith("; attention: PyTorch (portable), bfloat16 on the CPU")
    assert lines[2:] == [sentence]


def test_a_cache_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "compiler", lambda: "/usr/bin/g++")
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    inexact = msgspec.structs.replace(FACTS, exact_resume=False, exact_resume_reason="x")
    (sentence,) = list(announcement(inexact, PORTABLE_ATTENTION))[2:]
    assert sentence == (
        f"the native kernels cannot be stored ({file}/troika: Not a directory): {COST};"
        " set XDG_CACHE_HOME to a directory that this user can write to"
    )


def test_what_prevents_an_exact_continuation_is_named() -> None:
    facts = msgspec.structs.replace(
        FACTS, device="cuda", exact_resume=False, exact_resume_reason="matrix products on cuda"
    )
    assert list(announcement(facts, PORTABLE_ATTENTION))[2:] == [
        "an interrupted request may continue with other tokens: matrix products on cuda"
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_cuda_that_is_not_there_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"finds no CUDA device; .* or use --device cpu"):
        resolve_device("cuda")
    assert resolve_device("auto").type == "cpu"


@pytest.mark.parametrize("name", ["cuda", "auto"])
def test_a_gpu_without_triton_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UnsupportedModel, match=r"Triton.* pip install triton, or use --device cpu"):
        resolve_device(name)
    assert resolve_device("cpu").type == "cpu"


@pytest.mark.parametrize(
    ("variable", "reason"),
    [
        (None, r"Triton needs a C compiler, and gcc or clang is missing; install gcc, or set CC"),
        ("no-such-compiler", r"Triton needs a C compiler, and no-such-compiler is missing"),
    ],
)
def test_a_gpu_without_a_c_compiler_is_refused(
    variable: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton would fail at its first kernel, in the midst of the load."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    if variable is not None:
        monkeypatch.setenv("CC", variable)
    with pytest.raises(UnsupportedModel, match=rf"^device cuda: {reason}.* or use --device cpu$"):
        resolve_device("cuda")


def test_a_gpu_without_pythons_headers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(UnsupportedModel, match=rf"Triton needs {tmp_path}/Python\.h, which is"):
        resolve_device("cuda")
    (tmp_path / "Python.h").touch()
    assert resolve_device("cuda").type == "cuda"


def test_weights_larger_than_memory_are_refused_before_they_are_read() -> None:
    sentence = r"the weights need 1024\.00 GiB of memory, but only .* GiB are free \(cpu\)"
    with pytest.raises(InsufficientMemory, match=sentence):
        check_room(2**40, torch.device("cpu"))
    check_room(1, torch.device("cpu"))
