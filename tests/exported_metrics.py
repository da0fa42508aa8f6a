"""Every metric that the processes export, with its labels, found in the code that makes it.

Read from the source, because no single process makes them all: calls of `MetricFactory` (`counter`, `gauge`,
`histogram`) and of the Prometheus client's own classes, with a literal name.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_FACTORY = {"counter": "counter", "gauge": "gauge", "histogram": "histogram"}
_CLIENT = {
    "Counter": "counter",
    "Gauge": "gauge",
    "Histogram": "histogram",
    "CounterMetricFamily": "counter",
    "GaugeMetricFamily": "gauge",
}
_MAKES = re.compile(rf'\b(?:{"|".join((*_FACTORY, *_CLIENT))})\(|"cohort_')
"""What stands in every source that makes a metric; no other is read for long."""
_PROCESS = ("process_open_fds", "process_max_fds", "process_cpu_seconds_total", "process_resident_memory_bytes")
"""Of the client's `ProcessCollector`."""


@dataclass(frozen=True, slots=True)
class Exported:
    """One series name, as Prometheus sees it."""

    name: str
    labels: frozenset[str]


@functools.cache
def exported() -> dict[str, frozenset[str]]:
    """Labels by series name; a name that several processes export has the labels of all of them."""
    found: dict[str, frozenset[str]] = {name: frozenset({"instance"}) for name in _PROCESS}
    for folder in ("common", "services"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            for item in _made_in(ast.parse(text)) if _MAKES.search(text) else ():
                found[item.name] = found.get(item.name, frozenset()) | item.labels
    found["cohort_scrape_up"] = frozenset({"instance"})  # written as text by the monitor
    return found


def _made_in(tree: ast.Module) -> Iterator[Exported]:
    tuples = {
        target.id: _strings(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Tuple)
    }
    families = {  # ("name", "help", value) rows that a loop turns into metrics: their names stand in tuples
        node.elts[0].value: None
        for node in ast.walk(tree)
        if isinstance(node, ast.Tuple) and node.elts and isinstance(node.elts[0], ast.Constant)
        if isinstance(node.elts[0].value, str) and node.elts[0].value.startswith("cohort_")
    }
    for name in families:
        for series in (name, f"{name}_total"):
            yield Exported(series, frozenset({"instance"}))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        kind = _FACTORY.get(called) or _CLIENT.get(called)
        first = node.args[0]
        if kind is None:
            continue
        name = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
        if isinstance(first, ast.JoinedStr) and called == "CounterMetricFamily":  # the bus's counters
            names = [f"cohort_bus_{part}" for part in ("sent", "received", "malformed", "forged", "unreachable")]
        else:
            names = [name] if name else []
        labels = frozenset(_labels(node, called, tuples)) | {"instance"}
        if called in _FACTORY:
            names, labels = [f"cohort_{name}" for name in names], labels | {"model_name"}
        for name in names:
            yield from _series(name.removesuffix("_total"), kind, labels)


def _series(name: str, kind: str, labels: frozenset[str]) -> Iterator[Exported]:
    match kind:
        case "counter":
            yield Exported(f"{name}_total", labels)
        case "gauge":
            yield Exported(name, labels)
        case _:
            yield Exported(f"{name}_bucket", labels | {"le"})
            yield Exported(f"{name}_sum", labels)
            yield Exported(f"{name}_count", labels)


def _labels(node: ast.Call, called: str, tuples: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    given = next((keyword.value for keyword in node.keywords if keyword.arg in ("labels", "labelnames")), None)
    if given is None and len(node.args) > 2:
        given = node.args[2]
    if given is None:
        return ()
    return tuples.get(given.id, ()) if isinstance(given, ast.Name) else _strings(given)


def _strings(node: ast.expr) -> tuple[str, ...]:
    if not isinstance(node, ast.Tuple | ast.List):
        return ()
    return tuple(item.value for item in node.elts if isinstance(item, ast.Constant) and isinstance(item.value, str))
