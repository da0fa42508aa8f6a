"""Time of live iterations beyond the cost model's: for clusters whose engines share cores.

    cohort bench fit shared-cores RECORDING… --cluster cpu-2x1

RECORDINGs are those of all workers of one run (`recording.folder`). Iterations are told apart by whether another
engine ran meanwhile (for less than a tenth of the time, for more than nine tenths). Prints for both: how many, their
seconds from plan to tokens, what the model says for them, and the two constants that follow:

    step_s           of the device's stack: what a lone iteration takes beyond the model's, and the time between two
    service_step_s   of the cluster: what the other processes, and changing between them, take for an iteration

and, where prefill workers are among them, what lies between a computed prompt and the arrival of its KV: a constant, a
time for each run of blocks (`run_s` of the link) and one for each block (its `bytes_per_s`).

Changes no file. Calibrate with one run, judge with others (`cohort bench fidelity`).
"""

from __future__ import annotations

import argparse
import json
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cohort.common.policies.cost_model import CostModel, StepWork, prefill_pairs
from cohort.services.simulator.hardware.hardware import Cluster, core_slowdowns, load_cluster, load_model

_ROW = re.compile(r"\[(\d+), (\d+)\)(?:;| \+|$)")
AT_ONCE_S = 0.005
"""No process waited for a plan that follows an iteration by less."""
_STALLED_S = 0.2


@dataclass(frozen=True)
class Iteration:
    planned_s: float
    ended_s: float
    rows: tuple[tuple[int, int], ...]

    def work(self) -> StepWork:
        decodes = [start + 1 for start, end in self.rows if end - start == 1]
        prompts = [(start, end) for start, end in self.rows if end - start > 1]
        return StepWork(
            sum(end - start for start, end in self.rows),
            len(self.rows),
            len(self.rows),
            sum(prefill_pairs(start, end - start) for start, end in prompts),
            sum(end for _, end in prompts),
            len(decodes),
            sum(decodes),
            max(decodes, default=0),
        )


def iterations(path: Path) -> Iterator[Iteration]:
    """A step that was begun behind another (`StartStep.ahead`) counts from the end of that one, when it runs."""
    begun: deque[tuple[float, tuple[tuple[int, int], ...]]] = deque()
    free_s = 0.0
    for call in _calls(path):
        for event in call["events"]:
            if event["event"] == "StepEnded":
                planned_s, rows = begun.popleft()
                yield Iteration(max(planned_s, free_s), call["now_s"], rows)
                free_s = call["now_s"]
            elif event["event"] == "StepFailed":
                begun.clear()
        begun.extend((call["now_s"], rows) for rows in _started(call))


def _started(call: dict[str, Any]) -> Iterator[tuple[tuple[int, int], ...]]:
    for effect in call["effects"]:
        if effect.startswith("StartStep "):
            yield tuple((int(start), int(end)) for start, end in _ROW.findall(effect))


def overlap(iteration: Iteration, others: Sequence[Iteration], starts: Sequence[float]) -> float:
    """Share of the iteration during which another engine ran."""
    at = max(0, bisect_right(starts, iteration.planned_s) - 1)
    shared_s = 0.0
    while at < len(others) and others[at].planned_s < iteration.ended_s:
        other = others[at]
        shared_s += max(0.0, min(iteration.ended_s, other.ended_s) - max(iteration.planned_s, other.planned_s))
        at += 1
    return shared_s / (iteration.ended_s - iteration.planned_s)


def beside(iteration: Iteration, others: Sequence[Iteration], starts: Sequence[float]) -> list[Iteration]:
    """The other engine's iteration in the middle of this one."""
    middle_s = (iteration.planned_s + iteration.ended_s) / 2
    at = bisect_right(starts, middle_s) - 1
    return [others[at]] if at >= 0 and others[at].ended_s > middle_s else []


def kv_transfers(sender: Path, receiver: Path) -> Iterator[tuple[int, int, float]]:
    """Of prompts computed in one iteration whose KV went to this receiver: runs of blocks, blocks, seconds until all
    of it was there. Transfers longer than `_STALLED_S`, which waited for something else, are left out."""
    block_size = _setup(sender)["capacity"]["block_size"]
    computed: list[float] = []
    blocks: list[tuple[int, int]] = []
    leases: set[int] = set()
    held: deque[int] = deque()
    for call in _calls(sender):
        for event in call["events"]:
            if event["event"] == "StepEnded":
                count = held.popleft()
                if event["sampled"]:
                    computed.append(call["now_s"])
                    blocks.append((count, len(event["sampled"])))
            elif event["event"] == "StepFailed":
                held.clear()
            elif event["event"] == "RunsSent":
                leases.add(event["lease_id"])
        held.extend(sum(-(-end // block_size) for _, end in rows) for rows in _started(call))
    arrivals: dict[int, tuple[float, float, int]] = {}
    for call in _calls(receiver):
        for event in call["events"]:
            if event["event"] == "RunsReceived" and event["lease_id"] in leases:
                start_s, _, runs = arrivals.get(event["lease_id"], (call["now_s"], 0.0, 0))
                arrivals[event["lease_id"]] = (start_s, call["now_s"], runs + event.get("runs", 1))
    together: dict[int, list[tuple[float, int]]] = {}
    for start_s, end_s, runs in arrivals.values():
        together.setdefault(bisect_right(computed, start_s) - 1, []).append((end_s, runs))
    for index, ends in together.items():
        seconds = max(end_s for end_s, _ in ends) - computed[index]
        if index >= 0 and len(ends) == blocks[index][1] and seconds < _STALLED_S:
            yield sum(runs for _, runs in ends), blocks[index][0], seconds


def _setup(path: Path) -> dict[str, Any]:
    """The parts of the recorded machine."""
    with path.open(encoding="utf-8") as lines:
        setup: dict[str, Any] = json.loads(next(lines))["setup"]
        return setup


def _calls(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        next(lines)
        yield from map(json.loads, lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recordings", type=Path, nargs="+")
    parser.add_argument("--cluster", default="cpu-2x1")
    parser.add_argument("--model", default="smollm2-135m")


def execute(options: argparse.Namespace) -> int:
    """Everything from parsed options."""
    cluster = load_cluster(options.cluster)
    cost = CostModel(load_model(options.model), cluster.device, replace(cluster.stack, step_s=0.0))
    runs = [list(iterations(path)) for path in options.recordings]
    alone: list[tuple[Iteration, float]] = []
    shared: list[list[tuple[Iteration, float]]] = []
    gaps: list[float] = []
    for run in runs:
        others = sorted((i for other in runs if other is not run for i in other), key=lambda i: i.planned_s)
        starts = [i.planned_s for i in others]
        between = (b.planned_s - a.ended_s for a, b in pairwise(run))
        gaps += [gap_s for gap_s in between if gap_s < AT_ONCE_S]
        for iteration in run:
            share = overlap(iteration, others, starts)
            if share < 0.1:
                alone.append((iteration, cost.step_s(iteration.work())))
            elif share > 0.9:
                engines = [iteration, *beside(iteration, others, starts)]
                shared.append([(engine, cost.step_s(engine.work())) for engine in engines])
    between_s = sum(gaps) / len(gaps)
    real_s, model_s = sum(i.ended_s - i.planned_s for i, _ in alone), sum(seconds for _, seconds in alone)
    print(f"{len(alone)} alone: {real_s:.2f} s, the model without step_s {model_s:.2f} s")
    own_s = (real_s - model_s) / len(alone)
    print(f"between two iterations: {between_s * 1e3:.2f} ms")
    print(f"step_s: {between_s + own_s:.5f}  (in the file: {cluster.stack.step_s})")
    real_s = sum(engines[0][0].ended_s - engines[0][0].planned_s for engines in shared)
    model_s = shared_s(shared, own_s, cluster)
    print(f"{len(shared)} shared: {real_s:.2f} s, the model on shared cores {model_s:.2f} s")
    low, high = 0.0, 0.1
    for _ in range(30):
        middle = (low + high) / 2
        smaller = shared_s(shared, own_s, msgspec.structs.replace(cluster, service_step_s=middle)) < real_s
        low, high = (middle, high) if smaller else (low, middle)
    print(f"service_step_s: {low:.5f}  (in the file: {cluster.service_step_s})")
    role = {path: _setup(path)["capacity"]["role"] for path in options.recordings}
    pairs = product((p for p in role if role[p] == "prefill"), (p for p in role if role[p] == "decode"))
    found = np.array([each for sender, receiver in pairs for each in kv_transfers(sender, receiver)])
    if len(found):
        terms = np.column_stack([np.ones(len(found)), found[:, :2]])
        constant_s, run_s, block_s = np.linalg.lstsq(terms, found[:, 2], rcond=None)[0]
        print(f"{len(found)} KV transfers: {constant_s:.5f} s, {run_s:.5f} s a run, {block_s:.5f} s a block")
    return 0


def shared_s(shared: Sequence[Sequence[tuple[Iteration, float]]], own_s: float, cluster: Cluster) -> float:
    """The model's time for the first of each, while the second runs beside it. `own_s`: the worker's part."""
    total_s = 0.0
    for engines in shared:
        alone_s = [seconds + own_s for _, seconds in engines]
        loads = [cluster.service_load(len(i.rows), s) for (i, _), s in zip(engines, alone_s, strict=True)]
        total_s += alone_s[0] * core_slowdowns(cluster.cores, list(zip(alone_s, loads, strict=True)))[0]
    return total_s
