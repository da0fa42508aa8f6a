"""Listening sockets that outlive the process which serves them: the launcher binds them, gateways serve them in turn.

    launcher: bound ──pass_fds, COHORT_LISTENERS──▶ gateway: listen, accept ── ends ──▶ the next gateway: accept

While no process accepts, connections wait in the kernel's backlog instead of being refused. The launcher never listens,
so before the first gateway is there they are refused. Called by the launcher's supervisor and by `http_server`.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence

VARIABLE = "COHORT_LISTENERS"
"""Descriptors of the sockets that a process inherits, with commas between them."""


def _bound(family: int, address: tuple[object, ...], shared: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def bound_everywhere(host: str, port: int, *, shared: bool = False) -> list[socket.socket]:
    """Bind one socket for each address of `host`; "" is all of this machine's. `shared`: other processes of this user
    may listen on the same port. Raises `OSError`."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            listeners.append(_bound(family, address, shared))
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def environment(descriptors: Sequence[int]) -> Mapping[str, str]:
    """Return the variable for the process that the listeners are passed to, under these numbers."""
    return {VARIABLE: ",".join(map(str, descriptors))} if descriptors else {}


def inherited(port: int) -> list[socket.socket]:
    """Take the sockets that were passed to this process, if they are of this port; works once."""
    named = os.environ.pop(VARIABLE, "")
    listeners: list[socket.socket] = []
    for text in named.split(",") if named else ():
        with contextlib.suppress(OSError, ValueError):
            listener = socket.socket(fileno=int(text))
            listener.set_inheritable(False)
            listener.setblocking(False)
            listeners.append(listener)
    if any(each.getsockname()[1] != port for each in listeners):
        return []
    return listeners
