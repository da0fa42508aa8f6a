"""Fits parts of the cost model to tables of measured operators, each model foreseen by a fit to the others.

    cohort bench fit operators linear TABLE… --device a100-80    matrices of one layer on one device, by tokens
    cohort bench fit operators mixed TABLE:GROUP…        attention calls, prompts and decodes alone and together

`linear`: CSV with a row a number of tokens, columns `time_stats.OPERATOR.median` in ms, `n_head`, `n_kv_head`,
`n_embd`, `n_expanded_embd`, `use_gated_mlp`, `num_tokens`, `num_tensor_parallel_workers` (Vidur's `mlp.csv`). The
pointwise operators between the matrices count with them, as the cost model has no term of their own.

`mixed`: CSV with `prefill_chunk`, `kv_prefill`, `n_decode`, `kv_decode`, `time_us` (LLMServingSim's `attention.csv`);
GROUP is the number of query heads that share a KV head. Fits `mixed_reads` to calls that hold both, given the times of
the same prompt alone and of the same decodes alone.

Prints the constants and the errors that remain by model, length and batch. Changes no file.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from cohort.common.errors import ConfigError
from cohort.common.policies.cost_model import DeviceShape
from cohort.services.simulator.hardware.hardware import load_device

_Array = npt.NDArray[np.float64]
_MATRICES = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
_POINTWISE = ("input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act", "add")
_CORNER = 4.0
"""As in the cost model."""
_KNOTS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
_NEAR = 0.12
"""Logarithm: points that far from a knot count for it."""
_TOKENS = ((1, 16), (17, 64), (65, 256), (257, 1024), (1025, 4096))
_ROWS = ((1, 2), (3, 8), (9, 32), (33, 64), (65, 256))
_CONTEXTS = ((1, 255), (256, 1023), (1024, 4095), (4096, 16384))
_SEEN_POSITIONS = 4096
"""Decodes that read fewer positions together take what a launch takes, however they are read."""


@dataclass(frozen=True)
class LinearTable:
    """One layer of a model: parameters, and by row number of tokens and seconds."""

    name: str
    parameters: int
    tokens: _Array
    seconds: _Array


def linear_table(path: Path) -> LinearTable:
    """Rows of one device; the median where a number of tokens was measured several times."""
    found: dict[int, list[float]] = defaultdict(list)
    parameters = 0
    for row in _rows(path):
        if int(row["num_tensor_parallel_workers"]) != 1 or not row.get("time_stats.mlp_down_proj.median"):
            continue
        times = [row.get(f"time_stats.{name}.median") for name in (*_MATRICES, *_POINTWISE)]
        found[int(row["num_tokens"])].append(sum(float(each) for each in times if each) * 1e-3)
        heads, kv_heads, hidden = int(row["n_head"]), int(row["n_kv_head"]), int(row["n_embd"])
        mlp = (3 if row["use_gated_mlp"] == "True" else 2) * hidden * int(row["n_expanded_embd"])
        parameters = hidden * (heads + 2 * kv_heads) * (hidden // heads) + hidden * hidden + mlp
    if not found:
        raise ConfigError(f"{path}: no row of one device")
    tokens = sorted(found)
    seconds = np.array([float(np.median(found[count])) for count in tokens])
    return LinearTable(path.parent.name + "/" + path.stem, parameters, np.array(tokens, dtype=np.float64), seconds)


@dataclass(frozen=True)
class LinearFit:
    """Shares of the device's peaks, and `linear_table`."""

    compute: float
    memory: float
    table: tuple[tuple[int, float], ...] = ()

    def seconds(self, table: LinearTable, device: DeviceShape) -> _Array:
        """The cost model's time of a layer's matrices, 16 bit a weight."""
        computing = 2.0 * table.parameters * table.tokens / (device.flops_per_s * self.compute)
        reading = 2.0 * table.parameters / (device.memory_bytes_per_s * self.memory)
        found: _Array = (computing**_CORNER + reading**_CORNER) ** (1.0 / _CORNER)
        if self.table:
            knots, factors = zip(*self.table, strict=True)
            found = found * np.interp(np.log(table.tokens), np.log(knots), factors)
        return found


def fit_linear(tables: Sequence[LinearTable], device: DeviceShape) -> LinearFit:
    """Memory efficiency by few tokens, compute efficiency by many, and what is left between them by tokens; medians of
    the models."""

    def median(values: Iterable[_Array]) -> float:
        return float(np.median([np.median(each) for each in values if len(each)]))

    many, few = 1024.0, 16.0
    flops = device.flops_per_s
    compute = median((2.0 * t.parameters * t.tokens / flops / t.seconds)[t.tokens >= many] for t in tables)
    memory = median((2.0 * t.parameters / device.memory_bytes_per_s / t.seconds)[t.tokens <= few] for t in tables)
    plain = LinearFit(compute, memory)
    off = [(table.tokens, table.seconds / plain.seconds(table, device)) for table in tables]
    found = []
    for knot in _KNOTS:
        near = [ratio[np.abs(np.log(tokens / knot)) <= _NEAR] for tokens, ratio in off]
        found.append((knot, round(median(near), 3)))
    return LinearFit(compute, memory, tuple(found))


@dataclass(frozen=True)
class MixedTable:
    """Attention calls with both, of a model with so many query heads a KV head: by row the prompt's tokens, number and
    positions of the decodes, and seconds of the call, of its prompt alone and of its decodes alone."""

    name: str
    group: int
    chunk: _Array
    rows: _Array
    context: _Array
    seconds: _Array
    prefill_s: _Array
    decode_s: _Array

    def foreseen_s(self, reads: float) -> _Array:
        return self.prefill_s + self.decode_s * (1.0 + reads * (self.group - 1))


def mixed_table(path: Path, group: int) -> MixedTable:
    prefills: dict[tuple[int, int], float] = {}
    decodes: dict[tuple[int, int], float] = {}
    both: list[tuple[int, int, int, int, float]] = []
    for row in _rows(path):
        chunk, before, count, context = (
            int(row[name]) for name in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
        )
        seconds = float(row["time_us"]) * 1e-6
        if not count:
            prefills[chunk, before] = seconds
        elif not chunk:
            decodes[count, context] = seconds
        else:
            both.append((chunk, before, count, context, seconds))
    columns = [
        (chunk, count, context, seconds, prefills[chunk, before], decodes[count, context])
        for chunk, before, count, context, seconds in both
        if count * context >= _SEEN_POSITIONS and (chunk, before) in prefills and (count, context) in decodes
    ]
    if not columns:
        raise ConfigError(f"{path}: no call of prompts and decodes whose parts were measured alone")
    name = "/".join(path.parts[-5:-1])
    return MixedTable(name, group, *np.array(columns, dtype=np.float64).T)


def fit_reads(tables: Sequence[MixedTable]) -> float:
    """`mixed_reads`: every model weighs alike, every point by its relative error."""

    def residuals(x: Any) -> _Array:
        return np.concatenate(
            [np.log(table.foreseen_s(x[0]) / table.seconds) / np.sqrt(len(table.chunk)) for table in tables]
        )

    return float(least_squares(residuals, [0.3], bounds=([0.0], [1.0]), loss="soft_l1", f_scale=0.02).x[0])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=("linear", "mixed"))
    parser.add_argument("tables", nargs="+", metavar="TABLE", help="CSV; of `mixed` with :GROUP behind it")
    parser.add_argument("--device", default="a100-80", help="device file with the peaks (linear)")


def execute(options: argparse.Namespace) -> int:
    """Everything from parsed options."""
    if options.kind == "linear":
        _linear([linear_table(Path(text)) for text in options.tables], load_device(options.device)[0])
    else:
        _mixed([mixed_table(*_with_group(text)) for text in options.tables])
    return 0


def _linear(tables: Sequence[LinearTable], device: DeviceShape) -> None:
    best = fit_linear(tables, device)
    print(f"{device.name}, one device: compute_efficiency {best.compute:.3f}, memory_efficiency {best.memory:.3f}")
    print(f"  linear_table: {[list(knot) for knot in best.table]}")
    file = LinearFit(device.compute_efficiency, device.memory_efficiency, device.linear_table)
    print(f"  (in the file: {file.compute:.3f}, {file.memory:.3f}, {[list(knot) for knot in file.table]})")
    for name in ("held out", "file"):
        together: list[tuple[_Array, _Array]] = []
        for table in tables:
            others = [other for other in tables if other is not table] or list(tables)
            found = fit_linear(others, device) if name == "held out" else file
            off = found.seconds(table, device) / table.seconds - 1.0
            together.append((table.tokens, off))
            print(f"  {name}, {table.name}: {_errors(off)}")
        tokens, off = (np.concatenate(columns) for columns in zip(*together, strict=True))
        _show(f"{name}, all", off, {"tokens": (tokens, _TOKENS)})


def _mixed(tables: Sequence[MixedTable]) -> None:
    print(f"mixed_reads: {fit_reads(tables):.3f}")
    for table in tables:
        others = [other for other in tables if other is not table] or list(tables)
        reads = fit_reads(others)
        for name, value in ((f"held out, {reads:.3f}", reads), ("no price", 0.0)):
            off = table.foreseen_s(value) / table.seconds - 1.0
            _show(
                f"{name}, {table.name}, groups of {table.group}",
                off,
                {"rows": (table.rows, _ROWS), "positions": (table.context, _CONTEXTS)},
            )


def _show(title: str, off: _Array, parts: Mapping[str, tuple[_Array, Sequence[tuple[int, int]]]]) -> None:
    """Median error with its sign, median and 90th percentile without, of all and by range."""
    print(f"  {title}: {_errors(off)}")
    for what, (values, ranges) in parts.items():
        for low, high in ranges:
            some = off[(values >= low) & (values <= high)]
            if len(some):
                print(f"    {what} {low} to {high}: {_errors(some)}")


def _errors(off: _Array) -> str:
    size = np.abs(off)
    return f"bias {np.median(off):+.1%}, median {np.median(size):.1%}, p90 {np.quantile(size, 0.9):.1%} ({len(off)})"


def _with_group(text: str) -> tuple[Path, int]:
    path, _, group = text.rpartition(":")
    if not path or not group.isdigit() or int(group) < 1:
        raise ConfigError(f"{text}: wants TABLE:GROUP, query heads that share a KV head")
    return Path(path), int(group)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
