"""A process that has imported what others import, and forks one for each order of the launcher: many start in the time
of one import, and share its memory.

    launcher ── order, log, listening sockets ─▶ template ── fork ── fork ─▶ process, which the launcher adopts
    launcher ◀──────────────── pid ─────────────────┘

Holds no thread, no event loop, no model and no device: a fork copies only what is safe to copy. The parent of what it
forks is the launcher: that dies with the launcher, and outlives the template. Started by `forks`, one for each
environment (an OpenMP pool's size is read at import).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

LARGEST_ORDER_BYTES = 1 << 16
MOST_DESCRIPTORS = 32
"""Descriptors with an order at most: the log, and the sockets of every address."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", type=int, required=True, help="descriptor of the socket to the launcher")
    parser.add_argument("modules", nargs="+", help="imported before the first order")
    options = parser.parse_args(arguments)
    orders = socket.socket(fileno=options.orders)
    for name in options.modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a worker writes to no page that it shares
    orders.send(b"{}")  # ready
    while True:
        data, descriptors, _, _ = socket.recv_fds(orders, LARGEST_ORDER_BYTES, MOST_DESCRIPTORS)
        if not data:
            return
        order = json.loads(data)
        pid = _fork_twice()
        if pid is None:
            orders.close()
            _become(order, *descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        orders.send(json.dumps({"order": order["order"], "pid": pid}).encode())


def _fork_twice() -> int | None:
    """Fork a process through another one, which ends at once. Return its pid, 0 = there was no place for it; in it,
    return None when it has been adopted."""
    told, tell = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            between = os.getpid()
            os.setsid()  # what ends the template's group ends no worker
            pid = _fork()
            if pid:
                os.write(tell, b"%d" % max(0, pid))
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0002)
            return None
        os.waitpid(between, 0)
        return int(os.read(told, 32) or 0)
    except OSError:
        return 0
    finally:
        os.close(told)
        os.close(tell)


def _fork() -> int:
    """Return as `os.fork` does; -1 where it fails."""
    try:
        return os.fork()
    except OSError:
        return -1


def _become(order: dict[str, Any], log: int, *listeners: int) -> None:
    """Turn this process into the one that was ordered."""
    import ctypes

    from cohort.common.http.listeners import environment
    from cohort.services.launcher.processes.child import PR_SET_NAME, PR_SET_PDEATHSIG

    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_NAME, order["module"].rpartition(".")[2].encode(), 0, 0, 0)  # as `top` and `ps -o comm` show it
    if os.getppid() != order["launcher"]:
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    for descriptor in (nothing, log):
        os.close(descriptor)
    os.environ.update(environment(listeners))
    sys.argv = ["", *order["arguments"]]
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
