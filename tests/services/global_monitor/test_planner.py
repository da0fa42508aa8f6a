"""The planner's host in the monitor: what it reads from heartbeats, and what it does with the machine's effects."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import structlog
from prometheus_client import CollectorRegistry

from cohort.common.config import Config, load_config
from cohort.common.errors import CohortError, ConfigError
from cohort.common.messages import Heartbeat, RequestTraffic
from cohort.common.planning.machine import PlannerSettings
from cohort.common.planning.settings import planner_settings
from cohort.common.planning.shape import Kind, Shape
from cohort.common.planning.simulation_jobs import Answer, Foreseen, Job, to_stats
from cohort.common.planning.traffic import Timing, TrafficRecord
from cohort.common.process.metrics import exposition
from cohort.common.types import Role, Slo, StepTimes
from cohort.services.global_monitor import launcher_orders
from cohort.services.global_monitor.aggregate import Cluster
from cohort.services.global_monitor.launcher_orders import LauncherOrders, OrderFailed
from cohort.services.global_monitor.live import planned
from cohort.services.global_monitor.planner import Planner, PlannerCollector, keep_config, planner_state, present
from tests.services.global_monitor.test_service import ManualClock

TIMES = StepTimes(0.004, 0.001, 1e-4, 0.006, 1e-8, 1e-7)
SLO = Slo(ttft_s=1.0)


def config(**planner: object) -> Config:
    given = {"mode": "act", "max_workers": 2, "settle_s": 2, "cpu_share": 1, **planner}
    pace = {"planner": {"interval_s": 1, "confirmations": 1}}
    return load_config(preset="unified", overrides={"planner": given, "experiment": pace})


def beat(
    instance: str, *, ready: bool = True, times: StepTimes | None = TIMES, role: str = "prefill_worker"
) -> Heartbeat:
    stats = {"kv_total_blocks": 100.0, **to_stats(times)}
    return Heartbeat(instance, role, 1, 1, ready, "", stats, {"dtype": "float32"})


class Orders:
    """A box that does what it is told, or cannot."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.failure = ""
        self.done: list[str] = []

    async def add(self, kind: Kind) -> str:
        if self.failure:
            raise CohortError(self.failure)
        name = f"{kind[0].value}-{len(self.rig.workers)}"
        self.rig.workers.append(name)
        self.done.append(f"add {name}")
        self.rig.beat()
        return name

    async def drain(self, instance: str) -> None:
        self.rig.workers.remove(instance)
        self.done.append(f"drain {instance}")
        self.rig.cluster.on_heartbeat(self.rig.clock.now_s(), beat(instance, ready=False))


class Rig:
    def __init__(self, options: Config, *workers: str) -> None:
        self.clock = ManualClock()
        self.cluster = Cluster(silence_s=1e9, history_s=1e9)
        self.workers = list(workers)
        self.orders = Orders(self)
        self.shares: dict[Shape, float] = {}
        self.settings: PlannerSettings = planner_settings(options)
        self.planner = Planner(
            options,
            self.settings,
            self.cluster,
            self.clock,
            structlog.get_logger(),
            simulate=self.simulate,
            orders=self.orders if options.planner.mode == "act" else None,
        )
        self.failure = ""
        self._count = 0

    async def simulate(self, job: Job) -> Answer:
        if self.failure:
            return Answer(job.round, (), 0.1, self.failure)
        found = tuple(
            Foreseen(shape, tuple(self.timing(index, shape) for index in range(len(job.requests))))
            for shape in job.shapes
        )
        return Answer(job.round, found, 0.1)

    def timing(self, index: int, shape: Shape) -> Timing:
        return Timing(0.1 if index * 37 % 100 < 100 * self.shares.get(shape, 0.5) else 9.0, 0.01, 9.5)

    def beat(self) -> None:
        for name in self.workers:
            self.cluster.on_heartbeat(self.clock.now_s(), beat(name))

    async def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.advance(1.0)
            self.beat()
            shape = present(config(), self.cluster)[0]
            records = [
                TrafficRecord(self._count + n, 0.5, 10, "rt", SLO, 5, 0, self.timing(self._count + n, shape))
                for n in range(5)
            ]
            self._count += 5
            self.planner.on_traffic(RequestTraffic("gateway", 1, records))
            self.planner.tick()
            for _ in range(10):
                await asyncio.sleep(0)


def unified(count: int) -> Shape:
    return Shape.of({(Role.UNIFIED, 1): count})


def test_the_shape_and_its_times_are_those_of_the_workers_that_are_ready():
    cluster = Cluster(silence_s=1e9, history_s=1e9)
    for each in (
        beat("unified-0"),
        beat("unified-1", times=msgspec.structs.replace(TIMES, step_s=0.008)),
        beat("unified-2", ready=False),
        beat("decode-0", role="decode_worker", times=None),
        beat("pod-7f", role="decode_worker", times=None),
        beat("gateway", role="gateway"),
    ):
        cluster.on_heartbeat(1.0, each)
    shape, costs = present(config(), cluster)
    assert shape == Shape.of({(Role.UNIFIED, 1): 2, (Role.DECODE, 1): 2})
    assert costs[1].times.step_s == pytest.approx(0.006) and costs[1].blocks == 100
    assert costs[1].kv_element_bytes == 4


async def test_what_no_round_can_begin_without_is_told():
    rig = Rig(config(), "unified-0")
    assert "workers" in planner_state(rig.planner).waits_for
    rig.cluster.on_heartbeat(rig.clock.now_s(), beat("unified-0", times=None))
    rig.planner.tick()
    assert "step times of workers of degree 1" in planner_state(rig.planner).waits_for
    await rig.run(1)
    assert planner_state(rig.planner).waits_for == ""


async def test_a_worker_is_added_and_drained_by_orders():
    rig = Rig(config(), "unified-0")
    rig.shares = {unified(1): 0.5, unified(2): 0.98}
    await rig.run(20)
    assert rig.orders.done == ["add unified-1"]
    rig.shares = {unified(1): 0.99, unified(2): 0.99}
    await rig.run(200)
    assert rig.orders.done == ["add unified-1", "drain unified-1"]
    state = planner_state(rig.planner)
    assert [each.action for each in state.decisions] == ["changed", "changed"]
    assert 0.0 < state.cpu_share <= 1.0 and state.shape == "1 unified"
    registry = CollectorRegistry()
    registry.register(PlannerCollector(rig.planner))
    text = exposition(registry).decode()
    assert 'cohort_planner_decisions_total{what="changed"} 2.0' in text
    assert 'cohort_planner_error{of="in_time"}' in text
    newest, oldest = planned(state, rig.clock.now_s())
    assert oldest.decision.kind == "planned" and oldest.decision.age_s > newest.decision.age_s
    assert "1 unified → 2 unified" in oldest.decision.what and "stands" in oldest.decision.what
    assert "50% → " in oldest.decision.reason


async def test_an_order_that_fails_is_a_failed_decision():
    rig = Rig(config(), "unified-0")
    rig.orders.failure = "every share of every GPU is taken"
    rig.shares = {unified(1): 0.5, unified(2): 0.98}
    await rig.run(30)
    state = planner_state(rig.planner)
    assert state.decisions[0].action == "failed" and "GPU" in state.decisions[0].why
    assert rig.workers == ["unified-0"] and state.shape == "1 unified"


async def test_advice_needs_no_orders():
    rig = Rig(config(mode="advise"), "unified-0")
    rig.shares = {unified(1): 0.5, unified(2): 0.98}
    await rig.run(30)
    assert [each.action for each in planner_state(rig.planner).decisions] == ["advised"]
    assert rig.workers == ["unified-0"]


async def test_a_simulation_that_fails_is_tried_again():
    rig = Rig(config(), "unified-0")
    rig.shares = {unified(1): 0.5, unified(2): 0.98}
    rig.failure = "ValueError: no such thing"
    await rig.run(10)
    assert rig.orders.done == [] and rig.planner.machine.counts["rounds_failed"] > 1
    rig.failure = ""
    await rig.run(10)
    assert rig.orders.done == ["add unified-1"]


def test_to_act_needs_a_launcher_here(tmp_path):
    with pytest.raises(ConfigError, match=r"cohort serve.*without one set advise"):
        LauncherOrders(tmp_path, config())


async def test_a_launcher_that_does_not_answer_is_not_waited_for_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher_orders, "_OVERHEAD_S", 0.1)
    silent = await asyncio.start_unix_server(lambda reader, writer: None, tmp_path / "workers.sock")
    (tmp_path / "monitor").mkdir()
    (tmp_path / "monitor" / "workers.sock").symlink_to(tmp_path / "workers.sock")
    quick = msgspec.structs.replace(config(start_timeout_s=0.1), drain_s=0.0)
    with pytest.raises(OrderFailed, match="has not answered"):
        await LauncherOrders(tmp_path / "monitor", quick).drain("unified-1")
    silent.close()


def test_no_key_is_in_the_file_of_the_simulations(tmp_path):
    options = load_config(preset="unified", overrides={"gateway": {"api_keys": ["sk-of-a-client"]}})
    keep_config(options, tmp_path / "planner.yaml")
    text = (tmp_path / "planner.yaml").read_text()
    assert "sk-of-a-client" not in text and (tmp_path / "planner.yaml").stat().st_mode & 0o077 == 0
    assert load_config([tmp_path / "planner.yaml"]).name == "unified"
