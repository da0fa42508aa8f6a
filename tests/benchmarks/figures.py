"""Which measurements of `scripts/opponents` count, and the table of those that do. Pure; called by `measuring`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from cohort.services.bench.output import markdown_table
from cohort.services.bench.rounds import Spread, spread

FOREIGN_LIMIT = 0.10
"""Largest share of all processors that other processes may take while one server is measured."""
ATTEMPTS = 3
"""A measurement and its two repetitions."""
OURS = ("cohort", "cohort, no drafts")
"""Names of our servers; ratios are those of the first, as it is shipped."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One server under one load. `foreign` is a share of all processors."""

    round: int
    sampling: str
    users: int
    server: str
    attempt: int
    output_tokens_per_s: float
    ttft_p50_ms: float | None
    tpot_p50_ms: float | None
    sent: int
    whole: int
    """Answers that ended without an error and have a permitted length."""
    duration_s: float
    foreign: float

    @property
    def verdict(self) -> Literal["keep", "disturbed", "failed"]:
        if self.whole < self.sent:
            return "failed"
        return "disturbed" if self.foreign > FOREIGN_LIMIT else "keep"

    @property
    def repeat(self) -> bool:
        """Whether another attempt is due: failures are shown, not repeated until they pass."""
        return self.verdict == "disturbed" and self.attempt < ATTEMPTS


def table(measurements: Iterable[Measurement], servers: Sequence[str]) -> str:
    """Return a row for each sampling and number of users: output tokens/s of every server, then the first server's
    ratio over every opponent. A figure is the median of the rounds that count, with the lowest and the highest."""
    cells: dict[tuple[str, int], dict[str, dict[int, float]]] = {}
    for each in measurements:
        rounds = cells.setdefault((each.sampling, each.users), {}).setdefault(each.server, {})
        if each.verdict == "keep":
            rounds[each.round] = each.output_tokens_per_s
    opponents = [name for name in servers if name not in OURS]
    rows = []
    for (sampling, users), found in sorted(cells.items()):
        row = [sampling, str(users), *(_cell(found.get(name, {}).values(), "{:.0f}") for name in servers)]
        ours = found.get(OURS[0], {})
        for name in opponents:
            theirs = found.get(name, {})
            row.append(_cell([ours[number] / theirs[number] for number in ours if number in theirs], "{:.2f}"))
        rows.append(row)
    return markdown_table(["sampling"], ["users", *servers, *(f"over {name}" for name in opponents)], rows)


def _cell(values: Iterable[float], form: str) -> str:
    if not (found := list(values)):
        return "–"
    of: Spread = spread(found)
    median, low, high = (form.format(value) for value in (of.median, of.min, of.max))
    return median if len(found) == 1 else f"{median} ({low}–{high})"
