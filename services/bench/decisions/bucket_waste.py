"""Expected padding waste against the number of buckets: `cohort bench decisions buckets TRACE…`.

For the prompt lengths of a trace, Eq. 3 of BucketServe at the bounds three splitters choose: halving (Alg. 1), equal
shares of the requests, and the optimum (dynamic programme). The bounds are chosen on the first half of the requests and
judged on the second, so that no splitter is praised for knowing its judge. One core, seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from cohort.common.policies.bucketserve.length_histogram import LengthHistogram
from cohort.common.policies.bucketserve.optimal_split import bisection_bounds, optimal_bounds
from cohort.common.policies.bucketserve.waste import FloatArray, expected_waste
from cohort.common.workloads.traces import read_trace

KS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True, slots=True)
class Point:
    """Eq. 3 with K buckets; `bisection_buckets` is the number halving really arrives at, at most K."""

    trace: str
    buckets: int
    bisection: float
    bisection_buckets: int
    equal_shares: float
    optimal: float


def compare(trace: str, lengths: FloatArray, limit: int, ks: Sequence[int] = KS) -> list[Point]:
    """`limit` is L_max; longer prompts are cut to it, as a server would."""
    lengths = np.minimum(lengths, limit - 1)
    chosen_on, judged_on = lengths[: len(lengths) // 2], lengths[len(lengths) // 2 :]
    ones = np.ones(len(judged_on))
    histogram = LengthHistogram(limit)
    for tokens in chosen_on.astype(int).tolist():
        histogram.add(tokens)
    known, weights = histogram.lengths_and_weights()
    halved = {len(bounds): bounds for bounds in _halvings(limit, known, weights)}
    points = []
    for k in ks:
        reached = max(size for size in halved if size <= k)
        shares = sorted({int(q) + 1 for q in np.quantile(chosen_on, np.arange(1, k) / k)} | {limit})
        best = optimal_bounds(histogram.edges, known, weights, k)
        points.append(
            Point(
                trace,
                k,
                expected_waste(halved[reached], judged_on, ones),
                reached,
                expected_waste(shares, judged_on, ones),
                expected_waste(best, judged_on, ones),
            )
        )
    return points


def _halvings(limit: int, lengths: FloatArray, weights: FloatArray) -> list[list[int]]:
    """What Alg. 1 arrives at for ever smaller batches (m of Alg. 1)."""
    total = float(weights.sum())
    return [bisection_bounds(limit, lengths, weights, total / 1.15**step) for step in range(60)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", nargs="+", type=Path, help="any trace `cohort bench --trace` reads")
    parser.add_argument("--limit", type=int, default=8192, help="L_max in tokens")
    parser.add_argument("--json", action="store_true", help="a list of objects instead of the table")


def execute(options: argparse.Namespace) -> int:
    """Everything from parsed options."""
    points: list[Point] = []
    for path in options.traces:
        rows = read_trace(path).rows
        lengths = np.array([row.prompt_tokens for row in rows], dtype=np.float64)
        points += compare(path.name.partition(".")[0], lengths, options.limit)
    if options.json:
        json.dump([asdict(point) for point in points], sys.stdout, indent=1)
        return 0
    table = Table("trace", "K", "halving (Alg. 1)", "equal shares", "optimal")
    for point in points:
        halving = f"{point.bisection:.3f}" + (
            f" ({point.bisection_buckets})" if point.bisection_buckets < point.buckets else ""
        )
        table.add_row(point.trace, str(point.buckets), halving, f"{point.equal_shares:.3f}", f"{point.optimal:.3f}")
    Console().print(table)
    return 0
