"""What a process that is killed held."""

from __future__ import annotations

import os
import socket

from cohort.services.bench.chaos.strikes import sockets_of


def test_a_connection_is_held_before_it_is_accepted_and_until_it_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        ours, port = server.accept()[0], first.getsockname()[1]
        with first, ours, socket.create_connection(server.getsockname()) as second:
            listening, held = sockets_of(os.getpid())
            assert server.getsockname()[1] in listening and {port, second.getsockname()[1]} <= held
        assert port not in sockets_of(os.getpid())[1]
