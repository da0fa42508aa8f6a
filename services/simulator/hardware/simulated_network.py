"""The simulator's network: control messages take a fixed time, KV what its ports and links need; nothing is lost.

`Ports` says when runs of blocks arrive, given the links and the other transfers on them.
"""

from __future__ import annotations

from collections.abc import Mapping

from cohort.common.messages import Message
from cohort.common.types import InstanceId, KvGeometry
from cohort.common.virtual_cluster.plugins import Flight
from cohort.services.simulator.hardware.hardware import Cluster, LinkShape

Host = tuple[int, int]
"""Machine, as `Cluster.host` names it."""


class Ports:
    """Pure bookkeeping of busy ports: the host schedules what it is told.

    Every instance sends one piece at a time and receives one at a time (a full-duplex port); a piece takes the link's
    latency, its bytes over the link's bandwidth, and a time for each of its runs. Between machines whose instances
    share network cards it also waits for the card that is free first at either end."""

    def __init__(self, instances: int, nics_per_host: Mapping[Host, int] | None = None) -> None:
        """`nics_per_host`: number of cards of the machines whose instances share them."""
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
        """Return when the piece, of `runs` runs of blocks, arrives if it is handed to the link now. `hosts`: the
        machines that it leaves and reaches, if it goes from one to another."""
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


class SimNetwork:
    whole_sends = True
    run_timeout_s = float("inf")

    def __init__(self, cluster: Cluster, geometry: KvGeometry) -> None:
        hosts = {cluster.host(number): cluster.of(number).nics_per_host for number in range(cluster.instances)}
        self._shared_nics = any(hosts.values())
        self.ports = Ports(cluster.instances, {host: count for host, count in hosts.items() if count})
        self._cluster = cluster
        self._geometry = geometry
        self._latency_s = cluster.control_latency_s

    def arrivals(self, now_s: float, source: InstanceId, target: InstanceId, message: Message) -> tuple[float]:
        return (now_s + self._latency_s,)

    def decoded(self, message: Message) -> Message:
        return message

    def landing_s(self, now_s: float, flight: Flight) -> float:
        """Queue the bytes at both ports. They never arrive before the message that announces them."""
        sender, receiver = flight.sender, flight.receiver
        assert sender is not None and receiver is not None
        link = link_of(self._cluster, flight)
        size = flight.num_blocks * self._geometry.block_bytes
        source, target = sender.number, receiver.number
        hosts = (self._cluster.host(source), self._cluster.host(target)) if self._shared_nics else None
        between = hosts if hosts is not None and hosts[0] != hosts[1] else None
        landing_s = self.ports.transfer(now_s, source, target, link, size, len(flight.sent), between)
        return max(landing_s, now_s + self._latency_s)

    def breaks(self, flight: Flight) -> bool:
        return False

    def break_delay_s(self) -> float:
        return 0.0


def link_of(cluster: Cluster, flight: Flight) -> LinkShape:
    """Return a flight's link; from host memory it is no faster than the host's path to its devices."""
    sender, receiver = flight.sender, flight.receiver
    assert sender is not None and receiver is not None
    link = cluster.link(sender.number, receiver.number)
    if not flight.from_host:
        return link
    part = cluster.of(sender.number)
    host_rate = part.device.host_bytes_per_s * part.tensor_parallel
    return LinkShape(min(link.bytes_per_s, host_rate), link.latency_s, link.run_s)
