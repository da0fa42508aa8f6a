"""Sources and arrivals: same seed same items, one aspect changed leaves the others, rates come out as asked."""

from __future__ import annotations

import numpy as np
import pytest

from cohort.common.errors import ConfigError
from cohort.common.workloads.arrivals import ClosedLoop, RandomArrivals, TraceTimes
from cohort.common.workloads.generate import Drawn, FromTrace, Mixed, generate
from cohort.common.workloads.lengths import Shape, Uniform
from cohort.common.workloads.traces import Trace, TraceRow

ROWS = (TraceRow(0.0, 512, 5, (1,)), TraceRow(1.0, 1024, 6, (1, 2)), TraceRow(4.0, 1536, 7, (3, 4, 5), "s"))
TRACE = Trace("cohort", ROWS, skipped_rows=2)
DRAWN = Drawn(Uniform(1, 1000), Uniform(1, 99))


def test_a_trace_keeps_its_times_lengths_and_prefixes() -> None:
    workload = generate("t", FromTrace(TRACE, "file"), TraceTimes(2.0))
    assert [(i.arrival_s, i.prompt_tokens, i.output_tokens, i.hash_ids, i.session) for i in workload.items] == [
        (0.0, 512, 5, (1,), ""),
        (2.0, 1024, 6, (1, 2), ""),
        (8.0, 1536, 7, (3, 4, 5), "s"),
    ]
    assert {i.hash_block for i in workload.items} == {512}
    assert (workload.facts.skipped_rows, workload.facts.arrivals) == (2, "the trace's times x 2")


def test_rows_of_a_trace_at_another_rate_resampled() -> None:
    many = generate("t", FromTrace(TRACE, "f", resample=True), RandomArrivals(5.0), count=3000)
    counts = np.bincount([i.output_tokens for i in many.items])[5:]
    assert all(abs(int(count) - 1000) < 130 for count in counts)
    with pytest.raises(ConfigError, match="tears"):
        generate("t", FromTrace(TRACE, "f", resample=True), TraceTimes(), count=3)
    with pytest.raises(ConfigError, match="trace times need"):
        generate("t", DRAWN, TraceTimes(), count=3)


def test_the_same_seed_gives_the_same_items_and_a_rate_changes_times_only() -> None:
    slow = generate("w", DRAWN, RandomArrivals(2.0), count=100, seed=5)
    fast = generate("w", DRAWN, RandomArrivals(4.0), count=100, seed=5)
    assert slow == generate("w", DRAWN, RandomArrivals(2.0), count=100, seed=5)
    assert [i.prompt_tokens for i in slow.items] == [i.prompt_tokens for i in fast.items]
    assert [i.arrival_s for i in fast.items] == pytest.approx([i.arrival_s / 2 for i in slow.items])
    assert slow != generate("w", DRAWN, RandomArrivals(2.0), count=100, seed=6)


def test_a_duration_bounds_the_arrivals_and_is_filled() -> None:
    workload = generate("w", DRAWN, RandomArrivals(20.0), duration_s=100.0)
    assert 95.0 < workload.items[-1].arrival_s < 100.0
    assert len(workload.items) == pytest.approx(2000, rel=0.08)
    with pytest.raises(ConfigError, match="how many"):
        generate("w", DRAWN, RandomArrivals(1.0))


def test_a_closed_loop_becomes_a_part() -> None:
    workload = generate("be", DRAWN, ClosedLoop(4), count=10, duration_s=60.0, traffic_class="be")
    (part,) = workload.closed_loop
    assert (workload.items, part.concurrency, part.until_s, len(part.items)) == ((), 4, 60.0, 10)
    assert {item.traffic_class for item in part.items} == {"be"}


def test_shapes_by_weight() -> None:
    source = Mixed((Shape(3.0, 8, 4), Shape(1.0, 9, 2)))
    workload = generate("m", source, RandomArrivals(1.0), count=4000)
    assert sum(i.prompt_tokens == 9 for i in workload.items) == pytest.approx(1000, abs=120)
    assert workload.facts.source == "mix 75 % 8x4, 25 % 9x2"
