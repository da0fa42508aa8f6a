"""Simulations of `cohort advise`: a candidate under a part of the traffic, as many at once as there are processes.

A look is a seed and a length; every candidate of a look replays the same requests. Results do not depend on the number
of processes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import NamedTuple, TypeVar

from cohort.common.errors import ConfigError
from cohort.common.policies.cost_model import ModelShape
from cohort.common.workloads.items import Workload
from cohort.services.simulator.advise.candidates import Candidate
from cohort.services.simulator.core.capacity import Capacity, Load
from cohort.services.simulator.core.report import SimReport
from cohort.services.simulator.core.run import simulate
from cohort.services.simulator.core.setup import configuration
from cohort.services.simulator.core.sim_options import SimOptions
from cohort.services.simulator.core.traffic import Traffic

_T = TypeVar("_T")
_R = TypeVar("_R")
_FEWEST = 60
"""Requests of a look at least, however long their answers are."""
_REQUEST = 100.0
"""Work of a request beside its answer, in tokens of one."""
_TAIL_S = 120.0
"""Time after the last arrival; what has not ended by then is late."""
_WARM_UP, _WARM_REQUESTS = 0.1, 200
"""Share of a look whose requests do not count, from so many on."""
_COARSE = 0.1
"""Tolerance of the search for capacities."""


class Look(NamedTuple):
    """`work`: at most, in tokens of answers."""

    seed: int
    duration_s: float
    work: float = math.inf


class Tried(NamedTuple):
    candidate: Candidate
    report: SimReport


Progress = Callable[[float, float], None]
"""Callback with the work done and the work in all, in tokens of answers."""


@dataclass
class Lab:
    """Ingredients that all candidates have in common. `impossible`: reason → what cannot run for it."""

    options: argparse.Namespace
    model: ModelShape
    traffic: Traffic
    sim_options: SimOptions
    progress: Progress = lambda done, total: None
    impossible: dict[str, list[str]] = field(default_factory=dict)
    done: float = 0.0
    planned: float = 0.0
    _pool: ProcessPoolExecutor | None = None

    def __post_init__(self) -> None:
        sample = self.traffic.sample()
        self.request_work = _REQUEST + sum(item.output_tokens for item in sample) / len(sample)

    @contextmanager
    def processes(self, count: int) -> Iterator[None]:
        """Simulate in so many processes within the block; in this one if it is one."""
        global _lab  # of processes that are forked here
        if count == 1:
            yield
            return
        _lab = replace(self, progress=lambda done, total: None)
        with ProcessPoolExecutor(count, get_context("fork")) as pool:
            self._pool = pool
            try:
                yield
            finally:
                self._pool, _lab = None, None
                pool.shutdown(cancel_futures=True)

    def refuse(self, label: str, error: ConfigError) -> None:
        self.impossible.setdefault(str(error), []).append(label)

    def requests(self, look: Look) -> int | None:
        """Return the most requests of a look; None without a bound."""
        if math.isinf(look.work):
            count: int | None = self.options.count
            return count
        within = max(_FEWEST, math.ceil(look.work / self.request_work))
        return min(within, self.options.count or within)

    def workload(self, look: Look) -> Workload:
        traffic = self.traffic.lasting(look.duration_s, seed=look.seed, most=self.requests(look))
        return traffic.workload(self.options.rate)

    def size(self, look: Look) -> float:
        """Return a look's work."""
        return len(self.workload(look).items) * self.request_work

    def look(self, candidates: Sequence[Candidate], look: Look) -> list[Tried]:
        """Simulate the candidates. Those that cannot run are left out, and known as `impossible`."""
        found = []
        pairs = [(candidate, look) for candidate in candidates]
        for candidate, result in zip(candidates, self._map(_look, pairs, self.size(look)), strict=True):
            if isinstance(result, ConfigError):
                self.refuse(candidate.label, result)
            else:
                found.append(Tried(candidate, result))
        return found

    def capacities(
        self, candidates: Sequence[Candidate], seed: int, start_per_s: float | None, size: float
    ) -> list[Capacity]:
        """Search the capacities, with traffic of this seed. `size`: work for one."""
        asked = [(candidate, seed, start_per_s) for candidate in candidates]
        return list(self._map(_capacity, asked, size))

    def simulate(self, candidate: Candidate, look: Look) -> SimReport:
        workload = self.workload(look)
        deadlines_s = [item.slo.deadline_s for item in workload.items]
        span_s = workload.items[-1].arrival_s if workload.items else 0.0
        options = replace(
            self.sim_options,
            seed=look.seed,
            horizon_s=span_s + max(_TAIL_S, 2.0 * max(deadlines_s, default=0.0)),
            warmup_s=_WARM_UP * span_s if len(workload.items) >= _WARM_REQUESTS else 0.0,
        )
        config = configuration(self.options, candidate.preset, candidate.settings)
        return simulate(config, candidate.cluster, self.model, workload, options, candidate.roles)

    def load(self, candidate: Candidate, seed: int) -> Load:
        """Return the candidate under traffic of this seed."""
        config = configuration(self.options, candidate.preset, candidate.settings)
        traffic = self.traffic.lasting(0.0, seed=seed)
        options = replace(self.sim_options, seed=seed)
        return Load(config, candidate.cluster, self.model, traffic, options, candidate.roles)

    def _map(self, function: Callable[[Lab, _T], _R], arguments: Sequence[_T], size: float) -> Iterator[_R]:
        results: Iterator[_R] = (
            (function(self, argument) for argument in arguments)
            if self._pool is None
            else self._pool.map(_forked, [function] * len(arguments), arguments)
        )
        for result in results:
            self.done += size
            self.planned = max(self.planned, self.done)
            self.progress(self.done, self.planned)
            yield result


_lab: Lab | None = None
"""Lab of the processes that simulate for another one."""


def _forked(function: Callable[[Lab, _T], _R], argument: _T) -> _R:
    assert _lab is not None, "forked while there is a lab"
    return function(_lab, argument)


def _look(lab: Lab, asked: tuple[Candidate, Look]) -> SimReport | ConfigError:
    try:
        return lab.simulate(*asked)
    except ConfigError as error:
        return error


def _capacity(lab: Lab, asked: tuple[Candidate, int, float | None]) -> Capacity:
    candidate, seed, start_per_s = asked
    return lab.load(candidate, seed).capacity(start_per_s, lab.options.capacity, tolerance=_COARSE)
