"""The TLS context of the server, made from the files that the configuration names."""

import ssl
from pathlib import Path

from protocol.config import ApiConfig

HANDSHAKE_TIMEOUT_S = 10.0


def tls_files(api: ApiConfig) -> list[Path]:
    """Return the files whose change means a new context; none without TLS."""
    names = (api.ssl_certfile, api.ssl_keyfile, api.ssl_ca_certs)
    return [Path(name) for name in names if name is not None]


def make_context(api: ApiConfig) -> ssl.SSLContext | None:
    """Load certificate, key and authorities; None without a certificate.

    A ValueError names the setting and the reason.
    """
    if api.ssl_certfile is None:
        return None
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path = getattr(api, name)
        if path is not None:
            _check_readable(name, path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    key_file = api.ssl_keyfile or api.ssl_certfile

    def reject_passphrase() -> str:
        raise ValueError(f"the private key in {key_file} has a passphrase; remove it")

    try:
        context.load_cert_chain(api.ssl_certfile, api.ssl_keyfile, reject_passphrase)
    except ssl.SSLError as error:
        files = f"ssl_certfile {api.ssl_certfile}"
        if api.ssl_keyfile is not None:
            files += f" and ssl_keyfile {api.ssl_keyfile}"
        raise ValueError(f"{files} cannot be used: {_reason(error)}") from error
    if api.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(api.ssl_ca_certs)
        except ssl.SSLError as error:
            text = f"ssl_ca_certs {api.ssl_ca_certs} cannot be used: {_reason(error)}"
            raise ValueError(text) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_readable(name: str, path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ValueError(f"{name} {path} cannot be read: {error.strerror}") from error


def _reason(error: ssl.SSLError) -> str:
    if error.reason is None:
        return "it is not PEM, or it holds no certificate with its key"
    return error.reason.lower().replace("_", " ")
