"""How well a placement foresees what it predicts: moving averages over the predictions that came to their end."""

from __future__ import annotations

_NEW = 0.02
"""Weight of a new prediction among many; the first fifty count alike."""


class PredictionError:
    """Moving averages. `error`: |predicted − real| / real. `bias`: predicted / real."""

    def __init__(self) -> None:
        self.error = self.bias = 0.0
        self.tracked = 0

    def add(self, predicted_s: float, real_s: float) -> None:
        """Record a prediction and what came; `real_s` is above 0."""
        self.tracked += 1
        share = max(_NEW, 1.0 / self.tracked)
        self.error += share * (abs(predicted_s - real_s) / real_s - self.error)
        self.bias += share * (predicted_s / real_s - self.bias)

    def metrics(self, what: str) -> dict[str, float]:
        return {f"{what}_error": self.error, f"{what}_bias": self.bias, f"{what}_tracked_total": float(self.tracked)}
