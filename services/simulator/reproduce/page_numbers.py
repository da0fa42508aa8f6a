"""docs/reproduction.json, beside the page that is made of it: our number of every figure, with the page's digits.

    conditions   system → those under which its figures were measured
    figures      heading → id → lowest, median, highest, seeds; one line each

Written by `cohort reproduce --docs`; verdicts are never kept. Measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import msgspec

from cohort.common.errors import ConfigError
from cohort.services.simulator.figures.figure import Figure
from cohort.services.simulator.reproduce.reproduce import Reproduced, conditions
from cohort.services.simulator.reproduce.verdicts import Spread

_Number = tuple[float | None, float | None, float | None, int]
"""Null: not finite."""


class PageNumbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    conditions: dict[str, list[str]] = {}
    figures: dict[str, dict[str, _Number]] = {}

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
        for name, number in self._numbers().items():
            low, median, high = (math.nan if value is None else value for value in number[:3])
            found[name] = Spread(low, median, high, number[3])
        return found

    def results(self, figures: Iterable[Figure]) -> list[Reproduced]:
        found, rows = self.spreads(), []
        for figure in figures:
            if (ours := found.get(figure.id)) is not None:
                values = (ours.low, ours.median, ours.high)
                rows.append(Reproduced.of(figure, values, range(ours.seeds)))
        return rows

    def lacking(self, figures: Iterable[Figure], seeds: int) -> list[str]:
        """Return the ids of figures without a number, or with one of fewer seeds."""
        enough = {name for name, found in self.spreads().items() if not 0 < found.seeds < seeds}
        return [figure.id for figure in figures if figure.id not in enough]

    def with_results(self, results: Iterable[Reproduced], figures: Iterable[Figure]) -> PageNumbers:
        """Replace the numbers of these figures; those of no figure any more go."""
        known, under = self._numbers(), dict(self.conditions)
        for result in results:
            low, median, high = (float(f"{value:.4g}") for value in (result.low, result.ours, result.high))
            known[result.id] = (low, median, high, len(result.seeds))
            under[result.system] = conditions(result.system)
        placed: dict[str, dict[str, _Number]] = {}
        for figure in figures:
            if figure.id in known:
                placed.setdefault(f"{figure.figure} ({figure.system})", {})[figure.id] = known[figure.id]
        return PageNumbers(under, placed)

    def encoded(self) -> bytes:
        encode = msgspec.json.encode
        lines = b",\n".join(b"%b: %b" % (encode(heading), encode(numbers)) for heading, numbers in self.figures.items())
        return b'{"conditions": %b, "figures": {\n%b\n}}\n' % (encode(self.conditions), lines)

    def _numbers(self) -> dict[str, _Number]:
        return {name: number for of_heading in self.figures.values() for name, number in of_heading.items()}
