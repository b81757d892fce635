"""The list of host agents: leases, names, settings, and the file of their cores."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq

from protocol.config import ParallelConfig
from protocol.config.cpu_lists import parse_cpu_lists
from protocol.config.rules import validate
from protocol.config.settings import configure
from protocol.message import MAX_TEXT, NO_EPOCH, encode
from protocol.process.host_agents import (
    LEASE_S,
    Failed,
    Join,
    Joined,
    Leave,
    Settings,
    ToAgent,
    decode_to_agent,
)
from protocol.process.machines import members_file, read_addresses
from protocol.transport.channel import DealerChannel, HighWaterMark
from protocol.transport.curve import ClientKeys, make_keys, read_client_keys
from scripts.supervisor import head_link
from scripts.supervisor.head_link import HeadLink, decoded
from scripts.supervisor.host_agents import HostAgents, digest_of, settings_of
from tests.ports import free_port

TIMEOUT_S = 10.0
_REPEAT_S = 0.5


class Agent:
    """The connection of one agent."""

    def __init__(self, address: str, keys: ClientKeys) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.channel = DealerChannel(self._context, address, HighWaterMark.LIFECYCLE_LINK, keys)
        self.received: list[ToAgent] = []

    def close(self) -> None:
        self.channel.close()
        self._context.term()


class Bench:
    """The supervisor's end, at a time that the test sets."""

    def __init__(self, path: Path) -> None:
        make_keys(path / "keys", ["api"])
        place = f"127.0.0.1:{free_port()}"
        self.run_dir = path / "run"
        self.run_dir.mkdir()
        config = configure(model="null", agents_listen=place, curve_keys=str(path / "keys"))
        self.agents = HostAgents(config, str(self.run_dir))
        self.now = 0.0
        self.notes: list[str] = []
        self.address, self.keys = f"tcp://{place}", read_client_keys(path / "keys")
        self._peers: list[Agent] = []
        self.settings = ""

    def connect(self) -> Agent:
        agent = Agent(self.address, self.keys)
        self._peers.append(agent)
        return agent

    def turn(self) -> None:
        self.notes += [text for _, text in self.agents.turn(self.now)]
        for peer in self._peers:
            peer.channel.link_events()
            for received in peer.channel.drain(10):
                peer.received.append(decode_to_agent(received.body))

    def ask(self, agent: Agent, message: Join) -> ToAgent:
        """Send a message until there is an answer, as agents do: the first may be lost."""
        agent.received.clear()
        now = time.monotonic()
        deadline, repeat_at = now + TIMEOUT_S, now
        while not agent.received:
            now = time.monotonic()
            assert now < deadline
            if now >= repeat_at and agent.channel.send(NO_EPOCH, encode(message)):
                repeat_at = now + _REPEAT_S
            self.turn()
            time.sleep(0.002)
        return agent.received[0]

    def wait(self, seconds: float) -> None:
        """Let time pass in turns, in which nothing arrives."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 0.5, end)
            self.turn()

    def join(self, agent: Agent, name: str, address: str = "") -> ToAgent:
        return self.ask(agent, Join(name, address, self.settings))

    def leave(self, agent: Agent, name: str) -> None:
        """Send that an agent leaves, and wait until this has been handled."""
        self.ask(agent, Join("before-it"))  # it is connected
        assert agent.channel.send(NO_EPOCH, encode(Join(name, "", self.settings, is_leaving=True)))
        self.ask(agent, Join("after-it"))

    @property
    def addresses(self) -> list[str]:
        return read_addresses([members_file(str(self.run_dir))])

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self.agents.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    settings = made.ask(made.connect(), Join("first"))
    assert isinstance(settings, Settings)
    made.settings = digest_of(settings)
    yield made
    made.close()


PARALLEL: tuple[dict[str, object], ...] = (
    {"data_parallel_size": 2, "worker_cpus": "0:1", "num_threads": 1},
    {"data_parallel_size": 0, "worker_cpus": "0-1:2", "tensor_parallel_size": 2},
    {"data_parallel_size": 2, "worker_cpus": "0:1:2:3", "pipeline_parallel_size": 2},
    {"data_parallel_size": 3, "prefill_replicas": 2, "kv_offload_bytes": 1000},
    {"replica_addresses": ["tcp://10.0.0.2:7000"], "replica_file": "replicas"},
    {"core_listen": "10.0.0.1:7000", "session_key": "cache_salt", "routing_policy": "round_robin"},
    {"ray": "auto", "replicas": 2, "max_replicas": 4, "ray_cpus": 2.0},
)


@pytest.mark.parametrize("values", PARALLEL)
def test_an_agent_can_use_the_settings_of_every_engine(values: dict[str, object]) -> None:
    """They are those of one replica, without addresses and keys of the engine's machine."""
    head = configure(model="null", agents_listen="10.0.0.1:7100", curve_keys="keys", **values)
    agent = decoded(settings_of(head))
    assert validate(agent) == agent
    assert agent.parallel == ParallelConfig(
        tensor_parallel_size=head.parallel.tensor_parallel_size,
        pipeline_parallel_size=head.parallel.pipeline_parallel_size,
    )
    if head.worker.worker_cpus is not None:
        first = parse_cpu_lists(head.worker.worker_cpus)[: head.parallel.num_ranks]
        assert parse_cpu_lists(agent.worker.worker_cpus or "") == first


def test_an_agent_is_listed_while_its_core_serves_and_it_renews_its_lease(bench: Bench) -> None:
    agent = bench.connect()
    assert bench.join(agent, "one") == Joined()
    assert bench.addresses == []
    bench.join(agent, "one", "tcp://10.0.0.2:7000")
    assert bench.addresses == ["tcp://10.0.0.2:7000"]
    bench.wait(LEASE_S)
    bench.join(agent, "one", "tcp://10.0.0.2:7000")
    bench.wait(LEASE_S)
    assert bench.addresses == ["tcp://10.0.0.2:7000"]
    bench.wait(0.1)
    assert bench.addresses == []
    assert "has been silent" in bench.notes[-1]
    bench.join(agent, "one", "tcp://10.0.0.2:7000")
    assert bench.addresses == ["tcp://10.0.0.2:7000"]
    bench.leave(agent, "one")
    assert bench.addresses == []


def test_a_lease_does_not_end_while_this_process_is_stopped(bench: Bench) -> None:
    """What the agent has sent meanwhile may arrive after the first turn."""
    bench.join(bench.connect(), "one", "tcp://10.0.0.2:7000")
    bench.now += 100 * LEASE_S
    bench.turn()
    assert bench.addresses == ["tcp://10.0.0.2:7000"]
    bench.wait(LEASE_S)
    assert bench.addresses == []


def test_messages_that_cannot_be_read_bring_a_line_now_and_then(bench: Bench) -> None:
    agent = bench.connect()
    bench.join(agent, "one")

    def send_noise() -> int:
        for _ in range(50):
            assert agent.channel.send(NO_EPOCH, b"noise")
        bench.join(agent, "one")  # behind them
        return sum(note.startswith("unreadable message") for note in bench.notes)

    assert [send_noise(), send_noise()] == [1, 1]
    bench.now += 60.0
    assert send_noise() == 2


def test_failures_of_an_agent_are_reported_three_times_a_minute_at_most(bench: Bench) -> None:
    """It may be started again every second. Its reason is a line without control characters."""
    agent = bench.connect()
    bench.join(agent, "one")

    def fail(name: str, reason: str) -> list[str]:
        del bench.notes[:]
        assert agent.channel.send(NO_EPOCH, encode(Failed(name, reason)))
        bench.join(agent, "one")  # behind it
        return bench.notes

    assert fail("one", "no memory\n\x1b[2J") == ["agent one has failed: no memory [2J"]
    assert fail("one", "no memory\n\x1b[2J") == []
    assert fail("other", "no CPU") == ["agent other has failed: no CPU"]
    assert fail("one", "no CPU") == ["agent one has failed: no CPU"]
    bench.now += 60.0
    assert fail("one", "no CPU") == ["agent one has failed: no CPU"]
    assert fail("one", "pid 71 at 0x7f3a") == ["agent one has failed: pid 71 at 0x7f3a"]
    assert fail("one", "pid 72 at 0x81bc") == [], "only numbers differ"
    texts = [list(fail("one", f"/tmp/{letter}")) for letter in "abc"]
    assert texts == [["agent one has failed: /tmp/a"], [], []], "three a minute"
    bench.now += 60.0
    assert fail("one", "/tmp/c") == ["agent one has failed: /tmp/c"]


def fetch_settings(bench: Bench, link: HeadLink, on_turn: Callable[[], None] = lambda: None) -> Any:
    """Return the settings that an agent receives while the bench serves it, or None."""
    fd, other_fd = os.pipe()
    with ThreadPoolExecutor() as threads:
        fetched = threads.submit(link.fetch_settings, fd)
        deadline = time.monotonic() + TIMEOUT_S
        while not fetched.done() and time.monotonic() < deadline:
            bench.turn()
            on_turn()
            time.sleep(0.002)
        os.close(other_fd)  # ends a fetch that still waits
    os.close(fd)
    return fetched.result()


def test_an_agent_sends_why_its_engine_could_not_start(bench: Bench) -> None:
    """It does so even before it has joined."""
    link = HeadLink(bench.address, bench.keys, "two")
    fetch_settings(bench, link)
    link.close("worker 1 failed: " + "x" * MAX_TEXT)
    deadline = time.monotonic() + TIMEOUT_S
    while not bench.notes and time.monotonic() < deadline:
        bench.turn()
        time.sleep(0.002)
    [failed] = bench.notes
    assert failed.startswith("agent two has failed: worker 1 failed: xxx")


def test_an_agent_whose_key_is_added_later_joins_then(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(head_link, "SILENCE_S", 0.1)
    make_keys(tmp_path / "late", ["late"])
    keys = read_client_keys(tmp_path / "late")._replace(server=bench.keys.server)
    link = HeadLink(bench.address, keys, "late")
    name = Path("clients", "late.key")

    def add_key() -> None:
        if "the key of this client is unknown there" in caplog.text:
            (tmp_path / "keys" / name).write_bytes((tmp_path / "late" / name).read_bytes())

    settings = fetch_settings(bench, link, add_key)
    link.close(None)
    assert settings is not None


def test_the_older_of_two_agents_with_a_name_leaves_and_takes_nothing_along(bench: Bench) -> None:
    older, newer = bench.connect(), bench.connect()
    bench.join(older, "one", "tcp://10.0.0.2:7000")
    assert bench.join(newer, "one", "tcp://10.0.0.3:7000") == Joined()
    assert isinstance(bench.join(older, "one", "tcp://10.0.0.2:7000"), Leave)
    bench.leave(older, "one")
    assert bench.addresses == ["tcp://10.0.0.3:7000"]
    assert bench.join(newer, "one", "tcp://10.0.0.3:7000") == Joined()


def test_a_stranger_that_leaves_under_a_name_does_not_remove_its_agent(bench: Bench) -> None:
    bench.join(bench.connect(), "one", "tcp://10.0.0.2:7000")
    bench.leave(bench.connect(), "one")
    assert bench.addresses == ["tcp://10.0.0.2:7000"]


def test_an_agent_with_other_settings_has_to_leave(bench: Bench) -> None:
    answer = bench.ask(bench.connect(), Join("one", "tcp://10.0.0.2:7000", "other"))
    assert answer == Leave("the engine has other settings now")
    assert bench.addresses == []


@pytest.mark.parametrize("address", ["tcp://ho!st:7000", "tcp://10.0.0.2:99999", "10.0.0.2:7000"])
def test_an_agent_with_an_address_that_is_none_has_to_leave(bench: Bench, address: str) -> None:
    answer = bench.join(bench.connect(), "one", address)
    assert isinstance(answer, Leave)
    assert address in answer.reason
    assert bench.addresses == []


def test_a_list_that_cannot_be_written_is_written_later(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    agent = bench.connect()
    bench.run_dir.rename(bench.run_dir.with_name("away"))
    bench.join(agent, "one", "tcp://10.0.0.2:7000")
    bench.turn()
    assert caplog.text.count("cannot be listed") == 1
    bench.run_dir.with_name("away").rename(bench.run_dir)
    bench.turn()
    assert bench.addresses == ["tcp://10.0.0.2:7000"]


def test_a_list_that_was_removed_is_written_again(bench: Bench) -> None:
    bench.join(bench.connect(), "one", "tcp://10.0.0.2:7000")
    members_file(str(bench.run_dir)).unlink()
    bench.agents.write_again()
    bench.turn()
    assert bench.addresses == ["tcp://10.0.0.2:7000"]


def test_settings_that_no_message_holds_are_refused_at_the_start(tmp_path: Path) -> None:
    modules = tuple(f"name{i}=/{'directory/' * 100}{i}" for i in range(1200))
    keys = str(tmp_path / "keys")
    make_keys(tmp_path / "keys", ["api"])
    config = configure(
        model="null",
        agents_listen=f"127.0.0.1:{free_port()}",
        curve_keys=keys,
        enable_lora=True,
        lora_modules=modules,
    )
    with pytest.raises(ValueError, match=r"agents_listen.* 1048576 bytes .*lora_modules"):
        HostAgents(config, str(tmp_path))
