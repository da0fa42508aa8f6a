"""KV between instances: when runs of blocks arrive, given the links and the other transfers on them.

Every instance sends one piece at a time and receives one at a time (a full-duplex port); a piece takes the link's
latency, its bytes over the link's bandwidth, and a time for each of its runs. Pure bookkeeping of busy ports: the host
schedules what it is told.
"""

from __future__ import annotations

from cohort.services.simulator.hardware import LinkShape


class Ports:
    def __init__(self, instances: int) -> None:
        self._sending_until_s = [0.0] * instances
        self._receiving_until_s = [0.0] * instances
        self.moved_bytes = 0

    def transfer(
        self, now_s: float, source: int, target: int, link: LinkShape, size_bytes: int, runs: int = 1
    ) -> float:
        """When the piece, in so many runs of blocks, is there if it is handed to the link now."""
        start_s = max(now_s, self._sending_until_s[source], self._receiving_until_s[target])
        end_s = start_s + size_bytes / link.bytes_per_s + runs * link.run_s
        self._sending_until_s[source] = self._receiving_until_s[target] = end_s
        self.moved_bytes += size_bytes
        return end_s + link.latency_s
