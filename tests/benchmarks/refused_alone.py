"""Was it right to refuse? Some refused requests are served, each alone, in a run that is otherwise as it was.

    python -m tests.benchmarks.refused_alone routers agents tiers --load 1.3 --count 200

A first run finds the refused requests. In a second one the process is forked where one of the drawn ones arrives: the
fork serves it (`if_late: serve`) and runs to the end, the parent refuses it as before and goes on. Printed is how many
of them kept their SLO, and how many requests more the run as a whole kept with one of them served.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from cohort.common.comparison import comparison
from cohort.common.comparison.comparison_spec import load_spec
from cohort.common.workloads.items import WorkItem
from cohort.services.simulator.core.clients import InFlight
from cohort.services.simulator.core.cluster import SimCluster
from cohort.services.simulator.core.run import simulation_of, workload_of

_AT_ONCE = 2
_LINE = 16  # bytes of an outcome: a pipe holds 4,096 of them


@dataclass(eq=False)
class Run:
    """A simulation, and one more in a fork for each of `drawn`, which is served there."""

    sim: SimCluster
    drawn: frozenset[int] = frozenset()
    kept: int = 0
    refused: list[int] = field(default_factory=list)
    _serves: int | None = None
    """In a fork, the number of the request that it serves."""
    _own_kept: bool = False
    _forks: list[int] = field(default_factory=list)

    def outcomes(self) -> list[tuple[bool, int]]:
        """Run. Return of each drawn request whether it kept its SLO, and how many its fork's run kept."""
        clients = self.sim.clients
        self._arrive, clients.arrive = clients.arrive, self._arriving  # type: ignore[method-assign]
        clients.on_end = self._ended
        reading, writing = os.pipe()
        self.sim.run()
        if self._serves is not None:
            os.write(writing, f"{self._own_kept:d} {self.kept}".ljust(_LINE).encode())
            os._exit(0)
        os.close(writing)
        while self._forks:
            self._wait()
        with open(reading) as lines:
            text = lines.read()
        found = [text[at : at + _LINE].split() for at in range(0, len(text), _LINE)]
        assert len(found) == len(self.drawn)
        return [(own == "1", int(kept)) for own, kept in found]

    def _arriving(self, now_s: float, item: WorkItem, answered: Callable[[float], None] | None) -> None:
        clients = self.sim.clients
        number = clients._count
        if self._serves is None and number in self.drawn:
            while len(self._forks) >= _AT_ONCE:
                self._wait()
            fork = os.fork()
            if fork:
                self._forks.append(fork)
            else:
                self._serves = number
        clients._if_late = "serve" if number == self._serves else "refuse"
        self._arrive(now_s, item, answered)

    def _ended(self, live: InFlight, finished: bool) -> None:
        in_time = finished and all(live.attained)
        self.kept += in_time
        if live.index == self._serves:
            self._own_kept = in_time
        if not finished:
            self.refused.append(live.index)

    def _wait(self) -> None:
        _, status = os.waitpid(self._forks.pop(0), 0)
        assert status == 0, "a fork of the run has failed"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("spec", help="a file of configs/comparisons by name")
    parser.add_argument("workloads", nargs="+")
    parser.add_argument("--load", type=float, default=1.3)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--count", type=int, default=200, help="requests to serve of each workload (200)")
    options = parser.parse_args()
    spec, loads, seeds = load_spec(options.spec), [options.load], [options.seed]
    for cell in comparison.cells(spec, workloads=options.workloads, systems=["cohort"], loads=loads, seeds=seeds):
        first = Run(simulation_of(cell, workload_of(cell)))
        first.outcomes()
        sent, refused = first.sim.clients.all.sent, first.refused
        drawn = frozenset(Random(cell.seed).sample(refused, min(options.count, len(refused))))
        found = Run(simulation_of(cell, workload_of(cell)), drawn).outcomes()
        print(f"{cell.label}: {len(refused)} of {sent} refused, {first.kept} kept", end="")
        if found:
            own = 100 * statistics.mean(own for own, _ in found)
            more = [kept - first.kept for _, kept in found]
            error = statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else 0.0
            print(f"; of {len(found)} served alone {own:.1f} % in time; the run keeps", end=" ")
            print(f"{statistics.mean(more):+.2f} (standard error {error:.2f})", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
