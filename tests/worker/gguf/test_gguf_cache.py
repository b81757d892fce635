"""The checkpoint directories of GGUF files in the user's cache: what is kept, and what is made."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type
from transformers import LlamaConfig

from scripts.gguf import cache
from scripts.gguf.cache import make_room, place_of
from scripts.gguf.directory import make_directory
from scripts.gguf.locks import hold_directories
from scripts.hub.gguf import directory_of
from scripts.hub.messages import Refusal
from tests.worker.gguf.gguf_files import WIDE, write_gguf
from worker_proc.errors import CheckpointError
from worker_proc.gguf.model_header import read_header
from worker_proc.quantization import gguf as settings
from worker_proc.quantization.gguf import check_unchanged
from worker_proc.quantization.scheme import SourceFile

FEW = 3


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(**WIDE | {"num_hidden_layers": 1})
    return write_gguf(tmp_path_factory.mktemp("original"), config, Type.F16)[0]


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory with those of all files, of which a few are kept."""
    monkeypatch.setattr(cache, "cache_directory", lambda: tmp_path / "cache")
    monkeypatch.setattr(cache, "MAX_DIRECTORIES", FEW)
    return tmp_path / "cache" / "gguf"


def fill(keys: Path, count: int) -> list[Path]:
    """Return new directories, the oldest first."""
    made = []
    for number in range(count):
        directory = keys / f"key{number}" / "name"
        directory.mkdir(parents=True)
        (directory / "config.json").touch()
        os.utime(directory.parent, (number, number))
        made.append(directory)
    return made


def test_a_directory_that_an_engine_uses_is_not_removed(keys: Path) -> None:
    first, second, *_ = made = fill(keys, FEW + 2)
    program = (
        "import sys; from pathlib import Path; from scripts.gguf.locks import hold_directories;"
        "held = hold_directories([Path(sys.argv[1])]);"
        "print(len(held), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(first)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"1\n"
        make_room(keys / "another" / "name")
        assert first.exists()
        assert not second.exists()
        engine.kill()
    assert all(directory.exists() for directory in made[3:])
    (keys / "further").mkdir()
    make_room(keys / "another" / "name")
    assert not first.exists()


def test_directories_that_were_used_a_short_time_ago_stay(keys: Path) -> None:
    made = fill(keys, FEW + 2)
    for directory in made[1:]:
        os.utime(directory.parent)
    make_room(keys / "another" / "name")
    assert [directory.exists() for directory in made] == [False] + [True] * (FEW + 1)


def test_without_locks_all_stay_and_a_sentence_states_it(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fill(keys, FEW + 1)
    (made[0] / "tokenizer.json").write_bytes(bytes(3_000_000))
    (made[0] / "model-1.gguf").symlink_to(__file__)
    assert cache.why_not_bounded() == ""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    make_room(keys / "another" / "name")
    assert all(directory.exists() for directory in made)
    assert f"{keys} has {FEW + 1} directories of GGUF files, 3 MB, and" in cache.why_not_bounded()
    shutil.rmtree(made[0].parent)
    assert cache.why_not_bounded() == ""


def test_what_is_not_a_directory_is_not_held(tmp_path: Path) -> None:
    assert hold_directories([tmp_path / "none", Path("demo")]) == []


def test_a_removal_that_is_killed_leaves_no_part_in_place(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fill(keys, FEW)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # killed before it begins
    make_room(keys / "another" / "name")
    assert not made[0].parent.exists()


def test_what_a_killed_start_has_left_is_replaced(keys: Path, original: Path) -> None:
    directory = place_of(read_header(original), needs_tokenizer=True)
    directory.mkdir(parents=True)
    (directory / "tokenizer.json").write_text("{")
    assert make_directory(original) == directory
    assert (directory / "config.json").is_file()
    assert (directory / "tokenizer.json").stat().st_size > 1


@pytest.mark.parametrize("name", ["..gguf", "...gguf", ".gguf"])
def test_a_name_of_dots_is_that_of_a_directory(
    name: str, keys: Path, original: Path, tmp_path: Path
) -> None:
    path = tmp_path / name
    shutil.copyfile(original, path)
    directory = make_directory(path)
    assert directory.parent.parent == keys
    assert (directory / "config.json").is_file()


def test_code_that_states_settings_is_part_of_the_key(
    keys: Path, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = read_header(original)
    before = place_of(header, needs_tokenizer=True)
    read_bytes = Path.read_bytes
    for name in ("gguf.py", "scheme.py"):
        source = Path(settings.__file__).with_name(name)

        def changed(path: Path, source: Path = source) -> bytes:
            return read_bytes(path) + (b"#" if path == source else b"")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", changed)
            assert place_of(header, needs_tokenizer=True) != before, name
    assert place_of(header, needs_tokenizer=True) == before


def test_a_file_that_cannot_be_reached_is_named(
    keys: Path, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match=r"gone.gguf: No such file"):
        check_unchanged(SourceFile(tmp_path / "gone.gguf", 1, 1))
    path = tmp_path / "copy.gguf"
    shutil.copyfile(original, path)
    header = read_header(path)
    path.unlink()
    monkeypatch.setattr("scripts.hub.gguf.read_header", lambda path: header)
    with pytest.raises(Refusal, match=r"^model .*copy.gguf: No such file"):
        directory_of(path, needs_tokenizer=True)
