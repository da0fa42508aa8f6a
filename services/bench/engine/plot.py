"""An engine measurement as one picture: steps beside their lower bounds, a step taken apart, growth. Called by
`engine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cohort.services.bench.decisions.growth import Curve
from cohort.services.bench.engine.render import FORMS, PARTS
from cohort.services.bench.engine.report import Comparison, EngineReport, Form, StepPart
from cohort.services.bench.engine.result import EngineBench
from cohort.services.bench.picture import COLOURS, picture

_FORM_STYLE: dict[Form, Any] = {"linear": ":", "prepacked": "--", "ours": "-.", "memory": (0, (1, 4))}
_PART_COLOURS: dict[StepPart, str] = {
    "products": "#1f6feb",
    "attention": "#2b8a3e",
    "elementwise": "#8e44ad",
    "embedding": "#17a2b8",
    "sampling": "#b8860b",
    "inputs": "#d1571b",
    "dispatch": "#c2255c",
    "plan": "#555555",
    "build": "#777777",
    "completed": "#999999",
    "glue": "#bbbbbb",
}


def write_engine_plot(path: Path, result: EngineBench) -> None:
    report = result.engine
    title = (
        "decisions"
        if report is None
        else (
            f"{report.model.name} in {report.machine.dtype}, {report.machine.threads} threads, "
            f"{report.machine.processor}"
        )
    )
    blocks = [each for each in result.growth if each.size_of == "cached blocks"]
    waiting = [each for each in result.growth if each.size_of == "waiting requests"]
    panels: list[Callable[[Any], None]] = []
    if report is not None:
        measured = {
            _decode: _comparisons(report, "decode"),
            _contexts: _comparisons(report, "decode"),
            _prefill: _comparisons(report, "prefill"),
            _shares: report.shares,
        }
        panels += [partial(draw, report=report) for draw, found in measured.items() if found]
    curves = (("prefix cache", blocks), ("decisions", waiting))
    panels += [partial(_growth, title=name, curves=found) for name, found in curves if found]
    columns = max(1, min(3, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    with picture(path, rows, columns, title) as axes:
        for axis, draw in zip(axes.flat, panels, strict=False):
            draw(axis)
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()


def _comparisons(report: EngineReport, kind: str) -> list[Comparison]:
    found = [comparison for comparison in report.comparisons if comparison.kind == kind and comparison.steps]
    return sorted(found, key=lambda comparison: comparison.tokens)


def _decode(axis: Any, report: EngineReport) -> None:
    """Against rows, at the context that most numbers of rows have."""
    comparisons = _comparisons(report, "decode")
    contexts = [point.context for comparison in comparisons for point in comparison.steps]
    context = max(dict.fromkeys(contexts), key=contexts.count)
    steps = [
        (comparison.tokens, point.step.median_s * 1e3)
        for comparison in comparisons
        for point in comparison.steps
        if point.context == context
    ]
    _against_lower_bounds(axis, comparisons, steps, f"decode step, context {context}", "rows")


def _prefill(axis: Any, report: EngineReport) -> None:
    comparisons = _comparisons(report, "prefill")
    steps = [(comparison.tokens, comparison.steps[0].step.median_s * 1e3) for comparison in comparisons]
    _against_lower_bounds(axis, comparisons, steps, "prefill step", "tokens")


def _against_lower_bounds(
    axis: Any, comparisons: Sequence[Comparison], steps: Sequence[tuple[int, float]], title: str, label: str
) -> None:
    axis.plot([at for at, _ in steps], [ms for _, ms in steps], marker="o", color=COLOURS[0], label="engine's step")
    for form, name in FORMS.items():
        lower_bound = [
            (each.tokens, each.lower_bounds[form].median_s * 1e3) for each in comparisons if form in each.lower_bounds
        ]
        if lower_bound:
            shown = "weights read once" if form == "memory" else f"products, {name}"
            axis.plot(
                [at for at, _ in lower_bound],
                [ms for _, ms in lower_bound],
                linestyle=_FORM_STYLE[form],
                color="#444",
                label=shown,
            )
    axis.set(title=title, xlabel=label, ylabel="ms", xscale="log", yscale="log")
    ticks = sorted({comparison.tokens for comparison in comparisons})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=8)


def _contexts(axis: Any, report: EngineReport) -> None:
    comparisons = _comparisons(report, "decode")
    for index, comparison in enumerate(comparisons):
        points = [(point.context, point.step.median_s * 1e3) for point in comparison.steps]
        axis.plot(
            [at for at, _ in points],
            [ms for _, ms in points],
            marker="o",
            color=COLOURS[index % len(COLOURS)],
            label=f"{comparison.tokens} rows",
        )
    axis.set(title="decode step against context", xlabel="context, tokens", ylabel="ms", xscale="log", yscale="log")
    _widen(axis)
    axis.legend(frameon=False, fontsize=8, loc="upper left")


def _shares(axis: Any, report: EngineReport) -> None:
    """Stacked bars, in percent of a step."""
    names = [f"{one.rows} x {one.context}" for one in report.shares]
    below = [0.0] * len(names)
    for part, title in PARTS.items():
        heights = [100 * one.parts_s.get(part, 0.0) / sum(one.parts_s.values()) for one in report.shares]
        axis.bar(names, heights, bottom=below, color=_PART_COLOURS[part], label=title, width=0.6)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axis.set(title="where a decode step goes", xlabel="rows x context", ylabel="% of a step")
    axis.set_xlim(-0.5, len(names) + 0.9)  # room for the legend
    axis.legend(frameon=False, fontsize=7, loc="upper right")


def _growth(axis: Any, title: str, curves: Sequence[Curve]) -> None:
    for index, each in enumerate(curves):
        axis.plot(
            each.sizes,
            [seconds * 1e6 for seconds in each.seconds],
            marker="o",
            color=COLOURS[index % len(COLOURS)],
            label=f"{each.name} (size^{each.exponent:.2f})",
        )
    axis.set(title=title, xlabel=curves[0].size_of, ylabel="µs", xscale="log", yscale="log")
    _widen(axis)
    axis.legend(frameon=False, fontsize=7, loc="upper left")


def _widen(axis: Any) -> None:
    """A flat line shall look flat, and the legend have its place above it."""
    low, high = axis.get_ylim()
    axis.set_ylim(low / 2, high * 5)
