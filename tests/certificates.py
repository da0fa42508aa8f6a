"""Self-made certificates, by the `openssl` program: for tests of TLS."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, name: str = "server", *, host: str = "localhost", passphrase: str = "") -> Path:
    """FOLDER/NAME.pem and FOLDER/NAME.key, valid for a day; returns the first."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl is not installed")
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "1"]
    command += ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{host},IP:127.0.0.1"]
    command += ["-passout", f"pass:{passphrase}"] if passphrase else ["-nodes"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True, timeout=60)
    return cert
