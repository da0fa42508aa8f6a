"""States in, revisions out: only for requests that were asked about, only when refining helps."""

from __future__ import annotations

import asyncio
import contextlib
import math
from pathlib import Path

import numpy as np
import structlog

from cohort.common.messages import PromptState, RevisePrediction
from cohort.common.types import Attempt, Prediction
from cohort.services.length_predictor.prediction_revisions import PredictionRevisions

WIDTH = 12


class Rig:
    def __init__(self, path: Path) -> None:
        self.sent: list[RevisePrediction] = []
        self.opinions = PredictionRevisions(path, structlog.get_logger(), self.sent.append)
        self.random = np.random.default_rng(0)

    def request(self, name: str) -> tuple[PromptState, int]:
        """Two kinds of answers that only the state tells apart."""
        long = self.random.random() < 0.5
        state = self.random.normal(scale=0.3, size=WIDTH)
        state[3] += 2.0 if long else -2.0
        length = round((400 if long else 25) * math.exp(self.random.normal(0.0, 0.1)))
        return PromptState(Attempt(name, 1), state.astype("<f2").tobytes()), length

    def serve(self, count: int) -> None:
        for index in range(count):
            name = f"r{index}"
            self.opinions.on_predicted(name, Prediction(100.0, 90.0, 300.0, 500.0), 1000)
            state, length = self.request(name)
            self.opinions.on_prompt_state(state)
            self.opinions.finished(name, length, truncated=False)


def test_after_some_requests_revisions_are_sent_and_right(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "r.npz")
    rig.serve(60)
    assert rig.sent == []
    rig.serve(300)
    assert rig.opinions.revisions == len(rig.sent) > 200
    for _ in range(40):
        rig.opinions.on_predicted("x", Prediction(100.0, 90.0, 300.0, 500.0), 1000)
        state, length = rig.request("x")
        rig.opinions.on_prompt_state(state)
        prediction = rig.sent[-1].prediction
        assert rig.sent[-1].request_id == "x"
        assert prediction.source == "refined"
        assert 0.4 < prediction.mean / length < 2.5  # the base is wrong by a factor of four
        assert prediction.p50 <= prediction.p90 <= prediction.p99 <= 1000.0
    stats = rig.opinions.stats()
    assert stats["refined_log_error"] < 0.5 * stats["base_log_error"]


def test_unrequested_or_malformed_states_are_ignored(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "r.npz")
    state, _ = rig.request("unknown")
    rig.opinions.on_prompt_state(state)
    rig.opinions.finished("unknown", 5, truncated=False)
    rig.opinions.on_predicted("r", Prediction(10.0, 9.0, 30.0, 50.0), 100)
    for hidden in (b"", b"odd", np.array([np.inf, 1.0], "<f2").tobytes()):
        rig.opinions.on_prompt_state(PromptState(Attempt("r", 1), hidden))
    rig.opinions.finished("r", 5, truncated=False)
    assert rig.opinions.refiner is None
    assert rig.opinions.stats() == {}


def test_requests_whose_end_is_never_told_are_forgotten(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "r.npz")
    for index in range(5000):
        rig.opinions.on_predicted(f"r{index}", Prediction(10.0, 9.0, 30.0, 50.0), 100)
    assert len(rig.opinions._in_flight) == 4096
    assert "r0" not in rig.opinions._in_flight


async def test_learned_state_is_saved_when_the_service_ends(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "r.npz")
    keeping = asyncio.create_task(rig.opinions.save_periodically(60.0))
    await asyncio.sleep(0)
    rig.serve(150)
    keeping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await keeping
    fresh = Rig(tmp_path / "r.npz")
    fresh.opinions.on_predicted("x", Prediction(100.0, 90.0, 300.0, 500.0), 1000)
    fresh.opinions.on_prompt_state(fresh.request("x")[0])
    assert fresh.opinions.refiner is not None and fresh.opinions.refiner.learned == 150
    assert len(fresh.sent) == 1
