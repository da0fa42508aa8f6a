"""Runs of KV blocks on their way between two workers.

    SendRuns ──▶ announced (KvChunk) ──▶ posted by the receiver ─┐
        └──────▶ bytes on their way ───────▶ landed ─────────────┴─▶ both ends are told
        └──────▶ broken (link, deadline, cancelled, an end died) ──▶ both ends are told, a while later

A flight is known by its tag from both ends, in whichever order they post it. Its source is read when it lands, and its
target written then, so that blocks which were freed or reused too early show.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cohort.common.machines.effects import ReceiveRuns, Run, SendRuns
from cohort.common.machines.events import RunsReceived, RunsSent
from cohort.common.messages import KvChunk, KvRun
from cohort.common.virtual_cluster.plugins import Flight, WorkerNode

if TYPE_CHECKING:
    from cohort.common.virtual_cluster.cluster import VirtualCluster


class KvFlights:
    def __init__(self, cluster: VirtualCluster) -> None:
        self._cluster = cluster
        self._network = cluster.network
        self._flights: dict[int, Flight] = {}

    def send(self, node: WorkerNode, effect: SendRuns) -> None:
        cluster = self._cluster
        runs = [KvRun(run.tag, run.target, run.num_blocks, run.checksum) for run in effect.runs]
        cluster.post(node, effect.peer, KvChunk(effect.attempt, effect.lease_id, effect.round, effect.link, runs))
        receiver = cluster.worker(effect.peer)
        for together in self._together(effect.runs):
            flight = self._flight(together, node)
            flight.sender, flight.sender_lease, flight.sent = node, effect.lease_id, together
            flight.from_host = effect.from_host
            if flight.receiver is None:
                flight.receiver = receiver
            landing_s = self._network.landing_s(cluster.now_s, flight)
            if self._network.breaks(flight):
                cluster.events.at(landing_s, self.break_off, flight)
            else:
                cluster.events.at(landing_s, self._land, flight)

    def receive(self, node: WorkerNode, effect: ReceiveRuns) -> None:
        for together in self._together(effect.runs):
            flight = self._flight(together, node)
            flight.receiver, flight.receiver_lease, flight.round = node, effect.lease_id, effect.round
            flight.posted = together
            if flight.landed:  # not now: the effects that this one stands among are still being performed
                self._cluster.events.at(self._cluster.now_s, self._land, flight)

    def cancel(self, node: WorkerNode, lease_id: int) -> None:
        """Every flight of this lease at this end breaks."""
        for flight in list(node.flights.values()):
            sends = flight.sender is node and flight.sent and flight.sender_lease == lease_id
            receives = flight.receiver is node and flight.posted and flight.receiver_lease == lease_id
            if sends or receives:
                self.break_off(flight)

    def died(self, node: WorkerNode) -> None:
        for flight in list(node.flights.values()):
            self.break_off(flight)

    def break_off(self, flight: Flight) -> None:
        """It fails; until both ends have been told, its bytes may still arrive, or others."""
        if flight.broken or flight.tag not in self._flights:
            return
        flight.broken = True
        cluster = self._cluster
        cluster.events.at(cluster.now_s + self._network.break_delay_s(), self._tell_broken, flight)

    # -- within ------------------------------------------------------------------------------------------------

    def _together(self, runs: tuple[Run, ...]) -> Iterator[tuple[Run, ...]]:
        if self._network.whole_sends:
            yield runs
        else:
            for run in runs:
                yield (run,)

    def _flight(self, runs: tuple[Run, ...], node: WorkerNode) -> Flight:
        tag = runs[0].tag
        flight = self._flights.get(tag)
        if flight is None:
            flight = self._flights[tag] = Flight(tag)
        node.flights[tag] = flight
        timeout_s = self._network.run_timeout_s
        if timeout_s < float("inf"):
            self._cluster.events.at(self._cluster.now_s + timeout_s, self.break_off, flight)
        return flight

    def _land(self, flight: Flight) -> None:
        if flight.broken or flight.tag not in self._flights:
            return
        flight.landed = True
        if not flight.posted or not flight.sent:
            return
        self._cluster.engine.copy(flight)
        self._tell(flight, None)

    def _tell_broken(self, flight: Flight) -> None:
        if flight.posted and flight.receiver is not None and flight.receiver.alive:
            self._cluster.engine.scribble(flight)
        self._tell(flight, "broken")

    def _tell(self, flight: Flight, error: str | None) -> None:
        if self._flights.pop(flight.tag, None) is None:
            return
        sender, receiver = flight.sender, flight.receiver
        for node in (sender, receiver):
            if node is not None:
                node.flights.pop(flight.tag, None)
        if sender is not None and flight.sent:
            self._cluster.tell(sender, RunsSent(flight.sender_lease, error, len(flight.sent)))
        if receiver is not None and flight.posted:
            runs = len(flight.posted)
            self._cluster.tell(receiver, RunsReceived(flight.receiver_lease, flight.round, error, runs))
