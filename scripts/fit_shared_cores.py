"""What live iterations take beside what the cost model says: for clusters whose engines share cores.

    python scripts/fit_shared_cores.py RECORDING… --cluster cpu-2x1

RECORDINGs are those of all workers of one run (`engine.record_dir`). Iterations are told apart by whether another
engine ran meanwhile (for less than a tenth of the time, for more than nine tenths). Prints for both: how many, their
seconds from plan to tokens, what the model says for them, alone and with the cluster's shared cores, and the two
constants that follow:

    step_s         of the device's stack: what a lone iteration takes beyond the model's, and the time between two
    interference   of the cluster: what remains beside the shares of cores once another engine runs

Changes no file. Calibrate with one run, judge with others (`scripts/bench_fidelity`).
"""

from __future__ import annotations

import argparse
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from cohort.common.policies.cost_model import CostModel, StepWork, prefill_pairs
from cohort.services.simulator.hardware import load_cluster, load_model

_ROW = re.compile(r"\[(\d+), (\d+)\)$")
_AT_ONCE_S = 0.005
"""A plan that follows an iteration by less was waited for by nobody."""


@dataclass(frozen=True)
class Iteration:
    planned_s: float
    ended_s: float
    rows: tuple[tuple[int, int], ...]

    def work(self) -> StepWork:
        decodes = [start + 1 for start, end in self.rows if end - start == 1]
        prompts = [(start, end) for start, end in self.rows if end - start > 1]
        return StepWork(
            sum(end - start for start, end in self.rows), len(self.rows), len(self.rows),
            sum(prefill_pairs(start, end - start) for start, end in prompts), sum(end for _, end in prompts),
            len(decodes), sum(decodes), max(decodes, default=0),
        )  # fmt: skip


def iterations(path: Path) -> Iterator[Iteration]:
    planned_s = 0.0
    rows: tuple[tuple[int, int], ...] = ()
    with path.open(encoding="utf-8") as lines:
        next(lines)  # what the machine is made of
        for line in lines:
            entry = json.loads(line)
            if entry["kind"] == "plan":
                planned_s = entry["now_s"]
            elif entry["kind"] == "planned" and entry["answer"][0] != "nothing":
                found = (_ROW.search(text) for text in entry["answer"])
                rows = tuple((int(match[1]), int(match[2])) for match in found if match)
            elif entry["kind"] == "completed":
                yield Iteration(planned_s, entry["now_s"], rows)


def overlap(iteration: Iteration, others: Sequence[Iteration], starts: Sequence[float]) -> float:
    """Share of the iteration during which another engine ran."""
    at = max(0, bisect_right(starts, iteration.planned_s) - 1)
    shared_s = 0.0
    while at < len(others) and others[at].planned_s < iteration.ended_s:
        other = others[at]
        shared_s += max(0.0, min(iteration.ended_s, other.ended_s) - max(iteration.planned_s, other.planned_s))
        at += 1
    return shared_s / (iteration.ended_s - iteration.planned_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path, nargs="+")
    parser.add_argument("--cluster", default="cpu-2x1")
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    cluster = load_cluster(options.cluster)
    cost = CostModel(load_model(options.model), cluster.device, replace(cluster.stack, step_s=0.0))
    runs = [list(iterations(path)) for path in options.recordings]
    taken: dict[str, list[tuple[float, float, float]]] = {"alone": [], "shared": []}
    gaps: list[float] = []
    for run in runs:
        others = sorted((i for other in runs if other is not run for i in other), key=lambda i: i.planned_s)
        starts = [i.planned_s for i in others]
        between = (b.planned_s - a.ended_s for a, b in pairwise(run))
        gaps += [gap_s for gap_s in between if gap_s < _AT_ONCE_S]
        for iteration in run:
            share = overlap(iteration, others, starts)
            kind = "alone" if share < 0.1 else "shared" if share > 0.9 else ""
            if kind:
                alone_s = cost.step_s(iteration.work())
                load = cluster.service_load(len(iteration.rows), alone_s)
                factor = cluster.slowdown([load, load]) if kind == "shared" else 1.0
                taken[kind].append((iteration.ended_s - iteration.planned_s, alone_s, factor))
    between_s = sum(gaps) / len(gaps)
    steps = taken["alone"]
    real_s, model_s = sum(real for real, _, _ in steps), sum(alone for _, alone, _ in steps)
    print(f"{len(steps)} alone: {real_s:.2f} s, the model without step_s {model_s:.2f} s")
    step_s = between_s + (real_s - model_s) / len(steps)
    print(f"between two iterations: {between_s * 1e3:.2f} ms")
    print(f"step_s: {step_s:.5f}  (in the file: {cluster.stack.step_s})")
    steps = taken["shared"]
    real_s = sum(real for real, _, _ in steps)
    model_s = sum((alone + step_s - between_s) * factor for _, alone, factor in steps)
    print(f"{len(steps)} shared: {real_s:.2f} s, the model on shared cores {model_s:.2f} s")
    print(f"interference: {max(0.0, real_s / model_s - 1):.3f}  (in the file: {cluster.interference})")


if __name__ == "__main__":
    main()
