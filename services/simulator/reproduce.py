"""Runs the papers' comparisons and prints paper, ours, ratio. `docs/reproduction.md` is written from the same list."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from itertools import groupby

import msgspec

from cohort.common.errors import ConfigError
from cohort.services.simulator import verdicts
from cohort.services.simulator.figures.figure import Figure, Lab

MODULES = ("baselines", "bucketserve", "alignedserve", "dynaserve", "ecoserve", "bros")
"""Modules of `figures/`, in the order in which they run."""


class Reproduced(msgspec.Struct, frozen=True):
    id: str
    system: str
    figure: str
    workload: str
    baseline: str
    metric: str
    unit: str
    paper: float
    ours: float
    ratio: float
    note: str

    @classmethod
    def of(cls, figure: Figure, ours: float) -> Reproduced:
        """`ours`: what was measured, in the figure's unit."""
        return cls(
            figure.id,
            figure.system,
            figure.figure,
            figure.workload,
            figure.baseline,
            figure.metric,
            figure.unit,
            figure.paper,
            ours,
            ours / figure.paper,
            figure.note,
        )


def all_figures() -> list[Figure]:
    found: list[Figure] = []
    for name in MODULES:
        found += importlib.import_module(f"cohort.services.simulator.figures.{name}").FIGURES
    return found


def select(system: str | None, prefix: str | None) -> list[Figure]:
    """Raises `ConfigError` when nothing is left."""
    figures = all_figures()
    chosen = [
        figure
        for figure in figures
        if (system is None or figure.system == system.lower()) and figure.id.startswith(prefix or "")
    ]
    if not chosen:
        systems = ", ".join(sorted({figure.system for figure in figures}))
        raise ConfigError(f"no such figure; systems: {systems}; `cohort reproduce --list` names all")
    return chosen


def remarks(system: str) -> list[str]:
    """The remarks of a module of figures about them as a whole (`REMARKS`): why some differ, and further attempts."""
    if system not in MODULES:
        return []
    return list(getattr(importlib.import_module(f"cohort.services.simulator.figures.{system}"), "REMARKS", ()))


def reproduce(figures: Iterable[Figure], progress: Callable[[Figure], None]) -> list[Reproduced]:
    lab = Lab()
    results = []
    for figure in figures:
        progress(figure)
        results.append(Reproduced.of(figure, float(figure.measure(lab))))
    return results


def markdown(results: Iterable[Reproduced], before: str = "") -> str:
    """The page. Sections that `before`, an earlier page, has of systems that are not among the results stay."""
    sections = _sections(before)
    for system, sections_of_system in groupby(results, key=lambda result: result.system):
        sections[system] = _tables(sections_of_system) + _words(system)
    order = {name: index for index, name in enumerate(MODULES)}
    lines = [
        "# Do we reproduce the papers?",
        "",
        "Written by `cohort reproduce --docs docs/reproduction.md`; nothing here is edited by hand. Every number comes",
        "from the simulator: the policies of the live services under virtual time (docs/guide/simulator.md says what",
        "it models). `ratio` is ours over the paper's.",
    ]
    body = [
        line for system in sorted(sections, key=lambda name: order.get(name, len(order))) for line in sections[system]
    ]
    lines += verdicts.summary(body, all_figures()) + body
    return "\n".join(lines) + "\n"


def _sections(page: str) -> dict[str, list[str]]:
    """System → its lines on a page that `markdown` wrote."""
    sections: dict[str, list[str]] = {}
    system = ""
    for line in page.splitlines():
        if line.startswith("## ") and line.endswith(")"):
            system = line[line.rindex("(") + 1 : -1]
            sections.setdefault(system, []).append("")
        if system and line:
            sections[system].append(line)
            if line.startswith("## "):
                sections[system].append("")
    return sections


def _words(system: str) -> list[str]:
    said = remarks(system)
    return ["", f"## Why, and what was tried ({system})", "", *(f"- {remark}" for remark in said)] if said else []


def _tables(results: Iterable[Reproduced]) -> list[str]:
    lines: list[str] = []
    for (system, figure), group in groupby(results, key=lambda result: (result.system, result.figure)):
        lines += [
            "",
            f"## {figure} ({system})",
            "",
            "| workload | system | metric | paper | ours | ratio | note |",
            "|---|---|---|---:|---:|---:|---|",
        ]
        for r in group:
            lines.append(
                f"| {r.workload} | {r.baseline} | {r.metric}, {r.unit} | {r.paper:g} | {r.ours:.4g} | {r.ratio:.2f} "
                f"| {r.note} |"
            )
    return lines
