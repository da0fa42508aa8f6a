"""A process that has imported what a worker imports, and forks one for each order of the launcher: many workers start
in the time of one import, and share its memory.

    launcher ── order, descriptor of the log ─▶ template ── fork ─▶ worker
    launcher ◀── pid; later its exit code ───── template ◀─ ends ───┘

Holds no thread, no event loop, no model and no device: a fork copies only what is safe to copy. Dies with the launcher,
as its workers die with it. Started by `forks`, one for each environment (an OpenMP pool's size is read at import).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

LARGEST_ORDER_BYTES = 1 << 16


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
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    sources: list[Any] = [orders, woken]
    orders.send(b"{}")  # ready
    while True:
        readable, _, _ = select.select(sources, [], [])
        if woken in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            _reap(orders)
        if orders in readable:
            data, descriptors, _, _ = socket.recv_fds(orders, LARGEST_ORDER_BYTES, 1)
            if not data:
                return
            order = json.loads(data)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (orders.detach(), woken, wake):
                    os.close(descriptor)
                _become(order, descriptors[0])
                return
            for descriptor in descriptors:
                os.close(descriptor)
            orders.send(json.dumps({"order": order["order"], "pid": pid}).encode())


def _reap(orders: socket.socket) -> None:
    """Reap workers that ended. Their process groups are killed first, before the ids can belong to others."""
    while (ended := _ended()) is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(ended.si_pid, signal.SIGKILL)
        _, status = os.waitpid(ended.si_pid, 0)
        orders.send(json.dumps({"pid": ended.si_pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def _ended() -> os.waitid_result | None:
    """Return a worker that has ended and is not reaped yet."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there is none left
        return None


def _become(order: dict[str, Any], log: int) -> None:
    """Turn this process into the worker."""
    import ctypes

    from cohort.services.launcher.processes.child import PR_SET_PDEATHSIG

    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != order["template"]:
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    for descriptor in (nothing, log):
        os.close(descriptor)
    sys.argv = ["", *order["arguments"]]
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
