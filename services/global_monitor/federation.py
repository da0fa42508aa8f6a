"""Many Prometheus expositions into one valid one.

Pure. Called by `exporter.py`. Families of the same name are joined under one HELP and TYPE; every sample without an
`instance` label gets its source's, so that no two sources write the same series. Unreadable input (a broken line, a
family whose type contradicts an earlier source's) is left out and counted, and never spoils the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_SAMPLE = re.compile(
    r'^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[^"{}]|"(?:[^"\\]|\\.)*")*)\})?[ \t]+([^ \t]+)(?:[ \t]+(-?\d+))?[ \t]*$'
)
_LABELS = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_TYPES = {"counter", "gauge", "histogram", "summary", "untyped"}
_SUFFIXES = ("_total", "_created", "_bucket", "_count", "_sum", "_info")


@dataclass(slots=True)
class _Family:
    type_: str = "untyped"
    help_: str = ""
    samples: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Merged:
    """The joint exposition, and how many lines were left out per source."""

    text: str
    skipped: dict[str, int]


def merge(sources: Iterable[tuple[str, str]]) -> Merged:
    """Merge `sources`: (instance, exposition). Families appear in the order first met, samples by source."""
    families: dict[str, _Family] = {}
    seen: set[str] = set()
    skipped: dict[str, int] = {}
    for instance, text in sources:
        omitted = _add(instance, text, families, seen)
        if omitted:
            skipped[instance] = omitted
    lines: list[str] = []
    for name, family in families.items():
        if family.samples:
            if family.help_:
                lines.append(f"# HELP {name} {family.help_}")
            lines.append(f"# TYPE {name} {family.type_}")
            lines += family.samples
    return Merged("\n".join(lines) + "\n" if lines else "", skipped)


def _add(instance: str, text: str, families: dict[str, _Family], seen: set[str]) -> int:
    """Add one source; the number of lines left out."""
    omitted = 0
    helps: dict[str, str] = {}
    types: dict[str, str] = {}
    for line in text.split("\n"):
        line = line.rstrip("\r")
        if line.startswith("#"):
            word, _, rest = line[1:].lstrip().partition(" ")
            name, _, value = rest.partition(" ")
            if word == "HELP":
                helps[name] = value
            elif word == "TYPE" and value.strip() in _TYPES:
                types[name] = value.strip()
            continue
        if not line.strip():
            continue
        sample = _label(instance, line)
        if sample is None:
            omitted += 1
            continue
        name, series, rest = sample
        owner = _owner(name, types)
        type_ = types.get(owner, "untyped")
        family = families.setdefault(owner, _Family(type_, helps.get(owner, "")))
        if family.type_ != type_ or series in seen:
            omitted += 1
            continue
        seen.add(series)
        family.samples.append(f"{series} {rest}")
    return omitted


def _label(instance: str, line: str) -> tuple[str, str, str] | None:
    """Return metric name, series with its instance label, and value with time stamp; None if the line is no sample."""
    match = _SAMPLE.match(line)
    if match is None:
        return None
    name, inside, value, stamp = match.groups()
    try:
        float(value)
    except ValueError:
        return None
    labels: dict[str, str] = {}
    position = 0
    inside = (inside or "").strip()
    while position < len(inside):
        label = _LABELS.match(inside, position)
        if label is None or label[1] in labels:
            return None
        labels[label[1]] = label[2]
        position = label.end()
    labels.setdefault("instance", escape(instance))
    series = name + "{" + ",".join(f'{key}="{text}"' for key, text in labels.items()) + "}"
    return name, series, value if stamp is None else f"{value} {stamp}"


def _owner(name: str, types: dict[str, str]) -> str:
    """Return the family of a sample: its own name, or the histogram's or summary's before a suffix."""
    if name in types:
        return name
    for suffix in _SUFFIXES:
        base = name.removesuffix(suffix)
        if base != name and base in types:
            return base
    return name


def escape(value: str) -> str:
    """Escape a label value for the exposition format."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
