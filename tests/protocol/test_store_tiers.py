"""The directories of stores: whose they are, and when they are removed."""

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from protocol.config.settings import configure
from protocol.stores.tiers import (
    check_private,
    hold_memory,
    index_path,
    make_private,
    memory_directory,
    name_engine,
    remove_memory,
    remove_orphaned_memory,
    tiers,
)


def test_replicas_share_the_directory_of_their_engine(tmp_path: Path) -> None:
    replica_dir = tmp_path / "replica-1"
    replica_dir.mkdir()
    config = configure(
        model="null", kv_offload_bytes=1000, kv_offload_dir="/disk", run_dir=str(tmp_path)
    )
    memory, disk = tiers(config)
    assert (memory.max_bytes, disk.directory) == (1000, Path("/disk"))
    run = msgspec.structs.replace(config.run, replica=1, run_dir=str(replica_dir))
    assert tiers(msgspec.structs.replace(config, run=run)) == [memory, disk]
    assert index_path(disk, "abc", 1) == Path("/disk/abc/rank-1/index")
    assert tiers(configure(model="null", run_dir=str(tmp_path))) == []


def test_two_engines_have_two_directories_which_end_with_them(tmp_path: Path) -> None:
    paths = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        paths.append(memory_directory(str(tmp_path / name)))
        make_private(paths[-1])
    assert paths[0] != paths[1]
    remove_memory(str(tmp_path / "a"))
    assert [path.exists() for path in paths] == [False, True]
    remove_memory(str(tmp_path / "b"))
    remove_memory(str(tmp_path / "gone"))


def test_blocks_in_memory_whose_engine_has_no_directory_any_more_are_removed(
    tmp_path: Path,
) -> None:
    """The system has removed the run directory of a supervisor that died."""
    paths = {}
    for name in ("gone", "made again", "there", "unnamed"):
        engine_dir = tmp_path / name
        engine_dir.mkdir()
        paths[name] = memory_directory(str(engine_dir))
        make_private(paths[name])
        if name != "unnamed":
            name_engine(paths[name], str(engine_dir))
            name_engine(paths[name], str(engine_dir))
    (tmp_path / "gone").rmdir()
    (tmp_path / "made again").rename(tmp_path / "old")
    (tmp_path / "made again").mkdir()
    try:
        remove_orphaned_memory()
        left = [name for name, path in paths.items() if path.exists()]
        assert left == ["there", "unnamed"]
    finally:
        for path in paths.values():
            shutil.rmtree(path, ignore_errors=True)


def test_blocks_in_memory_stay_while_their_engine_lives_where_its_directory_is_not_seen(
    tmp_path: Path,
) -> None:
    """Containers may share memory, but not the directories of temporary files."""
    engine_dir = tmp_path / "here"
    engine_dir.mkdir()
    directory = memory_directory(str(engine_dir))
    held = hold_memory(str(engine_dir))
    try:
        assert held is not None
        engine_dir.rename(tmp_path / "not seen")
        remove_orphaned_memory()
        assert directory.is_dir()
        os.close(held)
        remove_orphaned_memory()
        assert not directory.exists()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def test_an_engine_that_may_not_use_the_directory_holds_nothing(tmp_path: Path) -> None:
    directory = memory_directory(str(tmp_path))
    directory.mkdir(mode=0o777)
    directory.chmod(0o777)
    try:
        assert hold_memory(str(tmp_path)) is None
    finally:
        directory.rmdir()


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    """Its name can be guessed, and who writes to it decides tokens."""
    private = tmp_path / "kv"
    make_private(private)
    check_private(private)
    private.chmod(0o770)
    with pytest.raises(PermissionError, match="must be a directory of this user with mode 0700"):
        make_private(private)
    link = tmp_path / "link"
    link.symlink_to(private)
    with pytest.raises(PermissionError):
        make_private(link)
