"""Results that one start keeps for the next: found again under the same key, and only if whole."""

import os
from pathlib import Path

import pytest

from worker_proc.loading import start_cache
from worker_proc.loading.proofs import proven
from worker_proc.loading.start_cache import StartCache
from worker_proc.startup.import_structure import Folder, fingerprint

RESULT = {"layers": 3}


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "troika"


def cache(*key: bytes) -> StartCache:
    return StartCache("proofs", key)


def test_a_result_is_found_under_its_key_alone() -> None:
    cache(b"a", b"b").put("layers", RESULT)
    assert cache(b"a", b"b").get("layers", dict[str, int]) == RESULT
    assert cache(b"ab").get("layers", dict[str, int]) is None
    assert cache(b"a", b"c").get("layers", dict[str, int]) is None
    assert cache(b"a", b"b").get("heads", dict[str, int]) is None
    assert cache(b"a", b"b").get("layers", list[int]) is None  # of another type


def test_a_damaged_file_counts_as_absent(root: Path) -> None:
    cache(b"a").put("layers", RESULT)
    [path] = root.rglob("layers")
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert cache(b"a").get("layers", dict[str, int]) is None
        path.write_bytes(whole[:place])
        assert cache(b"a").get("layers", dict[str, int]) is None
    path.write_bytes(whole)
    assert cache(b"a").get("layers", dict[str, int]) == RESULT


def test_the_file_of_another_user_counts_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    cache(b"a").put("layers", RESULT)
    monkeypatch.setattr(os, "getuid", lambda: 12_345)
    assert cache(b"a").get("layers", dict[str, int]) is None


def test_without_a_directory_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    cache(b"a").put("layers", RESULT)
    assert cache(b"a").get("layers", dict[str, int]) is None


def test_the_first_keys_are_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_cache, "MAX_KEYS", 3)
    known: set[Path] = set()
    for number in range(6):
        cache(bytes([number])).put("layers", RESULT)
        [path] = {*root.glob("proofs/*")} - known
        os.utime(path, (number, number))
        known.add(path)
    kept = [cache(bytes([number])).get("layers", dict[str, int]) for number in range(6)]
    assert kept == [None] * 3 + [RESULT] * 3


def test_what_is_proven_is_not_proven_again() -> None:
    counted: list[int] = []

    def prove() -> int:
        counted.append(1)
        return len(counted)

    assert [proven(cache(b"a"), "n", int, prove) for _ in range(3)] == [1, 1, 1]
    assert proven(cache(b"b"), "n", int, prove) == 2
    assert [proven(None, "n", int, prove) for _ in range(2)] == [3, 4]


def test_an_import_structure_is_kept_whole() -> None:
    structure = {
        "albert": {
            frozenset(): {"configuration_albert": {"AlbertConfig"}},
            frozenset({"torch", "vision"}): {"modeling_albert": {"AlbertModel", "AlbertLayer"}},
        },
        "deprecated": {"old": {frozenset(): {"configuration_old": {"OldConfig"}}}, "empty": {}},
    }
    kept = Folder.of(structure)
    assert kept is not None
    StartCache("imports", [b"a"]).put("structure", kept)
    found = StartCache("imports", [b"a"]).get("structure", Folder)
    assert found is not None
    assert found.structure() == structure
    assert Folder.of({"albert": ["a list"]}) is None


def test_an_added_file_changes_the_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "models" / "albert").mkdir(parents=True)
    folder = tmp_path / "models"
    before = fingerprint(folder)
    assert fingerprint(folder) == before
    os.utime(folder / "albert", ns=(1, 1))
    (folder / "albert" / "modeling_albert.py").touch()
    assert fingerprint(folder) != before
