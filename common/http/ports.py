"""Ports of this machine: whether a process could listen on one, and which are free. Reserves nothing.

Called before anything is started, by the launcher, `cohort doctor` and the benchmarks.
"""

from __future__ import annotations

import errno
import itertools
import random
import socket
from pathlib import Path

from cohort.common.errors import ConfigError

PORT_BLOCK = 40  # the gateway's, the monitor's, and metrics ports of up to 28 workers
_FIRST_PORT = 10_000
_OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_blocks = itertools.count(random.randrange(10_000))


def port_problem(host: str, port: int) -> str:
    """Return why no process can listen on this address, or ""."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        return f"{host!r} is no address of this machine: {error.strerror}"
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port} on {host} is taken by another program"
            return f"cannot listen on {host}:{port}: {error.strerror}"
    return ""


def free_port() -> int:
    """Return the first of `PORT_BLOCK` ports without a listener now, never one of an earlier call. None of them is for
    outgoing connections, if there are enough others: one could take it before a process listens."""
    ports = _for_listeners()
    for _ in range(len(ports) // PORT_BLOCK):
        port = ports[0] + next(_blocks) * PORT_BLOCK % (len(ports) - PORT_BLOCK)
        if not any(port_problem("127.0.0.1", candidate) for candidate in range(port, port + PORT_BLOCK)):
            return port
    raise ConfigError(f"no {PORT_BLOCK} free ports in a row on 127.0.0.1 from {ports[0]} to {ports[-1]}")


def _for_listeners() -> range:
    """Return the larger range below or above the ports of outgoing connections, or all ports if that is small."""
    try:
        first, last = map(int, _OUTGOING_PORTS.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        first, last = 32_768, 60_999
    widest = max(range(_FIRST_PORT, first), range(last + 1, 65_536), key=len)
    return widest if len(widest) >= 100 * PORT_BLOCK else range(_FIRST_PORT, 65_536)
