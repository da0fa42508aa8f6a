"""`cohort traces`: what ships as real traffic, its numbers and licences; other traces converted to our format.

Reads `configs/traces` and files; a conversion has one row in memory at a time and leaves no half of a file.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import numpy as np

from cohort.common.errors import ConfigError
from cohort.common.workloads import servegen
from cohort.common.workloads.trace_files import FOLDER, SUFFIX, Shipped, names, shipped, trace_file
from cohort.common.workloads.traces import Trace, open_trace, read_trace, write_trace

DESCRIPTION = """\
Real traffic: lengths, arrival times and shared prefixes of requests, without a word of them. `simulate`, `advise` and
`bench` take the names of `list` as --trace, comparisons as the trace of a workload."""

EPILOG = """\
examples:
  cohort traces list
  cohort traces show azure2023_code
  cohort traces convert AzureLLMInferenceTrace_conv.csv --to conv.csv.gz
  cohort simulate --trace mooncake_conversation --time-scale 0.5 --cluster a100-80:8 --model llama-2-13b
  cohort simulate --trace servegen-deepseek-r1 --duration 3600 --rate 8 …      a day in an hour, its peak at 8 a second

`convert` reads Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens), Mooncake's JSON lines (timestamp in ms,
input_length, output_length, hash_ids), BurstGPT's CSV and ours, plain or gzip, and writes ours: arrival_s,
prompt_tokens, output_tokens and, where there are any, hash_ids, session, adapter. Requests without a prompt or an
answer are left out and counted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", metavar="list|show|convert", required=True)
    commands.add_parser("list", help="names, what they are, licences")
    show = commands.add_parser("show", help="numbers of a trace, whose it is, its licence")
    show.add_argument("name", metavar="NAME", help="of the list, or a file")
    convert = commands.add_parser("convert", help="write a trace in our format")
    convert.add_argument("file", metavar="FILE")
    convert.add_argument("--to", default="-", metavar="FILE", help="with .gz compressed (default: standard output)")


def run(options: argparse.Namespace) -> int:
    match options.action:
        case "list":
            _print(*_listed())
        case "show":
            _print(*_shown(options.name))
        case _:
            _convert(Path(options.file), options.to)
    return 0


def _print(*lines: str) -> None:
    sys.stdout.write("\n".join((*lines, "")))


def _listed() -> Iterator[str]:
    for name in names():
        yield f"{name:23} {shipped()[name].licence:11} {shipped()[name].what}"
    windows = shipped()["servegen_windows"]
    for name in servegen.NAMES:
        yield f"{name:23} {windows.licence:11} {windows.what}, drawn by seed"


def _shown(name: str) -> Iterator[str]:
    """Describe a trace: its numbers, then where it comes from. Raises `ConfigError`."""
    if name in servegen.NAMES:
        yield from numbers(servegen.servegen_trace(name))
        yield f"seed 0: the whole span in {servegen.SPAN_S:g} s, at most {servegen.PEAK_PER_S:g} a second in a window"
        of = [title for title, one in shipped().items() if not one.has_requests]
    elif (path := trace_file(name)) is not None:
        yield from numbers(read_trace(path, sort=True))
        of = [path.name.removesuffix(SUFFIX)] if path.parent == FOLDER else []
    else:
        raise ConfigError(f"{name}: neither a file nor one of {', '.join((*names(), *servegen.NAMES))}")
    for title in of:
        yield from _origin(title, shipped()[title])


def _origin(name: str, one: Shipped) -> Iterator[str]:
    yield f"\n{name}: {one.what}"
    yield f"columns      {', '.join(one.columns)}"
    if one.block_tokens:
        yield f"hash_ids     one for {one.block_tokens} tokens of the prompt; equal leading ids are a shared prefix"
    yield from (f"source       {one.source}", f"licence      {one.licence}", f"attribution  {one.attribution}")
    yield f"sha256       {one.sha256}"


def numbers(trace: Trace) -> Iterator[str]:
    """Describe a trace's requests: number, rate and burstiness, and their lengths in tokens."""
    times = trace.arrival_s
    yield f"{len(trace.rows):,} requests" + (f", {trace.skipped_rows} left out" if trace.skipped_rows else "")
    if times is not None and times[-1] > 0:
        gaps = np.diff(times)
        most = np.bincount(np.asarray(times, dtype=np.int64)).max()
        yield (
            f"{times[-1]:,.0f} s, {len(gaps) / times[-1]:.4g} requests/s; variation of the gaps "
            f"{gaps.std() / gaps.mean():.2f}, at most {most} in a second"
        )
    elif times is None:
        yield "no arrival times"
    yield f"{'tokens':12} {'mean':>8} {'p50':>7} {'p90':>7} {'p99':>7} {'max':>7}"
    yield _lengths("prompt", [row.prompt_tokens for row in trace.rows])
    yield _lengths("output", [row.output_tokens for row in trace.rows])


def _lengths(title: str, tokens: Sequence[int]) -> str:
    places = np.percentile(tokens, (50, 90, 99, 100))
    return f"{title:12} {np.mean(tokens):8,.1f} " + " ".join(f"{place:7,.0f}" for place in places)


def _convert(source: Path, to: str) -> None:
    """Write a trace in our format. Raises `ConfigError` with the line and column of what cannot be read."""
    with open_trace(source) as reader, _written(to) as file:
        count = write_trace(reader, file, reader.columns)
    left_out = f", {reader.skipped_rows} without a prompt or an answer left out" if reader.skipped_rows else ""
    sys.stderr.write(f"{source}: {reader.format}, {count:,} requests{left_out}\n")


@contextmanager
def _written(to: str) -> Iterator[TextIO]:
    """Open a file that appears when it is whole. Raises `ConfigError`."""
    if to == "-":
        yield sys.stdout
        return
    path, part = Path(to), Path(f"{to}.part")
    try:
        with part.open("wb") as binary:
            packed = gzip.GzipFile("", "wb", fileobj=binary, mtime=0) if path.suffix == ".gz" else binary
            with io.TextIOWrapper(packed, encoding="utf-8", newline="") as file:
                yield file
        os.replace(part, path)
    except OSError as error:
        raise ConfigError(f"{to}: cannot be written ({error.strerror or error})") from error
    finally:
        with suppress(OSError):
            part.unlink()
