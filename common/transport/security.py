"""CURVE keys: one key pair for the whole cluster, used as server and as client by every process.

A holder of the key file belongs to the cluster; no other peer gets through the handshake, because every listening
socket asks a ZAP authenticator that knows exactly one public key. It proves membership, not identity: peers name
themselves, and a member may take another's name over (`ROUTER_HANDOVER`). Called by the sockets' owners (`zmq_bus`,
`zmq_link`, `rank_wire`) and by `cohort keys`. The configuration decides whether anything is encrypted.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from cohort.common.errors import ConfigError

ZAP_DOMAIN = b"cohort"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Key pair of the cluster, as Z85 text. The secret stays out of logs."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public.decode()!r})"


def generate_keys(path: Path) -> CurveKeys:
    """Write a new secret key file, readable by its owner alone, and return its keys. Never overwrites one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        _, made = zmq.auth.create_certificates(folder, "cohort")
        os.chmod(made, 0o600)
        try:
            os.link(made, path)  # unlike rename, link refuses an existing name: two set-ups cannot both win
        except FileExistsError as error:
            raise ConfigError(f"{path}: exists already; a cluster's key is not replaced silently") from error
    return _read_keys(path)


def load_keys(path: str | Path) -> CurveKeys | None:
    """Return the pair in a secret key file; None for "", as in a configuration that encrypts nothing."""
    return _read_keys(Path(path).expanduser()) if str(path) else None


def _read_keys(path: Path) -> CurveKeys:
    option = "security.curve_secret_key_file"
    if not zmq.has("curve"):
        raise ConfigError(f"{option}: this build of libzmq has no CURVE; leave the option empty or install another")
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}: {path}: no readable key file: {error}") from error
    if secret is None:
        raise ConfigError(f"{option}: {path}: holds no secret key; name the file that ends in key_secret")
    return CurveKeys(public, secret)


class Authenticator:
    """ZAP handler of one context: admits the cluster's own key and no other. It has its own thread, so that a handshake
    never waits for a busy event loop. Without it a listening socket with keys refuses every peer, because
    `protect_server` names a ZAP domain."""

    def __init__(self, context: zmq.Context[Any], keys: CurveKeys) -> None:
        self._thread = ThreadAuthenticator(context)
        self._thread.start()
        self._thread.configure_curve_callback(domain=ZAP_DOMAIN.decode(), credentials_provider=_OneKey(keys.public))

    def stop(self) -> None:
        self._thread.stop()


class _OneKey:
    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


def protect_server(socket: zmq.Socket[Any], keys: CurveKeys) -> None:
    """Protect a listening socket. Called before bind."""
    socket.curve_server = True
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    socket.zap_domain = ZAP_DOMAIN


def protect_client(socket: zmq.Socket[Any], keys: CurveKeys) -> None:
    """Protect a dialling socket. Called before connect."""
    socket.curve_serverkey = keys.public
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
