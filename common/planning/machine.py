"""When to simulate, when to change the workers, when to undo: the planner as a pure state machine.

    Traffic, Workers ──▶ ┌──────────────┐ ──Evaluate──▶ a simulation at low priority
                         │PlannerMachine│ ◀─Evaluated──
    Tick ──────────────▶ │              │ ──Apply─────▶ what starts and drains workers
                         └──────────────┘ ◀─Applied────
                                └──Decided──▶ log, metrics, live page

One round replays the traffic of the last minutes on the present shape and on its neighbours. What the present shape
was simulated to keep and what it kept in fact differ: that error, smoothed, is the bar that a gain must exceed, beside
`min_gain`. Where requests come ever more densely, they are replayed as dense as they will be `ahead_s` from now,
because a worker takes as long to come. A change is followed by `settle_s` without another one, but for more devices
behind more devices: a rise may be steeper than one step. Then the same comparison judges it: where less was served in
time than before, by more than the error, and less than the former shape would have served of the same traffic, it is
undone. Hosted by the global monitor live and by the simulator under virtual time.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Literal, assert_never

import msgspec

from cohort.common.machines.events import Tick
from cohort.common.planning.shape import Bounds, Shape, neighbours
from cohort.common.planning.simulation_jobs import Answer, Foreseen, Job, WorkerCost
from cohort.common.planning.traffic import (
    LEAD_IN,
    Seen,
    Timing,
    TrafficRecord,
    TrafficWindow,
    in_time,
    load_of,
    longest_answer_s,
    to_replay,
)
from cohort.common.types import InstanceId

Mode = Literal["off", "advise", "act"]
Action = Literal["advised", "changed", "undone", "failed"]
Verdict = Literal["", "stands", "undone", "too little traffic to tell"]

LEAST_JUDGED = 8
"""Requests without which a share says nothing."""
_ERROR_WEIGHT = 0.35
_CALM_S = 150.0
_CALM_LOAD = 0.1
"""Share of the load: a smaller change counts as none."""
_MAX_DECISIONS = 64
_MOST_LOG_ERROR = 3.0
_MOST_PACE = 4.0
_LASTS_S = 300.0
"""Time after which a beaten shape is tried again in any case: more than the load may have changed."""
_LESS = 0.85
"""Share of the load at which a shape lost; below it the shape is tried again."""
SAVED_S = 1800.0
"""Wall time whose share can be saved up."""


class PlannerSettings(msgspec.Struct, frozen=True):
    """See section `planner` of the configuration, and `PlannerPace`."""

    mode: Mode
    interval_s: float
    window_s: float
    max_requests: int
    cpu_share: float
    settle_s: float
    worker_cost: float
    confirmations: int
    bounds: Bounds
    default_output: int = 256
    cores: int = 0
    threads: int = 1
    ahead_s: float = 60.0
    """Time that a new worker takes: rising traffic is replayed as dense as it will be then. 0: as it was."""
    min_gain: float = 0.02
    """A change must gain more of the share served in time than this, and more than the planner's own error."""
    hold_s: float = 900.0
    """Time for which a shape that failed or was undone is not tried again."""
    best_effort_s: float = 60.0
    """Time within which a request without an SLO has to end to count as served in time."""


class PlanDecision(msgspec.Struct, frozen=True):
    """Shares are of requests served in time. `predicted`, `predicted_before`: of the replayed traffic, on the new and
    the former shape; `error`: of such a prediction at that time. `measured_before`, `measured_after`: real shares.
    `verdict` "": not judged yet."""

    number: int
    at_s: float
    action: Action
    before: Shape
    after: Shape
    predicted_before: float = 0.0
    predicted: float = 0.0
    error: float = 0.0
    measured_before: float | None = None
    measured_after: float | None = None
    verdict: Verdict = ""
    why: str = ""


class Traffic(msgspec.Struct, frozen=True):
    """Report of a gateway about its requests."""

    gateway: InstanceId
    incarnation: int
    records: Sequence[TrafficRecord]


class Workers(msgspec.Struct, frozen=True):
    """The workers that serve now, and what is measured of those of each degree."""

    shape: Shape
    costs: dict[int, WorkerCost]


class Evaluated(msgspec.Struct, frozen=True):
    """Reply to `Evaluate`."""

    answer: Answer


class Applied(msgspec.Struct, frozen=True):
    """Reply to `Apply`: the shape is reached, or `failure` says why not."""

    failure: str = ""


class Evaluate(msgspec.Struct, frozen=True):
    job: Job


class Apply(msgspec.Struct, frozen=True):
    before: Shape
    after: Shape


class Decided(msgspec.Struct, frozen=True):
    """New decision, or a former one that was judged (`decision.verdict`)."""

    decision: PlanDecision


PlannerEvent = Traffic | Workers | Evaluated | Applied | Tick
PlannerEffect = Evaluate | Apply | Decided


class _Round(msgspec.Struct):
    job: Job
    seen: Sequence[Seen]
    at_s: float
    growth: float
    settling: bool


class PlannerMachine:
    def __init__(self, settings: PlannerSettings, now_s: float) -> None:
        self.settings = settings
        self.budget = Budget(settings.cpu_share, now_s)
        self.decisions: deque[PlanDecision] = deque(maxlen=_MAX_DECISIONS)
        self.counts: Counter[str] = Counter()
        """Decisions by action, and verdicts by name."""
        self.error: float | None = None
        """Smoothed difference of shares predicted and measured; None before the first comparison."""
        self.time_errors: dict[str, float] = {}
        """Errors of median TTFT and TPOT, smoothed likewise, as a factor - 1."""
        self.pace = 1.0
        """Factor by which iterations take longer than learned, through what lies between two of them (messages, other
        processes): found from measured and simulated TPOT."""
        self.predicted: float | None = None
        self.measured: float | None = None
        """Measured share of the present shape in the last round; `predicted` is the simulated one."""
        self.shape: Shape | None = None
        """Present shape, or the one that a change in progress leads to."""
        self.costs: dict[int, WorkerCost] = {}
        self._window = TrafficWindow(settings.window_s, settings.max_requests)
        self._effects: list[PlannerEffect] = []
        self._rounds = 0
        self._round: _Round | None = None
        self._changing: PlanDecision | None = None
        self._unjudged: PlanDecision | None = None
        self._next_s = now_s + settings.interval_s
        self._changed_s = now_s
        self._other_since_s: float | None = None
        """Time since which the workers differ from `shape`: one died, say, and is restarted."""
        self._held: dict[Shape, float] = {}
        """Shapes that are not tried again, with the end of that time."""
        self._beaten = Beaten()
        self._calm: tuple[float, float] | None = None
        """Time and load of the last round in which all was in time and nothing better was found."""
        self._grown = False
        """Flag: the last change added devices."""
        self._leaning: tuple[int, int] = (0, 0)
        """Direction of the last rounds (fewer, other or more devices: -1, 0, 1), and their number."""
        self._advised: Shape | None = None

    def handle(self, now_s: float, *events: PlannerEvent) -> list[PlannerEffect]:
        for event in events:
            match event:
                case Traffic():
                    self._window.note(now_s, event.gateway, event.incarnation, event.records)
                case Workers():
                    self._workers(now_s, event)
                case Evaluated(answer=answer):
                    self._evaluated(now_s, answer)
                case Applied(failure=failure):
                    self._applied(now_s, failure)
                case Tick():
                    self._begin_round(now_s)
                case _:
                    assert_never(event)
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    @property
    def bar(self) -> float:
        """Threshold that a gain must exceed."""
        return max(self.settings.min_gain, self.error or 0.0)

    def score(self, share: float, shape: Shape) -> float:
        """Return what is maximised: the share served in time, less the cost of the devices."""
        return share - self.settings.worker_cost * shape.devices

    # -- what is there ---------------------------------------------------------------------------------------------

    def _workers(self, now_s: float, event: Workers) -> None:
        self.costs |= event.costs
        if self._changing is not None or event.shape == self.shape:
            self._other_since_s = None
            return
        if self._other_since_s is None:
            self._other_since_s = now_s
        starting = self.shape is None or not self._rounds
        if starting or now_s - self._other_since_s >= self.settings.settle_s:
            self.shape, self._changed_s, self._other_since_s = event.shape, now_s, None
            self._round, self._unjudged, self._calm, self._grown = None, None, None, False
            self._beaten.forget()

    # -- rounds ----------------------------------------------------------------------------------------------------

    def _begin_round(self, now_s: float) -> None:
        settings, shape = self.settings, self.shape
        busy = self._round is not None or self._changing is not None or self._other_since_s is not None
        settling = now_s < self._changed_s + settings.settle_s
        waits = now_s < self._next_s or (
            settling and (not self._grown or now_s < self._changed_s + settings.interval_s)
        )
        if settings.mode == "off" or shape is None or not shape.serves or busy or waits:
            return
        degrees = {group.degree for group in shape.groups}
        if not degrees <= self.costs.keys() or not self.budget.affords(now_s):
            return
        self._next_s = now_s + settings.interval_s
        unjudged = None if settling else self._unjudged
        # An error is learned, and a change judged, of what has come; a decision is about what will.
        forecasts = self.error is not None and unjudged is None
        replay = self._window.latest(now_s, settings.ahead_s if forecasts else 0.0)
        seen, start_s = replay.seen, replay.start_s
        former = () if unjudged is None else (unjudged.before,)
        bounds = msgspec.structs.replace(
            settings.bounds, degrees=tuple(each for each in settings.bounds.degrees if each in self.costs)
        )
        self._held = {each: until_s for each, until_s in self._held.items() if until_s > now_s}
        requests = tuple(to_replay(replay, settings.default_output))
        candidates = [each for each in neighbours(shape, bounds) if each not in self._held and each not in former]
        candidates = self._beaten.others(now_s, load_of(requests), candidates)
        if settling:
            candidates = [each for each in candidates if each.devices > shape.devices]
        # A round without requests costs nothing, and the error of busier times fades with each.
        calm = bool(seen) and not former and replay.growth == 1.0 and self._is_calm(now_s, load_of(requests))
        if calm or (settling and not candidates):
            return
        self._rounds += 1
        lead_in_s = start_s + LEAD_IN * (now_s - start_s)
        since_s = max(lead_in_s, self._changed_s) if former else lead_in_s
        job = Job(
            round=self._rounds,
            shapes=(shape, *former, *candidates),
            requests=requests,
            judged_from=sum(each.arrived_s < since_s for each in seen),
            costs={degree: cost.paced(self.pace) for degree, cost in self.costs.items()},
            worker_cost=settings.worker_cost,
            bar=self.bar,
            best_effort_s=settings.best_effort_s,
            keep=(shape, *former),
            cores=settings.cores,
            threads=settings.threads,
        )
        self._round = _Round(job, seen, now_s, replay.growth, settling)
        if seen:
            self._effects.append(Evaluate(job))
        else:  # nothing to replay: all shapes serve it
            self._evaluated(now_s, Answer(job.round, tuple(Foreseen(each, ()) for each in job.shapes), 0.0))

    def _evaluated(self, now_s: float, answer: Answer) -> None:
        self.budget.spend(answer.cpu_s)
        round_, shape = self._round, self.shape
        if round_ is None or round_.job.round != answer.round or shape is None:
            return
        self._round = None
        if answer.failure or not answer.foreseen or answer.foreseen[0].shape != shape:
            self.counts["rounds_failed"] += 1
            return
        shares = {each.shape: self._share(round_, each.timings) for each in answer.foreseen}
        self._learn_error(round_, answer.foreseen[0])
        self._note_beaten(now_s, shape, round_.job, shares)
        self.predicted = shares[shape]
        if self._unjudged is not None and not round_.settling and self._judge(now_s, round_, shares):
            return
        self._calm = None
        if self._other_since_s is None and self.error is not None:
            self._decide(now_s, round_, shares)

    def _is_calm(self, now_s: float, load: float) -> bool:
        """Return whether the load is nearly that of a recent round that wanted nothing. This round would want nothing
        either, and its cost is saved for a load that changes."""
        if self._calm is None:
            return False
        calm_s, then = self._calm
        return now_s < calm_s + _CALM_S and abs(load - then) <= _CALM_LOAD * then

    def _note_beaten(self, now_s: float, present: Shape, job: Job, shares: dict[Shape, float]) -> None:
        """Remember the shapes that lost. Those with more devices are not remembered: a rising load wants them next."""
        score = self.score(shares[present], present)
        lost = [each for each in job.shapes if each not in shares or self.score(shares[each], each) <= score]
        lost = [each for each in lost if each.devices <= present.devices and each not in job.keep]
        self._beaten.note(now_s, load_of(job.requests), lost)

    def _share(self, round_: _Round, timings: Sequence[Timing]) -> float:
        """Return the simulated share served in time of the judged requests; 1 without any."""
        job = round_.job
        pairs = list(zip(job.requests, timings, strict=True))[job.judged_from :]
        return _mean([in_time(request.slo, timing, job.best_effort_s) for request, timing in pairs])

    def _learn_error(self, round_: _Round, present: Foreseen) -> None:
        """Compare measured and simulated shares and times of the requests that ended or are overdue."""
        job, answer_s = round_.job, longest_answer_s(round_.seen)
        counted = [
            (each, timing)
            for each, timing in list(zip(round_.seen, present.timings, strict=True))[job.judged_from :]
            if each.arrived_s >= self._changed_s
        ]
        both = [
            (each.record, each.record.timing, timing)
            for each, timing in counted
            if each.record.timing is not None and each.judged
        ]
        overdue = [(each.record, Timing(), timing) for each, timing in counted if each.overdue(round_.at_s, answer_s)]
        if not both and not overdue:
            self.measured = None
            if not round_.seen:  # nothing was promised and nothing missed
                self._smooth_error(0.0)
            return
        outcomes = both + overdue
        measured = _mean([in_time(record.slo, real, job.best_effort_s) for record, real, _ in outcomes])
        simulated = _mean([in_time(record.slo, timing, job.best_effort_s) for record, _, timing in outcomes])
        self.measured = measured
        if len(outcomes) < LEAST_JUDGED or round_.growth > 1.0:  # what was simulated has not come yet
            return
        self._smooth_error(abs(measured - simulated))
        for name in ("ttft_s", "tpot_s"):
            real_s = _median([getattr(real, name) for _, real, _ in both])
            simulated_s = _median([getattr(timing, name) for _, _, timing in both])
            if real_s > 0.0 and simulated_s > 0.0:
                if name == "tpot_s":
                    weight = _ERROR_WEIGHT if name in self.time_errors else 1.0
                    pace = self.pace * (real_s / simulated_s) ** weight
                    self.pace = min(_MOST_PACE, max(1.0 / _MOST_PACE, pace))
                log = min(_MOST_LOG_ERROR, abs(math.log(simulated_s / real_s)))
                before = math.log1p(self.time_errors[name]) if name in self.time_errors else log
                self.time_errors[name] = math.expm1(before + _ERROR_WEIGHT * (log - before))

    def _smooth_error(self, error: float) -> None:
        self.error = error if self.error is None else self.error + _ERROR_WEIGHT * (error - self.error)

    # -- decisions -------------------------------------------------------------------------------------------------

    def _decide(self, now_s: float, round_: _Round, shares: dict[Shape, float]) -> None:
        shape = round_.job.shapes[0]
        present = self.score(shares[shape], shape)
        best = max(shares, key=lambda each: (self.score(shares[each], each), -each.devices))
        gain = self.score(shares[best], best) - present
        if best == shape or gain <= self.bar:
            calm = (
                min(shares[shape], self.measured if self.measured is not None else 1.0) >= 1.0 - self.settings.min_gain
            )
            self._calm = (round_.at_s, load_of(round_.job.requests)) if calm and round_.growth == 1.0 else None
            self._leaning, self._advised = (0, 0), None
            return
        way = (best.devices > shape.devices) - (best.devices < shape.devices)
        self._leaning = (way, self._leaning[1] + 1 if self._leaning[0] == way else 1)
        if self._leaning[1] < (1 if way > 0 else self.settings.confirmations):
            return
        decision = PlanDecision(
            number=self._number(),
            at_s=now_s,
            action="advised" if self.settings.mode == "advise" else "changed",
            before=shape,
            after=best,
            predicted_before=shares[shape],
            predicted=shares[best],
            error=self.error or 0.0,
            measured_before=self.measured,
            why=f"gain {gain:.3f} beyond {self.bar:.3f}",
        )
        if self.settings.mode == "advise":
            if best != self._advised:
                self._advised = best
                self._record(decision)
            return
        self._change(decision)

    def _change(self, decision: PlanDecision) -> None:
        self._changing, self._unjudged, self._leaning = decision, None, (0, 0)
        self.shape = decision.after
        self._grown = decision.after.devices > decision.before.devices
        self._beaten.forget()
        self._record(decision)
        self._effects.append(Apply(decision.before, decision.after))

    def _applied(self, now_s: float, failure: str) -> None:
        decision = self._changing
        if decision is None:
            return
        self._changing, self._changed_s, self._other_since_s = None, now_s, None
        if failure:
            self._held[decision.after] = now_s + self.settings.hold_s
            self.shape, self._grown = decision.before, False
            self._record(msgspec.structs.replace(decision, action="failed", why=failure))
        elif decision.action == "changed":
            self._unjudged = decision

    def _judge(self, now_s: float, round_: _Round, shares: dict[Shape, float]) -> bool:
        """Judge a change that has settled. Return True if it is undone."""
        decision = self._unjudged
        assert decision is not None
        self._unjudged = None
        before, after = decision.measured_before, self.measured
        answer_s = longest_answer_s(round_.seen)
        recent = [each for each in round_.seen if each.arrived_s >= self._changed_s]
        judged = sum(each.judged or each.overdue(round_.at_s, answer_s) for each in recent)
        if after is None or judged < LEAST_JUDGED:
            self._record(msgspec.structs.replace(decision, verdict="too little traffic to tell"))
            return False
        # The bar as it was: this change's own surprise is no excuse for it. A loss that was foreseen was accepted.
        bar = max(self.settings.min_gain, decision.error) + max(0.0, decision.predicted_before - decision.predicted)
        former = shares.get(decision.before, 1.0)
        worse = (before is None or after < before - bar) and after < former - bar
        judged_decision = msgspec.structs.replace(decision, measured_after=after)
        if not worse or not self.settings.bounds.allows(decision.before):
            self._record(msgspec.structs.replace(judged_decision, verdict="stands"))
            return False
        self._record(msgspec.structs.replace(judged_decision, verdict="undone"))
        self._held[decision.after] = now_s + self.settings.hold_s
        self._change(
            PlanDecision(
                number=self._number(),
                at_s=now_s,
                action="undone",
                before=decision.after,
                after=decision.before,
                predicted_before=shares.get(decision.after, after),
                predicted=shares.get(decision.before, 1.0),
                error=self.error or 0.0,
                measured_before=after,
                why=f"{after:.3f} in time, predicted were {decision.predicted:.3f}",
            )
        )
        return True

    def _number(self) -> int:
        self.counts["decisions"] += 1
        return self.counts["decisions"]

    def _record(self, decision: PlanDecision) -> None:
        """Record a new decision, or the outcome of a known one."""
        known = next((index for index, each in enumerate(self.decisions) if each.number == decision.number), None)
        if known is None:
            self.decisions.append(decision)
            self.counts[decision.action] += 1
        else:
            if decision.verdict:
                self.counts[f"verdict_{decision.verdict.partition(' ')[0]}"] += 1
            elif decision.action != self.decisions[known].action:
                self.counts[decision.action] += 1
            self.decisions[known] = decision
        self._effects.append(Decided(decision))


class Beaten:
    """Shapes that lately lost to the present one, so that a round does not pay for them again under the same load.

    While a load rises, fewer workers and other roles lose round after round, and each of their replays costs as much as
    that of the shape which is wanted next.
    """

    def __init__(self) -> None:
        self._lost: dict[Shape, tuple[float, float]] = {}
        """Time and load of each loss."""

    def note(self, now_s: float, load: float, shapes: Iterable[Shape]) -> None:
        self._lost |= {shape: (now_s, load) for shape in shapes}

    def others(self, now_s: float, load: float, shapes: Iterable[Shape]) -> list[Shape]:
        """Return the shapes that may win. `load` in tokens a second."""
        self._lost = {
            shape: (lost_s, then)
            for shape, (lost_s, then) in self._lost.items()
            if now_s < lost_s + _LASTS_S and load > _LESS * then
        }
        return [shape for shape in shapes if shape not in self._lost]

    def forget(self) -> None:
        """Forget all losses: another shape is the present one."""
        self._lost.clear()


class Budget:
    """Processor time that simulations may take: a share of one core, measured in CPU seconds over wall seconds.

    Credit grows with time and is spent by rounds. What a quiet time saves is there when the load rises, which is when
    rounds are large and late ones cost most; it is bounded, and begins full, because a pipeline that has just started
    knows least.
    """

    def __init__(self, share: float, now_s: float) -> None:
        self._share = share
        self._credit_s = share * SAVED_S
        self._last_s = now_s
        self._round_s = 0.0
        self.spent_s = 0.0

    def affords(self, now_s: float) -> bool:
        """Return whether the credit covers another round of average cost."""
        self._credit_s = min(self._share * SAVED_S, self._credit_s + self._share * max(0.0, now_s - self._last_s))
        self._last_s = now_s
        return self._credit_s > 0.0 and self._credit_s >= min(self._round_s, self._share * SAVED_S)

    def spend(self, cpu_s: float) -> None:
        self._credit_s -= cpu_s
        self.spent_s += cpu_s
        self._round_s = cpu_s if not self._round_s else 0.5 * (self._round_s + cpu_s)


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 1.0


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0
