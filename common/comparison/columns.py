"""What is told of a run beside the share of kept SLOs: columns of a client's report, by their titles.

The report is a live client's or a simulation's, as data: both have the same fields, but for the names of two. A column
that a run does not have is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OUTPUT_RATE = "output tokens/s"
_RATES = {OUTPUT_RATE: "output_tokens_per_s", "prompt tokens/s": "prompt_tokens_per_s", "requests/s": "requests_per_s"}
_TIMES = {
    "TTFT": (("ttft_ms",), ("mean", "p50", "p90", "p99", "max")),
    "TPOT": (("tpot_ms",), ("mean", "p90")),
    "TBT": (("itl_ms", "tbt_ms"), ("p50", "p99", "max")),
    "JCT": (("e2e_ms", "jct_ms"), ("mean", "p99")),
    "normalised latency": (("normalised_ms",), ("mean",)),
}


def columns_of(report: Mapping[str, Any]) -> dict[str, float]:
    """Times in milliseconds."""
    found = {title: float(report[field]) for title, field in _RATES.items()}
    if slo := report["slo"]:
        found["kept, %"] = 100 * slo["kept_of_sent"]
    for title, (fields, figures) in _TIMES.items():
        times = next((report[field] for field in fields if report.get(field)), None)
        if times is not None:
            found |= {f"{title} {figure}, ms": times[figure] for figure in figures}
    return found
