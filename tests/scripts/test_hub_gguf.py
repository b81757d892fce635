"""GGUF models of a hub: which files a name stands for, and what is refused by their headers."""

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from huggingface_hub import constants
from transformers import LlamaConfig

from scripts.gguf.check import check_headers
from scripts.hub.gguf import directory_of
from scripts.hub.messages import Refusal
from scripts.hub.snapshot import Request, Snapshot
from tests.hub import Hub, used_hub
from tests.worker.gguf.gguf_files import WIDE, write_gguf
from worker_proc.gguf.parts import part_paths

NAME = "tiny/files"
CONFIG = LlamaConfig(**WIDE | {"num_hidden_layers": 1})
FIRST_BYTES = 1 << 20
"""What is fetched of a header at first."""
DATA = bytes(8 << 20)
TEXT = b"x" * (5 << 18)
check = partial(
    check_headers,
    dtype="auto",
    device=torch.device("cpu"),
    quantization=None,
    needs_tokenizer=True,
)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that is asked for files in the directory `files`, with an empty cache."""
    monkeypatch.setattr("scripts.gguf.cache.cache_directory", lambda: tmp_path / "directories")
    (tmp_path / "files").mkdir()
    with used_hub(tmp_path, monkeypatch) as started:
        started.add(NAME, tmp_path / "files")
        yield started


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with much more data than header."""
    path, _ = write_gguf(tmp_path_factory.mktemp("whole"), CONFIG, Type.Q8_0)
    with path.open("ab") as file:
        file.write(DATA)
    return path


def fetch(quantization: str, check: Callable[[Path], None] = check, **options: Any) -> Snapshot:
    """Fetch a model. Refusal: it cannot be fetched, or cannot run."""
    request = Request(NAME, None, True, check, quantization)
    snapshot = Snapshot(request._replace(**options), lambda _: None)
    snapshot.prepare()
    snapshot.fetch()
    return snapshot


def refusal(quantization: str, check: Callable[[Path], None] = check) -> str:
    with pytest.raises(Refusal) as caught:
        fetch(quantization, check)
    return str(caught.value)


def header(*keys: tuple[str, bytes]) -> bytes:
    """Return a header without tensors, with keys whose values are texts."""
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 + len(keys))]
    for key, text in (("general.architecture", b"llama"), *keys):
        parts.append(struct.pack(f"<Q{len(key)}sIQ", len(key), key.encode(), 8, len(text)) + text)
    return b"".join(parts)


def test_the_file_of_a_quantization_is_fetched(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other file is, and no configuration; offline it is found in the cache."""
    files = tmp_path / "files"
    (files / "more").mkdir()
    names = ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "more/m.Q5_K.gguf", "m-IQ4_K_M.gguf")
    for name in (*names, "mmproj-Q8_0.gguf"):
        (files / name).write_bytes(header() + name.encode() * 1000)
    checked: list[str] = []

    def note(path: Path) -> None:
        checked.append(path.name)

    for quantization, file in (
        ("q4_k_m", names[0]),
        ("Q8_0", names[1]),
        ("Q5_K", names[2]),
    ):
        fetched = fetch(quantization, note)
        assert fetched.gguf_file() == fetched.directory / file
        assert fetched.gguf_file().read_bytes() == (files / file).read_bytes()
    assert checked == ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "m.Q5_K.gguf"]
    assert refusal("Q9") == (
        f"model {NAME} has no GGUF file of Q9; there are: m-IQ4_K_M.gguf, m-Q4_K_M.gguf,"
        " m-Q8_0.gguf, mmproj-Q8_0.gguf, m.Q5_K.gguf"
    )
    assert refusal("").endswith(f"name the one to serve as {NAME}:QUANTIZATION")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch("Q5_K", pytest.fail).directory == fetched.directory


def test_all_parts_are_fetched_and_a_missing_one_is_named(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "files" / "Q8_0"
    first, _ = write_gguf(tmp_path, CONFIG, Type.Q8_0, tensors_per_part=5)
    paths = part_paths(first)
    directory.mkdir()
    for path in paths:
        shutil.copy(path, directory / path.name.replace("tiny", "tiny-Q8_0"))
    copies = sorted(directory.iterdir())
    copies[2].rename(tmp_path / "kept")
    assert refusal("Q8_0") == (
        f"model {NAME} has not all of the 4 parts of Q8_0: Q8_0/{copies[2].name} is missing"
    )
    assert not hub.num_sent
    (tmp_path / "kept").rename(copies[2])
    fetched = fetch("Q8_0")
    assert fetched.gguf_file() == fetched.directory / "Q8_0" / copies[0].name
    for copy, path in zip(part_paths(fetched.gguf_file()), paths, strict=True):
        assert copy.read_bytes() == path.read_bytes()
    made = directory_of(fetched.gguf_file(), needs_tokenizer=True)
    assert made.name == "tiny-Q8_0"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch("Q8_0", pytest.fail).gguf_file() == fetched.gguf_file()
    part_paths(fetched.gguf_file())[3].unlink()
    assert "is not complete in the cache" in refusal("Q8_0")


REFUSED = {
    "architecture": (b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lamma", "is 'lamma'"),
    "type": (b"blk.0.attn_v.weight\x02\0\0\0", None, "blk.0.attn_v.weight is stored as type 99"),
    "tensor": (b"blk.0.attn_v.w", b"blk.1.attn_v.w", "misses model.layers.0.self_attn.v_proj"),
    "tokenizer": (b"llama-bpe", b"llama-b9e", "tokenizer.ggml.pre is 'llama-b9e'"),
    "magic": (b"GGUF", b"GGML", "it does not begin with GGUF"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_header_shows_is_refused_before_the_weights_are_fetched(
    what: str, hub: Hub, whole: Path, tmp_path: Path
) -> None:
    old, new, reason = REFUSED[what]
    content = bytearray(whole.read_bytes())
    place = content.index(old)
    if new is not None:
        content[place : place + len(old)] = new
    else:
        struct.pack_into("<I", content, place + len(old) + 2 * 8, 99)
    (tmp_path / "files" / "tiny-Q8_0.gguf").write_bytes(content)
    text = refusal("Q8_0")
    assert text.startswith(f"model {NAME} cannot run: ")
    assert reason in text
    assert str(tmp_path) not in text
    assert "/tmp" not in text
    assert 0 < hub.num_sent["tiny-Q8_0.gguf"] <= FIRST_BYTES
    assert not list(Path(constants.HF_HUB_CACHE).rglob("blobs/*"))


@pytest.mark.parametrize("what", ["architecture", "tokenizer", "no tokenizer"])
def test_names_of_a_file_are_refused_before_torch_is_imported(
    what: str, whole: Path, tmp_path: Path
) -> None:
    path, content, reason = tmp_path / "m.gguf", header(), "tokenizer.ggml.tokens"
    if what in REFUSED:
        old, new, reason = REFUSED[what]
        assert new is not None
        content = whole.read_bytes().replace(old, new, 1)
    path.write_bytes(content)
    code = (
        "import pathlib, sys; from scripts.hub.gguf import directory_of\n"
        "from scripts.hub.messages import Refusal\n"
        f"try: directory_of(pathlib.Path({str(path)!r}), needs_tokenizer=True)\n"
        "except Refusal as error: print(error)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert reason in done.stdout


def test_a_file_that_is_shorter_than_its_tensors_is_refused(
    hub: Hub, whole: Path, tmp_path: Path
) -> None:
    path = tmp_path / "files" / "tiny-Q8_0.gguf"
    path.write_bytes(whole.read_bytes()[: -len(DATA) - 100])
    assert "it is truncated" in refusal("Q8_0")


def test_weights_that_do_not_fit_in_memory_are_not_fetched(
    hub: Hub, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(whole, tmp_path / "files" / "tiny-Q8_0.gguf")
    monkeypatch.setattr("worker_proc.loading.inspection.available_memory", lambda: 100_000)
    assert "the weights need" in refusal("Q8_0")
    assert hub.num_sent["tiny-Q8_0.gguf"] <= FIRST_BYTES


def test_a_long_header_is_fetched_in_growing_ranges(hub: Hub, tmp_path: Path) -> None:
    """Each is as long as all before it; a range that is cut short is asked for again."""
    content = header(("general.description", TEXT), ("general.license", TEXT)) + DATA
    (tmp_path / "files" / "m-F16.gguf").write_bytes(content)
    hub.cuts["m-F16.gguf"] = [FIRST_BYTES, FIRST_BYTES + 1000]
    ranges = ["0-1048575", "1048576-2097151", "1048576-2097151", "2097152-4194303"]
    seen: list[list[str | None]] = []

    def note(path: Path) -> None:
        seen.append(hub.fetched("m-F16.gguf"))
        assert path.stat().st_size == len(content)

    assert fetch("F16", note).gguf_file().read_bytes() == content
    assert seen == [[f"bytes={range}" for range in ranges]]


def test_a_header_without_an_end_is_given_up(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_proc.gguf.header._MAX_HEADER_BYTES", 2 << 20)
    content = header(("general.description", b"x" * (5 << 20))) + DATA
    (tmp_path / "files" / "m-F16.gguf").write_bytes(content)
    assert "its header has more than 2097152 bytes" in refusal("F16")
    assert hub.num_sent["m-F16.gguf"] <= 2 << 20


def test_a_hub_without_ranges_is_read_from_the_begin(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hub, "has_ranges", False)
    content = header(("general.description", b"x" * (3 << 19))) + DATA
    (tmp_path / "files" / "m-F16.gguf").write_bytes(content)
    assert fetch("F16", lambda _: None).gguf_file().read_bytes() == content


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_factors_of_frequencies_are_fetched_with_the_header(
    factor: float, hub: Hub, tmp_path: Path
) -> None:
    """They lie behind all weights, and the configuration needs their values."""
    rope = {
        **{"rope_type": "llama3", "factor": 8.0, "rope_theta": 500000.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    }
    config = LlamaConfig(**WIDE | {"num_hidden_layers": 1}, rope_parameters=rope)
    periods = 2 * np.pi * 500000.0 ** (np.arange(0, 64, 2) / 64)
    share = np.clip((8192 / periods - 1.0) / 3.0, 0.0, 1.0)
    factors = (1.0 / ((1.0 - share) / 8.0 + share)).astype(np.float32)
    factors[20] *= factor
    path, _ = write_gguf(tmp_path, config, Type.Q8_0, tensors={"rope_freqs.weight": factors})
    path.rename(tmp_path / "files" / "m-Q8_0.gguf")
    made: list[dict[str, Any]] = []

    def rope_parameters(path: Path) -> dict[str, Any]:
        config = json.loads((directory_of(path, needs_tokenizer=True) / "config.json").read_text())
        found: dict[str, Any] = config["rope_parameters"]
        return found

    def note(path: Path) -> None:
        check(path)
        made.append(rope_parameters(path))

    if factor != 1.0:
        assert "rope_freqs.weight has other factors" in refusal("Q8_0", note)
        return
    fetched = fetch("Q8_0", note).gguf_file()
    assert rope_parameters(fetched) == made[0] == pytest.approx(rope)
