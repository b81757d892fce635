"""Self-signed certificates for tests."""

import subprocess
from pathlib import Path


def make_certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """Write `name.pem` and `name.key` for localhost; return both paths."""
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", f"/CN={name}", "-keyout", key, "-out", certificate),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
        timeout=20,
    )
    return certificate, key
