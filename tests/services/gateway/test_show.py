"""What a gateway shows of its requests to a person who looks at the live page."""

from __future__ import annotations

import asyncio

from cohort.common.messages import GatewayView, Look
from cohort.common.process.metrics import TTFT_STAGES
from cohort.common.transport.memory_bus import MemoryBus
from cohort.services.gateway.generation.past_requests import KEPT
from cohort.services.gateway.show import slo_tallies
from tests.services.gateway.conftest import OpenSite, Site


async def look(site: Site, monitor: MemoryBus, *requests: str) -> GatewayView:
    monitor.send("gateway", Look(2048, list(requests)))
    async with asyncio.timeout(5):
        while True:
            _, message = await monitor.receive()
            if isinstance(message, GatewayView):
                return message


def monitor_of(site: Site) -> MemoryBus:
    bus = site.network.bus("monitor")
    bus.connect("gateway", "memory://gateway")
    site.context.bus.connect("monitor", "memory://monitor")
    return bus


async def test_an_ended_request_has_its_stages_moments_and_outcomes(open_site: OpenSite) -> None:
    async with open_site() as site:
        monitor = monitor_of(site)
        assert (await look(site, monitor)).requests == []
        options = {"cohort": {"ttft_slo_ms": 60_000, "deadline_ms": 60_000}}
        status, body = await site.post("/v1/completions", {"prompt": "The sea", "max_tokens": 4, **options})
        assert status == 200
        view = await look(site, monitor)
        [brief] = view.requests
        assert (brief.state, brief.traffic_class, view.open, view.chosen) == ("finished", "rt", 0, [])
        assert brief.output_tokens == body["usage"]["completion_tokens"]
        [life] = (await look(site, monitor, brief.request_id, "unknown")).chosen
        assert life.outcomes == {"ttft": True, "deadline": True}
        assert life.first_token_s is not None and life.ended_s is not None
        assert list(life.stages) == list(TTFT_STAGES) and all(seconds >= 0 for seconds in life.stages.values())
        happened = [moment.what for moment in life.moments]
        assert happened[0] == "submitted" and "placed" in happened
        tallies = {(each.objective, each.key): (each.met, each.missed) for each in view.slo}
        assert tallies[("ttft", "")] == (1, 0)


async def test_an_open_request_is_shown_and_its_text_is_not(open_site: OpenSite) -> None:
    async with open_site(step_s=0.05) as site:
        monitor = monitor_of(site)
        ask = {"prompt": "A very secret prompt", "max_tokens": 200}
        running = asyncio.create_task(site.post("/v1/completions", ask))
        async with asyncio.timeout(5):
            while not (view := await look(site, monitor)).requests:  # noqa: ASYNC110 -- a look is all there is
                await asyncio.sleep(0.01)
        [brief] = view.requests
        assert brief.ended_s is None and brief.state in ("open", "waiting", "placed", "running") and view.open == 1
        shown = repr(await look(site, monitor, brief.request_id))
        assert "secret" not in shown and "owner" not in shown
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_only_the_monitor_is_shown_anything(open_site: OpenSite) -> None:
    async with open_site() as site:
        monitor_of(site)
        other = site.network.bus("decode-9")
        other.connect("gateway", "memory://gateway")
        other.send("gateway", Look(2048, []))
        assert (await site.post("/v1/completions", {"prompt": "The sea", "max_tokens": 2}))[0] == 200
        assert other.take() is None


async def test_what_is_remembered_is_bounded(open_site: OpenSite) -> None:
    async with open_site() as site:
        stats = site.gateway.streams.stats
        await site.post("/v1/completions", {"prompt": "The sea", "max_tokens": 2})
        [one] = stats.past.latest()
        for _ in range(2 * KEPT):
            stats.past._past.append(one)
        assert len(list(stats.past.latest())) == KEPT


def test_tallies_by_api_key_come_with_the_metrics_label() -> None:
    labels = {"class": "rt", "objective": "ttft"}
    counted = [
        ({**labels, "outcome": "met", "key": "a"}, 3.0),
        ({**labels, "outcome": "missed", "key": "b"}, 2.0),
        ({**labels, "outcome": "met", "key": "b"}, 1.0),
    ]
    found = {(each.key, each.met, each.missed) for each in slo_tallies(counted)}
    assert found == {("", 4, 2), ("a", 3, 0), ("b", 1, 2)}
