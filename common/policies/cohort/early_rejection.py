"""`policies.placement: colocated_early_rejection`: another placement, asked only about requests that can be in time.

The TTFT is predicted for every worker that could compute the prompt, and the admission test judges the soonest: only
what no worker can make is refused or demoted. Where nothing is known of a worker's pace the request is served. Wraps a
placement and decides nothing else; which worker it is stays that placement's decision.

The prediction is simple: what a worker still has to compute before this prompt, and the prompt, at its pace beside the
decodes there. Before this prompt come those that `PromptOrder` puts there: shorter ones that can still be in time.
Shorter prompts that arrive later and overtake it take their share of the pace. Under the order of another scheduler the
prediction is too hopeful.
"""

from __future__ import annotations

from math import inf
from typing import Literal

from cohort.common.policies.baselines.placements import fits
from cohort.common.policies.cohort.admission_test import AdmissionTest
from cohort.common.policies.cohort.overtaking import Overtaking
from cohort.common.policies.cohort.prompt_order import PromptOrder
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
from cohort.common.types import InstanceId, QueuedWork, RequestId

_LEAST_SHARE = 0.01  # of the pace, for prompts that are overtaken by more than a worker can compute
_LEAST_TOKENS = 16.0  # prompt tokens of an iteration, whatever decodes take (cohort.least_prefill)


class EarlyRejection(Placement):
    def __init__(self, inner: Placement, test: AdmissionTest, *, order: Literal["shortest", "earliest_due"]) -> None:
        """`order`: of prompts on the workers."""
        self.moves_kv = inner.moves_kv  # type: ignore[misc]
        self._inner = inner
        self._test = test
        self._order = PromptOrder(first=order)
        self._due_s: dict[RequestId, float] = {}
        """By when the first token of what was placed is due; infinite where it is served behind all others."""
        self._overtaking = Overtaking()

    def place(
        self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, preferred: InstanceId | None
    ) -> Placed | Wait | Impossible | Refuse:
        predicted_s = self.predicted_s(now_s, waiting, cluster) if self._test.applies_to(waiting) else 0.0
        verdict = self._test.judge(now_s, waiting, predicted_s)
        if isinstance(verdict, Refuse):  # before the other placement keeps anything of it
            return verdict
        placed = self._inner.place(now_s, waiting, cluster, preferred)
        if not isinstance(placed, Placed):
            return placed
        decided = self._test.apply(now_s, waiting, predicted_s, placed)
        if isinstance(decided, Placed):
            due_s = self._due_s[waiting.request_id] = inf if decided.best_effort else _due_s(waiting)
            if due_s < inf:
                self._overtaking.arrived(now_s, len(waiting.request.tokens))
        return decided

    def completed(self, now_s: float, request_id: RequestId) -> None:
        self._inner.completed(now_s, request_id)

    def finished(self, now_s: float, request_id: RequestId) -> None:
        self._due_s.pop(request_id, None)
        self._inner.finished(now_s, request_id)

    def metrics(self) -> dict[str, float]:
        return self._inner.metrics()

    def predicted_s(self, now_s: float, waiting: WaitingRequest, cluster: ClusterView) -> float:
        """Seconds to the first token on the worker that gives it soonest; 0 where one's pace is unknown."""
        request = waiting.request
        able = [view for view in cluster.instances.values() if view.role.prefills and fits(view, request)]
        overtaking = 0.0
        if self._order.first == "shortest":
            overtaking = self._overtaking.tokens_per_s(now_s, len(request.tokens)) / max(1, len(able))
        return min((self._on(now_s, view, waiting, overtaking) for view in able), default=0.0)

    def _on(self, now_s: float, view: InstanceView, waiting: WaitingRequest, overtaking: float) -> float:
        """`overtaking`: tokens a second, of shorter prompts to come."""
        request, token_s = waiting.request, _token_s(view, waiting.request.slo.tpot_s)
        own, due_s = len(request.tokens), _due_s(waiting)
        ahead = view.assigned_prefill_tokens
        for work in view.stats.queue:
            if work.prefill_left > 1 and self._goes_before(now_s, work, own, due_s, token_s):
                ahead += work.prefill_left
        return (ahead + own) * token_s / max(_LEAST_SHARE, 1.0 - overtaking * token_s)

    def _goes_before(self, now_s: float, work: QueuedWork, own: int, due_s: float, token_s: float) -> bool:
        """Before a prompt of `own` tokens whose first answer token is due at `due_s`."""
        left, its_due_s = work.prefill_left, self._due_s.get(work.request_id)
        shorter = left <= own
        if its_due_s is None:  # a manager before this one placed it: taken for on time, and due before
            return shorter or self._order.first == "earliest_due"
        if its_due_s == inf or now_s + left * token_s * self._order.caution > its_due_s:
            return False
        return shorter if self._order.first == "shortest" else its_due_s <= due_s


def _due_s(waiting: WaitingRequest) -> float:
    """When its first token is due; infinite where nothing was promised, as such requests are served behind all others.
    A resubmitted request starts anew, as on its worker."""
    request = waiting.request
    promised = request.traffic_class == "rt" and request.slo.ttft_s > 0.0
    return waiting.since_s + request.slo.ttft_s if promised else inf


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
