"""While somebody looks at the live page: asks processes for their views, keeps the latest, counts rates.

    viewer opens /api/live ──▶ a `Look` a second to gateways, manager, workers ──▶ GatewayView, ManagerView, WorkerView
    the last viewer leaves ──▶ no further `Look`; what was heard is forgotten

So the page costs the pipeline nothing while nobody looks, and the same for one viewer as for many. Called by
`service.py` (messages) and `server.py` (viewers); `live.py` makes the feed of what is kept here. Never acts on it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from cohort.common.messages import Look, Message, View, WorkerView
from cohort.common.types import InstanceId, RequestId
from cohort.common.views import MOST_CHOSEN, MOST_ID, DraftTally
from cohort.services.global_monitor.aggregate import Cluster
from cohort.services.global_monitor.window import WINDOW_S

V = TypeVar("V", bound=View)

POLL_S = 1.0
"""Interval of requests to the processes, and of updates of the page."""
MOST_VIEWERS = MOST_CHOSEN
"""Pages that are open at once; a page beyond them is refused until later."""
MOST_WORKERS = 32
"""Workers that are asked; of a larger cluster the first ones, along their names."""
_ALL_CELLS = 8192
_LEAST_CELLS = 256
_STALE_S = 4.0
"""A view older than this is of a process that does not answer, and is not shown."""


@dataclass(slots=True, eq=False)
class Viewer:
    """A page that is open. `request_id`: whose life it shows; "" = none was chosen."""

    request_id: RequestId
    updated: asyncio.Event = field(default_factory=asyncio.Event)


class TooManyViewers(Exception):
    """`MOST_VIEWERS` look already."""


class _Seen(NamedTuple):
    at_s: float
    incarnation: int
    counters: dict[str, float]


class Aged(NamedTuple, Generic[V]):
    """A view of a process that is up."""

    age_s: float
    view: V


class Meter:
    """Rates of the views' counters over the last minute, as far as somebody looked; a new incarnation starts anew."""

    def __init__(self) -> None:
        self._seen: dict[InstanceId, deque[_Seen]] = {}

    def note(self, now_s: float, instance: InstanceId, incarnation: int, counters: dict[str, float]) -> None:
        seen = self._seen.setdefault(instance, deque(maxlen=2 * round(WINDOW_S)))
        if seen and seen[-1].incarnation != incarnation:
            seen.clear()
        if not seen or now_s > seen[-1].at_s:
            seen.append(_Seen(now_s, incarnation, counters))
        while len(seen) > 2 and seen[1].at_s <= now_s - WINDOW_S:
            seen.popleft()

    def rate(self, instance: InstanceId, name: str) -> float | None:
        """Return the rate per second; None while it cannot be known."""
        seen = self._seen.get(instance)
        if not seen or len(seen) < 2 or name not in seen[-1].counters:
            return None
        before, now = seen[0], seen[-1]
        return max(0.0, now.counters[name] - before.counters.get(name, 0.0)) / (now.at_s - before.at_s)

    def keep(self, instances: Iterable[InstanceId]) -> None:
        """Forget all others."""
        present = set(instances)
        self._seen = {name: seen for name, seen in self._seen.items() if name in present}


class LiveViews:
    def __init__(
        self, cluster: Cluster, now_s: Callable[[], float], send: Callable[[InstanceId, Message], None]
    ) -> None:
        """`send` says nothing where a peer is away."""
        self._cluster = cluster
        self._now_s = now_s
        self._send = send
        self._viewers: list[Viewer] = []
        self._watched = asyncio.Event()
        self._views: dict[InstanceId, tuple[float, View]] = {}
        self.meter = Meter()

    @asynccontextmanager
    async def watching(self, request_id: RequestId) -> AsyncIterator[Viewer]:
        """Register a viewer, whose `updated` is set after each round of views. Raises `TooManyViewers`."""
        if len(self._viewers) >= MOST_VIEWERS:
            raise TooManyViewers
        viewer = Viewer(request_id[:MOST_ID])
        self._viewers.append(viewer)
        self._watched.set()
        self._request_views()  # what it sees first comes at once
        try:
            yield viewer
        finally:
            self._viewers.remove(viewer)
            if not self._viewers:
                self._watched.clear()
                self._views.clear()
                self.meter = Meter()

    def on_view(self, view: View) -> None:
        """Store a view. One that nobody requested, or that comes after the last viewer left, is dropped."""
        if not self._viewers:
            return
        process = self._cluster.processes.get(view.instance)
        if process is None:
            return
        now_s = self._now_s()
        self._views[view.instance] = (now_s, view)
        if isinstance(view, WorkerView):
            counters = {"sent": view.kv_sent_bytes, "received": view.kv_received_bytes}
            for tally in view.drafts:
                counters |= draft_counters(tally)
            self.meter.note(now_s, view.instance, process.incarnation, counters)

    async def run(self) -> None:
        """Run rounds until cancelled."""
        while True:
            await self._watched.wait()
            await asyncio.sleep(POLL_S)
            self.round()

    def round(self) -> None:
        """Wake the viewers for the last round's views, and request new ones."""
        if not self._viewers:
            return
        self.meter.keep(self._cluster.processes)
        self._request_views()
        for viewer in self._viewers:
            viewer.updated.set()

    def fresh(self, kind: type[V]) -> list[Aged[V]]:
        """Return the views of this kind, by instance."""
        now_s, up = self._now_s(), {process.instance for process in self._cluster.up()}
        return [
            Aged(now_s - received_s, view)
            for name, (received_s, view) in sorted(self._views.items())
            if name in up and now_s - received_s <= _STALE_S and isinstance(view, kind)
        ]

    def _request_views(self) -> None:
        services = [process for process in self._cluster.up() if process.role in ("gateway", "bucketing_manager")]
        workers = sorted((p for p in self._cluster.up() if p.role.endswith("_worker")), key=lambda p: p.instance)
        cells = max(_LEAST_CELLS, _ALL_CELLS // max(1, len(workers)))
        chosen = list(dict.fromkeys(viewer.request_id for viewer in self._viewers if viewer.request_id))[:MOST_CHOSEN]
        for process in (*services, *workers[:MOST_WORKERS]):
            self._send(process.instance, Look(cells, chosen if process.role == "gateway" else []))


def draft_counters(tally: DraftTally) -> dict[str, float]:
    """Return a class's counters under the meter's names."""
    of_class = tally.traffic_class
    return {
        f"{of_class} rows": tally.rows,
        f"{of_class} proposed": tally.proposed,
        f"{of_class} accepted": tally.accepted,
    }
