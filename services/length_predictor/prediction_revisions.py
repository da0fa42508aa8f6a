"""The predictor's second answer: PromptState from a worker → refined prediction → RevisePrediction to the manager.

Remembers, for requests in flight, the first prediction and the state that came; when the request's true length is
known the refiner learns from both. Owned by `service.py`; no request ever waits for it.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from structlog.stdlib import BoundLogger

from cohort.common.messages import PromptState, RevisePrediction
from cohort.common.types import Prediction, RequestId
from cohort.services.length_predictor.model import to_prediction
from cohort.services.length_predictor.refinement import Floats, Refiner

_IN_FLIGHT = 4096
"""Requests remembered; the oldest is forgotten first (its end was never reported)."""


@dataclass(slots=True)
class _InFlight:
    log_mean: float
    max_tokens: int
    state: Floats | None = None


class PredictionRevisions:
    """`send` takes the revision to the manager and may drop it."""

    def __init__(self, path: Path, log: BoundLogger, send: Callable[[RevisePrediction], None]) -> None:
        self.revisions = 0
        self.refiner: Refiner | None = None
        self._path = path
        self._log = log
        self._send = send
        self._in_flight: OrderedDict[RequestId, _InFlight] = OrderedDict()
        self._saved = 0

    def on_predicted(self, request_id: RequestId, prediction: Prediction, max_tokens: int) -> None:
        """Record the first prediction."""
        self._in_flight[request_id] = _InFlight(math.log(max(1.0, prediction.mean)), max_tokens)
        if len(self._in_flight) > _IN_FLIGHT:
            self._in_flight.popitem(last=False)

    def on_prompt_state(self, message: PromptState) -> None:
        """E4 · Send a revised prediction once the prompt is computed, if revisions are known to be better."""
        request = self._in_flight.get(message.attempt.request_id)
        if request is None or len(message.hidden) % 2:
            return  # another choice of the same prompt, or predicted before this process started
        state = np.frombuffer(message.hidden, dtype="<f2").astype(np.float64)
        if not len(state) or not np.isfinite(state).all():
            return
        if self.refiner is None or self.refiner.hidden_size != len(state):
            self.refiner = Refiner.load(self._path, len(state))
            self._saved = self.refiner.learned
        request.state = state
        if self.refiner.better:
            refined = to_prediction(self.refiner.predict_log(request.log_mean, state), request.max_tokens)
            self.revisions += 1
            self._send(
                RevisePrediction(
                    message.attempt.request_id,
                    Prediction(refined.mean, refined.p50, refined.p90, refined.p99, "refined"),
                )
            )

    def finished(self, request_id: RequestId, output_tokens: int, truncated: bool) -> None:
        """Learn from the true length."""
        request = self._in_flight.pop(request_id, None)
        if request is not None and request.state is not None and self.refiner is not None and output_tokens > 0:
            self.refiner.learn(request.log_mean, request.state, output_tokens, request.max_tokens, truncated)

    async def save_periodically(self, every_s: float) -> None:
        """Save what was learned now and then, and once more when cancelled."""
        try:
            while True:
                await asyncio.sleep(every_s)
                await asyncio.to_thread(self._save)
        finally:
            self._save()

    def _save(self) -> None:
        refiner = self.refiner
        if refiner is not None and refiner.learned != self._saved:
            learned = refiner.learned
            try:
                refiner.save(self._path)
                self._saved = learned
            except OSError as error:
                self._log.warning("predictor_refinement_not_saved", error=str(error))

    def stats(self) -> dict[str, float]:
        """Return figures for heartbeats; errors are moving averages of |log predicted − log real|."""
        if self.refiner is None or not self.refiner.learned:
            return {}
        return {
            "refinements_total": float(self.revisions),
            "refinement_observations": float(self.refiner.learned),
            "base_log_error": self.refiner.base_error,
            "refined_log_error": self.refiner.refined_error,
        }
