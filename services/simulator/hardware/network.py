"""KV between instances: when runs of blocks arrive, given the links and the other transfers on them.

Every instance sends one piece at a time and receives one at a time (a full-duplex port); a piece takes the link's
latency, its bytes over the link's bandwidth, and a time for each of its runs. Between machines whose instances share
network cards it also waits for the card that is free first at either end. Pure bookkeeping of busy ports: the host
schedules what it is told.
"""

from __future__ import annotations

from collections.abc import Mapping

from cohort.services.simulator.hardware.hardware import LinkShape

Host = tuple[int, int]
"""A machine, as `Cluster.host` names it."""


class Ports:
    def __init__(self, instances: int, nics_per_host: Mapping[Host, int] | None = None) -> None:
        """`nics_per_host`: of machines whose instances share them."""
        self._sending_until_s = [0.0] * instances
        self._receiving_until_s = [0.0] * instances
        shared = nics_per_host or {}
        self._nics_out_s = {host: [0.0] * count for host, count in shared.items()}
        self._nics_in_s = {host: [0.0] * count for host, count in shared.items()}
        self.moved_bytes = 0

    def transfer(
        self,
        now_s: float,
        source: int,
        target: int,
        link: LinkShape,
        size_bytes: int,
        runs: int = 1,
        hosts: tuple[Host, Host] | None = None,
    ) -> float:
        """When the piece, in so many runs of blocks, is there if it is handed to the link now. `hosts`: the machines
        that it leaves and reaches, if it goes from one to another."""
        start_s = max(now_s, self._sending_until_s[source], self._receiving_until_s[target])
        nics = []
        if hosts is not None:
            nics = [cards for cards in (self._nics_out_s.get(hosts[0]), self._nics_in_s.get(hosts[1])) if cards]
            start_s = max(start_s, *(min(cards) for cards in nics)) if nics else start_s
        end_s = start_s + size_bytes / link.bytes_per_s + runs * link.run_s
        self._sending_until_s[source] = self._receiving_until_s[target] = end_s
        for cards in nics:
            cards[cards.index(min(cards))] = end_s
        self.moved_bytes += size_bytes
        return end_s + link.latency_s
