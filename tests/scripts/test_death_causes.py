"""The kernel's counter of OOM kills, in both versions of control groups."""

from pathlib import Path

import pytest

from scripts.supervisor.death_causes import OomCounter


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        ("0::/app.slice/x\n", "app.slice/x/memory.events"),
        ("12:cpu,cpuacct:/a\n9:memory:/b/c\n0::/\n", "memory/b/c/memory.oom_control"),
        ("9:memory:/host/path\n", "memory/memory.oom_control"),
    ],
)
def test_each_kill_is_reported_once(tmp_path: Path, groups: str, file: str) -> None:
    """Kills before the start do not count."""
    proc, counts = tmp_path / "proc", tmp_path / "cgroup" / file
    proc.mkdir()
    counts.parent.mkdir(parents=True)
    (proc / "cgroup").write_text(groups)
    counts.write_text("low 0\noom_kill 3\n")
    counter = OomCounter(tmp_path / "cgroup", proc)
    assert not counter.take()
    counts.write_text("low 0\noom_kill 5\n")
    assert [counter.take() for _ in range(3)] == [True, True, False]
    counts.unlink()
    assert not counter.take()


def test_without_a_counter_no_death_is_an_oom_kill(tmp_path: Path) -> None:
    assert not OomCounter(tmp_path, tmp_path).take()
