"""Running stats of the gateway for its heartbeat: totals, and percentiles over the latest requests.

Touched by `request_stats.py` and `generator.py`, read by `service.py` twice a second. The exact distributions are in
the metrics; this is what a person watching wants at a glance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from cohort.common.types import FinishReason

KEPT = 1024


class Recent:
    def __init__(self) -> None:
        self.totals = dict.fromkeys(
            (
                "requests_total",
                "finished_total",
                "failed_total",
                "cancelled_total",
                "refused_total",
                "rejected_total",
                "prompt_tokens_total",
                "generation_tokens_total",
            ),
            0,
        )
        self._ttft_s: deque[float] = deque(maxlen=KEPT)
        self._itl_s: deque[float] = deque(maxlen=KEPT)

    def accepted(self, prompt_tokens: int) -> None:
        self.totals["requests_total"] += 1
        self.totals["prompt_tokens_total"] += prompt_tokens

    def rejected(self) -> None:
        """Before it was accepted."""
        self.totals["rejected_total"] += 1

    def refused(self) -> None:
        """By the manager, after that."""
        self.totals["refused_total"] += 1

    def first_token(self, ttft_s: float, tokens: int) -> None:
        self._ttft_s.append(ttft_s)
        self.totals["generation_tokens_total"] += tokens

    def tokens(self, gap_s: float, updates: int, tokens: int) -> None:
        """So many updates of so many tokens each."""
        self._itl_s.extend([gap_s] * updates)
        self.totals["generation_tokens_total"] += updates * tokens

    def ended(self, finish: FinishReason) -> None:
        match finish:
            case FinishReason.CANCELLED:
                self.totals["cancelled_total"] += 1
            case FinishReason.FAILED:
                self.totals["failed_total"] += 1
            case _:
                self.totals["finished_total"] += 1

    def stats(self) -> dict[str, float]:
        return {**self.totals, **_percentiles("ttft", self._ttft_s), **_percentiles("itl", self._itl_s)}


def _percentiles(name: str, values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    last = len(ordered) - 1
    return {f"{name}_p50_s": ordered[round(0.5 * last)], f"{name}_p99_s": ordered[round(0.99 * last)]}
