"""A process for the supervisor's tests: answers /ready, and misbehaves as its first argument says.

ready         serves until SIGTERM, then exits 0
stubborn      serves and ignores SIGTERM
config_error  says so and exits 2
crash         exits 1 at once
helper        as ready, with a child of its own (its pid goes to the log)
once          the first time as ready, later exits 1
crash_once    exits 1 if the file named by the second-to-last argument does not exist yet (and makes it), else ready
"""

from __future__ import annotations

import http.server
import signal
import subprocess
import sys
from pathlib import Path


class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    behaviour, port, marker = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    if behaviour == "config_error":
        print("kv.block_size: 7 is none of 8, 16", flush=True)
        sys.exit(2)
    if behaviour == "crash" or (behaviour == "crash_once" and not marker.exists()):
        marker.touch()
        sys.exit(1)
    if behaviour == "once":
        if marker.exists():
            sys.exit(1)
        marker.touch()
    if behaviour == "helper":
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "stubborn" else lambda *_: sys.exit(0))
    http.server.HTTPServer(("127.0.0.1", port), Ready).serve_forever()


main()
