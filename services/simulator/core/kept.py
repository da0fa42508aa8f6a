"""Who kept the SLO: requests by class, tier and length, how long they waited, and how many could have kept it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from cohort.common.workloads.items import WorkItem, Workload
from cohort.services.simulator.bound.least_work import Instance, Prices, jobs, new_tokens
from cohort.services.simulator.core.clients import InFlight, has_slo
from cohort.services.simulator.core.cluster import SimCluster

_QUARTERS = 4

Groups = dict[str, dict[str, list[int]]]
"""Question → group → the number of its requests that kept their SLO, and of those sent."""


@dataclass(slots=True)
class Waits:
    """Outcomes of the judged requests of a run, made before it. `longest_s`: the longest wait for a first token, or
    for a refusal, or in vain for the run's end."""

    sim: SimCluster
    judges: Callable[[WorkItem], bool]
    longest_s: float = 0.0
    ended: list[tuple[WorkItem, bool]] = field(default_factory=list)
    """Requests and whether they kept their SLO."""

    def __post_init__(self) -> None:
        self.sim.clients.on_end = self._note

    def close(self) -> None:
        """Count what is unserved at the end of the run."""
        for live in self.sim.clients.live.values():
            self._note(live, False)

    def _note(self, live: InFlight, finished: bool) -> None:
        item = live.item
        if not self.judges(item):
            return
        until_s = live.first_s if live.produced else self.sim.events.now_s
        self.longest_s = max(self.longest_s, until_s - item.arrival_s)
        self.ended.append((item, finished and has_slo(item) and all(live.attained)))

    def groups(self) -> Groups:
        lengths = sorted(item.prompt_tokens + item.output_tokens for item, _ in self.ended)
        found: Groups = {}
        for item, kept in self.ended:
            below = bisect_left(lengths, item.prompt_tokens + item.output_tokens) / len(lengths)
            slo = item.slo
            of = {
                "class": item.traffic_class,
                "SLO": f"{slo.ttft_s:g} s, {1e3 * slo.tpot_s:g} ms" if slo.ttft_s else f"{slo.deadline_s:g} s in all",
                "length": f"quarter {1 + int(_QUARTERS * below)}",
            }
            for question, group in of.items():
                counts = found.setdefault(question, {}).setdefault(group, [0, 0])
                counts[0] += kept
                counts[1] += 1
        return {question: dict(sorted(groups.items())) for question, groups in found.items()}


@dataclass(frozen=True, slots=True)
class AtMost:
    """`requests`: so many could be kept at most. `left_out`: numbers of judged ones that the bound's optimum keeps less
    than half of, or that could not be kept alone."""

    requests: float
    left_out: dict[int, None]


def at_most(
    sim: SimCluster, workload: Workload, judges: Callable[[WorkItem], bool], capacity: float = 1.0
) -> AtMost | None:
    """Bound how many of the judged requests any scheduler could keep on a share of the capacity, with lengths and
    arrivals known. None where SciPy is missing, iterations scatter, or users who ask when they are answered are judged:
    nothing bounds those."""
    try:
        from cohort.services.simulator.bound.relaxation import most_fitting
    except ImportError:
        return None
    scatter = sim.cluster.scatter if sim.options.scatter is None else sim.options.scatter
    loops = [item for part in workload.closed_loop for item in part.items]
    if scatter or any(has_slo(item) and judges(item) for item in loops):
        return None
    items = workload.items
    fresh = new_tokens(items) if sim.shares_prompts else [item.prompt_tokens for item in items]
    judged = [index for index, item in enumerate(items) if has_slo(item) and judges(item)]
    able, resources = jobs(
        [items[index] for index in judged],
        [fresh[index] for index in judged],
        _instances(sim),
        longest=sim.longest,
        horizon_s=sim.options.horizon_s,
    )
    fitting = most_fitting(len(able), [replace(each, capacity=capacity * each.capacity) for each in resources])
    stays = {judged[index] for index, share in zip(able, fitting.shares, strict=True) if share >= 0.5}
    return AtMost(fitting.most, dict.fromkeys(index for index in judged if index not in stays))


def _instances(sim: SimCluster) -> Sequence[Instance]:
    prices = {cost: Prices.of(cost) for cost in dict.fromkeys(sim.costs)}
    frees = sim.geometry.frees_behind_window
    positions = [0 if frees else worker.machine.setup.capacity.positions for worker in sim.workers]
    return [Instance(prices[cost], held) for cost, held in zip(sim.costs, positions, strict=True)]
