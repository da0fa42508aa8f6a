"""The planner's state machine: bounds, settling, undo, budget, against worlds that answer as a test wants."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.machines.events import Tick
from cohort.common.planning.machine import (
    SAVED_S,
    Applied,
    Apply,
    Decided,
    Evaluate,
    Evaluated,
    PlanDecision,
    PlannerEvent,
    PlannerMachine,
    PlannerSettings,
    Traffic,
    Workers,
)
from cohort.common.planning.shape import Bounds, Shape
from cohort.common.planning.simulation_jobs import Answer, Foreseen, Job, WorkerCost
from cohort.common.planning.traffic import Timing, TrafficRecord
from cohort.common.types import Role, Slo, StepTimes

SLO = Slo(ttft_s=1.0)
COST = WorkerCost(StepTimes(0.001, 0.0, 0.0, 0.0, 0.0, 0.0), 100)
SETTINGS = PlannerSettings(
    mode="act",
    interval_s=10.0,
    window_s=120.0,
    max_requests=100,
    cpu_share=0.02,
    settle_s=60.0,
    min_gain=0.02,
    worker_cost=0.03,
    confirmations=2,
    hold_s=600.0,
    best_effort_s=60.0,
    bounds=Bounds(1, 4),
)


def unified(count: int) -> Shape:
    return Shape.of({(Role.UNIFIED, 1): count})


class World:
    """Workers that serve the share of the requests that `real` says; simulations that predict what `foreseen` says.
    A request a second."""

    def __init__(self, options: PlannerSettings = SETTINGS, start: Shape | None = None) -> None:
        self.shape = start or unified(1)
        self.machine = PlannerMachine(options, 0.0)
        self.now_s = 0.0
        self.real: dict[Shape, float] = {}
        self.foreseen: dict[Shape, float] = {}
        self.default = 0.5
        self.traffic = True
        self.cpu_s = 0.1
        self.jobs: list[Job] = []
        self.applied: list[tuple[float, Shape, Shape]] = []
        self.told: list[PlanDecision] = []
        self.fails = False
        self.tpot_s = 0.01
        self._count = 0

    def run(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 1.0
            events: list[PlannerEvent] = [Workers(self.shape, {1: COST}), Tick()]
            if self.traffic:
                # One request of a hundred after the other is late, as many as the share says.
                kept = (self._count * 37) % 100 < 100 * self.real.get(self.shape, self.default)
                timing = Timing(0.1 if kept else 9.0, self.tpot_s, 9.5)
                record = TrafficRecord(self._count, 0.5, 10, "rt", SLO, 5, 0, timing)
                self._count += 1
                events.insert(0, Traffic("gateway", 1, [record]))
            self.tell(*events)
            self.machine.settings.bounds.allows(self.shape)

    def tell(self, *events: PlannerEvent) -> None:
        for effect in self.machine.handle(self.now_s, *events):
            match effect:
                case Evaluate(job=job):
                    self.jobs.append(job)
                    found = tuple(Foreseen(shape, self.timings(job, shape)) for shape in job.shapes)
                    self.tell(Evaluated(Answer(job.round, found, self.cpu_s)))
                case Apply(before=before, after=after):
                    assert before == self.shape
                    self.applied.append((self.now_s, before, after))
                    if not self.fails:
                        self.shape = after
                    self.tell(Applied("no device left" if self.fails else ""))
                case Decided(decision=decision):
                    self.told.append(decision)

    def timings(self, job: Job, shape: Shape) -> tuple[Timing, ...]:
        share, tpot_s = self.foreseen.get(shape, self.default), 10.0 * job.costs[1].times.step_s
        return tuple(
            Timing(0.1 if (index * 37) % 100 < 100 * share else 9.0, tpot_s, 9.5) for index in range(len(job.requests))
        )


def settle(**changes: object) -> PlannerSettings:
    return msgspec.structs.replace(SETTINGS, **changes)


def test_a_gain_beyond_the_error_adds_a_worker_that_then_stands():
    world = World()
    world.real = world.foreseen = {unified(1): 0.5, unified(2): 0.95, unified(3): 0.96}
    world.run(300.0)
    assert [(before, after) for _, before, after in world.applied] == [(unified(1), unified(2))]
    decision = world.machine.decisions[-1]
    assert decision.verdict == "stands" and decision.measured_after == pytest.approx(0.95, abs=0.05)
    assert decision.predicted == pytest.approx(0.95, abs=0.05)


def test_no_gain_changes_nothing():
    world = World(start=unified(2))
    world.real = world.foreseen = {unified(1): 0.5, unified(2): 0.95, unified(3): 0.96}
    world.run(600.0)
    assert world.applied == [] and len(world.jobs) > 20


@pytest.mark.parametrize(("ended", "changes"), [(True, True), (False, False)])
def test_in_an_overload_requests_that_are_overdue_are_what_it_judges_by(ended: bool, changes: bool) -> None:
    """None of the latest has ended, as long as the queue is. How long an answer takes, one that ended long ago says;
    without such a one nothing can be told."""
    world = World()
    world.traffic = False
    world.foreseen = {unified(1): 0.0, unified(2): 1.0}
    if ended:
        old = TrafficRecord(10_000, 0.5, 10, "rt", SLO, 5, 0, Timing(0.1, 0.01, 0.6))
        world.tell(Traffic("gateway", 1, [old]))
    for number in range(150):
        world.tell(Traffic("gateway", 1, [TrafficRecord(number, 0.0, 10, "rt", SLO)]))
        world.run(1.0)
    assert bool(world.applied) == changes
    if changes:
        assert world.applied[0][1:] == (unified(1), unified(2)) and world.told[0].measured_before == 0.0


def test_a_gain_below_its_own_error_changes_nothing():
    """It foresees far more than is measured: what it foresees of others is worth no more."""
    world = World()
    world.real = {unified(1): 0.3}
    world.foreseen = {unified(1): 0.8, unified(2): 0.99}
    world.run(600.0)
    assert world.applied == [] and world.machine.error == pytest.approx(0.5, abs=0.1)


def test_a_change_that_makes_it_worse_is_undone_and_not_tried_again():
    world = World()
    world.foreseen = {unified(1): 0.5, unified(2): 0.99}
    world.real = {unified(1): 0.5, unified(2): 0.2}
    world.run(400.0)
    assert [after for _, _, after in world.applied] == [unified(2), unified(1)]
    assert world.machine.decisions[0].verdict == "undone" and world.machine.decisions[1].action == "undone"
    world.run(200.0)
    assert len(world.applied) == 2, "held for hold_s"


def test_more_load_after_a_change_is_no_reason_to_undo_it():
    """Less is served in time than before, but the former shape would have served still less."""
    world = World()
    world.real = world.foreseen = {unified(1): 0.6, unified(2): 0.95}
    world.run(60.0)
    while not world.applied:
        world.run(1.0)
    world.real = world.foreseen = {unified(1): 0.1, unified(2): 0.5}
    world.run(200.0)
    assert all(decision.action != "undone" for decision in world.machine.decisions)
    assert world.machine.decisions[0].verdict == "stands"


def test_without_traffic_workers_go_one_after_the_other():
    world = World(start=unified(4))
    world.traffic = False
    world.run(600.0)
    assert [after for _, _, after in world.applied] == [unified(3), unified(2), unified(1)]
    assert world.jobs == [], "nothing to simulate"


def test_after_a_load_that_it_foresaw_badly_workers_go_all_the_same() -> None:
    """Its error was larger than what a device costs; without traffic there is nothing to be wrong about."""
    world = World(msgspec.structs.replace(SETTINGS, bounds=Bounds(1, 4, ("colocated",))), unified(3))
    world.default, world.foreseen = 1.0, dict.fromkeys((unified(2), unified(3), unified(4)), 0.7)
    world.run(300)
    assert not world.applied and world.machine.bar > SETTINGS.worker_cost
    world.traffic = False
    world.run(400)
    assert world.applied[0][2] == unified(2)


def test_advice_is_told_once_and_changes_nothing():
    world = World(settle(mode="advise"))
    world.real = world.foreseen = {unified(1): 0.5, unified(2): 0.95}
    world.run(600.0)
    assert world.applied == [] and [decision.action for decision in world.told] == ["advised"]
    assert world.told[0].after == unified(2)


def test_off_does_nothing():
    world = World(settle(mode="off"))
    world.run(300.0)
    assert world.jobs == [] and world.told == []


def test_a_change_that_fails_is_said_and_held():
    world = World()
    world.fails = True
    world.real = world.foreseen = {unified(1): 0.5, unified(2): 0.95, unified(3): 0.4}
    world.run(400.0)
    assert len(world.applied) == 1 and world.machine.decisions[-1].action == "failed"
    assert world.machine.shape == unified(1)


def test_a_worker_that_is_away_for_a_moment_stops_rounds_and_is_no_new_shape():
    world = World(start=unified(2))
    world.real = world.foreseen = {unified(1): 0.5, unified(2): 0.9, unified(3): 0.91}
    world.run(100.0)
    rounds = len(world.jobs)
    world.shape = unified(1)
    world.run(30.0)
    assert len(world.jobs) == rounds and world.machine.shape == unified(2)
    world.run(60.0)
    assert world.machine.shape == unified(1), "it stays away: this is what there is"


def test_simulations_take_over_the_pace_that_is_measured():
    """Tokens come every 20 ms where the simulation says 10: iterations take twice as long as learned."""
    world = World()
    world.tpot_s, world.real = 0.02, {unified(1): 0.9}
    world.foreseen = {unified(1): 0.9, unified(2): 0.9}
    world.run(65.0)
    assert world.machine.pace == pytest.approx(2.0)
    assert world.machine.time_errors["tpot_s"] == pytest.approx(1.0)
    world.run(300.0)
    assert world.machine.pace == pytest.approx(2.0, rel=0.05)
    assert world.machine.time_errors["tpot_s"] < 0.1
    assert world.jobs[-1].costs[1].times.step_s == pytest.approx(0.002, rel=0.05)


def test_rounds_wait_for_processor_time():
    world = World()
    world.cpu_s = 5.0
    world.run(3000.0)
    assert 5.0 * len(world.jobs) <= 0.02 * (SAVED_S + 3000.0) + 5.0
    assert len(world.jobs) >= 15


def test_an_answer_to_a_round_that_is_over_is_dropped():
    world = World()
    world.run(100.0)
    before = world.machine.shape
    world.tell(Evaluated(Answer(1, (Foreseen(unified(1), ()), Foreseen(unified(2), ())), 0.0)))
    assert world.machine.shape == before and world.applied == []


def test_a_rise_that_is_steeper_than_a_step_is_followed_within_a_settling_time():
    world = World()
    world.real = world.foreseen = {unified(1): 0.5, unified(2): 0.9, unified(3): 0.91}
    while not world.applied:
        world.run(1.0)
    grown_s, rounds = world.now_s, len(world.jobs)
    world.real = world.foreseen = {unified(1): 0.1, unified(2): 0.3, unified(3): 0.9}
    world.run(SETTINGS.settle_s - 1.0)
    assert [after for _, _, after in world.applied] == [unified(2), unified(3)]
    assert world.applied[1][0] - grown_s < 2.5 * SETTINGS.interval_s
    assert all(shape.devices >= 2 for shape in world.jobs[rounds].shapes), "nothing less while it settles"


def test_fewer_devices_want_to_be_confirmed_and_to_settle():
    world = World(start=unified(3))
    world.real = world.foreseen = {shape: 1.0 for shape in map(unified, (1, 2, 3, 4))}
    world.run(400.0)
    times = [at_s for at_s, _, _ in world.applied]
    assert [after for _, _, after in world.applied] == [unified(2), unified(1)]
    assert times[0] >= SETTINGS.settle_s + SETTINGS.interval_s and times[1] - times[0] >= SETTINGS.settle_s


def test_what_lost_is_not_simulated_again_under_the_same_load():
    world = World(settle(min_gain=0.05), start=unified(2))
    world.real = world.foreseen = {unified(1): 0.5, unified(2): 0.94, unified(3): 0.97, unified(4): 0.97}
    world.run(200.0)
    asked = [unified(1) in job.shapes for job in world.jobs]
    assert asked[0] and not any(asked[1:]) and len(asked) > 5
    assert all(unified(3) in job.shapes for job in world.jobs), "more devices may be wanted at any time"
    world.run(300.0)
    assert any(unified(1) in job.shapes for job in world.jobs[len(asked) :]), "after a while it is"


def test_a_calm_load_costs_no_rounds_until_it_changes():
    world = World(settle(worker_cost=0.03, min_gain=0.04), start=unified(2))
    world.real = world.foreseen = {shape: 1.0 for shape in map(unified, (1, 2, 3, 4))}
    world.run(200.0)
    calm = len(world.jobs)
    world.run(140.0)
    assert len(world.jobs) - calm <= 2
    busy = [TrafficRecord(10_000 + number, 0.1, 40, "rt", SLO, 5, 0, Timing(0.1, 0.01, 0.2)) for number in range(99)]
    world.tell(Traffic("gateway", 1, busy))
    asked = len(world.jobs)
    world.run(15.0)
    assert len(world.jobs) > asked


def test_a_rising_load_is_replayed_as_dense_as_it_will_be():
    def replayed_s(ahead_s: float) -> float:
        world = World(settle(ahead_s=ahead_s, window_s=60.0))
        world.real = world.foreseen = {shape: 0.9 for shape in map(unified, (1, 2, 3, 4))}
        world.run(70.0)  # what simulations are worth is known
        for second in range(40):
            more = [
                TrafficRecord(1000 * second + n, 0.5, 10, "rt", SLO, 5, 0, Timing(0.1, 0.01, 0.4))
                for n in range(second)
            ]
            world.tell(Traffic("other", 1, more))
            world.run(1.0)
        return world.jobs[-1].requests[-1].at_s

    assert replayed_s(30.0) < 0.8 * replayed_s(0.0)


shares = st.floats(0.0, 1.0)
shapes = [unified(n) for n in range(1, 5)] + [
    Shape.of({(Role.PREFILL, 1): p, (Role.DECODE, 1): d}) for p in (1, 2, 3) for d in (1, 2, 3) if p + d <= 4
]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from(shapes), shares),
            st.dictionaries(st.sampled_from(shapes), shares),
            st.booleans(),
            st.booleans(),
        ),
        min_size=2,
        max_size=6,
    ),
    st.sampled_from(shapes),
    st.integers(1, 2),
    st.integers(2, 4),
)
def test_never_outside_the_bounds_and_one_change_at_most_in_a_settling_time_but_to_more_behind_more(
    phases, start, least, most
):
    bounds = Bounds(least, most)
    if not bounds.allows(start):
        start = unified(least)
    world = World(settle(bounds=bounds, confirmations=1, hold_s=100.0), start)
    for real, foreseen, traffic, fails in phases:
        world.real, world.foreseen, world.traffic, world.fails = real, foreseen, traffic, fails
        world.run(150.0)
    assert all(bounds.allows(after) for _, _, after in world.applied)
    for (sooner_s, less, more), (later_s, _, most) in itertools.pairwise(world.applied):
        grows = less.devices < more.devices < most.devices
        assert later_s - sooner_s >= (SETTINGS.interval_s if grows else SETTINGS.settle_s)
    # An undo leads back to where its change came from.
    for decision in world.machine.decisions:
        if decision.action == "undone":
            changed = [each for each in world.machine.decisions if each.number < decision.number and each.verdict]
            assert changed and changed[-1].before == decision.after and changed[-1].after == decision.before
