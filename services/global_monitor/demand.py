"""How much is coming: arrival rate, its forecast, and mean lengths, from the gateways' counters.

Pure: time is an argument. Called by `aggregate.py`; its numbers reach the manager in `ClusterStats` (B9).

Arrivals are counted in bins of one second. Each full bin updates
  - an exponentially weighted mean, the *rate*:                 rate ← rate + w·(bin - rate),  w from a 10 s half-life
  - Holt's linear method, damped (Gardner and McKenzie 1985):   level ← α·bin + (1-α)·(level + φ·trend)
                                                                trend ← β·(level - previous level) + (1-β)·φ·trend
    whose *forecast* for h bins ahead is                        level + (φ + φ² + … + φʰ)·trend, at least 0.

The damping keeps a burst from being read as a trend for ever.
"""

from __future__ import annotations

_BIN_S = 1.0
_RATE_HALF_LIFE_S = 10.0
_MEAN_HALF_LIFE_S = 60.0
_ALPHA, _BETA, _PHI = 0.3, 0.1, 0.9
FORECAST_S = 10.0
_MOST_EMPTY_BINS = 600  # after a longer silence everything has decayed anyway


class Counters:
    """Turns a process's ever-growing counters into increases, across restarts (a new incarnation starts at zero)."""

    def __init__(self) -> None:
        self._incarnation = -1
        self._last: dict[str, float] = {}

    def increase(self, incarnation: int, stats: dict[str, float], name: str) -> float:
        if incarnation != self._incarnation:
            # Counts from before a process's first heartbeat did not happen now.
            first_ever = self._incarnation == -1
            self._incarnation = incarnation
            self._last = dict(stats) if first_ever else {}
        value = stats.get(name, 0.0)
        grown = max(0.0, value - self._last.get(name, 0.0))
        self._last[name] = value
        return grown


class _DecayedMean:
    """Mean over recent events, old ones fading; silence leaves it as it was."""

    def __init__(self) -> None:
        self.value = 0.0
        self._sum = 0.0
        self._count = 0.0

    def add(self, total: float, count: float) -> None:
        self._sum += total
        self._count += count
        if self._count > 1e-6:
            self.value = self._sum / self._count

    def decay(self, factor: float) -> None:
        self._sum *= factor
        self._count *= factor


class Demand:
    """Feed it increases with `arrived` and `finished`, move it on with `advance`."""

    def __init__(self) -> None:
        self.rate = 0.0
        """Requests a second, moving average."""
        self._level = 0.0
        self._trend = 0.0
        self._bin_start_s: float | None = None
        self._in_bin = 0.0
        self._bins = 0
        self._prompts = _DecayedMean()
        self._outputs = _DecayedMean()

    @property
    def mean_prompt_tokens(self) -> float:
        return self._prompts.value

    @property
    def mean_output_tokens(self) -> float:
        return self._outputs.value

    def forecast(self, ahead_s: float = FORECAST_S) -> float:
        """Forecast requests a second, `ahead_s` from now."""
        bins = round(ahead_s / _BIN_S)
        damped = _PHI * (1 - _PHI**bins) / (1 - _PHI)
        return max(0.0, self._level + damped * self._trend)

    def arrived(self, now_s: float, requests: float, prompt_tokens: float) -> None:
        self.advance(now_s)
        self._in_bin += requests
        self._prompts.add(prompt_tokens, requests)

    def finished(self, now_s: float, requests: float, output_tokens: float) -> None:
        self.advance(now_s)
        self._outputs.add(output_tokens, requests)

    def advance(self, now_s: float) -> None:
        """Close all bins that ended before `now_s`."""
        if self._bin_start_s is None:
            self._bin_start_s = now_s
            return
        passed = int((now_s - self._bin_start_s) / _BIN_S)
        for _ in range(min(passed, _MOST_EMPTY_BINS)):
            self._close_bin()
        self._bin_start_s += max(0, passed) * _BIN_S

    def _close_bin(self) -> None:
        sample, self._in_bin = self._in_bin / _BIN_S, 0.0
        self._bins += 1
        # Until the window has filled once the weight is that of a plain mean, else the start would count as silence.
        weight = max(1 - 0.5 ** (_BIN_S / _RATE_HALF_LIFE_S), 1 / self._bins)
        self.rate += weight * (sample - self.rate)
        alpha = max(_ALPHA, 1 / self._bins)
        previous = self._level
        self._level = alpha * sample + (1 - alpha) * (self._level + _PHI * self._trend)
        if self._bins > 1:
            self._trend = _BETA * (self._level - previous) + (1 - _BETA) * _PHI * self._trend
        for mean in (self._prompts, self._outputs):
            mean.decay(0.5 ** (_BIN_S / _MEAN_HALF_LIFE_S))
