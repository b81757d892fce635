"""The kernel's counter of OOM kills, in both versions of control groups."""

from pathlib import Path

import pytest

from scripts.supervisor.system import OomCounter


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        ("0::/app.slice/x\n", "app.slice/x/memory.events"),
        ("12:cpu,cpuacct:/a\n9:memory:/b/c\n0::/\n", "memory/b/c/memory.oom_control"),
        ("9:memory:/host/path\n", "memory/memory.oom_control"),
    ],
)
def test_only_kills_since_the_last_death_count(tmp_path: Path, groups: str, file: str) -> None:
    """Three old kills do not make three later deaths out-of-memory kills."""
    proc, counts = tmp_path / "proc", tmp_path / "cgroup" / file
    proc.mkdir()
    counts.parent.mkdir(parents=True)
    (proc / "cgroup").write_text(groups)
    counts.write_text("low 0\noom_kill 3\n")
    counter = OomCounter(tmp_path / "cgroup", proc)
    assert not counter.has_grown(), "kills before the start do not count"
    counts.write_text("low 0\noom_kill 6\n")
    assert [counter.has_grown() for _ in range(4)] == [True, False, False, False]
    counts.write_text("low 0\noom_kill 7\n")
    assert [counter.has_grown() for _ in range(2)] == [True, False]
    counts.unlink()
    assert not counter.has_grown()
    counts.write_text("low 0\noom_kill 7\n")
    assert not counter.has_grown(), "a counter that could not be read for a while has not grown"


def test_kill_of_another_process_does_not_explain_a_later_death(tmp_path: Path) -> None:
    counts = tmp_path / "memory.events"
    (tmp_path / "cgroup").write_text("0::/\n")
    counts.write_text("oom_kill 0\n")
    counter = OomCounter(tmp_path, tmp_path)
    for number, until_death_s in enumerate((1.0, 60.0), start=1):
        counts.write_text(f"oom_kill {number}\n")
        for second in range(int(until_death_s)):
            counter.expire(100.0 * number + second)
        assert counter.has_grown() == (until_death_s < 10.0)


def test_without_a_counter_no_death_is_an_oom_kill(tmp_path: Path) -> None:
    assert not OomCounter(tmp_path, tmp_path).has_grown()
