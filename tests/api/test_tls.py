"""HTTPS: certificates, their renewal under open connections, and clients' certificates."""

import asyncio
import contextlib
import shutil
import socket
import ssl
from pathlib import Path

import httpx
import pytest

from api_proc.http.tls import make_context, tls_files
from protocol.config.settings import configure
from protocol.process.file_watch import watch_files
from tests.api.fake_engine import FakeClient, LiveServer, wait_until
from tests.certificates import make_certificate

POLL_S = 0.05


def connect(live: LiveServer, authority: Path, identity: Path | None = None) -> ssl.SSLSocket:
    """Connect as a client that trusts `authority`."""
    context = ssl.create_default_context(cafile=str(authority))
    if identity is not None:
        context.load_cert_chain(identity, identity.with_suffix(".key"))
    plain = socket.create_connection(("127.0.0.1", live.port), timeout=5)
    try:
        return context.wrap_socket(plain, server_hostname="localhost")
    except OSError:
        plain.close()
        raise


def is_served(connection: ssl.SSLSocket) -> bool:
    """Send a request; False: the server has closed the connection."""
    connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    received = b""
    while b"alive" not in received:
        piece = connection.recv(4096)
        if not piece:
            return False
        received += piece
    return received.startswith(b"HTTP/1.1 200 OK")


def test_streams_over_https_and_plain_http_is_rejected(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "one")
    config = configure(model="null", ssl_certfile=str(certificate), ssl_keyfile=str(key))
    with LiveServer(config, FakeClient()) as live:
        assert live.url.startswith("https://")
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "stream": True}
        trust = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(base_url=live.url, verify=trust) as client:
            for _ in range(2):
                text = client.post("/v1/completions", json=body).text
                assert text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(live.url.replace("https", "http") + "/livez")
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        plain = socket.create_connection(("127.0.0.1", live.port), timeout=5)
        with plain, pytest.raises(OSError):  # noqa: PT011 (which one depends on OpenSSL)
            old.wrap_socket(plain)


def test_a_new_certificate_is_used_and_no_connection_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pair that does not match is not used."""
    first, _ = make_certificate(tmp_path, "one")
    second, _ = make_certificate(tmp_path, "two")
    used, used_key = tmp_path / "used.pem", tmp_path / "used.key"

    def install(certificate: Path) -> None:
        shutil.copy(certificate, used)
        shutil.copy(certificate.with_suffix(".key"), used_key)

    install(first)
    config = configure(model="null", ssl_certfile=str(used), ssl_keyfile=str(used_key))
    with LiveServer(config, FakeClient()) as live, connect(live, first) as early:
        api = config.api
        renew = live._server.renew_tls

        async def begin() -> asyncio.Task[None]:
            work = watch_files(tls_files(api), lambda: make_context(api), renew, POLL_S)
            return asyncio.get_running_loop().create_task(work)

        watch = live.call(begin)
        assert is_served(early)
        install(second)

        def is_renewed() -> bool:
            with contextlib.suppress(ssl.SSLError), connect(live, second) as late:
                return is_served(late)
            return False

        wait_until(is_renewed, 5.0)
        with pytest.raises(ssl.SSLCertVerificationError):
            connect(live, first)
        shutil.copy(first.with_suffix(".key"), used_key)
        wait_until(lambda: "key values mismatch" in caplog.text, 5.0)
        assert is_renewed()
        assert is_served(early), "it began with the first certificate"
        live.call(watch.cancel)


def test_clients_need_a_certificate_of_the_authority(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "server")
    client, _ = make_certificate(tmp_path, "client")
    stranger, _ = make_certificate(tmp_path, "stranger")
    config = configure(
        model="null",
        ssl_certfile=str(certificate),
        ssl_keyfile=str(key),
        ssl_ca_certs=str(client),
    )
    with LiveServer(config, FakeClient()) as live:
        with connect(live, certificate, client) as connection:
            assert is_served(connection)
        for identity in (None, stranger):
            with contextlib.suppress(OSError), connect(live, certificate, identity) as connection:
                assert not is_served(connection)


def test_a_silent_client_does_not_delay_others(tmp_path: Path) -> None:
    """A handshake that does not go on occupies one connection for a bounded time."""
    certificate, key = make_certificate(tmp_path, "one")
    config = configure(model="null", ssl_certfile=str(certificate), ssl_keyfile=str(key))
    with LiveServer(config, FakeClient()) as live, contextlib.ExitStack() as silent:
        for _ in range(20):
            silent.enter_context(socket.create_connection(("127.0.0.1", live.port), timeout=5))
        with connect(live, certificate) as connection:
            assert is_served(connection)
