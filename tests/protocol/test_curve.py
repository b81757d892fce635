"""Links between machines: a client with a known key gets in, others get and read nothing."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from protocol.message import NO_EPOCH
from protocol.transport import curve
from protocol.transport.channel import DealerChannel, HighWaterMark, LinkEvent, RouterChannel
from protocol.transport.curve import (
    CLIENTS,
    ClientAuthenticator,
    ClientKeys,
    make_keys,
    read_client_keys,
    read_server_keys,
)
from tests.ports import free_port

HWM = HighWaterMark.CLIENT_LINK
TIMEOUT_S = 20.0


class Server:
    """A binding end with a path and a tcp address."""

    def __init__(self, directory: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.path = f"ipc://{directory}/core.sock"
        self.address = f"tcp://127.0.0.1:{free_port()}"
        keys = read_server_keys(directory)
        self.authenticator = ClientAuthenticator(self.context, keys.directory)
        self.link = RouterChannel(self.context, self.path, HWM)
        self.link.listen(self.address, keys)
        self.received: list[bytes] = []

    def turn(self) -> None:
        """Answer what has arrived, as the core's loop does."""
        self.authenticator.answer()
        for received in self.link.drain(100):
            self.received.append(received.body)
            self.link.send(received.peer, 5, b"re: " + received.body)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_keys(tmp_path, ["api"])
    return tmp_path


@pytest.fixture
def server(directory: Path) -> Iterator[Server]:
    made = Server(directory)
    yield made
    made.context.destroy(linger=0)


class Client:
    """A connecting end, in a context of its own."""

    def __init__(self, address: str, keys: ClientKeys | None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.channel = DealerChannel(self._context, address, HWM, keys)
        self.events: list[LinkEvent] = []
        self.received: list[bytes] = []

    def turn(self) -> None:
        self.events += self.channel.link_events()
        self.received += (received.body for received in self.channel.drain(100))

    def close(self) -> None:
        self.channel.close()
        self._context.destroy(linger=0)


@contextlib.contextmanager
def connected(address: str, keys: ClientKeys | None) -> Iterator[Client]:
    client = Client(address, keys)
    try:
        yield client
    finally:
        client.close()


def until(server: Server, client: Client, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        server.turn()
        client.turn()
        time.sleep(0.001)


def ask(server: Server, client: Client, body: bytes) -> None:
    until(server, client, lambda: LinkEvent.CONNECTED in client.events)
    assert client.channel.send(NO_EPOCH, body)
    until(server, client, lambda: client.received)
    assert client.received == [b"re: " + body]


def test_clients_come_by_tcp_with_a_key_and_by_the_path_without(
    server: Server, directory: Path
) -> None:
    with connected(server.address, read_client_keys(directory)) as client:
        ask(server, client, b"hello")
    with connected(server.path, None) as client:
        ask(server, client, b"hello")
    assert server.authenticator.num_refused == 0


def test_a_path_that_was_removed_is_open_without_a_key_again(
    server: Server, directory: Path
) -> None:
    """The tcp address still needs one."""
    Path(server.path.removeprefix("ipc://")).unlink()
    assert server.link.keep_listening()
    with connected(server.path, None) as client:
        ask(server, client, b"hello")
    with connected(server.address, read_client_keys(directory)) as client:
        ask(server, client, b"hello")
    stranger = ClientKeys(*zmq.curve_keypair(), server=read_client_keys(directory).server)
    with connected(server.address, stranger) as client:
        until(server, client, lambda: server.authenticator.num_refused)


def test_a_refused_client_knows_why_and_connects_once_its_key_is_there(
    server: Server, directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """libzmq does not try again by itself."""
    made = tmp_path_factory.mktemp("late")
    make_keys(made, ["late"])
    late = read_client_keys(made)._replace(server=read_client_keys(directory).server)
    with connected(server.address, late) as client:
        until(server, client, lambda: client.channel.problem)
        assert client.channel.problem == "the key of this client is unknown there"
        name = Path(CLIENTS, "late.key")
        (directory / name).write_bytes((made / name).read_bytes())
        server.authenticator._known_until = 0.0
        client.channel.reconnect()
        ask(server, client, b"hello")
        assert not client.channel.problem
        client.channel.reconnect()  # one that is connected
        client.received.clear()
        client.events.clear()
        ask(server, client, b"again")


def test_a_client_with_the_key_of_another_server_knows_it(server: Server, directory: Path) -> None:
    public, _ = zmq.curve_keypair()
    with connected(server.address, read_client_keys(directory)._replace(server=public)) as client:
        until(server, client, lambda: client.channel.problem)
        assert "has another server.key" in client.channel.problem


def test_a_client_whose_connection_ends_at_once_knows_what_may_be_the_reason(
    server: Server, directory: Path
) -> None:
    """A server that is being restarted does this, and so does one of another protocol."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.setblocking(False)
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with connected(address, read_client_keys(directory)) as client:

            def is_explained() -> bool:
                with contextlib.suppress(BlockingIOError):
                    other.accept()[0].close()
                return bool(client.channel.problem)

            until(server, client, is_explained)
            assert "it is being restarted" in client.channel.problem


def test_refused_clients_are_logged_once_a_minute(
    server: Server, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = ClientKeys(*zmq.curve_keypair(), server=read_client_keys(directory).server)
    with connected(server.address, stranger) as client:
        for count in (1, 2):
            until(server, client, lambda count=count: server.authenticator.num_refused == count)
            client.channel.reconnect()
    [line] = [one for one in caplog.messages if "was refused" in one]
    assert line.startswith("a client at 127.0.0.1 was refused")
    assert str(directory / CLIENTS) in line


def test_a_client_without_a_known_key_gets_nothing(server: Server, directory: Path) -> None:
    known = read_client_keys(directory)
    stranger = ClientKeys(*zmq.curve_keypair(), server=known.server)
    with connected(server.address, stranger) as client:
        client.channel.send(NO_EPOCH, b"hello")
        until(server, client, lambda: server.authenticator.num_refused)
        assert not client.received
    with pytest.raises(ValueError, match="needs CURVE keys"):
        DealerChannel(zmq.Context.instance(), server.address, HWM)
    with pytest.raises(ValueError, match="the address 'nowhere' must begin with ipc:// or tcp://"):
        DealerChannel(zmq.Context.instance(), "nowhere", HWM)
    plain = zmq.Context.instance().socket(zmq.DEALER)
    plain.connect(server.address)
    plain.send_multipart([b"x", b"y"])
    with connected(server.address, known) as client:
        ask(server, client, b"later")  # neither of them is in its way
    plain.close(linger=0)
    assert server.received == [b"later"]


def test_a_key_that_is_added_is_known_soon_and_one_that_is_removed_no_more(
    server: Server, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve, "_REREAD_S", 0.0)
    known = read_client_keys(directory)
    public, secret = zmq.curve_keypair()
    (directory / CLIENTS / "new.key").write_bytes(public)
    with connected(server.address, ClientKeys(public, secret, known.server)) as client:
        ask(server, client, b"hello")
    (directory / CLIENTS / "new.key").unlink()
    with connected(server.address, ClientKeys(public, secret, known.server)) as client:
        until(server, client, lambda: server.authenticator.num_refused)


def test_a_key_file_that_cannot_be_read_is_named_once(
    server: Server,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(curve, "_REREAD_S", 0.0)
    (directory / CLIENTS / "cut.key").write_bytes(b"short")
    for _ in range(2):
        with connected(server.address, read_client_keys(directory)) as client:
            ask(server, client, b"hello")
    named = [record.message for record in caplog.records if "cut.key" in record.message]
    path = directory / CLIENTS / "cut.key"
    assert named == [f"a client cannot connect: {path} must have a key of 40 characters"]


def test_a_listener_in_the_middle_reads_no_text(server: Server, directory: Path) -> None:
    seen = bytearray()
    port = int(server.address.rpartition(":")[2])
    listening = socket.create_server(("127.0.0.1", 0))

    def forward(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                seen.extend(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with (
            listening,
            listening.accept()[0] as one,
            socket.create_connection(("127.0.0.1", port)) as other,
        ):
            back = threading.Thread(target=forward, args=(other, one))
            back.start()
            forward(one, other)
            back.join(TIMEOUT_S)

    relay = threading.Thread(target=serve)
    relay.start()
    address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
    with connected(address, read_client_keys(directory)) as client:
        ask(server, client, b"the prompt of a client")
    assert len(seen) > 200
    assert b"prompt" not in seen
    server.context.destroy(linger=0)  # the other end
    relay.join(TIMEOUT_S)
    assert not relay.is_alive()


def test_keys_are_made_once_and_belong_to_their_user(tmp_path: Path) -> None:
    written = make_keys(tmp_path, ["one"])
    names = {"server.key", "server.secret", "one.key", "one.secret"}
    assert {path.name for path in written} == names
    assert all(path.stat().st_mode & 0o077 == 0 for path in written)
    server = read_server_keys(tmp_path)
    assert [path.name for path in make_keys(tmp_path, ["one", "two"])] == ["two.secret", "two.key"]
    assert read_server_keys(tmp_path) == server
    with pytest.raises(ValueError, match=r"and has one\.secret, two\.secret"):
        read_client_keys(tmp_path)
    with pytest.raises(ValueError, match="must be 1 to 64 letters"):
        make_keys(tmp_path, ["../three"])
    (tmp_path / "server.secret").write_text("short")
    with pytest.raises(ValueError, match="must have a key of 40 characters"):
        read_server_keys(tmp_path)


def test_keys_are_made_again_after_an_interrupted_call(tmp_path: Path) -> None:
    make_keys(tmp_path, ["api"])
    (tmp_path / CLIENTS / "api.key").unlink()
    (tmp_path / CLIENTS / "api.secret").write_bytes(b"cut")
    written = make_keys(tmp_path, ["api"])
    assert {path.name for path in written} == {"api.key", "api.secret"}
    assert read_client_keys(tmp_path).secret != b"cut"
