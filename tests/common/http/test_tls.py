"""Certificates of a server: what is refused and in which words, and that changed files are taken."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cohort.common.errors import ConfigError
from cohort.common.http.tls import ServerTls, TlsFiles, load
from tests.certificates import make_certificate


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __getattr__(self, level: str) -> Callable[..., None]:
        return lambda event, **details: self.lines.append((level, f"{event} {details}"))


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    cert = make_certificate(tmp_path)
    found = TlsFiles.of(str(cert), str(cert.with_suffix(".key")))
    assert found is not None
    return found


def serving(files: TlsFiles) -> tuple[ServerTls, Log]:
    log = Log()
    return ServerTls(files, log), log  # type: ignore[arg-type]


def test_a_certificate_is_loaded_and_its_end_known(files: TlsFiles) -> None:
    loaded = load(files)
    assert loaded.context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert 0 < loaded.expires_s - time.time() < 2 * 86_400


def test_half_of_it_is_refused(files: TlsFiles) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.tls_key: needed as well"):
        TlsFiles.of(str(files.cert), "")
    with pytest.raises(ConfigError, match=r"gateway\.tls_cert: needed as well"):
        TlsFiles.of("", str(files.key))
    assert TlsFiles.of("", "") is None


def test_a_file_that_is_not_there(files: TlsFiles) -> None:
    files.key.unlink()
    with pytest.raises(ConfigError, match=r"gateway\.tls_key: .*server\.key cannot be read: No such file"):
        load(files)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read(files: TlsFiles) -> None:
    files.key.chmod(0)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        load(files)


def test_files_that_hold_something_else(files: TlsFiles) -> None:
    swapped = TlsFiles(files.key, files.cert)
    with pytest.raises(ConfigError, match=r"gateway\.tls_cert: .* holds no certificate in PEM format"):
        load(swapped)
    files.key.write_bytes(b"\x00\x01")
    with pytest.raises(ConfigError, match="holds no private key in PEM format"):
        load(files)
    files.key.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    with pytest.raises(ConfigError, match="cannot be used"):
        load(files)


def test_a_key_of_another_certificate(files: TlsFiles, tmp_path: Path) -> None:
    other = make_certificate(tmp_path, "other").with_suffix(".key")
    with pytest.raises(ConfigError, match=r"gateway\.tls_key: .*other\.key is not the key of .*server\.pem"):
        load(TlsFiles(files.cert, other))


def test_a_passphrase_is_not_asked_for(tmp_path: Path) -> None:
    cert = make_certificate(tmp_path, passphrase="secret")
    with pytest.raises(ConfigError, match="protected by a passphrase"):
        load(TlsFiles(cert, cert.with_suffix(".key")))


def test_a_renewal_is_taken_once_both_files_are_there(files: TlsFiles, tmp_path: Path) -> None:
    tls, log = serving(files)
    first = tls.context
    assert not tls.reload_if_changed()
    renewed = make_certificate(tmp_path, "renewed")
    renewed.replace(files.cert)
    assert not tls.reload_if_changed() and not tls.reload_if_changed()
    assert tls.context is first
    assert [level for level, _ in log.lines] == ["error"], "said once, not at every look"
    renewed.with_suffix(".key").replace(files.key)
    assert tls.reload_if_changed()
    assert tls.context is not first
    files.cert.unlink()
    assert not tls.reload_if_changed() and tls.loaded.expires_s > time.time()


def test_a_link_that_is_pointed_elsewhere_counts_as_changed(tmp_path: Path) -> None:
    """As Kubernetes renews a mounted secret."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        make_certificate(tmp_path / name)
    link = tmp_path / "now"
    link.symlink_to("one")
    tls, _ = serving(TlsFiles(link / "server.pem", link / "server.key"))
    link.unlink()
    link.symlink_to("two")
    assert tls.reload_if_changed()


def test_an_expired_certificate_is_said(files: TlsFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cohort.common.http.tls.time.time", lambda: 4e9)
    _, log = serving(files)
    assert log.lines[0][0] == "warning" and "has expired" in log.lines[0][1]
