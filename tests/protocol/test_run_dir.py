"""Run directories: private, short enough, or refused with the reason."""

import os
import tempfile
from pathlib import Path

import pytest

from protocol.process.run_dir import make_run_dir, replica_dir, runtime_base


def test_a_new_run_dir_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = Path(make_run_dir(None))
    assert path.parent == tmp_path
    assert path.stat().st_mode & 0o777 == 0o700


def test_a_runtime_directory_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_base() == str(tmp_path)
    # Root may write to every directory, so the answer of the system is a stand-in.
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(tmp_path))
    assert runtime_base() == tempfile.gettempdir()


def test_a_new_run_dir_whose_name_is_too_long_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / ("x" * 100)
    base.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    with pytest.raises(ValueError, match="is too long"):
        make_run_dir(None)
    assert not list(base.iterdir())


def test_an_absent_run_dir_is_created_with_its_parents(tmp_path: Path) -> None:
    path = make_run_dir(str(tmp_path / "a" / "b"))
    assert os.stat(path).st_mode & 0o777 == 0o700
    assert make_run_dir(path) == path


@pytest.mark.parametrize("kind", ["open", "file", "link", "foreign"])
def test_a_run_dir_that_others_could_use_is_refused(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "dir"
    if kind == "file":
        path.write_text("")
        error: type[Exception] = OSError
    elif kind == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "real")
        error = ValueError
    else:
        path.mkdir(mode=0o700)
        error = ValueError
    if kind == "open":
        path.chmod(0o750)
    if kind == "foreign":
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(error):
        make_run_dir(str(path))


def test_a_run_dir_too_long_for_sockets_is_refused_with_the_bound(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="107"):
        make_run_dir(str(tmp_path / ("x" * 107)))
    assert not (tmp_path / ("x" * 107)).exists()


def test_a_replica_that_starts_first_leaves_its_engine_a_directory_that_it_can_use(
    tmp_path: Path,
) -> None:
    """The directory may be removed while it runs, and a process start before it is back."""
    engine = str(tmp_path / "engine")
    make_run_dir(replica_dir(engine, 1))
    assert make_run_dir(engine) == engine
