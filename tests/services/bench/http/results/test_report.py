"""Report mathematics against cases computed by hand."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from cohort.services.bench.http.load.client import RequestRecord, RunLog, Status
from cohort.services.bench.http.load.target import Dialect, Target
from cohort.services.bench.http.load.workload import RequestPlan, WorkloadFacts
from cohort.services.bench.http.results.figures import Spread, compare
from cohort.services.bench.http.results.report import (
    Distribution,
    LengthCheck,
    RunReport,
    SloLimits,
    distribution,
    length_check,
    max_in_flight,
    run_duration_s,
    slice_figures,
    slo_verdict,
    summarise,
)

FACTS = WorkloadFacts("a", "s", 3, 0, 30, 12, None, 0, 0, 0, False)
DIALECT = Dialect("completions", "ids", True, True)


def record(
    sent_s: float,
    tokens_s: Sequence[float],
    *,
    due_s: float | None = None,
    status: Status = "completed",
    usage: tuple[int, int] | None = None,
    traffic_class: str = "",
    planned: tuple[int, int] = (10, 4),
    kind: str = "",
) -> RequestRecord:
    plan = RequestPlan(0, None, *planned, traffic_class=traffic_class)
    return RequestRecord(
        plan,
        due_s=sent_s if due_s is None else due_s,
        sent_s=sent_s,
        end_s=tokens_s[-1] if tokens_s else sent_s + 1,
        token_s=array("d", tokens_s),
        status=status,
        error_kind=kind,
        reported_prompt_tokens=usage[0] if usage else None,
        reported_output_tokens=usage[1] if usage else None,
    )


def summary(
    records: Sequence[RequestRecord], limits: SloLimits | None = None, lag_s: Sequence[float] = ()
) -> RunReport:
    return summarise(
        RunLog(tuple(records), tuple(lag_s), False),
        FACTS,
        Target("n", "u", "m", "", 0),
        DIALECT,
        limits or SloLimits(),
        prompt_salt=1,
        started_at="t",
        ignore_eos_wanted=True,
    )


def fields(found: Distribution | Spread | None) -> list[float]:
    assert found is not None
    return [getattr(found, name) for name in found.__struct_fields__ if name != "values"]


def test_one_request_by_hand() -> None:
    """Sent at 1.0; tokens at 1.5, 1.6, 1.8, 2.1."""
    one = record(1.0, [1.5, 1.6, 1.8, 2.1], due_s=0.9)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.e2e_s == pytest.approx(1.1)
    assert one.tpot_s == pytest.approx(0.6 / 3)
    assert one.itl_s == pytest.approx([0.1, 0.2, 0.3])
    assert one.client_queue_s == pytest.approx(0.1)


def test_tpot_divides_by_tokens_not_by_chunks() -> None:
    """Two chunks that held 7 tokens by the server's usage: 0.6 s over 6 tokens."""
    assert record(0.0, [0.4, 1.0], usage=(10, 7)).tpot_s == pytest.approx(0.1)


def test_a_single_token_has_no_tpot() -> None:
    one = record(0.0, [0.4])
    assert one.tpot_s is None and one.itl_s == []
    assert slice_figures([one], 1.0, SloLimits()).tpot_ms is None


def test_distribution_by_hand() -> None:
    """1…101 ms: every percentile falls on a sample."""
    values = [i / 1000 for i in range(1, 102)]
    assert fields(distribution(values)) == pytest.approx([101, 51, 51, 91, 96, 100, 101])
    assert fields(distribution([0.001, 0.002])) == pytest.approx([2, 1.5, 1.5, 1.9, 1.95, 1.99, 2.0])
    assert distribution([]) is None


def test_throughput_by_hand() -> None:
    """Two done in 4 s with 10 prompt tokens each and 4 + 2 output tokens; what failed adds nothing but time."""
    records = [
        record(1.0, [1.5, 2.0, 2.5, 3.0]),
        record(2.0, [4.0, 5.0]),
        record(1.0, [2.0], status="failed", kind="timeout"),
        record(1.0, [2.0], status="cancelled"),
    ]
    assert run_duration_s(records) == 4.0
    found = slice_figures(records, 4.0, SloLimits())
    assert (found.sent, found.completed, found.failed, found.cancelled) == (4, 2, 1, 1)
    assert found.requests_per_s == 0.5
    assert found.output_tokens_per_s == 1.5
    assert found.total_tokens_per_s == (20 + 6) / 4
    assert found.ttft_ms is not None and found.ttft_ms.count == 2
    assert found.itl_ms is not None and found.itl_ms.count == 4


def test_slo_attainment_and_goodput_by_hand() -> None:
    """Limits TTFT 500 ms, TPOT 100 ms. Kept; TTFT missed; TPOT missed; failed; cancelled. 2 s in all."""
    limits = SloLimits(ttft_ms={"": 500.0}, tpot_ms={"": 100.0})
    records = [
        record(0.0, [0.4, 0.5, 0.6]),
        record(0.0, [0.6, 0.7]),
        record(0.0, [0.3, 0.5]),
        record(0.0, [], status="failed"),
        record(0.0, [0.1], status="cancelled"),
    ]
    assert [slo_verdict(r, limits) for r in records[:4]] == [
        {"ttft": True, "tpot": True},
        {"ttft": False, "tpot": True},
        {"ttft": True, "tpot": False},
        {"ttft": False, "tpot": False},
    ]
    slo = slice_figures(records, 2.0, limits).slo
    assert slo is not None
    assert (slo.judged, slo.attained, slo.attainment) == (4, 1, 0.25)
    assert (slo.sent, slo.kept_of_sent) == (5, 0.2), "what was cancelled was sent, and not served"
    assert slo.within == {"ttft": 2, "tpot": 2}
    assert slo.goodput_requests_per_s == 0.5
    assert slo.goodput_output_tokens_per_s == 1.5


def test_slo_on_the_limit_is_kept() -> None:
    limits = SloLimits(ttft_ms={"": 500.0}, tpot_ms={"": 1.0})
    assert slo_verdict(record(0.0, [0.5]), limits) == {"ttft": True, "tpot": True}


def test_itl_slo_uses_the_requests_own_99th_percentile() -> None:
    """One gap of 1 s among 9 of 0.1 s: p99 = 0.1 + 0.91 · 0.9 = 0.919 s."""
    tokens = [0.1 * i for i in range(10)] + [1.9]
    one = record(0.0, tokens)
    assert slo_verdict(one, SloLimits(itl_ms={"": 918.0})) == {"itl": False}
    assert slo_verdict(one, SloLimits(itl_ms={"": 920.0})) == {"itl": True}


def test_the_share_of_gaps_within_their_limit() -> None:
    """Of completed requests alone, each by its class's limit: 8 of 9 gaps and 1 of 2."""
    records = [
        record(0.0, [0.1 * i for i in range(9)] + [1.9]),
        record(0.0, [0.1, 0.5, 2.0], traffic_class="be"),
        record(0.0, [0.1, 9.0], status="failed"),
    ]
    shares = [
        found.itl_share if (found := slice_figures(records, 10.0, limits).slo) else -1.0
        for limits in (SloLimits(itl_ms={"": 500.0}), SloLimits(itl_ms={"be": 500.0}), SloLimits(e2e_ms={"": 500.0}))
    ]
    assert shares == [9 / 11, 0.5, None]


def test_classes_have_their_own_limits() -> None:
    limits = SloLimits(e2e_ms={"rt": 500.0, "be": 5000.0})
    slow = [0.5, 1.0]
    assert slo_verdict(record(0.0, slow, traffic_class="rt"), limits) == {"e2e": False}
    assert slo_verdict(record(0.0, slow, traffic_class="be"), limits) == {"e2e": True}
    assert slo_verdict(record(0.0, slow, traffic_class="other"), limits) == {}
    report = summary([record(0.0, slow, traffic_class="rt"), record(0.0, slow, traffic_class="be")], limits)
    assert {name: part.slo.attained for name, part in report.by_class.items() if part.slo} == {"be": 1, "rt": 0}
    assert report.by_kind == {}


def test_length_check_by_hand() -> None:
    records = [record(0, [1], usage=(10, 4)), record(0, [1], usage=(11, 3)), record(0, [1])]
    assert length_check(records) == LengthCheck(2, 1, 0, 1, 1, -1, 0, None)
    assert length_check(records[2:]) is None


def test_in_flight_counts_back_to_back_once() -> None:
    assert max_in_flight([record(0.0, [1.0]), record(1.0, [2.0]), record(1.5, [3.0])]) == 2


def test_warnings_name_weaknesses_of_the_figures() -> None:
    late = record(1.0, [1.5], due_s=0.0, usage=(10, 3))
    failed = record(0.0, [], status="failed", kind="http_500")
    text = "\n".join(summary([late, failed], lag_s=[0.5]).warnings)
    for part in ("woke up late", "left late", "1 of 2 requests failed", "differ in length"):
        assert part in text
    assert summary([record(0.0, [0.1], usage=(10, 4))], lag_s=[0.0001]).warnings == []


def test_errors_are_counted_by_kind() -> None:
    records = [record(0, [], status="failed", kind=kind) for kind in ("http_500", "timeout", "http_500")]
    assert summary(records).errors == {"http_500": 2, "timeout": 1}


def test_nothing_sent_is_not_an_error() -> None:
    report = summary([])
    assert report.duration_s == 0.0 and report.overall.ttft_ms is None and report.overall.requests_per_s == 0.0


def run_with_ttft(ttft_s: float) -> RunReport:
    return summary([record(0.0, [ttft_s, ttft_s + 1.0], usage=(10, 4))])


def test_comparison_takes_medians_and_paired_ratios() -> None:
    """TTFT 1, 2, 3 s against 2, 4, 3 s: medians 2 and 3; ratios 2, 2, 1 with median 2 (not 3/2)."""
    rounds = {"a": [run_with_ttft(t) for t in (1, 2, 3)], "b": [run_with_ttft(t) for t in (2, 4, 3)]}
    found = {figure.key: figure for figure in compare(rounds)}
    ttft = found["ttft_p50_ms"]
    assert [fields(ttft.by_name[name]) for name in "ab"] == [
        pytest.approx([2000, 1000, 3000]),
        pytest.approx([3000, 2000, 4000]),
    ]
    assert ttft.by_name["b"].values == pytest.approx([2000, 4000, 3000])
    assert fields(ttft.ratio_to_first["b"]) == pytest.approx([2, 1, 2])
    assert "slo_attainment" not in found
    assert found["failed"].ratio_to_first == {}
