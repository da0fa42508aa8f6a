"""The length predictor's loop: PredictLength → model → Predicted; ObserveLength → calibration, training child.

Hosted by `__main__.py`, and by tests on an in-process bus. Every answer is computed at once from the model at hand;
nothing here waits for training, disk or another process.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from structlog.stdlib import BoundLogger

from cohort.common.config import Config
from cohort.common.errors import PeerUnreachable
from cohort.common.messages import LengthFacts, ObserveLength, Predicted, PredictLength
from cohort.common.paths import DEFAULT_MODEL_NAME, state_dir
from cohort.common.process.activity import Activity
from cohort.common.tracing.spans import Tracing
from cohort.common.tracing.traceparent import parse
from cohort.common.transport.bus import Bus
from cohort.common.transport.repeated_warning import RepeatedWarning
from cohort.common.types import Prediction
from cohort.services.length_predictor.buffer import Observation
from cohort.services.length_predictor.calibration import OnlineCalibration
from cohort.services.length_predictor.features import FeatureVector, extract
from cohort.services.length_predictor.model import LengthModel, default_prediction, to_prediction
from cohort.services.length_predictor.trainer import NEVER, USUAL, TrainingChild
from cohort.services.length_predictor.training_wire import TrainingPace

_ERROR_MEMORY = 0.98  # moving average of the error: about the last 50 requests


def state_file(config: Config) -> Path:
    """Return the file of the served model's state: lengths are a habit of a model."""
    name = config.model.served_name or Path(config.model.path).name or DEFAULT_MODEL_NAME
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    return state_dir(config.state.folder) / "length_predictor" / f"{safe}.npz"


class LengthPredictor:
    """Owner of the present model, its calibration and the training child."""

    def __init__(
        self, config: Config, bus: Bus, log: BoundLogger, registry: CollectorRegistry, pace: TrainingPace = USUAL
    ) -> None:
        self.model: LengthModel | None = None
        self._calibration = OnlineCalibration()
        self._bus = bus
        self._log = log
        self._warn_unexpected = RepeatedWarning(log, "unexpected_message")
        self._default_mean = float(config.gateway.default_prediction_tokens)
        self._predictions = 0
        self._observations = 0
        self._error_tokens = math.nan
        self.tracing: Tracing | None = None
        self.activity = Activity()
        self.pace = pace if config.predictor.learns else NEVER
        self.child = TrainingChild(self.pace, state_file(config), log, self._take_model)
        self._answered = Counter(
            "cohort_predictor_predictions", "Predictions answered, by source.", ["source"], registry=registry
        )
        self._latency = Histogram(
            "cohort_predictor_latency_seconds",
            "Time to compute one prediction.",
            registry=registry,
            buckets=(5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2),
        )
        self._learned_from = Counter(
            "cohort_predictor_observations", "Finished requests learned from.", registry=registry
        )
        self._errors = Histogram(
            "cohort_predictor_absolute_error_tokens",
            "Difference between the predicted mean and the true length.",
            registry=registry,
            buckets=(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000),
        )
        for name, help_text, read in (
            ("cohort_predictor_trainings", "Trainings since start.", lambda: self.child.trainings),
            (
                "cohort_predictor_dropped_observations",
                "Observations the training child could not take.",
                lambda: self.child.dropped,
            ),
            (
                "cohort_predictor_model_observations",
                "Requests the current model was fitted to.",
                lambda: self.model.trained_on if self.model else 0,
            ),
        ):
            Gauge(name, help_text, registry=registry).set_function(read)

    async def serve(self) -> None:
        """Answer until cancelled."""
        while True:
            sender, message = await self._bus.receive()
            self.activity.work.set()
            match message:
                case PredictLength():
                    try:
                        self._bus.send(sender, self._answer(message))
                    except PeerUnreachable:
                        self._log.debug("predictor_asker_gone", peer=sender, request_id=message.request_id)
                case ObserveLength():
                    self.observe(message.facts, message.output_tokens, message.truncated)
                case _:
                    self._warn_unexpected(peer=sender, type=type(message).__name__)

    def _answer(self, message: PredictLength) -> Predicted:
        started_s = time.monotonic()
        answer = Predicted(message.request_id, self.predict(message.facts))
        if self.tracing is not None and (parent := parse(message.traceparent)) is not None:
            source, mean = answer.prediction.source, answer.prediction.mean
            self.tracing.span("predict length", started_s, time.monotonic(), parent, source=source, mean_tokens=mean)
        return answer

    def predict(self, facts: LengthFacts) -> Prediction:
        started_s = time.perf_counter()
        if self.model is None:
            prediction = default_prediction(self._default_mean, facts.max_tokens)
        else:
            prediction = to_prediction(self._log_lengths(self.model, extract(facts)), facts.max_tokens)
        self._predictions += 1
        self._answered.labels(prediction.source).inc()
        self._latency.observe(time.perf_counter() - started_s)
        return prediction

    def observe(self, facts: LengthFacts, output_tokens: int, truncated: bool) -> None:
        """Learn from a finished request; one without any output says nothing."""
        if output_tokens < 1:
            return
        vector = extract(facts)
        self._observations += 1
        self._learned_from.inc()
        if self.model is not None:
            log_lengths = self._log_lengths(self.model, vector)
            error = abs(to_prediction(log_lengths, facts.max_tokens).mean - output_tokens)
            self._errors.observe(error)
            first = math.isnan(self._error_tokens)
            self._error_tokens = error if first else _ERROR_MEMORY * self._error_tokens + (1 - _ERROR_MEMORY) * error
            self._calibration.observe(log_lengths, math.log(output_tokens), math.log(max(1, facts.max_tokens)))
        self.child.observe(Observation(vector, output_tokens, max(1, facts.max_tokens), truncated))

    def stats(self) -> dict[str, float]:
        """Return stats for heartbeats; the error only once there is one."""
        stats = {
            "observations": float(self.child.remembered + self._observations),
            "predictions_total": float(self._predictions),
            "trainings_total": float(self.child.trainings),
        }
        if not math.isnan(self._error_tokens):
            stats["mae_tokens"] = self._error_tokens
        return stats

    def _log_lengths(self, model: LengthModel, vector: FeatureVector) -> NDArray[np.float64]:
        return self._calibration.adjusted(model.predict_log(vector))

    def _take_model(self, model: LengthModel) -> None:
        self.model = model
        self._calibration = OnlineCalibration()
