"""Order of arrival survives reconnects, repairs and restarts of the core."""

from collections.abc import Iterable

from core_proc.engine import EngineCore
from protocol.api_core import AddRequest
from protocol.client.ledger import Ledger, OpenLimits
from protocol.sampling import SamplingParams
from tests.core.engine_bench import make_engine, run_step

NUM_NEWER = 40
Served = tuple[bytes, int]


class Host:
    """A client with a ledger and a clock of its own."""

    def __init__(self, name: bytes, boot: float) -> None:
        self.name = name
        self.now = boot
        self.ledger = Ledger(OpenLimits(1000), clock=lambda: self.now)

    def accept(self, priority: int = 0) -> AddRequest:
        request_id = self.ledger.next_request_id()
        add = AddRequest(request_id, [5, 6, 7], SamplingParams(max_tokens=2), priority=priority)
        self.ledger.accept(add)
        return add

    def resend_to(self, engine: EngineCore) -> None:
        """Send everything open, as to a core that begins or has lost this connection."""
        engine.drop_client(self.name)
        for request_id in self.ledger:
            assert engine.add(self.name, self.resumed(request_id)) is None

    def resumed(self, request_id: int) -> AddRequest:
        entry = self.ledger.get(request_id)
        assert entry is not None
        return entry.resumed(self.now)


def pass_time(seconds: float, engine: EngineCore, hosts: Iterable[Host]) -> None:
    engine.now += seconds
    for host in hosts:
        host.now += seconds


def served(engine: EngineCore) -> list[Served]:
    """Requests in the order of their first tokens."""
    order: list[Served] = []
    while engine.has_unfinished:
        for client, outputs in run_step(engine).items():
            order += [(client, row.request_id) for row in outputs.outputs]
    return list(dict.fromkeys(order))


def make_core(policy: str, now: float) -> EngineCore:
    engine = make_engine(max_num_seqs=1, scheduling_policy=policy)
    engine.now = now
    return engine


def accept_stream_then_newer(engine: EngineCore, old: Host, new: Host) -> Served:
    """Accept a stream of `old`, and 40 requests of each host a minute later; return the stream."""
    stream = old.accept()
    assert engine.add(old.name, stream) is None
    pass_time(60.0, engine, (old, new))
    for _ in range(NUM_NEWER):
        for host in (old, new):
            assert engine.add(host.name, host.accept()) is None
            pass_time(0.01, engine, (old, new))
    pass_time(40.0, engine, (old, new))
    return old.name, stream.request_id


def hosts() -> tuple[Host, Host]:
    return Host(b"old", boot=7e6), Host(b"new", boot=3.0)


def test_a_stream_comes_before_40_newer_requests_after_a_reconnect() -> None:
    for policy in ("fcfs", "priority", "shortest"):
        old, new = hosts()
        engine = make_core(policy, 1000.0)
        stream = accept_stream_then_newer(engine, old, new)
        old.resend_to(engine)
        assert served(engine)[0] == stream, policy


def test_the_order_of_all_clients_survives_a_restart_of_the_core() -> None:
    """The client with the newer requests is the first that comes back."""
    for policy in ("fcfs", "priority"):
        old, new = hosts()
        engine = make_core(policy, 1000.0)
        stream = accept_stream_then_newer(engine, old, new)
        successor = make_core(policy, 2.0)
        new.resend_to(successor)
        pass_time(0.005, successor, (old, new))
        old.resend_to(successor)
        in_turn = [(host, n) for n in range(1, NUM_NEWER + 1) for host in (b"old", b"new")]
        expected = [stream] + [(host, n + (host == b"old")) for host, n in in_turn]
        assert served(successor) == expected, policy


def test_a_repaired_request_keeps_its_place() -> None:
    old, new = hosts()
    engine = make_core("fcfs", 1000.0)
    stream = accept_stream_then_newer(engine, old, new)
    assert engine.add(old.name, old.resumed(stream[1])) is None
    assert served(engine)[0] == stream
