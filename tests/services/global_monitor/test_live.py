"""The live page's feed: views are asked for while somebody looks and never else; what is sent is bounded, and text."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from cohort.common.messages import GatewayView, Heartbeat, Look, ManagerView, Message, WorkerView
from cohort.common.types import QueueBucket
from cohort.common.views import (
    MOST_BUCKETS,
    MOST_CELLS,
    MOST_DECISIONS,
    MOST_REQUESTS,
    MOST_ROWS,
    BlockMap,
    CellRun,
    Decision,
    DraftTally,
    QueueClass,
    RequestBrief,
    RequestLife,
    Row,
    SloTally,
)
from cohort.services.global_monitor.aggregate import Cluster
from cohort.services.global_monitor.live import LiveDrafts, LiveState, live_state
from cohort.services.global_monitor.live_views import MOST_VIEWERS, MOST_WORKERS, LiveViews, Meter, TooManyViewers
from cohort.services.global_monitor.page import state

MARKUP = "<img src=x onerror=alert(1)>\"'&</script>"


def brief(name: str, ended_s: float | None = None) -> RequestBrief:
    return RequestBrief(name, "rt", "running", 1.0, 10, 5, 1, ["decode-0"], ended_s)


def life(name: str) -> RequestLife:
    return RequestLife(name, "rt", "running", 1.0, 10, 5, 0, 40, 20.0, 1, ["d"], {}, [], [], {}, {})


def gateway_view(instance: str = "gateway", names: tuple[str, ...] = ("a",), met: int = 1) -> GatewayView:
    tallies = [SloTally("rt", "ttft", met, 1), SloTally("rt", "ttft", met, 1, key="team")]
    return GatewayView(instance, [brief(name) for name in names], len(names), [life(n) for n in names[:1]], tallies)


def worker_view(instance: str, rows: int = 1, runs: int = 1, sent: float = 0.0) -> WorkerView:
    made = [Row(f"r{n}", 0, "be", "decode", 1.0, 9, 10, 5, 40, 20.0, 1, 1, 0, 0) for n in range(rows)]
    blocks = BlockMap(runs, 16, 1, [CellRun(1, n % 5, -1) for n in range(runs)], {"free": runs}, 0, 0)
    return WorkerView(instance, "decode", rows, made, blocks, [], None, sent)


class Scene:
    """A monitor's state with processes and a list of what it asked them."""

    def __init__(self, *processes: tuple[str, str]) -> None:
        self.now_s = 0.0
        self.asked: list[tuple[str, Message]] = []
        self.cluster = Cluster(silence_s=3.0, history_s=900.0)
        self.looking = LiveViews(self.cluster, lambda: self.now_s, lambda to, what: self.asked.append((to, what)))
        self.processes = processes
        self.beat()

    def beat(self, **stats: float) -> None:
        for name, role in self.processes:
            self.cluster.on_heartbeat(self.now_s, Heartbeat(name, role, 1, 1, True, "", stats))

    def read(self, request_id: str = "") -> LiveState:
        now = state(self.cluster, self.now_s, name="n", model="m", uptime_s=1.0, history_s=300.0)
        return live_state(now, self.looking, request_id)


PIPELINE = (
    ("gateway", "gateway"),
    ("predictor", "length_predictor"),
    ("manager", "bucketing_manager"),
    ("decode-0", "decode_worker"),
)


async def test_nothing_is_asked_while_nobody_looks() -> None:
    scene = Scene(*PIPELINE)
    for _ in range(5):
        scene.looking.round()
    scene.looking.on_view(gateway_view())
    assert scene.asked == [] and scene.read().requests == []
    async with scene.looking.watching(""):
        assert [to for to, _ in scene.asked] == ["gateway", "manager", "decode-0"]  # at once
        scene.looking.on_view(gateway_view())
        assert [each.request_id for each in scene.read().requests] == ["a"]
    scene.asked.clear()
    scene.looking.round()
    assert scene.asked == [] and scene.read().requests == []  # what was heard is forgotten


async def test_many_viewers_ask_as_much_as_one_and_each_has_its_request() -> None:
    scene = Scene(*PIPELINE)
    async with scene.looking.watching("first") as one, scene.looking.watching("second") as other:
        scene.asked.clear()
        scene.looking.round()
        assert len(scene.asked) == 3 and one.updated.is_set() and other.updated.is_set()
        wanted = {to: message.requests for to, message in scene.asked if isinstance(message, Look)}
        assert wanted == {"gateway": ["first", "second"], "manager": [], "decode-0": []}
        scene.looking.on_view(gateway_view(names=("first", "x")))
        assert (found := scene.read("first").life) is not None and found.request_id == "first"
        assert scene.read("second").life is None


async def test_viewers_are_bounded() -> None:
    scene = Scene(*PIPELINE)
    watching = [scene.looking.watching("") for _ in range(MOST_VIEWERS)]
    for each in watching:
        await each.__aenter__()
    with pytest.raises(TooManyViewers):
        await scene.looking.watching("").__aenter__()
    await watching[0].__aexit__(None, None, None)
    async with scene.looking.watching(""):
        pass


async def test_what_is_old_or_of_the_dead_is_not_shown() -> None:
    scene = Scene(*PIPELINE)
    async with scene.looking.watching(""):
        scene.looking.on_view(worker_view("decode-0"))
        scene.looking.on_view(worker_view("stranger"))
        assert [worker.instance for worker in scene.read().workers] == ["decode-0"]
        scene.now_s = 5.0
        scene.beat()
        assert scene.read().workers == []  # it lives and does not answer
        scene.looking.on_view(worker_view("decode-0"))
        scene.now_s = 8.5
        scene.cluster.tick(scene.now_s)
        assert scene.read().workers == []  # it is down


async def test_ages_go_on_and_decisions_of_all_come_in_order() -> None:
    scene = Scene(*PIPELINE)
    async with scene.looking.watching(""):
        earlier, later = Decision(4.0, "refused", "a"), Decision(1.0, "preempted", "b")
        scene.looking.on_view(ManagerView("manager", "fcfs", [], [], [earlier]))
        scene.looking.on_view(msgspec.structs.replace(worker_view("decode-0"), decisions=[later]))
        scene.looking.on_view(gateway_view())
        scene.now_s = 2.0
        shown = scene.read()
        assert [(one.by, one.decision.age_s) for one in shown.decisions] == [("decode-0", 3.0), ("manager", 6.0)]
        assert shown.requests[0].age_s == 3.0


async def test_gateways_are_summed() -> None:
    scene = Scene(("g0", "gateway"), ("g1", "gateway"))
    async with scene.looking.watching(""):
        scene.looking.on_view(gateway_view("g0", ("a", "b"), met=3))
        scene.looking.on_view(gateway_view("g1", ("c",), met=5))
        shown = scene.read()
        assert shown.open_requests == 3 and {each.request_id for each in shown.requests} == {"a", "b", "c"}
        assert [(each.key, each.met, each.missed) for each in shown.slo] == [("", 8, 2), ("team", 8, 2)]


async def test_kv_rates_are_of_the_last_minute() -> None:
    scene = Scene(*PIPELINE)
    async with scene.looking.watching(""):
        scene.looking.on_view(worker_view("decode-0", sent=1000.0))
        assert scene.read().workers[0].kv_sent_per_s is None
        scene.now_s = 2.0
        scene.beat()
        scene.looking.on_view(worker_view("decode-0", sent=5000.0))
        assert scene.read().workers[0].kv_sent_per_s == 2000.0


async def test_drafts_are_told_by_class_lately_or_since_the_start() -> None:
    scene = Scene(*PIPELINE)
    async with scene.looking.watching(""):
        view = worker_view("decode-0")
        assert scene.read().workers == []
        scene.looking.on_view(msgspec.structs.replace(view, drafts=[DraftTally("be", 10, 40, 20)]))
        assert scene.read().workers[0].drafts == [LiveDrafts("be", 10, 0.5, 3.0, lately=False)]
        scene.now_s = 2.0
        scene.beat()
        more = [DraftTally("rt", 4, 8, 0), DraftTally("be", 20, 80, 59)]
        scene.looking.on_view(msgspec.structs.replace(view, drafts=more))
        assert scene.read().workers[0].drafts == [
            LiveDrafts("rt", 4, 0.0, 1.0, lately=True),
            LiveDrafts("be", 20, 0.975, 4.9, lately=True),
        ]


def test_a_meter_starts_anew_with_an_incarnation_and_forgets_the_gone() -> None:
    meter = Meter()
    for second in range(12):
        meter.note(float(second), "w", 1, {"n": 10.0 * second})
    assert meter.rate("w", "n") == pytest.approx(10.0)
    meter.note(12.0, "w", 2, {"n": 1.0})
    assert meter.rate("w", "n") is None
    meter.note(14.0, "w", 2, {"n": 5.0})
    assert (meter.rate("w", "n"), meter.rate("w", "other")) == (2.0, None)
    meter.keep([])
    assert meter.rate("w", "n") is None


async def test_a_large_busy_cluster_makes_no_large_feed() -> None:
    """Every process and every view at its bound, and more workers than are asked."""
    workers = tuple((f"decode-{n:03}", "decode_worker") for n in range(300))
    scene = Scene(("gateway", "gateway"), ("manager", "bucketing_manager"), *workers)
    scene.beat(**{f"stat_{n}_total": 123456.789 for n in range(60)})
    for second in range(900):
        scene.cluster.tick(float(second) / 400)  # samples as many as there may be
    async with scene.looking.watching("x" * 256):
        looks = {to: message for to, message in scene.asked if isinstance(message, Look)}
        assert len(looks) == MOST_WORKERS + 2
        cells = looks["decode-000"].cells
        decisions = [Decision(1.0, "refused", "r" * 32, [], "w" * 80, "w" * 200) for _ in range(MOST_DECISIONS)]
        for name in looks:
            if name.startswith("decode"):
                view = worker_view(name, rows=MOST_ROWS, runs=min(cells, MOST_CELLS))
                scene.looking.on_view(msgspec.structs.replace(view, decisions=decisions))
        buckets = [QueueBucket(n, n + 1, 1000) for n in range(MOST_BUCKETS)]
        classes = [QueueClass("rt", True, 9000, 10**7, 1.0)]
        scene.looking.on_view(ManagerView("manager", "buckets", classes, buckets, decisions))
        scene.looking.on_view(gateway_view(names=tuple("i" * 250 + str(n) for n in range(MOST_REQUESTS))))
        shown = scene.read("x" * 256)
        assert shown.processes == 302 and len(shown.cluster.processes) < 302
        assert len(msgspec.json.encode(shown)) < 600_000
        assert len(shown.requests) <= MOST_REQUESTS and len(shown.decisions) <= MOST_DECISIONS


async def test_markup_in_names_stays_text() -> None:
    """What a client or a model's folder is called is data on its whole way; the page's own test is in tests/browser."""
    scene = Scene(("gateway", "gateway"))
    async with scene.looking.watching(MARKUP):
        scene.looking.on_view(gateway_view(names=(MARKUP,)))
        shown: dict[str, Any] = json.loads(msgspec.json.encode(scene.read(MARKUP)))
        assert shown["requests"][0]["request_id"] == shown["life"]["request_id"] == MARKUP
        assert "\n" not in msgspec.json.encode(scene.read(MARKUP)).decode()  # one event is one line
