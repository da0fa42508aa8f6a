"""The certificate of a server: checked when it is loaded, loaded again when its files change.

Made by the gateway from `gateway.tls_cert` and `gateway.tls_key`; `http_server.AcceptingSite` asks for the context of
every new connection. Files that do not match, or cannot be read, are refused at start; later the certificate in use
stays, with an error in the log: a renewal writes two files, one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from cohort.common.errors import ConfigError

WATCH_EVERY_S = 5.0
_CERT, _KEY = "gateway.tls_cert", "gateway.tls_key"
Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files in PEM format: the certificate, followed by those that lead to its issuer, and its key without a
    passphrase."""

    cert: Path
    key: Path

    @staticmethod
    def of(cert: str, key: str) -> TlsFiles | None:
        """Make one, or None without either file. Raises `ConfigError` for one without the other."""
        if not cert and not key:
            return None
        if not (cert and key):
            missing, other = (_CERT, _KEY) if key else (_KEY, _CERT)
            raise ConfigError(f"{missing}: needed as well, {other} names the other half; both or none")
        return TlsFiles(Path(cert).expanduser(), Path(key).expanduser())

    def stamp(self) -> Stamp:
        """Return times, inodes and sizes: they change with the content, also of a link's target. Raises `OSError`."""
        found = [path.stat() for path in (self.cert, self.key)]
        return tuple((status.st_mtime_ns, status.st_ino, status.st_size) for status in found)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A certificate in use. `expires_s`: wall-clock seconds of its end; 0.0 if it has ended or is not known."""

    context: ssl.SSLContext
    expires_s: float


def load(files: TlsFiles) -> Loaded:
    """Load a context for TLS 1.2 or later and HTTP/1.1. Raises `ConfigError` that names the file and what is wrong."""
    for path, option in ((files.cert, _CERT), (files.key, _KEY)):
        try:
            text = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{option}: {path} cannot be read: {error.strerror}") from error
        wanted = b"CERTIFICATE-----" if option == _CERT else b"PRIVATE KEY-----"
        if b"-----BEGIN " not in text or wanted not in text:
            what = "certificate" if option == _CERT else "private key"
            raise ConfigError(f"{option}: {path} holds no {what} in PEM format")
        if b"ENCRYPTED" in text:
            raise ConfigError(
                f"{option}: {path} is protected by a passphrase, which no server can be asked for at night; write it "
                f"without one: openssl pkey -in {path} -out NEW"
            )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.cert, files.key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{_KEY}: {files.key} is not the key of {files.cert}") from error
        raise ConfigError(f"{_CERT}: {files.cert} and {files.key} cannot be used: {error.reason or error}") from error
    return Loaded(context, expires_s(context, files.cert))


def unverified() -> ssl.SSLContext:
    """Return a client's context for readiness and metrics of an own process, which are no secret: its certificate is
    for the names that clients use, not for the loopback address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def expires_s(server: ssl.SSLContext, cert: Path) -> float:
    """Return when this server's certificate ends. The standard library knows that of a peer alone, so a client that
    trusts just this certificate shakes hands with the server in memory."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        client.load_verify_locations(cert)
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        asking = client.wrap_bio(to_client, to_server)
        answering = server.wrap_bio(to_server, to_client, server_side=True)
        for _ in range(4):
            for side in (asking, answering):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        found = asking.getpeercert() or {}
    except (ssl.SSLError, OSError, ValueError):
        return 0.0
    ends = found.get("notAfter")
    return ssl.cert_time_to_seconds(ends) if isinstance(ends, str) else 0.0


class ServerTls:
    """Certificate in use. Raises `ConfigError` if the files cannot be used at the start."""

    def __init__(self, files: TlsFiles, log: structlog.stdlib.BoundLogger) -> None:
        self._files = files
        self._log = log
        self._refused: Stamp | None = None
        self._stamp: Stamp = ()
        with contextlib.suppress(OSError):  # `load` has the better error
            self._stamp = files.stamp()  # before they are read: what changes meanwhile is read again
        self.loaded = load(files)
        if self.loaded.expires_s <= time.time():
            log.warning("the certificate has expired or its end cannot be told", path=str(files.cert))

    @property
    def context(self) -> ssl.SSLContext:
        return self.loaded.context

    def reload_if_changed(self) -> bool:
        """Load changed files. Return whether another certificate is in use now."""
        try:
            stamp = self._files.stamp()
        except OSError as error:
            stamp = ((error.errno or 0, 0, 0),)
        if stamp in (self._stamp, self._refused):
            return False
        try:
            self.loaded = load(self._files)
        except ConfigError as error:
            self._refused = stamp
            self._log.error("the new certificate is not used; the one before stays", reason=str(error))
            return False
        self._stamp, self._refused = stamp, None
        self._log.info("certificate loaded again", path=str(self._files.cert), expires_s=self.loaded.expires_s)
        return True

    async def watch(self, every_s: float = WATCH_EVERY_S) -> None:
        """Load changed files until cancelled, in a thread: they may lie on a network's disk."""
        while True:
            await asyncio.sleep(every_s)
            await asyncio.to_thread(self.reload_if_changed)
