"""Columns of a comparison: what they compute, and what is refused before anything runs."""

from __future__ import annotations

import math

import pytest

from cohort.common.errors import ConfigError
from cohort.services.bench.live.expressions import Known, Reading, parse

KNOWN = Known(
    parameters=frozenset({"slo_ms", "name"}),
    clients=frozenset({"rt", "be"}),
    report_fields=frozenset({"output_tokens_per_s", "slo.itl_share"}),
    columns=frozenset({"ttft_ms", "output_tokens"}),
)
METRICS = """\
cohort_iteration_gap_seconds_bucket{instance="decode-0",le="0.001"} 3.0
cohort_iteration_gap_seconds_bucket{instance="decode-0",le="0.005"} 6.0
cohort_iteration_gap_seconds_bucket{instance="decode-0",le="+Inf"} 8.0
cohort_iteration_gap_seconds_bucket{instance="decode-1",le="0.005"} 0.0
cohort_iteration_gap_seconds_bucket{instance="decode-1",le="+Inf"} 4.0
cohort_step_seconds_bucket{instance="decode-0",kind="decode",le="0.05"} 1.0
cohort_step_seconds_bucket{instance="decode-0",kind="decode",le="+Inf"} 2.0
cohort_step_seconds_bucket{instance="decode-0",kind="prefill",le="0.05"} 0.0
cohort_step_seconds_bucket{instance="decode-0",kind="prefill",le="+Inf"} 2.0
cohort_worker_schedule_seconds_sum{instance="unified-0"} 1.5
cohort_worker_schedule_seconds_sum{instance="unified-1"} 2.5
cohort_schedule_seconds_summary 100.0
"""
READING = Reading(
    overall={"rt": {"output_tokens_per_s": 40.0, "slo": {"itl_share": 0.5}}, "be": {"slo": None}},
    rows={"rt": [{"ttft_ms": 5.0, "output_tokens": 2.0}, {"ttft_ms": 15.0, "output_tokens": 3.0}], "be": []},
    stats={
        "manager": {"splits_total": 3.0},
        "prefill-0": {"late": 0.1},
        "decode-0": {"late": 0.3, "moved": 2.0},
        "decode-1": {"moved": 5.0},
    },
    metrics=METRICS,
)


def value(text: str) -> float:
    return parse(text, KNOWN).number({"slo_ms": 10.0, "name": "x"}, READING)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 + 2 * 3 - 4 / 8", 6.5),
        ("rt.output_tokens_per_s * rt.slo.itl_share", 20.0),
        ('100 * mean("rt", ttft_ms <= slo_ms)', 50.0),
        ('summed("rt", ttft_ms / output_tokens)', 7.5),
        ('most("rt", ttft_ms) - least("rt", ttft_ms)', 10.0),
        ('counted("rt")', 2.0),
        ('total("manager", "splits_total")', 3.0),
        ('total("worker", "moved")', 7.0),
        ('total("decode-1", "moved")', 5.0),
        ('total("prefill", "moved")', 0.0),
        ('highest("worker", "late")', 0.3),
        ('exported("schedule_seconds_sum")', 4.0),
        ('100 * within("decode-0", "iteration_gap_seconds", 0.005)', 75.0),
        ('within("decode", "iteration_gap_seconds", 0.005)', 0.5),
        ('within("decode-0", "step_seconds", 0.05, kind="decode")', 0.5),
        ('total("manager", "splits_total") / 0 if total("manager", "none") else -1', -1.0),
        ("round(2.6)", 3.0),
    ],
)
def test_values_by_hand(text: str, expected: float) -> None:
    assert value(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text",
    [
        "1 / 0",
        'highest("manager", "none")',
        'mean("be", ttft_ms)',
        "be.slo.itl_share",
        'within("decode-7", "iteration_gap_seconds", 1)',
    ],
)
def test_an_unknown_name_is_no_number(text: str) -> None:
    assert math.isnan(value(text))


def test_a_parameter_alone_keeps_its_kind() -> None:
    assert parse("name", KNOWN).value({"name": "uniform:1-2", "slo_ms": 1}, Reading()) == "uniform:1-2"
    assert parse("slo_ms * 3", KNOWN).value({"slo_ms": 2}, Reading()) == 6


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 +", "invalid syntax"),
        ("slo_s", "no parameter 'slo_s'"),
        ("rt.output_tokens", "no 'output_tokens' in a client's report"),
        ("xx.slo.itl_share", "no client 'xx'"),
        ('mean("xx", ttft_ms)', "no client 'xx'"),
        ('mean("rt", tttft_ms)', "no parameter 'tttft_ms'"),
        ("ttft_ms", "no parameter 'ttft_ms'"),
        ('median("rt", ttft_ms)', "no function 'median'"),
        ('total("managr", "splits_total")', "no process 'managr'"),
        ('total("manager")', "takes 2 arguments"),
        ('total("manager", splits_total)', "must be a text"),
        ('total("manager", "splits_total", kind="x")', "takes no kind="),
        ("().__class__", "no client"),
        ("[1][0]", "is no number"),
        ("2 ** 9", "is no number"),
        ('__import__("os")', "no function '__import__'"),
    ],
)
def test_a_fault_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(text, KNOWN)
    assert said in str(refused.value) and repr(text) in str(refused.value)


def test_a_text_is_no_number() -> None:
    with pytest.raises(ConfigError, match="name is 'x'"):
        value("name + 1")
