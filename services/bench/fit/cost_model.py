"""Fits the cost model's constants to measurements and prints the error that remains.

    cohort bench fit cost-model splitwise TRACES/profile_splitwise_a100_h100.csv.gz     A100 and H100
    cohort bench fit cost-model profile points.json --device cpu-2core                  what `cohort profile` wrote
    cohort bench fit cost-model recordings RECORDING…                                   live workers' (recording.folder)

Prints the fitted values as they stand in configs/devices, beside what is there now, and the error of both against the
measurements: median, 90th percentile and worst, prefill, decode and mixed iterations apart. Changes no file.

What mixing prompts and decodes costs (`mixed_share` of a stack) is fitted where the points hold mixed iterations, as
those of `cohort bench mixed-iterations` do. Recordings say no more than that share, beside how well the model that
workers learn online (`step_times`) foresaw each of their iterations: other processes take part in all their times.

The GPU profile was taken with an eager stack whose launch time differs between the two models' implementations, so
launch and per-row times are fitted per (device, model) beside the device's own efficiencies; attention stays what its
kernels' authors publish, because the profile hardly separates it from the exchange. `--held-out` foresees each model
and number of devices by a fit to the others, and prints the errors by phase, length and batch. One group is left out:
llama2-70b on two devices with 64 rows, where the weights leave no room for the KV cache and the times belong to
something else (its prefill is eight times faster than with 32 rows).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from cohort.common.policies.cost_model import CostModel, DeviceShape, ModelShape, StackShape, StepWork, prefill_pairs
from cohort.common.policies.step_times.profile_table import IterationKind, ProfileTable, kind_of
from cohort.common.policies.step_times.step_cost import BatchShape
from cohort.services.bench.fit.shared_cores import iterations
from cohort.services.simulator.hardware.hardware import load_device, load_model

MODELS = {"llama2-70b": "llama-2-70b", "bloom-176b": "bloom-176b"}
DEVICES = {"a100-80gb": "a100-80", "h100-80gb": "h100-80"}
FITTED = ("compute_efficiency", "memory_efficiency", "exchange_bytes_per_s", "exchange_latency_s")
_STARTS = ((0.65, 0.65, 1.0, 1.5), (0.65, 0.8, 4.0, 0.9), (0.5, 0.55, 1.0, 3.0))
"""Compute and memory efficiency, exchange latency in 10 us and bandwidth in 100 GB/s."""


@dataclass(frozen=True)
class Point:
    """One measured iteration (the median of its repetitions)."""

    model: str
    tensor_parallel: int
    kind: str
    label: str
    work: StepWork
    seconds: float


def splitwise_points(path: Path, hardware: str) -> list[Point]:
    groups: dict[tuple[str, int, int, int, int], list[tuple[float, float]]] = defaultdict(list)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["hardware"] == hardware:
                key = (
                    row["model"],
                    int(row["tensor_parallel"]),
                    int(row["prompt_size"]),
                    int(row["batch_size"]),
                    int(row["token_size"]),
                )
                groups[key].append((float(row["prompt_time"]) / 1e3, float(row["token_time"]) / 1e3))
    points = []
    for (model, devices, prompt, rows, output), times in sorted(groups.items()):
        if (model, devices, rows) == ("llama2-70b", 2, 64):
            continue
        label = f"{model} x{devices}, {rows} x {prompt}"
        prefill = StepWork(rows * prompt, rows, rows, rows * prefill_pairs(0, prompt), rows * prompt)
        context = prompt + output // 2
        decode = StepWork(rows, rows, rows, 0, 0, rows, rows * context, context)
        points.append(Point(model, devices, "prefill", label, prefill, statistics.median(t[0] for t in times)))
        points.append(Point(model, devices, "decode", label, decode, statistics.median(t[1] for t in times)))
    return points


def profile_points(path: Path, time_of: str) -> tuple[str, list[Point]]:
    data = json.loads(path.read_text(encoding="utf-8"))
    points = []
    for entry in data["points"]:
        shape = entry["shape"]
        rows, count, context = shape["rows"], shape["tokens_per_row"], shape["context"]
        label, kind = f"{rows} x {count} at {context}", "prefill"
        if count == 1:
            kind, work = "decode", StepWork(rows, rows, rows, 0, 0, rows, rows * context, context)
        else:
            pairs = rows * prefill_pairs(context - count, count)
            beside, positions = shape.get("decodes", 0), shape.get("decode_context", 0)
            work = StepWork(
                rows * count + beside,
                rows + beside,
                rows + beside,
                pairs,
                rows * context,
                beside,
                beside * positions,
                positions,
            )
            if beside:
                kind, label = "mixed", f"{label}, {beside} at {positions}"
        points.append(Point(data["model"], 1, kind, label, work, entry[time_of]))
    return data["model"], points


def predicted(point: Point, model: str | ModelShape, device: DeviceShape, stack: StackShape) -> float:
    shape = load_model(model) if isinstance(model, str) else model
    return CostModel(shape, device, stack, tensor_parallel=point.tensor_parallel).step_s(point.work)


def errors(points: Sequence[Point], predict: Callable[[Point], float]) -> dict[str, tuple[float, float, float, str]]:
    """Median, 90th percentile and worst relative error, and where the worst is; by kind."""
    table = {}
    for kind in ("prefill", "decode", "mixed"):
        some = [point for point in points if point.kind == kind]
        if not some:
            continue
        off = np.array([abs(predict(point) / point.seconds - 1) for point in some])
        worst = int(off.argmax())
        table[kind] = (float(np.median(off)), float(np.quantile(off, 0.9)), float(off[worst]), some[worst].label)
    return table


def show_errors(title: str, table: dict[str, tuple[float, float, float, str]]) -> None:
    for kind, (median, p90, worst, where) in table.items():
        print(f"  {title:10s} {kind:8s} median {median:6.1%}   p90 {p90:6.1%}   worst {worst:6.1%} ({where})")


def fit_gpu(
    points: Sequence[Point], device: DeviceShape, step: StackShape
) -> tuple[DeviceShape, dict[str, StackShape]]:
    """The best of fits from several starts: there are several minima. `attention_efficiency` stays as it is in
    `device`: the points cannot tell it from the exchange."""
    models = sorted({point.model for point in points})
    # Time per iteration outside the model is known from elsewhere (see the device files) and stays as it is there.
    fixed = StackShape("", 0.0, step.step_s, 0.0, step.parallel_step_s)

    def unpack(x: np.ndarray[Any, Any]) -> tuple[DeviceShape, dict[str, StackShape]]:
        fitted = replace(
            device,
            compute_efficiency=x[0],
            memory_efficiency=x[1],
            exchange_latency_s=x[2] * 1e-5,
            exchange_bytes_per_s=x[3] * 1e11,
        )
        stacks = {
            model: replace(fixed, name=model, launch_s=x[4 + 2 * i] * 1e-4, row_s=x[5 + 2 * i] * 1e-4)
            for i, model in enumerate(models)
        }
        return fitted, stacks

    def residuals(x: np.ndarray[Any, Any]) -> list[float]:
        fitted, stacks = unpack(x)
        return [float(np.log(_eager(point, fitted, stacks[point.model]) / point.seconds)) for point in points]

    low = np.array([0.1, 0.1, 0.0, 0.1, *[0.1, 0.0] * len(models)])
    high = np.array([1.0, 1.0, 20.0, 6.0, *[50.0, 50.0] * len(models)])
    results = [
        least_squares(residuals, [*start, *[5.0, 3.0] * len(models)], bounds=(low, high), loss="soft_l1", f_scale=0.1)
        for start in _STARTS
    ]
    return unpack(min(results, key=lambda result: result.cost).x)


_known_model = cache(load_model)


def held_out(points: Sequence[Point], device: DeviceShape, step: StackShape) -> list[tuple[Point, float]]:
    """Every point beside its time by a fit to the points of the other models and numbers of devices. A model of which
    nothing else was measured gets the launch and row times of the others' mean."""
    groups: dict[tuple[str, int], list[Point]] = defaultdict(list)
    for point in points:
        groups[point.model, point.tensor_parallel].append(point)
    found = []
    for key, group in groups.items():
        others = [point for other, each in groups.items() if other != key for point in each]
        fitted, stacks = fit_gpu(others, device, step)
        known = list(stacks.values())
        mean = replace(
            known[0],
            launch_s=statistics.fmean(stack.launch_s for stack in known),
            row_s=statistics.fmean(stack.row_s for stack in known),
        )
        found += [(point, _eager(point, fitted, stacks.get(point.model, mean))) for point in group]
    return found


def show_held_out(found: Sequence[tuple[Point, float]]) -> None:
    """Errors by phase and model, length of the prompt and rows."""
    table: dict[str, list[float]] = defaultdict(list)
    for point, seconds in found:
        off, work = seconds / point.seconds - 1.0, point.work
        rows = work.rows
        length = work.tokens // rows if point.kind == "prefill" else work.longest_context
        table[f"{point.kind}, all"].append(off)
        table[f"{point.kind}, {point.model} x{point.tensor_parallel}"].append(off)
        table[f"{point.kind}, length {_range(length, (512, 2048, 8192))}"].append(off)
        table[f"{point.kind}, batch {_range(rows, (1, 4, 16, 64))}"].append(off)
    for name, errors_of in sorted(table.items()):
        sizes = np.abs(errors_of)
        print(
            f"  held out   {name:34s} bias {np.median(errors_of):+6.1%}   median {np.median(sizes):6.1%}   "
            f"p90 {np.quantile(sizes, 0.9):6.1%}   ({len(sizes)})"
        )


def _range(value: int, ends: Sequence[int]) -> str:
    low = 0
    for end in ends:
        if value <= end:
            return f"{low + 1} to {end}"
        low = end
    return f"above {low}"


def _eager(point: Point, device: DeviceShape, stack: StackShape) -> float:
    """Per-row time is spent in decode steps only: prefill times of this profile end at the first token's logits."""
    stack = stack if point.kind == "decode" else replace(stack, row_s=0.0)
    return predicted(point, _known_model(MODELS[point.model]), device, stack)


def fit_cpu(points: Sequence[Point], model: str | ModelShape, device: DeviceShape) -> tuple[DeviceShape, StackShape]:
    """Efficiencies of one device, and what its stack adds, by the points of one model on it alone."""
    shape = load_model(model) if isinstance(model, str) else model
    mixes = any(point.kind == "mixed" for point in points)

    def unpack(x: np.ndarray[Any, Any]) -> tuple[DeviceShape, StackShape]:
        fitted = replace(
            device,
            compute_efficiency=x[0],
            memory_efficiency=x[1],
            attention_efficiency=x[2],
            layer_s=x[3] * 1e-5,
            kv_efficiency=x[6],
        )
        return fitted, StackShape("fit", 0.0, x[4] * 1e-4, x[5] * 1e-5, mixed_share=x[7] if mixes else 0.0)

    def residuals(x: np.ndarray[Any, Any]) -> list[float]:
        cost = CostModel(shape, *unpack(x))
        return [float(np.log(cost.step_s(point.work) / point.seconds)) for point in points]

    start = np.array([0.6, 0.6, 0.3, 2.0, 5.0, 2.0, 0.4, 0.05])
    low = np.array([*[1e-3] * 7, -0.5])
    high = np.array([0.9, 0.9, 0.9, 100.0, 500.0, 500.0, 0.9, 2.0])
    result = least_squares(residuals, start, bounds=(low, high), loss="soft_l1", f_scale=0.1)
    return unpack(result.x)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", choices=("splitwise", "profile", "recordings"))
    parser.add_argument("paths", type=Path, nargs="+", metavar="FILE", help="one, or recordings")
    parser.add_argument("--device", default="cpu-2core", help="device file the profile belongs to")
    parser.add_argument("--fastest", action="store_true", help="fit the fastest repetition (on a machine that is busy)")
    parser.add_argument("--held-out", action="store_true", help="splitwise: errors of fits without the group, by shape")
    parser.add_argument("--verbose", action="store_true", help="every point")


def execute(options: argparse.Namespace) -> int:
    """Everything from parsed options."""
    match options.source:
        case "splitwise":
            _fit_splitwise(options)
        case "profile":
            _fit_profile(options)
        case "recordings":
            _fit_recordings(options)
    return 0


def _fit_splitwise(options: argparse.Namespace) -> None:
    for hardware, name in DEVICES.items():
        device, file = load_device(name)
        known = next(iter(file.stacks.values()))
        points = splitwise_points(options.paths[0], hardware)
        step = StackShape("", 0.0, known.step_s, 0.0, known.parallel_step_s)
        fitted, stacks = fit_gpu(points, device, step)
        print(f"{name}: {len(points)} points of {hardware}")
        for field in FITTED:
            print(f"  {field}: {getattr(fitted, field):.4g}  (in the file: {getattr(device, field):.4g})")
        for model, stack in stacks.items():
            print(f"  eager, {model}: launch_s {stack.launch_s:.3g}, row_s {stack.row_s:.3g}")
        show_errors("fitted", errors(points, lambda p, f=fitted, s=stacks: _eager(p, f, s[p.model])))  # type: ignore[misc]
        show_errors("file", errors(points, lambda p, d=device, s=stacks: _eager(p, d, s[p.model])))  # type: ignore[misc]
        if options.held_out:
            show_held_out(held_out(points, device, step))
        if options.verbose:
            for point in points:
                ratio = _eager(point, fitted, stacks[point.model]) / point.seconds
                print(f"    {point.kind:8s} {point.label:32s} {point.seconds * 1e3:9.1f} ms  x {ratio:.2f}")


def _fit_profile(options: argparse.Namespace) -> None:
    device, file = load_device(options.device)
    model, points = profile_points(options.paths[0], "fastest_s" if options.fastest else "median_s")
    cpu, stack = fit_cpu(points, model, device)
    print(f"{options.device}: {len(points)} points of {model}")
    for field in ("compute_efficiency", "memory_efficiency", "attention_efficiency", "kv_efficiency", "layer_s"):
        print(f"  {field}: {getattr(cpu, field):.4g}  (in the file: {getattr(device, field)})")
    print(f"  step_s: {stack.step_s:.3g}, row_s: {stack.row_s:.3g}")
    known = next(iter(file.stacks.values()))
    if any(point.kind == "mixed" for point in points):
        print(f"  mixed_share: {stack.mixed_share:.3f}  (in the file: {known.mixed_share})")
    show_errors("fitted", errors(points, lambda p: predicted(p, model, cpu, stack)))
    present = StackShape("file", known.launch_s, known.step_s, known.row_s, mixed_share=known.mixed_share)
    show_errors("file", errors(points, lambda p: predicted(p, model, device, present)))
    if options.verbose:
        for point in points:
            ratio = predicted(point, model, cpu, stack) / point.seconds
            print(f"    {point.kind:8s} {point.label:24s} {point.seconds * 1e3:9.2f} ms  x {ratio:.2f}")


def _fit_recordings(options: argparse.Namespace) -> None:
    for path in options.paths:
        table, counted = learned(path)
        times = table.step_times
        if times is None:
            print(f"{path.name}: too few iterations")
            continue
        print(f"{path.name}: mixed_share {times.mixed_share:.3f}")
        for kind, count in sorted(counted.items()):
            print(f"  {kind:8s} {count:6d} iterations, mean error of the last fifty {table.error_of(kind):6.1%}")


def learned(path: Path) -> tuple[ProfileTable, dict[IterationKind, int]]:
    """What a worker would have learned of its recorded iterations, and how many of each kind there were."""
    table = ProfileTable()
    counted: dict[IterationKind, int] = defaultdict(int)
    for iteration in iterations(path):
        decodes = [end for start, end in iteration.rows if end - start == 1]
        shape = BatchShape(0, 0, 0, len(decodes), sum(decodes))
        for start, end in iteration.rows:
            if end - start > 1:
                shape = shape.with_prefill(start, end - start)
        table.record(shape, iteration.ended_s - iteration.planned_s)
        counted[kind_of(shape)] += bool(iteration.rows)
    return table, counted
