"""Shows this gateway's requests to a person who looks at the live page: answers `Look` with a `GatewayView`.

Called by `service.py`. Reads open requests and the latest ended ones then; no prompt, response or key is in a view.
"""

from __future__ import annotations

import contextlib
from itertools import islice

import msgspec

from cohort.common.addresses import MONITOR
from cohort.common.errors import PeerUnreachable
from cohort.common.messages import GatewayView, Look
from cohort.common.process.metrics import RequestMetrics
from cohort.common.process.service import ServiceContext
from cohort.common.types import InstanceId, RequestId
from cohort.common.views import MOST_CHOSEN, MOST_REQUESTS, RequestBrief, RequestLife, SloTally
from cohort.services.gateway.generation.past_requests import PastRequests, brief_of, life_of
from cohort.services.gateway.generation.streams import Streams

_OPEN_SHOWN = 2 * MOST_REQUESTS // 3
"""Open requests in the list at most; the rest are the ones that ended last."""
_MOST_TALLIES = 64


class GatewayShow:
    def __init__(self, context: ServiceContext, streams: Streams, metrics: RequestMetrics) -> None:
        self._context = context
        self._streams = streams
        self._metrics = metrics

    def show(self, sender: InstanceId, request: Look) -> None:
        """Answer the monitor's request, and no other. A view that cannot be sent is dropped: the next is fresher."""
        if sender != MONITOR:
            return
        with contextlib.suppress(PeerUnreachable):
            self._context.bus.send(MONITOR, self._view(request.requests[:MOST_CHOSEN]))

    def _view(self, chosen: list[RequestId]) -> GatewayView:
        now_s, past = self._context.clock.now_s(), self._streams.stats.past
        briefs: list[RequestBrief] = [
            brief_of(life_of(now_s, entry, times), None)
            for entry, times in islice(self._streams.open_requests(), _OPEN_SHOWN)
        ]
        briefs += [
            brief_of(each.life, now_s - each.ended_at_s) for each in islice(past.latest(), MOST_REQUESTS - len(briefs))
        ]
        lives = [life for name in chosen if (life := self._life(name, now_s, past)) is not None]
        return GatewayView(
            self._context.instance,
            briefs,
            len(self._streams),
            lives,
            slo_tallies(self._metrics.slo.values())[:_MOST_TALLIES],
        )

    def _life(self, name: RequestId, now_s: float, past: PastRequests) -> RequestLife | None:
        for entry, times in self._streams.open_requests():
            if entry.request_id == name:
                return life_of(now_s, entry, times)
        found = past.find(name)
        if found is None:
            return None
        return msgspec.structs.replace(found.life, age_s=found.life.age_s + now_s - found.ended_at_s)


def slo_tallies(counted: list[tuple[dict[str, str], float]]) -> list[SloTally]:
    """Sum `cohort_slo_requests_total`, given as labels and values. The label `key`, where there is one, is an API key's
    name; tallies of all requests are sums over the keys."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for labels, value in counted:
        traffic_class, objective = labels["class"], labels["objective"]
        for key in {"", labels.get("key", "")}:
            tally = sums.setdefault((key, traffic_class, objective), [0, 0])
            tally[labels["outcome"] != "met"] += int(value)
    return [SloTally(of, objective, met, missed, key) for (key, of, objective), (met, missed) in sorted(sums.items())]
