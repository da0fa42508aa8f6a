"""The forms every measurement is written in: tables for a terminal or as Markdown, JSON, and the options for them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from cohort.common.errors import ConfigError

PIPED_WIDTH = 120


def plain_table(first: str, *columns: str) -> Table:
    """Make a table, words left, figures right; no frames, so that it fits a terminal of 80 columns."""
    table = Table(first, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def markdown_table(labels: Sequence[str], numbers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells under two kinds of columns: `labels` to the left, `numbers` to the right."""
    head = "| " + " | ".join([*labels, *numbers]) + " |\n" + "|---" * len(labels) + "|---:" * len(numbers) + "|\n"
    return head + "".join("| " + " | ".join(row) + " |\n" for row in rows)


def cells(found: Iterable[object], columns: Mapping[str, str]) -> list[list[str]]:
    """Return a row for each; a column's text names its attribute and form: `{0.median_us:.0f}`."""
    return [[text.format(each) for text in columns.values()] for each in found]


def print_costs(costs: Sequence[Any], columns: Mapping[str, str], *, as_json: bool) -> None:
    """Print dataclasses as a table of these `cells`, or as a list of objects in JSON."""
    if as_json:
        json.dump([asdict(cost) for cost in costs], sys.stdout, indent=1)
        return
    table = Table(*columns)
    for row in cells(costs, columns):
        table.add_row(*row)
    output_console().print(table)


def output_console() -> Console:
    """Return a console on stdout. A file or a pipe has no width; 80 columns would wrap tables for no reader."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the output options of a measurement of this machine."""
    parser.add_argument("--json", metavar="FILE", help="everything as JSON ('-': to stdout, instead of the tables)")
    parser.add_argument("--quiet", action="store_true", help="no tables, no progress")


def check_output(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for a result that cannot be written, before the measurement and not after it."""
    if args.json not in (None, "-") and not (folder := Path(args.json).parent).is_dir():
        raise ConfigError(f"--json {args.json}: no folder {folder}")


def publish_json(path: str | None, document: bytes) -> None:
    """Write to a file, or to stdout for "-"."""
    if path == "-":
        sys.stdout.buffer.write(document)
        sys.stdout.flush()
    elif path is not None:
        Path(path).write_bytes(document)
