"""A monitor with recorded reports, for the pages' tests: heartbeats and views as processes send them, no process.

`serve` is the monitor's own application over its own state; only what would come over the bus is put in by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import structlog
from aiohttp.test_utils import TestServer

from cohort.common.clock import SystemClock
from cohort.common.config import Config
from cohort.common.http.browsers import BrowserGuard
from cohort.common.messages import GatewayView, Heartbeat, Look, ManagerView, Message, View, WorkerView
from cohort.common.planning.machine import PlanDecision
from cohort.common.planning.shape import Shape
from cohort.common.process.metrics import LATENCY_BUCKETS_S
from cohort.common.transport.memory_bus import MemoryNetwork
from cohort.common.types import InstanceId, QueueBucket, Role
from cohort.common.views import (
    BlockMap,
    CellRun,
    Decision,
    DraftTally,
    Iteration,
    Moment,
    QueueClass,
    RequestBrief,
    RequestLife,
    Row,
    SloTally,
    WorkerTimes,
)
from cohort.services.global_monitor.live import LiveState, live_state
from cohort.services.global_monitor.live_views import POLL_S
from cohort.services.global_monitor.planner import PlannerState
from cohort.services.global_monitor.server import LiveFeed, application
from cohort.services.global_monitor.service import GlobalMonitor

MARKUP = "<img src=x onerror=document.title=1>"
ENDED = "0c7d1f27a1b24e0c9f11"


class NoExporter:
    async def expose(self) -> bytes:
        return b""


def life(request_id: str) -> RequestLife:
    return RequestLife(
        request_id=request_id,
        traffic_class="rt",
        state="finished",
        age_s=12.0,
        prompt_tokens=300,
        output_tokens=80,
        cached_tokens=16,
        max_tokens=200,
        predicted=90.0,
        attempts=2,
        instances=["prefill-0", "decode-0"],
        stages={
            "tokenize": 0.001,
            "predict": 0.002,
            "bucket": 0.1,
            "prefill_queue": 0.2,
            "prefill": 0.4,
            "transfer": 0.05,
        },
        moments=[Moment(0.003, "submitted", "", ""), Moment(0.103, "placed", "prefill-0", MARKUP)],
        times=[WorkerTimes("prefill-0", 0.2, 0.4, 0.0, 0.0, 0), WorkerTimes("decode-0", 0.0, 0.0, 0.05, 5.0, 1)],
        slo={"ttft_s": 1.0},
        outcomes={"ttft": True, "tpot": False},
        first_token_s=0.76,
        last_token_s=6.0,
        ended_s=6.1,
    )


def view_of(peer: InstanceId, asked: Look, many: int) -> View | None:
    """What the process of this name would answer. `many`: requests, rows and blocks of a busy one."""
    if peer == "gateway":
        requests = [RequestBrief(ENDED, "rt", "finished", 12.0, 300, 80, 2, ["prefill-0", "decode-0"], 5.9, 0.76, True)]
        requests += [
            RequestBrief(f"{MARKUP}{n}", "be", "running", 2.0, 30, 4, 1, [MARKUP]) for n in range(min(many, 50))
        ]
        slo = [SloTally("rt", "ttft", 90, 10), SloTally("rt", "ttft", 9, 1, key=MARKUP)]
        return GatewayView("gateway", requests, many, [life(each) for each in asked.requests], slo)
    if peer == "manager":
        decisions = [Decision(3.0, "refused", ENDED, [], "infeasible", MARKUP, 2.5), Decision(4.0, "placed", "x")]
        buckets = [QueueBucket(0, 256, many), QueueBucket(256, 1024, 3), QueueBucket(1024, 8192, 0)]
        return ManagerView("manager", "buckets", [QueueClass("rt", True, many + 3, 4000, 1.5)], buckets, decisions)
    if peer not in ("prefill-0", "decode-0"):
        return None
    cells = asked.cells if many > 100 else 120
    row = Row(f"{MARKUP}0", 0, "be", "decode", 2.0, 33, 34, 30, 200, 40.0, 3, 1, 1, 0)
    runs = [CellRun(cells - 40, 0, -1), CellRun(20, 2, -1), CellRun(10, 3, 0), CellRun(10, 1, -1)]
    counts = BlockMap(cells, 16, 1, runs, {"free": cells - 40, "rt": 20, "be": 10, "cached": 10}, 40, 30)
    role = "prefill" if peer == "prefill-0" else "decode"
    drafts = [DraftTally("rt", 40, 160, 120), DraftTally("be", 9, 30, 0)] if peer == "decode-0" else []
    rows, iteration = ([row], Iteration(1, 0, 0)) if many else ([], None)
    return WorkerView(peer, role, many, rows, counts, [], iteration, 1e6, 0.0, drafts)


def counts_of(serial: int) -> dict[str, list[float]]:
    """What the gateway's histograms say after so many beats: a TTFT of 0.05 to 0.1 s, one in ten of 2.5 to 5 s."""
    place = {bound: n for n, bound in enumerate(LATENCY_BUCKETS_S)}
    counts = {f"{name} rt": [0.0] * (len(place) + 1) for name in ("ttft", "tpot", "itl")}
    counts["ttft rt"][place[0.1]], counts["ttft rt"][place[5]] = 9.0 * serial, 1.0 * serial
    counts["tpot rt"][place[0.025]] = counts["itl rt"][place[0.025]] = 10.0 * serial
    return counts | {"slo rt ttft": [9.0 * serial, 1.0 * serial], "refused queue_full": [2.0 * serial]}


def planned(now_s: float) -> PlannerState:
    """A change that was judged, one that is not yet, and one that failed for a reason that somebody else wrote."""
    small, large = Shape.of({(Role.UNIFIED, 1): 1}), Shape.of({(Role.UNIFIED, 1): 2})
    decisions = [
        PlanDecision(3, now_s - 5, "failed", large, small, why=f"no device is free {MARKUP}"),
        PlanDecision(2, now_s - 60, "changed", small, large, 0.7, 0.95, 0.04),
        PlanDecision(1, now_s - 600, "changed", large, small, 0.99, 0.98, 0.02, 0.99, 0.97, "stands"),
    ]
    return PlannerState("act", "", str(small), 0.95, 0.93, 0.02, 0.1, 0.05, 0.04, 0.01, {"changed": 2}, decisions)


class Recorded:
    """`beat` is what processes say by themselves; views come when the monitor asks."""

    def __init__(self, *, many: int = 2, standbys: int = 0) -> None:
        """`standbys`: managers beside the one that leads; a planner decides as well then."""
        self.many = many
        self.standbys = standbys
        self.looks = 0
        self.history_s = 0.0
        """History that the page's curves were last read for."""
        self.down: set[str] = set()
        network = MemoryNetwork()
        self.monitor = GlobalMonitor(
            Config(),
            network.bus("monitor"),
            SystemClock(),
            structlog.get_logger(),
            manager_endpoints={"manager": "memory://manager"},
            model=MARKUP,
            instance="monitor",
            incarnation=1,
        )
        setattr(self.monitor.live_views, "_send", self._asked)  # noqa: B010 -- in place of the bus

    def _asked(self, peer: InstanceId, message: Message) -> None:
        if isinstance(message, Look) and peer not in self.down:
            self.looks += 1
            view = view_of(peer, message, self.many)
            if view is not None:
                asyncio.get_running_loop().call_soon(self.monitor.live_views.on_view, view)

    def live(self, request_id: str, history_s: float) -> LiveState:
        """As the monitor has it, with what a planner of its own would tell."""
        self.history_s = history_s
        if not self.standbys:
            return self.monitor.read_live(request_id, history_s)
        now_s = SystemClock().now_s()
        told = msgspec.structs.replace(self.monitor.read_state(history_s), planner=planned(now_s))
        return live_state(told, self.monitor.live_views, request_id, now_s)

    def beat(self, serial: int) -> None:
        roles = {
            "gateway": "gateway",
            "predictor": "length_predictor",
            "manager": "bucketing_manager",
            "prefill-0": "prefill_worker",
            "decode-0": "decode_worker",
        }
        roles |= {f"manager-{number + 1}": "bucketing_manager" for number in range(self.standbys)}
        for name, role in roles.items():
            if name in self.down:
                continue
            stats = {"requests_total": 2.0 * serial, "generation_tokens_total": 50.0 * serial, "requests_running": 3.0}
            if role == "bucketing_manager":
                stats["leads"] = float(name == "manager")
            url = "javascript:alert(1)" if name == "gateway" else ""
            warnings = [f"GPU 0 is there and unused {MARKUP}"] if name == "decode-0" else []
            counts = counts_of(serial) if name == "gateway" else {}
            if name.endswith("-0"):  # a worker; one has nothing to do
                steps = 20.0 * serial if name == "decode-0" else 0.0
                counts = {"steps": [steps, 0.03 * steps, 4.0 * steps]}
                stats |= {"kv_total_blocks": 120.0, "kv_used_blocks": 30.0, "kv_cached_blocks": 10.0}
            beat = Heartbeat(name, role, 1, 1, name != "predictor", url, stats, {}, warnings, counts=counts)
            self.monitor.cluster.on_heartbeat(SystemClock().now_s(), beat)


@asynccontextmanager
async def served(recorded: Recorded) -> AsyncIterator[str]:
    """The page's address."""
    monitor = recorded.monitor
    guard = BrowserGuard("127.0.0.1", (), option="monitor.allowed_hosts")
    feed = LiveFeed(monitor.live_views, recorded.live)
    app = application(
        NoExporter(),  # type: ignore[arg-type]
        monitor.read_state,
        instance="monitor",
        guard=guard,
        feed=feed,
    )

    async def live() -> None:
        serial = 0
        while True:
            serial += 1
            recorded.beat(serial)
            monitor.tick()
            monitor.live_views.round()
            await asyncio.sleep(POLL_S)

    living = asyncio.create_task(live())
    server = TestServer(app)
    await server.start_server(shutdown_timeout=0.1)
    try:
        yield str(server.make_url("/"))
    finally:
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
        await server.close()
