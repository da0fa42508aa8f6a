"""`policies.placement: colocated_early_rejection`: another placement, asked only about requests that can be in time.

The TTFT is predicted for every worker that could compute the prompt, and the admission test judges the soonest: only
what no worker can make is refused or demoted. Where nothing is known of a worker's pace the request is served. Wraps a
placement and decides nothing else; which worker it is stays that placement's decision.

The prediction is simple: what a worker still has to compute before this prompt, and the prompt, at its pace beside the
decodes there. Before this prompt come the shorter ones, as `PromptOrder` has it; on other workers it is too hopeful.
"""

from __future__ import annotations

from typing import Literal

from cohort.common.policies.baselines.placements import fits
from cohort.common.policies.cohort.admission_test import AdmissionTest
from cohort.common.policies.dynaserve.step_cost import tokens_within
from cohort.common.policies.interface import (
    ClusterView,
    Impossible,
    InstanceView,
    Placed,
    Placement,
    Refuse,
    Wait,
    WaitingRequest,
)
from cohort.common.types import InstanceId, Request, RequestId

_LEAST_TOKENS = 16.0  # prompt tokens of an iteration, whatever decodes take (cohort.least_prefill)


class EarlyRejection(Placement):
    def __init__(self, inner: Placement, test: AdmissionTest, *, order: Literal["shortest", "earliest_due"]) -> None:
        """`order`: of prompts on the workers."""
        self.moves_kv = inner.moves_kv  # type: ignore[misc]
        self._inner = inner
        self._test = test
        self._shortest = order == "shortest"

    def place(
        self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, preferred: InstanceId | None
    ) -> Placed | Wait | Impossible | Refuse:
        if not self._test.applies_to(waiting):
            return self._inner.place(now_s, waiting, cluster, preferred)
        predicted_s = self.predicted_s(waiting.request, cluster)
        verdict = self._test.judge(now_s, waiting, predicted_s)
        if isinstance(verdict, Refuse):  # before the other placement keeps anything of it
            return verdict
        placed = self._inner.place(now_s, waiting, cluster, preferred)
        return self._test.apply(now_s, waiting, predicted_s, placed) if isinstance(placed, Placed) else placed

    def completed(self, now_s: float, request_id: RequestId) -> None:
        self._inner.completed(now_s, request_id)

    def finished(self, now_s: float, request_id: RequestId) -> None:
        self._inner.finished(now_s, request_id)

    def metrics(self) -> dict[str, float]:
        return self._inner.metrics()

    def predicted_s(self, request: Request, cluster: ClusterView) -> float:
        """Seconds to the first token on the worker that gives it soonest; 0 where one's pace is unknown."""
        able = [view for view in cluster.instances.values() if view.role.prefills and fits(view, request)]
        return min((self._on(view, request) for view in able), default=0.0)

    def _on(self, view: InstanceView, request: Request) -> float:
        token_s = _token_s(view, request.slo.tpot_s)
        ahead = view.assigned_prefill_tokens + self._queued_before(view, len(request.tokens))
        return (ahead + len(request.tokens)) * token_s

    def _queued_before(self, view: InstanceView, tokens: int) -> int:
        """Reported prompt tokens that are computed before a prompt of so many."""
        if not self._shortest:
            return view.stats.queued_prefill_tokens
        return sum(work.prefill_left for work in view.stats.queue if 1 < work.prefill_left <= tokens)


def _token_s(view: InstanceView, tpot_s: float) -> float:
    """Seconds a prompt token takes on this worker: beside its decodes in iterations of `tpot_s`, or alone where none
    runs. 0 = unknown."""
    stats, times = view.stats, view.stats.step_times
    if times is None:
        return 1.0 / stats.prefill_tokens_per_s if stats.prefill_tokens_per_s else 0.0
    decodes = sum(work.prefill_left <= 1 and work.context > 0 for work in stats.queue)
    if not decodes or not tpot_s:
        return times.token_s
    left_s = tpot_s - times.step_s - times.row_s * decodes - times.position_s * stats.running_context_tokens
    tokens = max(_LEAST_TOKENS, tokens_within(times, left_s) - decodes)
    return tpot_s / tokens
