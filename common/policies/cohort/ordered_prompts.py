"""Cohort's order of prompts for schedulers that otherwise take them as they came (`experiment.cohort.orders_others`).

Such a scheduler says what an iteration took and asks for its prompts in order; rows, blocks and victims stay its own.
What waits is sorted at every decision: a scheduler built on the order keeps a `PromptQueue` instead.
"""

from __future__ import annotations

from collections.abc import Iterable

from cohort.common.policies.baselines.arrival_queues import PromptSort
from cohort.common.policies.cohort.prompt_order import PromptOrder
from cohort.common.policies.interface import Ran
from cohort.common.sequence import Sequence

_TELLING_TOKENS = 128
"""Prompt tokens from which on an iteration says what one of them takes: in smaller ones decode rows and the reading of
weights are most of it."""
_SMOOTH = 0.1


class OrderedPrompts(PromptSort):
    def __init__(self, order: PromptOrder) -> None:
        self._order = order
        self._token_s = 0.0
        """Of a prompt token, decode rows beside it included: what prompts here really wait for. 0 = not known yet."""

    def learn(self, ran: Ran) -> None:
        tokens = sum(row.count for row in ran.plan.rows if row.count > 1)
        if tokens < _TELLING_TOKENS:
            return
        token_s = ran.latency_s / tokens
        self._token_s = token_s if self._token_s == 0.0 else self._token_s + _SMOOTH * (token_s - self._token_s)

    def sort(self, now_s: float, prompts: Iterable[Sequence]) -> list[Sequence]:
        return sorted(prompts, key=lambda sequence: self._order.rank(now_s, sequence, self._token_s)[0])
