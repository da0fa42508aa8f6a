"""A socket that the launcher binds and one process after the other serves: what comes in between waits."""

from __future__ import annotations

import socket
import subprocess
import sys

from cohort.common.http import listeners

_SERVE = """
from cohort.common.http.listeners import inherited
[listener] = inherited(PORT)
assert inherited(PORT) == []
listener.setblocking(True)
listener.listen(8)
print("listening", flush=True)
connection, _ = listener.accept()
connection.sendall(b"from here")
"""


def server(held: list[socket.socket], port: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE.replace("PORT", str(port))],
        stdout=subprocess.PIPE,
        text=True,
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), **listeners.environment([each.fileno() for each in held])},
        pass_fds=[each.fileno() for each in held],
    )
    assert process.stdout is not None and process.stdout.readline() == "listening\n"
    return process


def test_connections_wait_for_the_next_process() -> None:
    held = listeners.bound_everywhere("127.0.0.1", 0)
    try:
        port = held[0].getsockname()[1]
        first = socket.socket()
        assert first.connect_ex(("127.0.0.1", port)) != 0, "nobody listens yet"
        first.close()
        killed = server(held, port)
        killed.kill()
        killed.wait(10)
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            following = server(held, port)
            assert client.recv(100) == b"from here"
            assert following.wait(10) == 0
    finally:
        for each in held:
            each.close()


def test_sockets_of_another_port_are_not_taken(monkeypatch) -> None:
    held = listeners.bound_everywhere("127.0.0.1", 0)
    copy = held[0].dup()
    monkeypatch.setenv(listeners.VARIABLE, str(copy.detach()))
    try:
        assert listeners.inherited(held[0].getsockname()[1] + 1) == []
        assert listeners.inherited(held[0].getsockname()[1]) == [], "they are named once"
    finally:
        for each in held:
            each.close()
