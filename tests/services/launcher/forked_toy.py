"""What a template forks in a test: `imported_by` tells in which process this module was imported first.

ends CODE     says where it was imported, exits with the code
serves        starts a helper, says its pid, and waits for SIGTERM, upon which it exits with 0
accepts PORT  answers one connection on the socket that it inherited
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from cohort.common.http.listeners import inherited
from tests.services.launcher import imported_once


def main() -> None:
    what = sys.argv[1]
    print(f"{what} in {os.getpid()}, imported in {imported_once.PID}", flush=True)
    if what == "ends":
        sys.exit(int(sys.argv[2]))
    if what == "accepts":
        [listener] = inherited(int(sys.argv[2]))
        listener.setblocking(True)
        listener.listen()
        print("listens", flush=True)
        listener.accept()[0].sendall(b"%d" % os.getpid())
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
