"""`cohort bench operators FOLDER`: the simulator's times of measured operators and iterations beside the measured ones.

FOLDER holds the tables of vidur (MIT: data/profiling/{compute,network,attention}) as `mlp_compute_GPU_MODEL.csv.gz`,
`NODE_allreduce.csv.gz` and `attention_GPU.csv.gz`. Splitwise's iterations (MIT: data/perf_model.csv) lie there or above
it as `profile_splitwise_a100_h100.csv.gz`. A file that `--sample` wrote does as well. Errors are those of cells that no
fit saw: bias is the median of model / measured - 1, then come median and 90th percentile of its absolute value.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import yaml

from cohort.common.policies.cost_model import DeviceShape, StackShape
from cohort.services.bench.fit.operator_cells import ITERATIONS, LONGEST, Cell, held_out, read, sample, write
from cohort.services.bench.fit.operator_fit import fit_exchange, fit_host, fit_operators, predicted_s, whole
from cohort.services.bench.output import markdown_table
from cohort.services.simulator.hardware.hardware import load_cluster, load_exchanges

DEVICES = ("a100-80", "h100-80")
STACK = "eager"
"""Stack of the engine whose whole iterations were measured."""
_MOST = 300
"""Cells of a device's operator in a sample."""


class Error(NamedTuple):
    """Relative errors of some cells: `bias` signed."""

    cells: int
    bias: float
    median: float
    p90: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--fit", action="store_true", help="print what fits the other cells, as device files have it")
    parser.add_argument("--sample", type=Path, metavar="FILE", help="write a sample of the cells held out")


def run(args: argparse.Namespace) -> int:
    """Run the command with parsed options. Raises `CohortError`."""
    cells = read(args.folder)
    if args.sample:
        write(sample(cells, _MOST), args.sample)
    if args.fit:
        sys.stdout.write(fitted(cells))
        return 0
    found = errors(filter(held_out, cells))
    lines = [
        [*key, str(each.cells), f"{100 * each.bias:+.1f} %", f"{100 * each.median:.1f} %", f"{100 * each.p90:.1f} %"]
        for key, each in found.items()
    ]
    sys.stdout.write(markdown_table(["device", "what"], ["cells", "bias", "median", "p90"], lines))
    return 0


def errors(cells: Iterable[Cell]) -> dict[tuple[str, str], Error]:
    """Return the errors of cells by device and operator; whole iterations of more tokens than `LONGEST` by
    themselves, and the others once more together."""
    devices = dict(map(_loaded, DEVICES))
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    curves = load_exchanges()
    for cell in cells:
        device, stack = devices.get(cell.device) or devices[DEVICES[0]]
        if cell.operator in ITERATIONS and not whole(cell, device):
            continue
        off = predicted_s(cell, device, curves, stack) / cell.seconds - 1.0
        for name in _names(cell):
            groups[cell.device, name].append(off)
    return {key: _error(each) for key, each in sorted(groups.items())}


def _names(cell: Cell) -> Iterator[str]:
    if cell.operator not in ITERATIONS:
        yield cell.operator
    elif cell.operator == "prefill" and cell.a * cell.b > LONGEST:
        yield f"prefill beyond {LONGEST} tokens"
    else:
        yield cell.operator
        yield "whole iterations"


def _error(off: list[float]) -> Error:
    ascending = sorted(map(abs, off))
    return Error(len(off), median(off), median(ascending), ascending[int(0.9 * (len(off) - 1))])


def fitted(cells: list[Cell]) -> str:
    """Return the operators, the host's times and the exchanges that fit the cells, as YAML."""
    text = []
    for name in DEVICES:
        device, stack = _loaded(name)[1]
        parts = fit_operators(cells, device)
        assert device.operators is not None
        operators = msgspec.structs.replace(device.operators, **parts)
        host = fit_host(cells, replace(device, operators=operators), stack)
        times = {field: round(getattr(host, field), 6) for field in ("launch_s", "prompt_launch_s", "row_s")}
        text.append(_yaml({name: {"operators": parts, "stacks": {STACK: times}}}))
    links = sorted({cell.device for cell in cells if cell.operator == "exchange"})
    text.append(_yaml({"exchanges": {link: fit_exchange(cells, link) for link in links}}))
    return "".join(text)


def _yaml(value: object) -> str:
    return yaml.safe_dump(msgspec.to_builtins(value), sort_keys=False, default_flow_style=None, width=120)


def _loaded(name: str) -> tuple[str, tuple[DeviceShape, StackShape]]:
    cluster = load_cluster(name, {"stack": STACK})
    return name, (cluster.device, cluster.stack)
