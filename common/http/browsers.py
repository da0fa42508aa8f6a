"""Keeps pages of other sites from using a server through the browser of a person who can reach it.

A server on loopback trusts every client, at least with what needs no key, and a browser connects for every page it
shows: by a request that the page sends there itself (cross-site), or under the page's own name once that name resolves
to this machine (DNS rebinding). Browsers say both in headers that pages cannot change. Called for every request by the
gateway, the live page and every process's metrics; clients that are no browsers pass unless they send a foreign `Host`.

Top-level navigation by GET passes: following a link to the live page shows it to the person, not to the page it was on.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from cohort.common.http.exposure import is_loopback


class BrowserGuard:
    """Guard of one server. `listens_on`: its host. `option`: the configured name of `allowed_hosts`, for the
    refusals."""

    def __init__(self, listens_on: str, allowed_hosts: Collection[str], *, option: str) -> None:
        allowed = frozenset(host_name(host) for host in allowed_hosts)
        self._option = option
        # Beyond loopback the names of this server are not known, unless they are listed.
        self._names_checked = bool(allowed) or is_loopback(listens_on)
        self._names = allowed | {"localhost", host_name(listens_on)}
        self._origins = allowed

    def refusal(self, method: str, headers: Mapping[str, str]) -> str | None:
        """Return why a request with these headers must be answered with 403; None if it need not."""
        host = headers.get("Host")
        if host is not None and self._names_checked and not self._is_own(host_name(host)):
            return f"Host {host[:100]!a} is no name of this server; {self._option} adds one."
        navigates = headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"
        if navigates and method in ("GET", "HEAD"):
            return None
        return self._foreign_origin(host or "", headers)

    def _is_own(self, name: str) -> bool:
        """Return whether Host may have this name. An address may: a page can be rebound under a name alone."""
        return name in self._names or _is_address(name)

    def _foreign_origin(self, host: str, headers: Mapping[str, str]) -> str | None:
        site, origin = headers.get("Sec-Fetch-Site", "").lower(), headers.get("Origin")
        netloc = _netloc(origin or "")
        if netloc and host_name(netloc) in self._origins:
            return None
        if site in ("same-origin", "none"):
            return None  # the browser has compared what it was given, a proxy between may have changed Host
        if site == "cross-site":
            return self._foreign("Sec-Fetch-Site: cross-site")
        if origin is not None and (not netloc or netloc.lower() != host.lower()):
            return self._foreign(f"Origin {origin[:100]!a}")
        return None

    def _foreign(self, what: str) -> str:
        return f"Pages of other sites may not use this server ({what}); {self._option} names the hosts that may."


def _netloc(origin: str) -> str:
    """Return host and port of an Origin; "" if it names none ("null", or what no browser sends)."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def host_name(netloc: str) -> str:
    """Return the host without its port, as names are compared: `[::1]:8000` is `::1`."""
    netloc = netloc.strip().lower()
    if netloc.startswith("["):
        return netloc[1:].partition("]")[0]
    name, colon, port = netloc.rpartition(":")
    return name if colon and ":" not in name and port.isdecimal() else netloc


def _is_address(name: str) -> bool:
    """Return whether a host is an IP address, not a name that is looked up."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
