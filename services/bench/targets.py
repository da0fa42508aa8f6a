"""Targets of the engine and the links, and whether they were met. Called by `engine` and `kv_link`; prints nothing.

A target is named, so that a missed one can be looked for in docs/benchmarks.md, where it is explained.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cohort.services.bench.engine.report import EngineReport

DECODE_OVER_PREPACKED = {(16, 128): 1.5, (64, 128): 1.4}
"""(rows, context): a step is at most so many times the prepacked products alone."""
PREFILL_OVER_PREPACKED = {512: 1.25}
OUTSIDE_KERNELS = {16: 0.15}
"""rows: at most this share of a step."""
ATTENTION_BANDWIDTH = {(16, 512): 0.60}
LINK_OVER_PERFTEST = 0.70


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """`found` should be at most, or at least, `wanted`."""

    name: str
    wanted: float
    found: float
    at_most: bool

    @property
    def met(self) -> bool:
        return self.found <= self.wanted if self.at_most else self.found >= self.wanted


def engine_targets(report: EngineReport) -> Iterator[Target]:
    """Those whose figure was measured."""
    for comparison in report.comparisons:
        for point in comparison.steps:
            ratio = point.ratios.get("prepacked")
            if comparison.kind == "decode":
                name = f"decode, {point.rows} rows x {point.context}: step / prepacked products"
                wanted = DECODE_OVER_PREPACKED.get((point.rows, point.context))
            else:
                name = f"prefill, {point.tokens_per_row} tokens: step / prepacked products"
                wanted = PREFILL_OVER_PREPACKED.get(point.tokens_per_row)
            if wanted is not None and ratio is not None:
                yield Target(name=name, wanted=wanted, found=ratio, at_most=True)
    for shares in report.shares:
        if (share := OUTSIDE_KERNELS.get(shares.rows)) is not None:
            name = f"decode, {shares.rows} rows x {shares.context}: share of a step outside kernels"
            yield Target(name=name, wanted=share, found=shares.outside_kernels, at_most=True)
    for attention in report.attention:
        if (share := ATTENTION_BANDWIDTH.get((attention.rows, attention.context))) is not None:
            name = f"attention, {attention.rows} rows x {attention.context}: share of the read bandwidth"
            yield Target(name=name, wanted=share, found=attention.share, at_most=False)
    for allocations in report.allocations:
        name = f"decode, {allocations.rows} rows x {allocations.context}: allocations in a step"
        yield Target(name=name, wanted=0.0, found=float(allocations.count), at_most=True)
