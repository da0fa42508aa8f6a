"""Messages under somebody else's name, and queues that fill a peer's memory.

Repeats these attacks on the processes of a pipeline, from inside its network: tokens that name the worker whose request
they belong to, so that they appear in its client's stream; reports, registrations and farewells in another worker's
name, so that it loses its requests; the manager's decisions from somebody who is not the manager; requests in another
gateway's name. With keys such a peer is not heard at all (test_containers.py); these are the checks behind that.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import structlog

from cohort.common.addresses import ROLES, never_dialling
from cohort.common.clock import SystemClock
from cohort.common.config import Config
from cohort.common.errors import PeerUnreachable
from cohort.common.machines.effects import Deliver, ManagerEffect, Send
from cohort.common.machines.events import Received, Tick
from cohort.common.machines.manager.manager import ManagerMachine, ManagerSettings
from cohort.common.messages import (
    AttemptsLost,
    Cancel,
    ClusterLoad,
    Farewell,
    GatewayHello,
    Heartbeat,
    KvOffer,
    Leaving,
    ManagerHello,
    Message,
    Predicted,
    Refused,
    RegisterWorker,
    SegmentEnded,
    StartSegment,
    Submit,
    TokenBatch,
    TokenUpdate,
    WorkerReport,
)
from cohort.common.policies.baselines.fcfs import Fcfs
from cohort.common.policies.baselines.placements import Colocated
from cohort.common.transport import zmq_bus
from cohort.common.transport.zmq_bus import ZmqBus
from cohort.common.types import Attempt, Outcome, Prediction, Request, Role, SamplingParams, WorkerCapacity, WorkerStats
from cohort.services.global_monitor.service import GlobalMonitor
from tests.common.machines import small_worker
from tests.common.machines.small_gateway import Gateway, only

CAPACITY = WorkerCapacity(Role.UNIFIED, "m", 1000, 1, 1, 1, 1, 16, 100, 0, 64, 512)
ATTEMPT = Attempt("a", 0)


# -- the gateway -----------------------------------------------------------------------------------------------------


def test_tokens_in_another_workers_name_reach_no_stream():
    gateway = Gateway()
    entry = gateway.serve("a")
    update = TokenUpdate(ATTEMPT, 3, [666])
    effects = gateway.tell(Received("stranger", TokenBatch("w", [update])))
    assert only(Deliver, effects) == [] and entry.output == []
    assert gateway.machine.misnamed_total == 1
    gateway.tokens("a", 3, [8])
    assert entry.output == [8]


@pytest.mark.parametrize(
    "lie",
    [
        AttemptsLost([ATTEMPT], "it is mine now"),
        Refused(ATTEMPT, 400, "no"),
        ManagerHello(99),
        ClusterLoad(False, [], 0, 0, 0, 0, 0, 0, 0.0),
    ],
)
def test_the_managers_words_count_from_the_manager_alone(lie: Message):
    gateway = Gateway()
    entry = gateway.serve("a")
    assert gateway.tell(Received("w", lie)) == []
    assert gateway.machine.misnamed_total == 1
    assert entry.attempt == ATTEMPT and gateway.machine.not_ready_because(gateway.now_s) is None


def test_a_prediction_counts_from_the_predictor_alone():
    gateway = Gateway()
    gateway.offer("a")
    lie = Prediction(1, 1, 1, 1)
    assert gateway.tell(Received("w", Predicted("a", lie))) == []
    assert gateway.machine.misnamed_total == 1


# -- the manager -----------------------------------------------------------------------------------------------------


def manager() -> ManagerMachine:
    """Worker u is there and computes request a of gateway g."""
    order = Fcfs(dispatch_ahead_tokens=1000)
    made = ManagerMachine("manager", 7, ManagerSettings(3.0, 2.0, 0.5, 2), order, Colocated(), None, 0.0)
    made.handle(
        0.0,
        Received("g", GatewayHello("g", 1, "at-g", ["u"])),
        Received("u", RegisterWorker("u", 1, "at-u", CAPACITY, [])),
        Tick(),
    )
    made.handle(0.1, Received("g", Submit(request("a"))))
    return made


def request(name: str) -> Request:
    return Request(Attempt(name, 0), "g", [1, 2, 3], 3, SamplingParams(max_tokens=5), 0.0)


def messages(effects: list[ManagerEffect]) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, Send)]


@pytest.mark.parametrize(
    "lie",
    [
        RegisterWorker("u", 2, "at-strangers", CAPACITY, []),
        WorkerReport("u", 1, 9, WorkerStats(), []),
        SegmentEnded("u", ATTEMPT, Outcome.FAILED, 0, "broken"),
        Leaving("u", 1),
        GatewayHello("g", 2, "at-strangers"),
        Submit(request("b")),
    ],
)
def test_the_manager_believes_no_message_in_anothers_name(lie: Message):
    made = manager()
    assert (made.live, made.workers) == (1, 1)
    assert messages(made.handle(0.2, Received("stranger", lie))) == []
    assert (made.live, made.workers) == (1, 1)
    assert made.counters.misnamed == 1
    assert made.stats()["misnamed_total"] == 1.0
    # What it is said of goes on: the next request is sent to the true worker, its tokens to the true gateway.
    started = [it for it in messages(made.handle(0.3, Received("g", Submit(request("c"))))) if type(it) is StartSegment]
    assert [it.gateway_endpoint for it in started] == ["at-g"]


def test_only_its_gateway_cancels_a_request():
    made = manager()
    made.handle(0.2, Received("other", GatewayHello("other", 1, "at-other")))
    assert messages(made.handle(0.3, Received("other", Cancel([ATTEMPT])))) == []
    assert made.live == 1
    made.handle(0.4, Received("g", Cancel([ATTEMPT])))
    assert made.live == 0


# -- workers and the monitor -----------------------------------------------------------------------------------------


def test_a_worker_computes_for_the_manager_alone():
    worker = small_worker.machine(Role.UNIFIED)
    lie = small_worker.segment(0)
    assert worker.handle(0.0, Received("stranger", lie)) == []
    assert worker.idle and worker.counters.misnamed == 1
    assert worker.handle(0.0, Received("manager", lie)) != []


def test_a_worker_takes_no_offer_in_anothers_name():
    worker = small_worker.machine(Role.DECODE)
    worker.handle(0.0, Received("stranger", KvOffer("prefill", ATTEMPT, 1, 12)))
    assert worker.counters.misnamed == 1


async def test_no_process_reports_for_another():
    class Inbox:
        """Says these things and is then silent."""

        def __init__(self, *said: tuple[str, Message]) -> None:
            self._said = list(said)
            self.heard = asyncio.Event()

        def connect(self, peer: str, endpoint: str) -> None: ...

        async def receive(self) -> tuple[str, Message]:
            if not self._said:
                self.heard.set()
                await asyncio.Event().wait()
            return self._said.pop(0)

    def beat(url: str) -> Heartbeat:
        return Heartbeat("decode-0", "decode_worker", 1, 1, True, url, {})

    inbox = Inbox(
        ("decode-0", beat("http://true")), ("stranger", beat("http://false")), ("stranger", Farewell("decode-0", 1))
    )
    monitor = GlobalMonitor(
        Config(),
        inbox,  # type: ignore[arg-type]
        SystemClock(),
        structlog.get_logger(),
        manager_endpoints={"manager": ""},
        model="m",
        instance="monitor",
        incarnation=1,
    )
    serving = asyncio.create_task(monitor.serve())
    await asyncio.wait_for(inbox.heard.wait(), 5)
    serving.cancel()
    process = monitor.cluster.processes["decode-0"]
    assert (process.metrics_url, process.status.value) == ("http://true", "up")


# -- the bus ---------------------------------------------------------------------------------------------------------


async def test_a_peer_that_never_dials_a_process_is_not_heard_in_its_inbox(tmp_path: Path):
    """Whoever dials the gateway's inbox as "manager" could have told it the manager's decisions."""
    gateway = ZmqBus("gateway", f"ipc://{tmp_path}/gateway.sock", never_dial=never_dialling("gateway"))
    true, false = ZmqBus("manager", f"ipc://{tmp_path}/manager.sock"), ZmqBus("manager")
    gateway.connect("manager", true.endpoint)
    false.connect("gateway", gateway.endpoint)
    false.send("gateway", AttemptsLost([ATTEMPT], "a lie"))
    gateway.send("manager", GatewayHello("gateway", 1, gateway.endpoint))
    await asyncio.wait_for(true.receive(), 5)
    true.send("gateway", ManagerHello(1))
    assert await asyncio.wait_for(gateway.receive(), 5) == ("manager", ManagerHello(1))
    async with asyncio.timeout(10):
        while not gateway.counters.forged:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(gateway.receive(), 0.3)
    assert gateway.counters.forged == 1
    for bus in (gateway, true, false):
        await bus.close()


def test_processes_that_do_dial_are_heard():
    """Who dials whom: workers the gateway and each other; gateway, workers and monitor the manager; all the monitor."""
    assert not never_dialling("gateway") & {"prefill-0", "decode-0"}
    assert not never_dialling("bucketing_manager") & {"gateway", "monitor", "prefill-0"}
    assert not never_dialling("length_predictor") & {"gateway"}
    assert never_dialling("global_monitor") == frozenset()
    assert all("gateway" not in never_dialling(role) for role in ROLES)


async def test_messages_that_wait_for_a_peer_are_bounded_in_bytes(tmp_path: Path):
    """64 MiB messages, 8192 of them, would have been half a terabyte."""
    size = 8 << 20
    bus = ZmqBus("a")
    bus.connect("b", f"ipc://{tmp_path}/b.sock")  # is not there yet
    large = AttemptsLost([], "x" * size)
    taken = 0
    with pytest.raises(PeerUnreachable, match="queue is full"):
        for _ in range(40):
            bus.send("b", large)
            taken += 1
    assert zmq_bus.LARGE_QUEUE_BYTES - 2 * size < taken * size <= zmq_bus.LARGE_QUEUE_BYTES
    assert bus.counters.unreachable == 1
    bus.send("b", ManagerHello(1))  # small ones have bounds of their own
    b = ZmqBus("b", f"ipc://{tmp_path}/b.sock")
    for _ in range(taken):
        assert (await asyncio.wait_for(b.receive(), 10)) == ("a", large)
    assert await asyncio.wait_for(b.receive(), 5) == ("a", ManagerHello(1))
    await until_accepted(bus, "b", large)  # libzmq has let go
    assert await asyncio.wait_for(b.receive(), 5) == ("a", large)
    for end in (bus, b):
        await end.close()


async def test_a_bus_that_holds_large_messages_closes(tmp_path: Path):
    bus = ZmqBus("a")
    bus.connect("b", f"ipc://{tmp_path}/b.sock")  # never comes
    bus.send("b", AttemptsLost([], "x" * (8 << 20)))
    await asyncio.wait_for(bus.close(), 10)


async def test_answers_are_bounded_likewise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Over the inbox's side of a connection; a peer that reads nothing."""
    monkeypatch.setattr(zmq_bus, "LARGE_QUEUE_BYTES", 40 << 20)
    hub = ZmqBus("hub", f"ipc://{tmp_path}/hub.sock")
    deaf = ZmqBus("deaf")
    deaf.connect("hub", hub.endpoint)
    deaf.send("hub", ManagerHello(1))
    await asyncio.wait_for(hub.receive(), 5)
    large = AttemptsLost([], "x" * (4 << 20))
    with pytest.raises(PeerUnreachable, match="queue is full"):
        for _ in range(zmq_bus.RECEIVED_MESSAGES):
            hub.send("deaf", large)
    for bus in (hub, deaf):
        await bus.close()


async def until_accepted(bus: ZmqBus, peer: str, message: Message) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                bus.send(peer, message)
                return
            except PeerUnreachable:
                await asyncio.sleep(0.02)
