"""Ranks as forks of one process that has imported what they import: by itself each takes three seconds for it. That
real starts work, `tests/e2e/equality/test_tensor_parallel.py` and `tests/chaos/test_ranks.py` see."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence

from cohort.services.launcher.processes.child import adopt_orphans
from tests.e2e.forked import READY_TIMEOUT_S, ForkedProcess

_TEMPLATE = """
import os, socket, sys
from cohort.common.engine.worker import follower_process
from cohort.services.launcher.processes.template import _fork_twice
orders = socket.socket(fileno=int(sys.argv[1]))
orders.send(b"ready")
while True:
    parent, descriptors, _, _ = socket.recv_fds(orders, 64, 3)
    if not parent:
        break
    pid = _fork_twice()
    if pid is None:
        orders.close()
        follower_process.main([parent.decode(), *map(str, descriptors)])
    for each in descriptors:
        os.close(each)
    orders.send(str(pid).encode())
"""
_orders: list[socket.socket] = []


def start_rank(arguments: Sequence[str], threads: int, descriptors: Sequence[int] = ()) -> ForkedProcess:
    """As `followers.start_rank`, with one thread."""
    assert threads == 1
    if not _orders:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        subprocess.Popen(
            [sys.executable, "-P", "-c", _TEMPLATE, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        adopt_orphans()
        assert _heard(ours) == b"ready"
        _orders.append(ours)
    socket.send_fds(_orders[0], [arguments[0].encode()], list(descriptors))
    return ForkedProcess(int(_heard(_orders[0])))


def _heard(orders: socket.socket) -> bytes:
    ready, _, _ = select.select([orders], [], [], READY_TIMEOUT_S)
    assert ready, "the template of the ranks does not answer"
    return orders.recv(64)
