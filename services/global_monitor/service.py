"""The monitor's loop: Heartbeat, Farewell → aggregate → ClusterStats to the manager, page and metrics to people.

Hosted by `__main__.py`, and by tests on an in-process bus under a virtual clock. Reports; never restarts or stops
anything.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from structlog.stdlib import BoundLogger

from cohort.common.clock import Clock
from cohort.common.config import Config
from cohort.common.errors import PeerUnreachable
from cohort.common.messages import Farewell, GatewayView, Heartbeat, ManagerView, Message, RequestTraffic, WorkerView
from cohort.common.process.activity import Activity
from cohort.common.process.service import process_stats
from cohort.common.transport.bus import Bus
from cohort.common.transport.repeated_warning import RepeatedWarning
from cohort.common.types import InstanceId, RequestId
from cohort.services.global_monitor.aggregate import Cluster, Event
from cohort.services.global_monitor.live import LiveState, live_state
from cohort.services.global_monitor.live_views import LiveViews
from cohort.services.global_monitor.page import ClusterState, state
from cohort.services.global_monitor.planner import Planner, planner_state

SILENCE_S = 3.0  # six heartbeats: a process that has missed these is reported as down
PUSH_INTERVAL_S = 0.5  # figures to the manager, which ignores them when they are several seconds old


class GlobalMonitor:
    """Owner of the cluster's state; the manager may come and go."""

    def __init__(
        self,
        config: Config,
        bus: Bus,
        clock: Clock,
        log: BoundLogger,
        *,
        manager_endpoints: Mapping[InstanceId, str],
        model: str,
        instance: str,
        incarnation: int,
        activity: Activity | None = None,
    ) -> None:
        self.cluster = Cluster(silence_s=SILENCE_S)
        self._config = config
        self._bus = bus
        self._clock = clock
        self._log = log
        self._warn_unexpected = RepeatedWarning(log, "unexpected_message")
        self._warn_foreign = RepeatedWarning(log, "message_of_another_dropped")
        self._model = model
        self._instance = instance
        self._incarnation = incarnation
        self._started_s = clock.now_s()
        self._activity = activity or Activity()
        slo = {"ttft": config.gateway.rt_ttft_slo_s, "tpot": config.gateway.rt_tpot_slo_s}
        self._slo = {name: seconds for name, seconds in slo.items() if seconds}
        self.live_views = LiveViews(self.cluster, clock.now_s, self._send)
        self._managers = tuple(manager_endpoints)
        for manager, endpoint in manager_endpoints.items():
            bus.connect(manager, endpoint)
        self.planner: Planner | None = None
        """Planner, unless section `planner` is off."""

    async def serve(self) -> None:
        """Take messages until cancelled."""
        while True:
            sender, message = await self._bus.receive()
            match message:
                case Heartbeat() | Farewell() | RequestTraffic() | GatewayView() | ManagerView() | WorkerView() if (
                    message.instance != sender
                ):
                    self._warn_foreign(peer=sender, named=message.instance)
                case Heartbeat():
                    self._report(self.cluster.on_heartbeat(self._clock.now_s(), message))
                    if not message.quiet_s:
                        self._activity.work.set()
                case Farewell():
                    self._report(self.cluster.on_farewell(self._clock.now_s(), message))
                case RequestTraffic():
                    if self.planner is not None:
                        self.planner.on_traffic(message)
                case GatewayView() | ManagerView() | WorkerView():
                    self.live_views.on_view(message)
                case _:
                    self._warn_unexpected(peer=sender, type=type(message).__name__)

    async def push(self) -> None:
        """Let time pass and tell the manager, every `PUSH_INTERVAL_S`, until cancelled; seldom while all are quiet."""
        while True:
            quiet_s = self._activity.quiet_s()
            self.tick(quiet_s)
            await self._activity.pause(PUSH_INTERVAL_S, quiet_s)

    def tick(self, quiet_s: float = 0.0) -> None:
        now_s = self._clock.now_s()
        # The monitor is a process of the pipeline too.
        own = Heartbeat(
            self._instance, "global_monitor", self._incarnation, os.getpid(), True, "", process_stats(), quiet_s=quiet_s
        )
        self._report(self.cluster.on_heartbeat(now_s, own))
        self._report(self.cluster.tick(now_s))
        stats = self.cluster.stats_for_manager(quiet_s)
        for manager in self._managers:
            self._send(manager, stats)  # one that is away: the next will be fresher anyway

    def read_state(self, history_s: float) -> ClusterState:
        now_s = self._clock.now_s()
        return state(
            self.cluster,
            now_s,
            name=self._config.name,
            model=self._model,
            uptime_s=now_s - self._started_s,
            history_s=history_s,
            slo=self._slo,
            planner=None if self.planner is None else planner_state(self.planner),
        )

    def read_live(self, request_id: RequestId, history_s: float) -> LiveState:
        """Return the live page's state, with the life of this request; "": of none."""
        return live_state(self.read_state(history_s), self.live_views, request_id, self._clock.now_s())

    def _send(self, peer: InstanceId, message: Message) -> None:
        with contextlib.suppress(PeerUnreachable):  # it will be seen to be down
            self._bus.send(peer, message)

    def _report(self, events: list[Event]) -> None:
        for event in events:
            level = self._log.warning if event.what in ("down", "restarted") else self._log.info
            level(f"process_{event.what}", process=event.instance)
