"""Counters of all API processes in one file, with a page for each process."""

import os
import subprocess
import sys
from pathlib import Path

from api_proc.metrics.process_metrics import Metrics
from api_proc.peers.directory import remove_all
from api_proc.peers.shared_counters import FILE_NAME, SharedCounters
from tests.api.peers.servers import COUNT

COUNT_ONE = """
import sys
from api_proc.metrics.process_metrics import Metrics
from api_proc.peers.shared_counters import SharedCounters
metrics = Metrics(SharedCounters(sys.argv[1], 1, 2).own())
metrics.count_end("stop")
print(metrics.num_finished["stop"], flush=True)
sys.stdin.read()
"""


def test_counts_survive_a_process_that_is_killed(tmp_path: Path) -> None:
    """Its successor counts on; a predecessor that still runs has a page of its own."""
    predecessor = subprocess.Popen(
        [sys.executable, "-c", COUNT_ONE, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert predecessor.stdout is not None
    assert predecessor.stdout.readline() == b"1\n"

    def total(index: int) -> int:
        counters = SharedCounters(str(tmp_path), index, COUNT)
        takes = [counters.own(), *counters.others()]
        return sum(Metrics(take).num_finished["stop"] for take in takes)

    successor = SharedCounters(str(tmp_path), 1, COUNT)
    Metrics(successor.own()).count_end("stop")
    assert total(1) == 2
    predecessor.kill()
    predecessor.communicate()
    assert total(1) == 2
    remove_all(str(tmp_path))
    assert not (tmp_path / FILE_NAME).exists()


def test_pages_of_counters_have_room_before_they_are_written(tmp_path: Path) -> None:
    """A page of a mapped file for which a full file system has no room ends its process."""
    SharedCounters(str(tmp_path), 0, COUNT)
    found = (tmp_path / FILE_NAME).stat()
    assert found.st_blocks * 512 >= found.st_size == 2 * COUNT * 4096


def test_measured_counters_continue_those_of_a_predecessor(tmp_path: Path) -> None:
    for expected in (5.0, 10.0):
        metrics = Metrics(SharedCounters(str(tmp_path), 0, COUNT).own())
        metrics.take_measured({"journal_bytes": 3})
        metrics.take_measured({"journal_bytes": 5})
        assert metrics.measured()["journal_bytes"] == expected
