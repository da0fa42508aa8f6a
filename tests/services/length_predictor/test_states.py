"""Worker, predictor and manager on one bus: a state in, a revision out."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import structlog
from prometheus_client import CollectorRegistry

from cohort.common.config import Config, PredictorConfig, StateConfig
from cohort.common.messages import LengthFacts, ObserveLength, Predicted, PredictLength, PromptState, RevisePrediction
from cohort.common.transport.memory_bus import MemoryNetwork
from cohort.common.types import Attempt
from cohort.services.length_predictor.service import LengthPredictor

WIDTH = 16


async def test_states_revise_predictions_from_prompts(tmp_path: Path) -> None:
    network = MemoryNetwork()
    config = Config(state=StateConfig(folder=str(tmp_path)), predictor=PredictorConfig(refine_after_prefill=True))
    bus = network.bus("predictor")
    service = LengthPredictor(config, bus, structlog.get_logger(), CollectorRegistry())
    gateway, worker, manager = (network.bus(name) for name in ("gateway", "decode-0", "manager"))
    for asker in (gateway, worker):
        asker.connect("predictor", "memory://predictor")
    bus.connect("manager", "memory://manager")
    serving = asyncio.create_task(service.serve())
    random = np.random.default_rng(0)
    facts = LengthFacts([5, 6, 7], True, 1000, 1.0, 0, 12)  # the same prompt every time

    async def request(name: str) -> tuple[int, bytes]:
        gateway.send("predictor", PredictLength(name, facts))
        async with asyncio.timeout(10):
            _, answer = await gateway.receive()
        assert isinstance(answer, Predicted) and answer.prediction.source == "default"
        length = int(random.choice([30, 600]))
        state = random.normal(scale=0.2, size=WIDTH)
        state[2] += 3.0 if length == 600 else -3.0
        hidden = state.astype("<f2").tobytes()
        worker.send("predictor", PromptState(Attempt(name, 1), hidden))
        return length, hidden

    try:
        for index in range(120):
            length, _ = await request(f"r{index}")
            await asyncio.sleep(0)
            # Worker and gateway have queues of their own; the end of a request comes long after its prompt.
            while service.second._in_flight[f"r{index}"].state is None:  # noqa: ASYNC110 - it is on the bus
                await asyncio.sleep(0)
            gateway.send("predictor", ObserveLength(f"r{index}", facts, length, False))
        length, _ = await request("last")
        async with asyncio.timeout(10):
            while True:
                sender, revision = await manager.receive()
                assert isinstance(revision, RevisePrediction) and sender == "predictor"
                if revision.request_id == "last":
                    break
        assert 0.5 < revision.prediction.mean / length < 2.0
        stats = service.stats()
        assert stats["refined_log_error"] < stats["base_log_error"]
        await manager.close()
        await request("nobody listens")  # is answered all the same
    finally:
        serving.cancel()
