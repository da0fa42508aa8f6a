"""The placement that refuses what no worker can make in time."""

from __future__ import annotations

from typing import Any

import msgspec

from cohort.common.policies.baselines.placements import Colocated
from cohort.common.policies.cohort.admission_test import AdmissionTest
from cohort.common.policies.cohort.early_rejection import EarlyRejection
from cohort.common.policies.dynaserve.step_cost import BatchShape, step_seconds
from cohort.common.policies.interface import ClusterView, Impossible, InstanceView, Placed, Refuse, WaitingRequest
from cohort.common.types import (
    Attempt,
    IfLate,
    QueuedWork,
    Request,
    Role,
    SamplingParams,
    Slo,
    StepTimes,
    WorkerCapacity,
    WorkerStats,
)

TIMES = StepTimes(0.001, 0.0, 0.001, 0.0, 0.0, 0.0)
"""A millisecond for each token, and one for the iteration."""
CAPACITY = WorkerCapacity(Role.UNIFIED, "m", 10_000, 1, 1, 1, 1, 16, 1000, 0, 64, 512)


def view(name: str, *prompts: int, decodes: int = 0, times: StepTimes | None = TIMES) -> InstanceView:
    """A worker with these prompts waiting, and as many requests that decode."""
    queue = [QueuedWork(f"p{index}", tokens, 0, 10) for index, tokens in enumerate(prompts)]
    queue += [QueuedWork(f"d{index}", 0, 50, 10) for index in range(decodes)]
    stats = WorkerStats(queued_prefill_tokens=sum(prompts), running=decodes, queue=queue, step_times=times)
    return InstanceView(name, CAPACITY, stats)


def cluster(*views: InstanceView) -> ClusterView:
    return ClusterView({each.instance: each for each in views})


def asks(tokens: int, *, ttft_s: float = 1.0, if_late: IfLate = "refuse", number: int = 0) -> WaitingRequest:
    request = Request(
        Attempt("r", number), "g", [1] * tokens, tokens, SamplingParams(8), 0.0, slo=Slo(ttft_s, 0.1), if_late=if_late
    )
    return WaitingRequest(request, 0.0, None)


def placement(order: str = "shortest") -> EarlyRejection:
    return EarlyRejection(Colocated(), AdmissionTest(caution=1.0), order=order)  # type: ignore[arg-type]


def test_only_what_no_worker_can_make_is_refused() -> None:
    busy, idle = view("busy", 400, 400), view("idle")
    assert isinstance(placement().place(0.0, asks(500), cluster(busy), None), Refuse)
    assert isinstance(placement().place(0.0, asks(500), cluster(busy, idle), None), Placed)


def test_the_time_to_retry_after_is_that_of_the_prompts_ahead() -> None:
    refused = placement().place(0.0, asks(500), cluster(view("w", 400, 400, 400, 900)), None)
    assert isinstance(refused, Refuse)
    assert round(refused.forecast_s, 6) == 1.7, "1,200 tokens ahead and its own 500; the longest prompt comes later"
    assert round(refused.retry_after_s, 6) == 1.0
    behind_all = placement("earliest_due").place(0.0, asks(500), cluster(view("w", 400, 400, 400, 900)), None)
    assert isinstance(behind_all, Refuse) and round(behind_all.forecast_s, 6) == 2.6


def placed_before(count: int, **changes: Any) -> tuple[EarlyRejection, ClusterView]:
    """A placement that has sent so many prompts of 400 tokens to a worker, which reports them as they came."""
    ours, nobody = placement(), cluster(view("w"))
    for index in range(count):
        each = asks(400, **changes)
        each.request = msgspec.structs.replace(each.request, attempt=Attempt(f"p{index}", 0))
        assert isinstance(ours.place(0.0, each, nobody, None), Placed)
    return ours, cluster(view("w", *[400] * count))


def test_what_is_late_already_or_promised_nothing_is_not_ahead() -> None:
    for changes, ahead in (({}, 1), ({"ttft_s": 0.0}, 0), ({"ttft_s": 0.3, "if_late": "best_effort"}, 0)):
        ours, busy = placed_before(2, **changes)
        alone, _ = placed_before(0)
        assert (ours.predicted_s(0.0, asks(500), busy) > alone.predicted_s(0.0, asks(500), cluster(view("w")))) is bool(
            ahead
        )
    ours, busy = placed_before(2)
    soon_s, late_s = (ours.predicted_s(now_s, asks(500), busy) for now_s in (0.0, 0.9))
    assert late_s < soon_s - 0.7, "at 0.9 s two of 400 ms cannot make 1 s any more: they let it pass"
    ours.finished(0.0, "p0")
    ours.finished(0.0, "p1")
    assert ours.predicted_s(0.9, asks(500), busy) > late_s, "what is unknown counts as ahead"


def test_shorter_prompts_that_keep_coming_overtake() -> None:
    """400 tokens a second of 1,000 that a worker computes: what is longer takes 1 / (1 - 0.4) as long."""
    ours, idle = placement(), cluster(view("w"))
    for tick in range(600):
        each = asks(40)
        each.since_s = 0.1 * tick
        ours.place(0.1 * tick, each, idle, None)
    assert round(ours.predicted_s(60.0, asks(600), idle), 1) == 1.0
    assert round(ours.predicted_s(60.0, asks(20), idle), 2) == 0.02
    assert round(placement("earliest_due").predicted_s(60.0, asks(600), idle), 2) == 0.6
    two = cluster(view("w"), view("other"))
    assert round(ours.predicted_s(60.0, asks(600), two), 2) == 0.75


def test_decodes_make_prompts_slower() -> None:
    alone, beside = view("w"), view("w", decodes=50)
    slow_s = placement().predicted_s(0.0, asks(500), cluster(beside))
    assert slow_s > 1.5 * placement().predicted_s(0.0, asks(500), cluster(alone))
    # What it takes for one iteration of the TPOT SLO fits one: the price is the scheduler's own.
    tokens = round(0.1 / (slow_s / 500))
    assert abs(step_seconds(TIMES, BatchShape(tokens, 1, 0, 50, 0)) - 0.1) < 0.005


def test_sent_a_moment_ago_counts_before_any_report_says_so() -> None:
    one = view("w")
    assert isinstance(placement().place(0.0, asks(500), cluster(one), None), Placed)
    one.assigned_prefill_tokens = 600
    assert isinstance(placement().place(0.0, asks(500), cluster(one), None), Refuse)


def test_unknown_pace_refuses_nothing() -> None:
    unknown = view("w", 10_000, times=None)
    assert isinstance(placement().place(0.0, asks(500), cluster(unknown), None), Placed)
    unknown.stats = msgspec.structs.replace(unknown.stats, prefill_tokens_per_s=1000.0)
    assert isinstance(placement("earliest_due").place(0.0, asks(500), cluster(unknown), None), Refuse)


def test_accepted_requests_and_other_answers_of_the_placement_pass() -> None:
    busy = cluster(view("w", 400, 400))
    assert isinstance(placement().place(0.0, asks(500, number=1), busy, None), Placed)
    served = placement().place(0.0, asks(500, if_late="serve"), busy, None)
    demoted = placement().place(0.0, asks(500, if_late="best_effort"), busy, None)
    assert isinstance(served, Placed) and isinstance(demoted, Placed)
    assert (served.best_effort, demoted.best_effort) == (False, True)
    assert isinstance(placement().place(0.0, asks(20_000), busy, None), Impossible)
    assert placement().moves_kv is False
