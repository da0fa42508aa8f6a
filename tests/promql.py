"""As much of PromQL as it takes to check an expression: which series and labels it names, and whether it reads.

No Prometheus is needed. Raises `ValueError` for what its parser would not take either: brackets that do not fit,
functions, durations and matchers that there are not, text between.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

FUNCTIONS = frozenset(
    (
        "abs",
        "absent",
        "absent_over_time",
        "avg_over_time",
        "ceil",
        "clamp_max",
        "clamp_min",
        "delta",
        "deriv",
        "exp",
        "floor",
        "histogram_quantile",
        "increase",
        "irate",
        "label_replace",
        "label_values",
        "last_over_time",
        "max_over_time",
        "min_over_time",
        "predict_linear",
        "rate",
        "round",
        "scalar",
        "sum_over_time",
        "time",
        "vector",
    )
)
AGGREGATIONS = frozenset(("avg", "bottomk", "count", "group", "max", "min", "quantile", "stddev", "sum", "topk"))
GROUPING = frozenset(("by", "without", "on", "ignoring", "group_left", "group_right"))
OPERATORS = frozenset(("and", "or", "unless", "bool", "offset"))
_TOKEN = re.compile(
    r"\s*(?:(?P<duration>\[(?:\d+[smhdw]|\$__rate_interval|\$__interval)(?::(?:\d+[smhdw])?)?\])"
    r"|(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)|(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)"
    r'|(?P<string>"(?:[^"\\]|\\.)*")|(?P<sign>=~|!~|!=|==|>=|<=|[-+*/%^<>=(){},]))'
)


@dataclass
class Expression:
    """`series`: every series that is named, with the labels of its matchers. `grouped`: labels of groupings."""

    series: list[tuple[str, frozenset[str]]] = field(default_factory=list)
    grouped: set[str] = field(default_factory=set)


def read(text: str) -> Expression:
    tokens = list(_tokens(text))
    _check_brackets(text, tokens)
    found = Expression()
    index = 0
    while index < len(tokens):
        kind, word = tokens[index]
        following = tokens[index + 1][1] if index + 1 < len(tokens) else ""
        if kind == "name" and word in GROUPING:
            index, labels = _listed(tokens, index + 1)
            found.grouped |= labels
            continue
        if kind == "name" and word not in OPERATORS | AGGREGATIONS:
            if following == "(":
                if word not in FUNCTIONS:
                    raise ValueError(f"{word} is no function")
            elif following == "{":
                index, labels = _matched(tokens, index + 1)
                found.series.append((word, labels))
                continue
            elif word != "class":  # an argument of label_values
                found.series.append((word, frozenset()))
        if kind == "sign" and word in ("{", "="):
            raise ValueError(f"{word} stands alone")
        index += 1
    return found


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"not understood: {text[position : position + 30]!r}")
        position = match.end()
        kind = str(match.lastgroup)
        yield kind, match[kind]


def _check_brackets(text: str, tokens: Sequence[tuple[str, str]]) -> None:
    pairs, opened = {")": "(", "}": "{"}, list[str]()
    for kind, word in tokens:
        if kind == "sign" and word in "({":
            opened.append(word)
        elif kind == "sign" and word in pairs and (not opened or opened.pop() != pairs[word]):
            raise ValueError(f"brackets do not fit in {text!r}")
    if opened:
        raise ValueError(f"a bracket stays open in {text!r}")


def _listed(tokens: Sequence[tuple[str, str]], index: int) -> tuple[int, set[str]]:
    """Names in brackets, from the opening one on."""
    if tokens[index][1] != "(":
        raise ValueError("a grouping wants labels in brackets")
    labels = set[str]()
    while tokens[index := index + 1][1] != ")":
        kind, word = tokens[index]
        if kind == "name":
            labels.add(word)
        elif word != ",":
            raise ValueError(f"{word!r} is no label")
    return index + 1, labels


def _matched(tokens: Sequence[tuple[str, str]], index: int) -> tuple[int, frozenset[str]]:
    labels = set[str]()
    index += 1
    while tokens[index][1] != "}":
        (kind, label), (_, sign), (value_kind, value) = tokens[index : index + 3]
        if kind != "name" or sign not in ("=", "!=", "=~", "!~") or value_kind != "string":
            raise ValueError(f"no matcher: {label}{sign}{value}")
        if sign in ("=~", "!~"):
            re.compile(value[1:-1])
        labels.add(label)
        index += 3
        if tokens[index][1] == ",":
            index += 1
    return index + 1, frozenset(labels)
