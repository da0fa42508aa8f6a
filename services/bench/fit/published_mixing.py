"""What mixing prompts and decodes costs, by published measurements of colocated serving: fitted to some, tested on
others.

    cohort bench fit published-mixing [--device a100-80] [--stack graphs]

Fitted to Table 1 of the DynaServe paper (Qwen2.5-14B, one A100-80 an instance, chunks of 2,048 beside decodes): the
median, the 99th percentile and the throughput of 8,192 + 32 tokens, and the 99th percentile of 2,048 + 512. Tested on
its Fig. 6 (Llama-3.1-8B: 512 prompt tokens beside 29 decodes at 1,024 take 50 ms), which no fit sees; what the forms
foretell for its section 6 takes simulations (docs/guide/simulator.md). The compositions are those of the steady state:
as many decodes as the lengths leave beside each chunk, and for 2,048 + 512 as many rows as the reported median of
decode iterations implies.

Three forms: none; a share of the whole iteration (`mixed_share`); KV read again by the query heads of a group
(`mixed_reads`), fitted, and as `cohort bench fit operators mixed` finds it. Changes no file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from scipy.optimize import minimize_scalar

from cohort.common.policies.cost_model import CostModel, StepWork, prefill_pairs
from cohort.services.simulator.hardware.hardware import Cluster, load_cluster, load_model

_CHUNK = 2048
OPERATORS = 0.31
"""`mixed_reads` by the measured attention calls of two GPUs and three models (docs/guide/simulator.md)."""


@dataclass(frozen=True)
class Reading:
    """A published time, and the iterations whose mean it is."""

    name: str
    model: str
    seconds: float
    works: tuple[StepWork, ...]
    fitted: bool = True

    def foreseen_s(self, cluster: Cluster, share: float, reads: float) -> float:
        stack = replace(cluster.stack, mixed_share=share, mixed_reads=reads)
        cost = CostModel(load_model(self.model), cluster.device, stack)
        return fmean(cost.step_s(work) for work in self.works)


def mixed_work(start: int, chunk: int, rows: int, context: int) -> StepWork:
    """A chunk of one prompt from `start` on beside decodes at the same position."""
    pairs = prefill_pairs(start, chunk)
    return StepWork(chunk + rows, 1 + rows, 1 + rows, pairs, start + chunk, rows, rows * context, context)


def readings(cluster: Cluster) -> list[Reading]:
    model = "qwen2.5-14b"
    beside = (
        31 * _CHUNK // 8192
    )  # of each chunk's iteration: a request decodes as often as prompts have chunks meanwhile
    chunks = [mixed_work(start, _CHUNK - beside, beside, 8208) for start in range(0, 8192, _CHUNK)]
    plain = CostModel(load_model(model), cluster.device, cluster.stack)
    rows = next(
        count
        for count in range(1, 512)
        if plain.step_s(StepWork(count, count, count, 0, 0, count, count * 2304, 2304)) >= 0.04686
    )
    balanced = mixed_work(0, _CHUNK - rows, rows, 2304)
    return [
        Reading("8,192 + 32, median", model, 0.30968, tuple(chunks[1:3])),
        Reading("8,192 + 32, 99th percentile", model, 0.35293, (chunks[3],)),
        Reading("8,192 + 32, by 1.49 requests/s", model, 2 / 1.49 / 4, tuple(chunks)),
        Reading(f"2,048 + 512 ({rows} rows), 99th percentile", model, 0.33681, (balanced,)),
        Reading("Fig. 6: 512 beside 29 at 1,024", "llama-3-8b", 0.050, (mixed_work(0, 512, 29, 1024),), fitted=False),
    ]


def fit(found: Sequence[Reading], cluster: Cluster, constants: Callable[[float], tuple[float, float]]) -> float:
    """The value whose `constants` (share, reads) explain the readings best, by squared relative error."""

    def loss(value: float) -> float:
        share, reads = constants(value)
        return float(np.sum([np.log(each.foreseen_s(cluster, share, reads) / each.seconds) ** 2 for each in found]))

    return float(minimize_scalar(loss, bounds=(0.0, 1.0), method="bounded").x)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="a100-80")
    parser.add_argument("--stack", help="of the device file (default: its first)")


def execute(options: argparse.Namespace) -> int:
    """Everything from parsed options."""
    cluster = load_cluster(options.device, {"stack": options.stack})
    found = readings(cluster)
    fitted = [each for each in found if each.fitted]
    share = fit(fitted, cluster, lambda value: (value, 0.0))
    reads = fit(fitted, cluster, lambda value: (0.0, value))
    forms = [("none", 0.0, 0.0), (f"mixed_share {share:.3f}", share, 0.0), (f"mixed_reads {reads:.3f}", 0.0, reads)]
    forms.append((f"mixed_reads {OPERATORS:.3f} (operators)", 0.0, OPERATORS))
    for name, share, reads in forms:
        print(name)
        for each in found:
            seconds = each.foreseen_s(cluster, share, reads)
            what = "fitted" if each.fitted else "tested"
            print(
                f"  {what} {each.name:42s} published {each.seconds * 1e3:6.1f} ms, model {seconds * 1e3:6.1f} "
                f"({seconds / each.seconds - 1:+.1%})"
            )
    return 0
