"""The addresses of cores on other machines, as they are written in files."""

from pathlib import Path

import pytest

from protocol.config.settings import configure
from protocol.process.machines import MAX_ADDRESSES, core_places, read_addresses, tcp_address
from scripts.supervisor.replica import replica_config


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_cores_that_listen_are_found_at_their_ports_by_other_machines(num_replicas: int) -> None:
    values = {"run_dir": "/run/t", "data_parallel_size": num_replicas}
    here = core_places(configure(model="null", **values))
    assert len(here) == num_replicas
    assert all(place.startswith("ipc:///run/t/") for place in here)
    config = configure(model="null", core_listen="10.0.0.2:7000", curve_keys="keys", **values)
    places = core_places(config)
    assert places == [f"tcp://10.0.0.2:{7000 + number}" for number in range(num_replicas)]
    for number, place in enumerate(places):
        replica = replica_config(config, number)
        assert core_places(replica) == [place] == [tcp_address(replica)]


def test_addresses_are_read_from_all_files(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("# machines\n\n  tcp://10.0.0.2:7000  \ntcp://b:1\n")
    other.write_text("")
    assert read_addresses([one, other]) == ["tcp://10.0.0.2:7000", "tcp://b:1"]
    assert read_addresses([]) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("tcp://a:1\n10.0.0.2:7000\n", "line 2: 10.0.0.2:7000 is not tcp://HOST:PORT"),
        ("tcp://a:1 tcp://b:1\n", "line 1: tcp://a:1 tcp://b:1 is not"),
        ("tcp://a:1\n" * (MAX_ADDRESSES + 1), f"addresses are more than {MAX_ADDRESSES}"),
        ("tcp://ho!st:1\n", "line 1: tcp://ho!st:1 is not tcp://HOST:PORT"),
        ("tcp://a:0\n", "line 1: tcp://a:0 is not tcp://HOST:PORT"),
        ("tcp://a:99999\n", "line 1: the port of tcp://a:99999 must be 1 to 65535"),
        ("\udcff", "cannot be read"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "replicas"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=complaint):
        read_addresses([file])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing cannot be read"):
        read_addresses([tmp_path / "nothing"])
