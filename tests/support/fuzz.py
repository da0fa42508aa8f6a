"""`python -m tests.support.fuzz --minutes 60`: everything that is fuzzed, each part for its share of the time.

Each part is tests that draw anew each time, in a process of its own, begun again until its time is over. A crash, an
answer of 500, a hang (each request has a deadline) and a wrong error are failed tests. Memory is that of the process
in which the gateway serves: what is more at its end than after a quarter of its time. The last line is the verdict;
exit status: 0 nothing was found, 1 something was.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PARTS = {
    "bodies of every route, batches' lines": ["tests/security/test_fuzz_bodies.py"],
    "frames to every socket": ["tests/e2e/test_malformed_frames.py", "tests/common/test_codec.py"],
    "TLS records": ["tests/services/gateway/test_tls.py"],
    "model files": ["tests/security/test_model_files.py", "tests/security/test_chat_template.py"],
}
GROWTH_MB = 300
"""Memory that a test's process may gain in a quarter of an hour: examples and logs are a part of it."""
_END_S = 60.0
_LOOK_S = 1.0


@dataclass
class Round:
    """One process of a part: its output, exit status (None: it was ended as its time was over) and memory."""

    output: str
    status: int | None
    growth_mb: int

    @property
    def finding(self) -> str:
        if self.status not in (0, None):
            return f"status {self.status}"
        return f"{self.growth_mb} MB more memory" if self.growth_mb > GROWTH_MB else ""


def run(tests: list[str], seconds: float) -> Round:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--hypothesis-profile=nightly", *tests]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began_s, sizes = time.monotonic(), list[int]()
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        ) as process,
    ):
        ended = False
        while process.poll() is None and not ended:
            sizes.append(resident_mb(process.pid))
            try:
                process.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                ended = time.monotonic() - began_s > seconds
        ended = ended and process.poll() is None  # its time is over
        if ended:
            process.send_signal(signal.SIGINT)  # pytest then reports, and its pipelines end
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        if process.poll() is None:  # in the midst of an example, whose own deadline would have told a hang
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    growth_mb = max(0, sizes[-1] - sizes[len(sizes) // 4]) if sizes else 0
    return Round(text, None if ended and " failed" not in text else process.returncode, growth_mb)


def resident_mb(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    except (OSError, IndexError):
        return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of all parts together (default %(default)g)")
    parser.add_argument("--part", nargs="*", default=list(PARTS), choices=list(PARTS), metavar="PART", help="by name")
    args = parser.parse_args()
    findings = 0
    for name in args.part:
        ends_s, rounds, growth_mb = time.monotonic() + 60 * args.minutes / len(args.part), 0, 0
        while (left_s := ends_s - time.monotonic()) > 0:
            found = run(PARTS[name], left_s)
            rounds, growth_mb = rounds + 1, max(growth_mb, found.growth_mb)
            if found.finding:
                findings += 1
                print(f"{name}: {found.finding}\n{found.output[-6000:]}", flush=True)
                break
        print(f"{name}: {rounds} rounds, {growth_mb} MB more memory at most", flush=True)
    print(f"verdict: {findings} findings in {args.minutes:g} minutes" if findings else "verdict: nothing was found")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
