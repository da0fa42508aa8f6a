"""How long decisions take as what they look at grows: `cohort bench engine`, section growth.

The prefix cache (`PagedAllocator.admit`) against the blocks it holds, the worker's scheduler (`decide`) and the
manager's prefill order against waiting requests. The work of one call does not grow with them, so its time should not.
Pure policies, one core, no model.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import msgspec
import numpy as np

from cohort.common.config import load_config
from cohort.common.policies import compose
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.interface import NO_NEWS, IterationPlan
from cohort.common.sequence import Sequence as Running
from cohort.common.types import Attempt, KvGeometry, Request, SamplingParams
from cohort.services.bench.decisions import scheduling
from cohort.services.bench.no_collection import no_collection

TOLERANCE = 0.2
"""An exponent may exceed the work's by this much: a binary search looks like it, and larger tables miss the processor's
caches more often."""

_LATE_POINTS = 3
_PROMPT_TOKENS = 512
_BLOCK_SIZE = 16
_ROWS = 64
_WAITING_PROMPT = 32


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds over sizes. `exponent` e of time ~ size^e, fitted on a log-log line through all points; `late_exponent`
    through the last three, which tells what is flat at first. `work_exponent`: how the work itself grows."""

    name: str
    size_of: str
    sizes: list[float]
    seconds: list[float]
    work_exponent: float
    exponent: float
    late_exponent: float

    @property
    def too_steep(self) -> bool:
        return max(self.exponent, self.late_exponent) > self.work_exponent + TOLERANCE

    @property
    def sentence(self) -> str:
        """For a person; empty when the time grows no faster than the work."""
        if not self.too_steep:
            return ""
        steeper = self.exponent >= self.late_exponent
        where = "" if steeper else f" from {self.sizes[-_LATE_POINTS]:,.0f} on"
        found = self.exponent if steeper else self.late_exponent
        return (
            f"{self.name} grows faster than its work: as {self.size_of}^{found:.2f}{where}, the work as "
            f"{self.size_of}^{self.work_exponent:g}"
        )


def curve(name: str, size_of: str, points: Sequence[tuple[float, float]], work_exponent: float = 0.0) -> Curve:
    """A curve with its fits, from (size, seconds)."""
    ordered = sorted(points)
    return Curve(
        name=name,
        size_of=size_of,
        sizes=[size for size, _ in ordered],
        seconds=[seconds for _, seconds in ordered],
        work_exponent=work_exponent,
        exponent=fit_exponent(ordered),
        late_exponent=fit_exponent(ordered[-_LATE_POINTS:]),
    )


def fit_exponent(points: Sequence[tuple[float, float]]) -> float:
    """e of seconds = c · size^e by least squares on logarithms; 0 for fewer than two sizes."""
    if len({size for size, _ in points}) < 2:
        return 0.0
    sizes, seconds = np.log(np.asarray(points, dtype=np.float64)).T
    return float(np.polyfit(sizes, seconds, 1)[0])


@dataclass(frozen=True, slots=True)
class Sizes:
    cached_blocks: tuple[int, ...] = (100, 1000, 10_000, 100_000)
    waiting: tuple[int, ...] = (10, 100, 1000, 10_000, 100_000)
    repeats: int = 200


QUICK = Sizes((100, 400), (10, 50), 5)


def tasks(sizes: Sizes) -> Iterator[tuple[str, Callable[[], list[Curve]]]]:
    """The measurements in order: each call takes seconds at most."""
    yield "prefix cache against its size", partial(prefix_cache, sizes)
    yield "worker's scheduler against waiting requests", partial(iteration_scheduler, sizes)
    for preset in ("cohort", "bucketserve"):
        yield f"prefill order of {preset} against waiting requests", partial(prefill_order, preset, sizes)


def prefix_cache(sizes: Sizes) -> list[Curve]:
    """One prompt of 512 tokens admitted: all of it known, and none of it with the cache full, so that blocks are
    evicted."""
    known: list[tuple[float, float]] = []
    unknown: list[tuple[float, float]] = []
    for blocks in sizes.cached_blocks:
        held = _PROMPT_TOKENS // _BLOCK_SIZE
        prompts = max(1, blocks // held)
        kv = PagedAllocator(KvGeometry(1, 1, 1, 2, _BLOCK_SIZE), prompts * held, 0)
        for seed in range(prompts):
            _admit_s(kv, _prompt(seed))
        which = random.Random(0)
        with no_collection():
            known_s = [_admit_s(kv, _prompt(which.randrange(prompts))) for _ in range(sizes.repeats)]
            unknown_s = [_admit_s(kv, _prompt(prompts + index)) for index in range(sizes.repeats)]
        known.append((kv.cached_blocks, median(known_s)))
        unknown.append((kv.cached_blocks, median(unknown_s)))
    return [
        curve("admit a known prompt of 512", "cached blocks", known),
        curve("admit an unknown prompt of 512, evicting", "cached blocks", unknown),
    ]


def iteration_scheduler(sizes: Sizes) -> list[Curve]:
    """64 rows run; every iteration one ends, one of the waiting joins, and another begins to wait."""
    config = load_config(overrides={"engine": {"max_rows": _ROWS}})
    deciding: list[tuple[float, float]] = []
    queueing: list[tuple[float, float]] = []
    for waiting in sizes.waiting:
        scheduler = compose.iteration(config)
        kv = PagedAllocator(KvGeometry(1, 1, 1, 2, _BLOCK_SIZE), 16 * _ROWS * _ROWS, 0, prefix_caching=False)
        for index in range(waiting + _ROWS):
            scheduler.add(0.0, _sequence(f"first-{index}", [0] * _WAITING_PROMPT, arrived_s=index * 1e-6))
        plan = IterationPlan()
        while len(plan.rows) < _ROWS:
            plan = scheduler.decide(1.0, kv, NO_NEWS)
            _ran(plan, kv)
        decide_s, queue_s = [], []
        with no_collection():
            for round_ in range(sizes.repeats):
                now_s = 2.0 + round_
                leaving = plan.rows[0].sequence
                coming = _sequence(f"then-{round_}", [0] * _WAITING_PROMPT, arrived_s=now_s)
                begin_s = time.perf_counter()
                scheduler.remove(now_s, leaving)
                scheduler.add(now_s, coming)
                queued_s = time.perf_counter()
                kv.release(leaving.key)
                released_s = time.perf_counter()
                plan = scheduler.decide(now_s, kv, NO_NEWS)
                decide_s.append(time.perf_counter() - released_s)
                queue_s.append(queued_s - begin_s)
                _ran(plan, kv)
        deciding.append((waiting, median(decide_s)))
        queueing.append((waiting, median(queue_s)))
    return [
        curve("worker's decide(), 64 rows", "waiting requests", deciding),
        curve("worker's queues, one in, one out", "waiting requests", queueing),
    ]


def prefill_order(preset: str, sizes: Sizes) -> list[Curve]:
    """The manager's order of a preset: one request added, decided on and dispatched (`services/bench/scheduling`)."""
    points = []
    for waiting in sizes.waiting:
        order = compose.prefill_order(load_config(preset=preset))
        cost = scheduling.measure(order, preset, waiting, max(10, sizes.repeats // 2))
        points.append((float(waiting), cost.median_us / 1e6))
    return [curve(f"prefill order of {preset}, one request", "waiting requests", points)]


def _prompt(seed: int) -> Running:
    draw = random.Random(seed)
    return _sequence(f"prompt-{seed}", [draw.randrange(50_000) for _ in range(_PROMPT_TOKENS)])


def _admit_s(kv: PagedAllocator, sequence: Running) -> float:
    """How long `admit` took; afterwards the sequence is computed and gone, and its blocks are cached."""
    begin_s = time.perf_counter()
    kv.admit(sequence)
    taken_s = time.perf_counter() - begin_s
    sequence.computed = len(sequence.tokens)
    kv.committed(sequence)
    kv.release(sequence.key)
    return taken_s


def _ran(plan: IterationPlan, kv: PagedAllocator) -> None:
    """The plan's rows were computed; sequences that reached their last known token sampled another."""
    for row in plan.rows:
        sequence = row.sequence
        sequence.computed = row.start + row.count
        if sequence.uncomputed == 0:
            sequence.tokens.append(0)
        kv.committed(sequence)


def _sequence(name: str, tokens: list[int], arrived_s: float = 0.0) -> Running:
    request = Request(Attempt(name, 1), "gateway", tokens, len(tokens), SamplingParams(max_tokens=1 << 20), 0.0)
    return Running(request=request, tokens=list(tokens), end=None, batch_id=0, arrived_s=arrived_s)
