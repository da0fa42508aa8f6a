"""Two hosts on one machine: network namespaces with a cable between them, whose rate a test sets.

Needs the right to make namespaces (root); `needs_namespaces` skips what has none. A process of a namespace is started
with `Hosts.before(...)` in front of its command. The kernel's token bucket sets the rate of what leaves one end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ADDRESSES = ("10.213.7.1", "10.213.7.2")
DEVICE = "cable"
"""At either end: names of devices are a namespace's own."""
_LIMIT = ["latency", "200ms"]


class Hosts:
    """Of index 0 and 1; each sees loopback and the cable, under `ADDRESSES` and
    as `DEVICE`. Unix sockets are everybody's."""

    def __init__(self, name: str) -> None:
        self.names = (f"{name}-0", f"{name}-1")

    def before(self, index: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[index]]

    def limit(self, mbit_per_s: float) -> None:
        """Of the cable, each way. 64 KiB pass at once."""
        for index in (0, 1):
            rate = ["rate", f"{mbit_per_s:g}mbit", "burst", "64kb", *_LIMIT]
            _run(*self.before(index), "tc", "qdisc", "replace", "dev", DEVICE, "root", "tbf", *rate)

    def unplug(self) -> None:
        """The cable: nothing arrives any more, and nothing says so."""
        _run("ip", "-n", self.names[1], "link", "set", DEVICE, "down")

    def open(self) -> None:
        for name in self.names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        here, there = self.names
        _run("ip", "-n", here, "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", there)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
            _run("ip", "-n", name, "link", "set", DEVICE, "up")
        self._wait_up()

    def _wait_up(self) -> None:
        """A cable that was just plugged in is there a moment later."""
        until_s = time.monotonic() + 10.0
        for index in (0, 1):
            state = [*self.before(index), "cat", f"/sys/class/net/{DEVICE}/operstate"]
            while subprocess.run(state, capture_output=True, text=True).stdout.strip() != "up":
                assert time.monotonic() < until_s, "the cable does not come up"
                time.sleep(0.05)

    def close(self) -> None:
        for name in self.names:
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "delete", name)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    hosts = Hosts(f"cohort{os.getpid()}")
    try:
        hosts.open()
        yield hosts
    finally:
        hosts.close()


def _can() -> bool:
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc")) and _makes_one()


def _makes_one() -> bool:
    name = f"cohort-try{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return made and not Path("/run/netns", name).exists()


needs_namespaces = pytest.mark.skipif(not _can(), reason="network namespaces need root and iproute2")
