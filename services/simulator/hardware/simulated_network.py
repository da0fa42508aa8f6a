"""The simulator's network: control messages take a fixed time, KV what its ports and links need; nothing is lost."""

from __future__ import annotations

from cohort.common.messages import Message
from cohort.common.types import InstanceId, KvGeometry
from cohort.common.virtual_cluster.plugins import Flight
from cohort.services.simulator.hardware.hardware import Cluster, LinkShape
from cohort.services.simulator.hardware.network import Ports


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

    def travelled(self, message: Message) -> Message:
        return message

    def landing_s(self, now_s: float, flight: Flight) -> float:
        """The bytes queue at both ports; they are never there before the word that announces them."""
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
    """Between its two ends; from host memory no faster than the host's own path to its devices."""
    sender, receiver = flight.sender, flight.receiver
    assert sender is not None and receiver is not None
    link = cluster.link(sender.number, receiver.number)
    if not flight.from_host:
        return link
    part = cluster.of(sender.number)
    host_rate = part.device.host_bytes_per_s * part.tensor_parallel
    return LinkShape(min(link.bytes_per_s, host_rate), link.latency_s, link.run_s)
