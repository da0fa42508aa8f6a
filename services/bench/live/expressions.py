"""Columns of a live comparison as small expressions over what a run left: parsed and checked before anything starts.

    client.output_tokens_per_s * client.slo.itl_share      of a client's report, by the client's name
    100 * mean("rt", ttft_ms <= slo_ttft_ms)               over a client's answered requests: columns of its CSV
    total("manager", "splits_total")                       of processes, as of their last heartbeat

Numbers, names of parameters, + - * /, comparisons (1 or 0), `A if B else C`, and the functions below. A division by
zero is nan. Called by `spec` (parsing, and `${…}` within a specification) and `runs`. Pure.

    total(PROCESS, STAT)     sum over the processes of that role or name ("worker": every worker); 0 where none has it
    highest(PROCESS, STAT)   the largest of theirs; nan where none has it
    exported(METRIC)         sum of a Prometheus metric over labels and processes
    within(PROCESS, HISTOGRAM, S [, LABEL=…])   share of a Prometheus histogram that is at most S
    mean, least, most, summed(CLIENT, EXPRESSION), counted(CLIENT)   over the client's answered requests
    round(X)                 the nearest whole number
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from cohort.common.errors import ConfigError

Value = float | str

PROCESSES = frozenset({"gateway", "manager", "predictor", "monitor", "prefill", "decode", "unified", "worker"})
_WORKERS = ("prefill", "decode", "unified")
_PROCESS_FUNCTIONS = {"total": 2, "highest": 2, "exported": 1, "within": 3}
_OVER_ROWS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "least": min,
    "most": max,
    "summed": math.fsum,
    "counted": len,
}
_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b if b else math.nan,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.LtE: lambda a, b: a <= b,
    ast.Lt: lambda a, b: a < b,
    ast.GtE: lambda a, b: a >= b,
    ast.Gt: lambda a, b: a > b,
    ast.Eq: lambda a, b: a == b,
}


@dataclass(frozen=True, slots=True)
class Reading:
    """The data of one run. `overall`: each client's report of all its requests; `rows`: its answered requests; `stats`:
    every process's own, by instance; `metrics`: the Prometheus text of all of them."""

    overall: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rows: Mapping[str, Sequence[Mapping[str, float]]] = field(default_factory=dict)
    stats: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    metrics: str = ""


@dataclass(frozen=True, slots=True)
class Known:
    """The names of an expression: parameters, clients, the fields of a client's report (dotted) and its columns."""

    parameters: frozenset[str] = frozenset()
    clients: frozenset[str] = frozenset()
    report_fields: frozenset[str] = frozenset()
    columns: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Expression:
    text: str
    tree: ast.expr

    def value(self, parameters: Mapping[str, Value], reading: Reading) -> Value:
        """A number; text only where the whole expression is a parameter that is one."""
        return _Evaluation(parameters, reading).of(self.tree)

    def number(self, parameters: Mapping[str, Value], reading: Reading) -> float:
        return float(self.value(parameters, reading))


def parse(text: str, known: Known) -> Expression:
    """Raises `ConfigError` that says what in the expression is wrong."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ConfigError(f"{text!r}: {error.msg}") from error
    _Check(text, known).expression(tree)
    return Expression(text, tree)


class _Check:
    def __init__(self, text: str, known: Known) -> None:
        self._text = text
        self._known = known

    def expression(self, node: ast.expr, columns: frozenset[str] = frozenset()) -> None:
        match node:
            case ast.Constant(value=int() | float()):
                pass
            case ast.Name(id=name):
                if name not in self._known.parameters | columns:
                    self._refuse(f"no parameter {name!r}", self._known.parameters | columns)
            case ast.Attribute():
                self._report_field(node)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                self.expression(operand, columns)
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
                self.expression(left, columns)
                self.expression(right, columns)
            case ast.Compare(left=left, ops=[comparison], comparators=[right]) if type(comparison) in _COMPARISONS:
                self.expression(left, columns)
                self.expression(right, columns)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                for part in (test, body, orelse):
                    self.expression(part, columns)
            case ast.Call(func=ast.Name(id=name), args=given, keywords=labels):
                self._call(name, given, labels, columns)
            case _:
                self._refuse(f"{ast.unparse(node)!r} is no number")

    def _call(self, name: str, given: list[ast.expr], labels: list[ast.keyword], columns: frozenset[str]) -> None:
        if labels and name != "within":
            self._refuse(f"{name} takes no {labels[0].arg}=")
        if not all(isinstance(label.value, ast.Constant) and label.arg for label in labels):
            self._refuse("a label is NAME=TEXT")
        if name == "round":
            self._count(name, given, 1)
            self.expression(given[0], columns)
        elif name in _OVER_ROWS:
            self._count(name, given, 1 if name == "counted" else 2)
            if (client := _text(given[0])) not in self._known.clients:
                self._refuse(f"{name}: no client {client!r}", self._known.clients)
            for part in given[1:]:
                self.expression(part, self._known.columns)
        elif name in _PROCESS_FUNCTIONS:
            self._count(name, given, _PROCESS_FUNCTIONS[name])
            if name != "exported" and (process := _text(given[0])).partition("-")[0] not in PROCESSES:
                self._refuse(f"{name}: no process {process!r}", PROCESSES)
            if not _text(given[0 if name == "exported" else 1]):
                self._refuse(f"{name}: the name of what is read must be a text")
            if name == "within":
                self.expression(given[2])
        else:
            self._refuse(f"no function {name!r}", {"round", *_OVER_ROWS, *_PROCESS_FUNCTIONS})

    def _report_field(self, node: ast.Attribute) -> None:
        client, _, path = ast.unparse(node).partition(".")
        if client not in self._known.clients:
            self._refuse(f"no client {client!r}", self._known.clients)
        if path not in self._known.report_fields:
            self._refuse(f"no {path!r} in a client's report", self._known.report_fields)

    def _count(self, name: str, given: Sequence[ast.expr], wanted: int) -> None:
        if len(given) != wanted:
            self._refuse(f"{name} takes {wanted} arguments, not {len(given)}")

    def _refuse(self, why: str, known: Iterable[str] = ()) -> None:
        there_are = f"; there are {', '.join(sorted(known))}" if known else ""
        raise ConfigError(f"{self._text!r}: {why}{there_are}")


class _Evaluation:
    """Of trees that `_Check` has passed."""

    def __init__(self, parameters: Mapping[str, Value], reading: Reading) -> None:
        self._names = parameters
        self._reading = reading

    def of(self, node: ast.expr) -> Value:
        match node:
            case ast.Name(id=name):
                return self._names[name]
            case _:
                return self._number(node)

    def _number(self, node: ast.expr) -> float:
        match node:
            case ast.Constant(value=value):
                return value  # type: ignore[return-value]  # an int stays one: sizes are written as they are
            case ast.Name(id=name):
                value = self._names[name]
                if isinstance(value, str):
                    raise ConfigError(f"{name} is {value!r}, where a number is needed")
                return value
            case ast.Attribute():
                return self._field(ast.unparse(node))
            case ast.UnaryOp(operand=operand):
                return -self._number(operand)
            case ast.BinOp(left=left, op=operator, right=right):
                return _OPERATORS[type(operator)](self._number(left), self._number(right))
            case ast.Compare(left=left, ops=[comparison], comparators=[right]):
                return float(_COMPARISONS[type(comparison)](self._number(left), self._number(right)))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._number(body) if self._number(test) else self._number(orelse)
            case ast.Call(func=ast.Name(id=name), args=given, keywords=labels):
                return self._call(name, given, labels)
            case _:
                raise AssertionError(f"unchecked expression {ast.unparse(node)!r}")

    def _call(self, name: str, given: Sequence[ast.expr], labels: Sequence[ast.keyword]) -> float:
        if name == "round":
            return round(self._number(given[0]))
        if name in _OVER_ROWS:
            return self._over_rows(name, given)
        if name == "exported":
            return exported(self._reading.metrics, _text(given[0]))
        process, what = _text(given[0]), _text(given[1])
        if name == "within":
            wanted = {str(label.arg): str(getattr(label.value, "value", "")) for label in labels}
            return within(self._reading.metrics, process, what, self._number(given[2]), wanted)
        meant = (stats for instance, stats in self._reading.stats.items() if _is(instance, process))
        found = [stats[what] for stats in meant if what in stats]
        return math.fsum(found) if name == "total" else max(found, default=math.nan)

    def _over_rows(self, name: str, given: Sequence[ast.expr]) -> float:
        rows = self._reading.rows.get(_text(given[0]), ())
        if name == "counted":
            return len(rows)
        values = [_Evaluation({**self._names, **row}, self._reading)._number(given[1]) for row in rows]
        return float(_OVER_ROWS[name](values)) if values else math.nan

    def _field(self, dotted: str) -> float:
        client, *path = dotted.split(".")
        found: Any = self._reading.overall.get(client)
        for name in path:
            found = found.get(name) if found is not None else None
        return math.nan if found is None else float(found)


def exported(metrics: str, name: str) -> float:
    """Sum of a metric over labels and processes; `name` without the prefix of ours and the process's."""
    pattern = re.compile(rf"^cohort_\w*{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)", re.MULTILINE)
    return math.fsum(float(value) for value in pattern.findall(metrics))


def within(metrics: str, process: str, histogram: str, limit_s: float, labels: Mapping[str, str]) -> float:
    """Share of a histogram's samples that are at most `limit_s`; nan without samples."""
    wanted = [f'{name}="{value}"' for name, value in labels.items()]
    series: dict[str, list[tuple[float, float]]] = {}
    for line in metrics.splitlines():
        if not line.startswith(f"cohort_{histogram}_bucket{{") or not all(label in line for label in wanted):
            continue
        instance, bound = re.search(r'instance="([^"]*)"', line), re.search(r'le="([^"]+)"', line)
        if instance is not None and bound is not None and _is(instance[1], process):
            name, count = line.rsplit(" ", 1)
            series.setdefault(name.replace(bound[0], ""), []).append((float(bound[1]), float(count)))
    # Buckets are cumulative: the largest bound holds all samples, the largest within the limit all within it.
    total = math.fsum(max(count for _, count in buckets) for buckets in series.values())
    inside = math.fsum(
        max((count for bound_s, count in buckets if bound_s <= limit_s), default=0.0) for buckets in series.values()
    )
    return inside / total if total else math.nan


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _is(instance: str, process: str) -> bool:
    """Whether a process is meant by its own name, its role's, or as a worker."""
    role = instance.rpartition("-")[0] or instance
    return process in (instance, role) or (process == "worker" and role in _WORKERS)
