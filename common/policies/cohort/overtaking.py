"""How much of the workers' time prompts take that arrive later and are computed before a given one.

Where the shortest prompt goes first, a long one waits for what is ahead of it and for every shorter one that arrives
meanwhile: with a share s of the time for these, work that takes W alone takes W / (1 - s). Kept by a placement, from
the prompts it placed; forgets exponentially, so that a burst counts while it lasts. Knows no queue.
"""

from __future__ import annotations

from math import exp, inf, log2

_MEMORY_S = 20.0
"""A prompt counts e times less after so long: several times a TTFT SLO, less than a burst."""
_LEAST_S = 2.0  # the first prompts are taken for those of so long
_PER_DOUBLING = 4
"""Classes of length."""


class Overtaking:
    def __init__(self) -> None:
        self._rates: dict[int, float] = {}
        """Prompt tokens a second by class of length, as of `_at_s`."""
        self._at_s = self._since_s = -inf

    def arrived(self, now_s: float, tokens: int) -> None:
        """A prompt was placed that overtakes longer ones."""
        self._forget(now_s)
        if not self._rates:
            self._since_s = now_s
        name = _class(tokens)
        self._rates[name] = self._rates.get(name, 0.0) + tokens / _MEMORY_S

    def tokens_per_s(self, now_s: float, tokens: int) -> float:
        """Of prompts shorter than `tokens`, over all workers."""
        self._forget(now_s)
        own = _class(tokens)
        rate = sum(rate for name, rate in sorted(self._rates.items()) if name < own)
        # What came before the first prompt is not known, rather than nothing.
        return rate / (1.0 - exp(-max(_LEAST_S, now_s - self._since_s) / _MEMORY_S)) if rate else 0.0

    def _forget(self, now_s: float) -> None:
        if self._rates and now_s > self._at_s:
            left = exp((self._at_s - now_s) / _MEMORY_S)
            self._rates = {name: rate * left for name, rate in self._rates.items()}
        self._at_s = max(self._at_s, now_s)


def _class(tokens: int) -> int:
    return int(_PER_DOUBLING * log2(max(1, tokens)))
