"""The monitor on an in-process bus: heartbeats in, figures to the manager, page, JSON and metrics out."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
import structlog
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from cohort.common.config import Config
from cohort.common.http.browsers import BrowserGuard
from cohort.common.messages import ClusterStats, Farewell, Heartbeat
from cohort.common.process.metrics import TOKEN_HEADER
from cohort.common.transport.memory_bus import MemoryBus, MemoryNetwork
from cohort.services.global_monitor import exporter
from cohort.services.global_monitor.aggregate import Status
from cohort.services.global_monitor.exporter import ClusterCollector, Exporter
from cohort.services.global_monitor.server import LiveFeed, application
from cohort.services.global_monitor.service import GlobalMonitor

DEADLINE_S = 5.0


class ManualClock:
    """Moves when a test says so."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds


class Rig:
    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.clock = ManualClock()
        self.monitor = GlobalMonitor(
            Config(),
            self.network.bus("monitor"),
            self.clock,
            structlog.get_logger(),
            manager_endpoints={"manager": "memory://manager"},
            model="tiny",
            instance="monitor",
            incarnation=1,
        )

    def peer(self, name: str) -> MemoryBus:
        bus = self.network.bus(name)
        bus.connect("monitor", "memory://monitor")
        return bus

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    task = asyncio.create_task(rig.monitor.serve())
    yield rig
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def http(rig: Rig) -> AsyncIterator[TestClient[web.Request, web.Application]]:
    registry = CollectorRegistry()
    registry.register(ClusterCollector(rig.monitor.cluster, rig.clock.now_s))
    async with aiohttp.ClientSession() as session:
        exporter = Exporter("monitor", rig.monitor.cluster, registry, session, structlog.get_logger())
        guard = BrowserGuard("127.0.0.1", (), option="monitor.allowed_hosts")
        app = application(
            exporter,
            rig.monitor.read_state,
            instance="monitor",
            guard=guard,
            feed=LiveFeed(rig.monitor.live_views, rig.monitor.read_live),
        )
        async with TestClient(TestServer(app)) as client:
            yield client


def beat(instance: str, role: str, url: str = "", **stats: float) -> Heartbeat:
    return Heartbeat(instance, role, 1, 1, True, url, stats)


async def test_the_manager_hears_of_demand_and_the_state_holds_all_processes(rig: Rig) -> None:
    rig.monitor.tick()  # no manager yet: harmless
    manager = rig.peer("manager")
    rig.peer("decode-0").send("monitor", beat("decode-0", "decode_worker", running=3))
    await rig.settle()
    rig.clock.advance(1.0)
    rig.monitor.tick()
    async with asyncio.timeout(DEADLINE_S):
        await manager.receive()  # what was pushed before it came
        sender, told = await manager.receive()
    assert sender == "monitor" and isinstance(told, ClusterStats)
    assert told == rig.monitor.cluster.stats_for_manager()
    processes = rig.monitor.cluster.processes
    assert set(processes) == {"monitor", "decode-0"}
    assert (processes["decode-0"].age_s(rig.clock.now_s()), processes["decode-0"].status) == (1.0, Status.UP)
    assert processes["decode-0"].stats == {"running": 3}


async def test_silence_and_farewell_show_in_the_state(rig: Rig) -> None:
    for name in ("decode-0", "decode-1"):
        rig.peer(name).send("monitor", beat(name, "decode_worker"))
    await rig.settle()
    rig.peer("decode-1").send("monitor", Farewell("decode-1", 1))
    await rig.settle()
    rig.clock.advance(10.0)
    rig.monitor.tick()
    state = rig.monitor.read_state(60.0)
    assert {p.instance: p.status for p in state.processes} == {"monitor": "up", "decode-0": "down", "decode-1": "left"}
    assert [(e.instance, e.what) for e in state.events][:2] == [("decode-0", "down"), ("monitor", "appeared")]


async def test_the_pusher_keeps_its_interval_while_the_manager_is_away(rig: Rig) -> None:
    task = asyncio.create_task(rig.monitor.push())
    await rig.settle()
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_page_state_and_health(rig: Rig) -> None:
    rig.peer("gateway").send("monitor", beat("gateway", "gateway", requests_running=2, new_stat=7))
    await rig.settle()
    rig.monitor.tick()
    async with http(rig) as client:
        page = await client.get("/")
        text = await page.text()
        assert page.status == 200 and page.content_type == "text/html"
        assert "/api/state" in text
        assert all(part.startswith("/") for part in re.findall(r'(?:src|href)="([^"#]+)"', text))
        for outside in ("http://", "https://", "@import", "url("):
            assert outside not in text.replace("http://www.w3.org/2000/svg", ""), outside
        state = await (await client.get("/api/state")).json()
        assert [process["instance"] for process in state["processes"]] == ["gateway", "monitor"]
        assert state["processes"][0]["stats"] == {"requests_running": 2, "new_stat": 7}
        assert (state["model"], state["name"]) == ("tiny", "cohort")
        assert (await client.get("/api/state?history_s=soon")).status == 400
        assert (await client.get("/health")).status == 200
        assert (await client.get("/ready")).status == 200


async def test_the_page_is_told_of_devices_and_warnings(rig: Rig) -> None:
    facts, warnings = {"device": "NVIDIA H200", "kernels": "triton"}, ["2 workers share this GPU without MPS"]
    rig.peer("w").send("monitor", Heartbeat("w", "prefill_worker", 1, 1, True, "", {}, facts, warnings))
    await rig.settle()
    async with http(rig) as client:
        state = await (await client.get("/api/state")).json()
    [worker] = [process for process in state["processes"] if process["instance"] == "w"]
    assert (worker["facts"], worker["warnings"]) == (facts, warnings)
    rig.peer("w").send("monitor", Heartbeat("w", "prefill_worker", 1, 1, True, "", {}))
    await rig.settle()
    assert rig.monitor.cluster.processes["w"].warnings == []


async def test_a_process_is_shown_its_own_token_and_the_state_has_none(rig: Rig) -> None:
    shown: list[str] = []

    async def metrics(request: web.Request) -> web.Response:
        shown.append(request.headers[TOKEN_HEADER])
        return web.Response(text='cohort_key_requests_total{key="alice"} 1\n')

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics)])
    async with TestServer(app) as server, http(rig) as client:
        gateway = msgspec.structs.replace(
            beat("gateway", "gateway", str(server.make_url("/metrics"))), metrics_token="t1"
        )
        rig.peer("gateway").send("monitor", gateway)
        await rig.settle()
        assert 'key="alice"' in await (await client.get("/metrics")).text()
        assert shown == ["t1"]
        assert "t1" not in repr(rig.monitor.read_state(60.0))


async def test_history_is_cut_to_the_span_asked(rig: Rig) -> None:
    for _ in range(60):
        rig.monitor.tick()
        rig.clock.advance(1.0)
    state = rig.monitor.read_state(10.0)
    assert len(state.sample_ages_s) == 10
    assert state.sample_ages_s == sorted(state.sample_ages_s, reverse=True)
    assert all(len(column) == 10 for column in state.samples.values())
    assert len(rig.monitor.read_state(900.0).sample_ages_s) == 59


async def test_metrics_of_all_processes_join_and_the_unreachable_do_not_hurt(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def fine(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(text="# TYPE work gauge\nwork 5\nprocess_cpu_seconds_total 1\n")

    async def broken(_: web.Request) -> web.Response:
        return web.Response(status=500)

    async def hangs(_: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/fine", fine), web.get("/broken", broken), web.get("/hangs", hangs)])
    async with TestServer(app) as server, http(rig) as client:
        for name, path in (("a", "fine"), ("b", "fine"), ("c", "broken"), ("d", "hangs")):
            rig.peer(name).send("monitor", beat(name, "decode_worker", str(server.make_url(f"/{path}"))))
        rig.peer("e").send("monitor", beat("e", "decode_worker", "http://127.0.0.1:1/metrics"))
        rig.peer("f").send("monitor", beat("f", "decode_worker", "nonsense"))
        await rig.settle()
        monkeypatch.setattr(exporter, "_KEEP_S", 60.0)
        started_s = time.monotonic()
        answers = await asyncio.gather(*(client.get("/metrics") for _ in range(3)))
        assert time.monotonic() - started_s < DEADLINE_S
        assert asked == 2  # three scrapers, one fetch
        assert answers[0].headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = await answers[0].text()
    series = {
        (sample.name, sample.labels.get("instance")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert series[("work", "a")] == series[("work", "b")] == 5
    assert series[("cohort_up", "d")] == 1
    assert [series[("cohort_scrape_up", name)] for name in "abcdef"] == [1, 1, 0, 0, 0, 0]
