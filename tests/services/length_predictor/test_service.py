"""The running service: answers from the first moment, learns, survives restarts and the death of its child."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import structlog
from prometheus_client import CollectorRegistry, generate_latest

from cohort.common.config import Config, ModelConfig, StateConfig
from cohort.common.messages import LengthFacts, ObserveLength, Predicted, PredictLength
from cohort.common.transport.memory_bus import MemoryBus, MemoryNetwork
from cohort.common.types import Prediction
from cohort.services.length_predictor import trainer
from cohort.services.length_predictor.service import LengthPredictor, state_file
from cohort.services.length_predictor.training_wire import TrainingPace

if TYPE_CHECKING:
    from .conftest import World

DEADLINE_S = 120.0
CHILD = """#!{python}
import sys
sys.argv[1:3] = []
from cohort.services.length_predictor import trainer_process
trainer_process.NICENESS = 0
trainer_process.main()
"""


class Rig:
    """A predictor and a gateway's end of the bus."""

    def __init__(self, service: LengthPredictor, gateway: MemoryBus, registry: CollectorRegistry) -> None:
        self.service = service
        self.gateway = gateway
        self.registry = registry

    async def ask(self, facts: LengthFacts, request_id: str = "r") -> Prediction:
        self.gateway.send("predictor", PredictLength(request_id, facts))
        async with asyncio.timeout(DEADLINE_S):
            sender, message = await self.gateway.receive()
        assert isinstance(message, Predicted) and (sender, message.request_id) == ("predictor", request_id)
        return message.prediction

    def tell(self, facts: LengthFacts, output_tokens: int) -> None:
        self.gateway.send(
            "predictor",
            ObserveLength("r", facts, min(output_tokens, facts.max_tokens), output_tokens > facts.max_tokens),
        )

    async def settled(self, observations: int) -> None:
        """Until the service has taken so many observations in."""
        await self.until(lambda: self.service.stats()["observations"] == observations)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 - what is awaited happens in another process
                await asyncio.sleep(0.02)


def configured(tmp_path: Path) -> Config:
    return Config(state=StateConfig(folder=str(tmp_path)))


def kept(tmp_path: Path) -> Path:
    return state_file(configured(tmp_path))


@asynccontextmanager
async def running(tmp_path: Path, **changes: int) -> AsyncIterator[Rig]:
    config = configured(tmp_path)
    network = MemoryNetwork()
    registry = CollectorRegistry()
    service = LengthPredictor(
        config, network.bus("predictor"), structlog.get_logger(), registry, TrainingPace(save_every_s=0.2, **changes)
    )
    gateway = network.bus("gateway")
    gateway.connect("predictor", "memory://predictor")
    tasks = [asyncio.create_task(service.serve()), asyncio.create_task(service.child.run())]
    try:
        yield Rig(service, gateway, registry)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results


@pytest.fixture(autouse=True)
def not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the lowest priority a child would learn only when nothing else computes on this machine."""
    child = tmp_path / "child"
    child.write_text(CHILD.format(python=sys.executable))
    child.chmod(0o700)
    monkeypatch.setattr(trainer, "sys", SimpleNamespace(executable=str(child)))


@pytest.mark.pipeline
async def test_first_default_then_learned_then_remembered_also_by_the_next_child(world: World, tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        facts, _ = world.request()
        assert (await rig.ask(facts)).source == "default"
        for _ in range(40):
            rig.tell(*world.request())
        await rig.until(lambda: rig.service.model is not None)
        learned = await rig.ask(facts)
        assert learned.source == "model"
        for _ in range(20):
            rig.tell(*world.request())
        await rig.until(lambda: rig.service.stats()["observations"] == 60)
        stats = rig.service.stats()
        assert stats["trainings_total"] >= 1 and stats["mae_tokens"] > 0
        text = generate_latest(rig.registry).decode()
        assert 'cohort_predictor_predictions_total{source="default"} 1.0' in text
        assert "cohort_predictor_observations_total 60.0" in text

    async with running(tmp_path) as rig:
        await rig.until(lambda: rig.service.model is not None)
        assert rig.service.stats()["observations"] == 60
        assert (await rig.ask(facts)).source == "model"
        await rig.until(lambda: rig.service.child.pid is not None)
        first = rig.service.child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert (await rig.ask(facts)).source == "model"  # serving never noticed
        await rig.until(lambda: rig.service.child.pid not in (None, first))
        for _ in range(70):
            rig.tell(*world.request())
        await rig.until(lambda: rig.service.model is not None and rig.service.model.trained_on >= 100)


@pytest.mark.pipeline
async def test_corrupt_state_starts_afresh_and_the_child_ends_with_its_parent(world: World, tmp_path: Path) -> None:
    kept(tmp_path).parent.mkdir()
    kept(tmp_path).write_bytes(b"PK\x03\x04 nonsense")
    async with running(tmp_path) as rig:
        await rig.until(lambda: kept(tmp_path).with_suffix(".npz.unreadable").exists())
        assert (await rig.ask(world.request()[0])).source == "default"
        rig.tell(*world.request())
        await rig.until(lambda: kept(tmp_path).exists())  # and it learns on
        pid = rig.service.child.pid
        rig.tell(*world.request())
        await rig.until(lambda: rig.service.stats()["observations"] == 2)
    assert pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        raise AssertionError("the training child is still there")
    assert kept(tmp_path).exists()


@pytest.mark.pipeline
async def test_predictions_do_not_wait_for_training(world: World, tmp_path: Path) -> None:
    async with running(tmp_path, min_observations=1000, retrain_every=1000) as rig:
        requests = [world.request() for _ in range(1000)]
        for start in range(0, len(requests), 200):
            for request in requests[start : start + 200]:
                rig.tell(*request)
            await rig.settled(start + 200)
        made = 0
        while rig.service.model is None and made < 20_000:  # the child is training now
            rig.service.predict(requests[made % 500][0])
            made += 1
            await asyncio.sleep(0)
        assert made > 100, "a prediction that waits for the training comes when there is a model"
        await rig.until(lambda: rig.service.model is not None)


async def test_strange_messages_and_vanished_askers_do_no_harm(world: World, tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        rig.tell(LengthFacts([], False, 0, float("nan"), 0, 0), 0)
        prediction = await rig.ask(LengthFacts([], False, 0, float("nan"), 0, 0))
        assert (prediction.p50, prediction.p99) == (1.0, 1.0)
        assert rig.service.stats()["observations"] == 0


def test_each_model_has_its_own_state() -> None:
    one = state_file(Config(model=ModelConfig(path="/models/Qwen2.5-7B/")))
    other = state_file(Config(model=ModelConfig(served_name="org/My model")))
    assert one.name == "Qwen2.5-7B.npz"
    assert other.name == "org_My_model.npz"
