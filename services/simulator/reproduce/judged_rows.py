"""The rows of docs/reproduction.md, judged, and docs/reproduction.json beside it, which holds them all.

    conditions   system → those under which its figures were measured
    rows         one line each: numbers with the page's digits, and what follows from them and the shipped rules

Only ids and numbers are read back; verdict, class, constants and reason are derived anew. Measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from cohort.common.errors import ConfigError
from cohort.services.simulator.figures.figure import (
    Claim,
    Constant,
    Figure,
    Kind,
    Reason,
    Standing,
    shipped_claims,
    shipped_constants,
    shipped_denominator,
    shipped_reasons,
)
from cohort.services.simulator.reproduce.reproduce import Reproduced, conditions, shown_paper
from cohort.services.simulator.reproduce.verdicts import REPRODUCED, WON, Spread, kind_of, row_verdict


@dataclass(frozen=True, slots=True)
class Rules:
    """Contents of `configs/reproduction/`: how rows are compared, which count, why some are not reproduced."""

    claims: Sequence[Claim] = field(default_factory=shipped_claims)
    reasons: Sequence[Reason] = field(default_factory=shipped_reasons)
    constants: Sequence[Constant] = field(default_factory=shipped_constants)
    denominator: Sequence[str] = field(default_factory=shipped_denominator)

    def reason_of(self, name: str) -> Reason | None:
        """Return the reason with the longest beginning of a row's id."""
        fitting = [(len(begin), reason) for reason in self.reasons for begin in reason.begins if name.startswith(begin)]
        return max(fitting, key=lambda found: found[0])[1] if fitting else None

    def class_of(self, figure: Figure) -> str:
        """Return the class in which a row is counted."""
        if figure.standing is not Standing.CLAIM:
            return figure.standing.name.lower()
        kind = kind_of(figure, self.claims)
        if kind in (Kind.MORE, Kind.LESS):
            return "win"
        if figure.id in self.denominator:
            return "counted"
        return "bound" if kind in (Kind.AT_MOST, Kind.AT_LEAST) else "added"


@dataclass(frozen=True, slots=True)
class Row:
    """`rests_on`: names of constants that were chosen by a figure. One that rests on any is not counted."""

    figure: Figure
    ours: Spread
    class_: str
    verdict: str
    rests_on: tuple[str, ...]
    reason: Reason | None

    @property
    def shown_verdict(self) -> str:
        return f"{self.verdict}*" if self.rests_on and self.verdict in (REPRODUCED, WON) else self.verdict


class _StoredRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Numbers are null where they are not finite."""

    id: str
    low: float | None
    median: float | None
    high: float | None
    seeds: int
    exercised: float | None = None
    paper: str = ""
    unit: str = ""
    class_: str = msgspec.field(default="", name="class")
    verdict: str = ""
    rests_on: tuple[str, ...] = ()
    why: str = ""
    shown_by: str = ""


class PageNumbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    conditions: dict[str, list[str]] = {}
    rows: tuple[_StoredRow, ...] = ()

    @staticmethod
    def read(path: Path) -> PageNumbers:
        """Read the numbers; none where there is no such file. Raises `ConfigError`."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=PageNumbers)
        except FileNotFoundError:
            return PageNumbers()
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}: not written by `cohort reproduce --docs`: {error}") from error

    def spreads(self) -> dict[str, Spread]:
        found = {}
        for row in self.rows:
            low, median, high = (math.nan if value is None else value for value in (row.low, row.median, row.high))
            found[row.id] = Spread(low, median, high, row.seeds, row.exercised)
        return found

    def results(self, figures: Iterable[Figure]) -> list[Reproduced]:
        found, rows = self.spreads(), []
        for figure in figures:
            if (ours := found.get(figure.id)) is not None:
                used = [] if ours.exercised is None else [ours.exercised]
                rows.append(Reproduced.of(figure, (ours.low, ours.median, ours.high), range(ours.seeds), used))
        return rows

    def lacking(self, figures: Iterable[Figure], seeds: int) -> list[str]:
        """Return the ids of figures without a number, with one of fewer seeds, or without how many requests used the
        mechanism."""
        known = self.spreads()

        def enough(figure: Figure) -> bool:
            ours = known.get(figure.id)
            if ours is None or 0 < ours.seeds < seeds:
                return False
            return figure.exercised is None or ours.exercised is not None

        return [figure.id for figure in figures if not enough(figure)]

    def judged(self, figures: Iterable[Figure], rules: Rules) -> list[Row]:
        spreads, rows = self.spreads(), []
        for figure in figures:
            if (ours := spreads.get(figure.id)) is None:
                continue
            verdict = row_verdict(kind_of(figure, rules.claims), figure.paper, ours, figure.paper_to)
            rests_on = tuple(constant.name for constant in rules.constants if constant.is_under(figure.id))
            judged = verdict not in (REPRODUCED, WON) and figure.standing is not Standing.UNCOMPARED
            reason = rules.reason_of(figure.id) if judged else None
            rows.append(Row(figure, ours, rules.class_of(figure), verdict, rests_on, reason))
        return rows

    def with_results(self, results: Iterable[Reproduced], figures: Sequence[Figure], rules: Rules) -> PageNumbers:
        """Replace the numbers of these figures; those of no figure any more go."""
        known, under = {row.id: row for row in self.rows}, dict(self.conditions)
        for result in results:
            low, median, high = (float(f"{value:.4g}") for value in (result.low, result.ours, result.high))
            exercised = None if result.exercised is None else float(f"{result.exercised:.3g}")
            known[result.id] = _StoredRow(result.id, low, median, high, len(result.seeds), exercised)
            under[result.system] = conditions(result.system)
        placed = tuple(known[figure.id] for figure in figures if figure.id in known)
        rows = PageNumbers(under, placed).judged(figures, rules)
        return PageNumbers(under, tuple(map(_judged_row, placed, rows)))

    def encoded(self) -> bytes:
        encode = msgspec.json.encode
        return b'{"conditions": %b, "rows": [\n%b\n]}\n' % (
            encode(self.conditions),
            b",\n".join(map(encode, self.rows)),
        )


def _judged_row(stored: _StoredRow, row: Row) -> _StoredRow:
    why, shown_by = (row.reason.why, row.reason.shown_by) if row.reason is not None else ("", "")
    return msgspec.structs.replace(
        stored,
        paper=shown_paper(row.figure),
        unit=row.figure.unit,
        class_=row.class_,
        verdict="" if row.figure.standing is Standing.UNCOMPARED else row.verdict,
        rests_on=row.rests_on,
        why=why,
        shown_by=shown_by,
    )
