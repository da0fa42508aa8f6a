"""A machine from its measurements: what was made with known constants is found again, on what was held out, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

pytest.importorskip("scipy")

from cohort.common.engine.worker.profile_process import default_shapes
from cohort.common.errors import ConfigError
from cohort.common.policies.cost_model import CostModel, StackShape, StepWork, prefill_pairs
from cohort.services.bench.child import MeasurementFailed
from cohort.services.bench.fit import live_cycles
from cohort.services.bench.fit.live_cycles import Cycle, Iteration, Phase, Slice, phases
from cohort.services.bench.fit.machine import (
    Contention,
    Machine,
    Point,
    contention,
    fit_machine,
    nominal,
    scatter,
    services,
    split,
    together,
)
from cohort.services.simulator.hardware.hardware import core_slowdowns, load_device, load_model
from cohort.services.simulator.hardware.scatter import StepScatter

MODEL = load_model("smollm2-135m")
DEVICE, FILE = load_device("cpu-core")
ENGINE = StackShape("engine", 0.0, 0.0012, 0.00005, mixed_share=0.15)
AROUND_S, ROW_S, SERVICE_STEP_S, SERVICE_ROW_S = 0.0055, 0.0002, 0.0018, 0.00014


def points(stack: StackShape = ENGINE) -> list[Point]:
    cost, found = CostModel(MODEL, DEVICE, stack), []
    for shape in default_shapes(1024, 32, 512):
        rows, count, context = shape.rows, shape.tokens_per_row, shape.context
        if count == 1:
            kind, work = "decode", StepWork(rows, rows, rows, 0, 0, rows, rows * context, context)
        else:
            beside, at = shape.decodes, shape.decode_context
            kind = "mixed" if beside else "prefill"
            pairs = prefill_pairs(context - count, count)
            work = StepWork(count + beside, 1 + beside, 1 + beside, pairs, context, beside, beside * at, at)
        found.append(Point(kind, str(shape), work, cost.step_s(work)))
    return found


def live(variation: float = 0.0) -> list[Phase]:
    random = Random(4)
    cost = CostModel(MODEL, DEVICE, replace(ENGINE, step_s=AROUND_S, row_s=ROW_S))

    def cycle(rows: Sequence[tuple[int, int]]) -> Cycle:
        iteration = Iteration(0.0, 0.0, tuple(rows))
        return Cycle(iteration, cost.step_s(iteration.work()) * max(0.2, random.gauss(1.0, variation)))

    return [
        Phase(
            users,
            (
                *(cycle([(99 + step, 100 + step)] * users) for step in range(60)),
                *(cycle([(0, 96), *[(120, 121)] * (users - 1)]) for _ in range(20)),
            ),
            SERVICE_STEP_S + SERVICE_ROW_S * users,
        )
        for users in (1, 4, 8)
    ]


def slices(
    core: float, memory: float, slow: Sequence[float] = (1.0,), apart: Sequence[float] = (1.0,), cache: float = 0.0
) -> list[Slice]:
    """Two workers on two cores: in each slice a prompt and decodes of one, then decodes of a row beside decodes of two,
    and prompts beside prompts and beside decodes. `slow`: how many times as long everything takes, slice by slice;
    `apart`: which part of the contention there is."""
    return [
        _slice(share * core, share * memory, share * cache, level) for level, share in zip(slow, apart, strict=True)
    ]


def _slice(core: float, memory: float, cache: float, level: float) -> Slice:
    cost = CostModel(MODEL, DEVICE, replace(ENGINE, step_s=AROUND_S, row_s=ROW_S))
    alone, now_s = [], 0.0
    for rows in [((0, 96),), *[((119, 120),)] * 40]:
        alone.append(Iteration(now_s, now_s + level * cost.step_s(Iteration(0.0, 0.0, rows).work()), rows))
        now_s = alone[-1].ended_s
    runs: list[list[Iteration]] = [[], []]
    decode, prompt = ((119, 120),), ((0, 256),)
    for begin_s, kinds in ((0.0, [decode, decode * 2]), (100.0, [((0, 96),), prompt]), (200.0, [decode, prompt])):
        works = [Iteration(0.0, 0.0, rows).work() for rows in kinds]
        alone_s = [cost.step_s(work) for work in works]
        loads = [(SERVICE_STEP_S + SERVICE_ROW_S * work.rows) / each for work, each in zip(works, alone_s, strict=True)]
        slowdowns = core_slowdowns(2, list(zip(alone_s, loads, strict=True)))
        shares = [cost.memory_share(work) for work in works]
        for run, rows, each, slow, share in zip(runs, kinds, alone_s, slowdowns, shares, strict=True):
            step_s = level * each * slow * (1.0 + core + cache * share + memory * shares[0] * shares[1])
            run += [Iteration(begin_s + n * step_s, begin_s + (n + 1) * step_s, rows) for n in range(100)]
    return Slice([alone, []], runs)


@pytest.fixture(scope="module")
def machine() -> Machine:
    return fit_machine(points(), MODEL, DEVICE, live())


def test_points_held_out_are_foreseen(machine: Machine) -> None:
    assert set(machine.engine_errors) == {"prefill", "decode", "mixed"}
    assert all(middle < 0.03 and p90 < 0.08 for middle, p90, _, _ in machine.engine_errors.values())
    assert machine.stack.mixed_share == pytest.approx(0.15, abs=0.04)


def test_what_the_services_add_is_found(machine: Machine) -> None:
    bare = CostModel(MODEL, machine.device, replace(machine.stack, step_s=0.0, row_s=0.0))
    truth = CostModel(MODEL, DEVICE, replace(ENGINE, step_s=AROUND_S, row_s=ROW_S))
    for rows in (1, 4, 8):
        work = StepWork(rows, rows, rows, 0, 0, rows, 130 * rows, 130)
        fitted_s = bare.step_s(work) + machine.stack.step_s + machine.stack.row_s * rows
        assert fitted_s == pytest.approx(truth.step_s(work), rel=0.02)
    assert set(machine.live_errors) == {"prefill", "decode", "mixed"}
    assert machine.live_errors["decode"][0] < 0.03
    assert machine.service_step_s == pytest.approx(SERVICE_STEP_S, rel=0.05)
    assert machine.service_row_s == pytest.approx(SERVICE_ROW_S, rel=0.05)
    assert machine.scatter < 0.02


def test_scatter_is_measured_about_the_model() -> None:
    machine = fit_machine(points(), MODEL, DEVICE, live(0.2))
    assert machine.scatter == pytest.approx(0.2, abs=0.03) and machine.scatter_lasting < 0.2


@pytest.mark.parametrize("lasting", [0.3, 0.7])
def test_how_much_of_it_lasts_is_found(lasting: float) -> None:
    cost = CostModel(MODEL, DEVICE, replace(ENGINE, step_s=AROUND_S, row_s=ROW_S))
    factors, decode = StepScatter(0.15, 5, lasting), Iteration(0.0, 0.0, ((119, 120),))
    cycles = [Cycle(decode, factors.factor(0, step) * cost.step_s(decode.work())) for step in range(8000)]
    halves = [Phase(1, tuple(cycles[:5000]), None), Phase(1, tuple(cycles[5000:]), None)]
    varying, found, prompts = scatter(halves, cost)
    assert (varying, found) == pytest.approx((0.15, lasting), abs=0.1) and prompts is None


def test_prompts_scatter_by_their_own_measure() -> None:
    """Whatever decodes do beside them, and from prompts of several lengths."""
    cost = CostModel(MODEL, DEVICE, replace(ENGINE, step_s=AROUND_S, row_s=ROW_S))
    truth, decode = StepScatter(0.3, 5, 0.7, 0.02), Iteration(0.0, 0.0, ((119, 120),))
    cycles = []
    for step in range(3000):
        one = Iteration(0.0, 0.0, ((0, 64 + step % 512),)) if step % 3 else decode
        seconds, prompts = cost.step_s(one.work()), step % 3 > 0
        cycles.append(Cycle(one, seconds * truth.factor(0, step, seconds if prompts else 0.0)))
    varying, _, of_prompts = scatter([Phase(1, tuple(cycles), None)], cost)
    assert (varying, of_prompts) == (pytest.approx(0.3, abs=0.05), pytest.approx(0.02, rel=0.1))


@pytest.mark.parametrize(
    ("core", "memory", "cache"), [(0.0, 0.0, 0.0), (0.2, 0.0, 0.0), (0.0, 0.6, 0.0), (0.2, 0.6, 0.0), (0.05, 0.6, 0.3)]
)
def test_what_engines_take_from_each_other_is_found(core: float, memory: float, cache: float) -> None:
    found = fit_machine(points(), MODEL, DEVICE, live(), slices(core, memory, cache=cache), 2).contention
    assert (found.core, found.memory, found.cache) == pytest.approx((core, memory, cache), abs=0.12)


def test_a_machine_whose_speed_moves_has_the_same_contention() -> None:
    steady, moving = slices(0.2, 0.6, [1.0] * 4, [1.0] * 4), slices(0.2, 0.6, [1.0, 1.5, 0.8, 1.2], [1.0] * 4)
    one, other = (fit_machine(points(), MODEL, DEVICE, live(), each, 2).contention for each in (steady, moving))
    assert (other.core, other.memory) == pytest.approx((one.core, one.memory), rel=1e-6)
    assert other.decodes == pytest.approx(one.decodes) and one.highest - one.lowest < 1e-9


def test_the_mean_of_two_states_counts_and_its_spread_is_known() -> None:
    found = fit_machine(points(), MODEL, DEVICE, live(), slices(0.0, 1.6, [1.0] * 8, [0.0, 1.0] * 4), 2).contention
    always = fit_machine(points(), MODEL, DEVICE, live(), slices(0.0, 0.8), 2).contention
    assert found.memory == pytest.approx(always.memory, rel=0.05)
    assert found.lowest < found.decodes < found.highest
    quarter = (found.decodes - 1.0) / 2.0
    assert 0.5 * quarter < found.highest - found.decodes < 2.0 * quarter


def test_decodes_beside_prompts_alone_tell_nothing() -> None:
    prompt = [Iteration(0.0, 5.0, ((0, 64),))]
    decodes = [Iteration(at / 10, at / 10 + 0.1, ((119, 120),)) for at in range(50)]
    cost = CostModel(MODEL, DEVICE, ENGINE)
    assert len(together([prompt, decodes])) == 51
    one = Slice([[decodes[0]], []], [[], decodes, prompt])
    assert contention([one], cost, 2, lambda rows, seconds: 0.0) == contention([], cost, 2, lambda *_: 0.0)
    assert contention([], cost, 2, lambda *_: 0.0) == Contention()
    assert together([decodes, decodes[:1]])[1:] == [[decodes[0], decodes[0]]], "none is in flight later"


def test_without_a_pipeline_the_engine_alone_is_known() -> None:
    alone = fit_machine(points(), MODEL, DEVICE, [])
    assert alone.live_errors == {} and alone.scatter == alone.service_step_s == 0.0
    assert alone.stack.step_s < 0.004


def test_mixing_that_costs_nothing_has_no_price() -> None:
    assert fit_machine(points(replace(ENGINE, mixed_share=0.0)), MODEL, DEVICE, []).stack.mixed_share == 0.0


def test_every_fourth_point_of_a_kind_is_held_out() -> None:
    fitted, held = split(points())
    assert len(fitted) + len(held) == len(points()) and not set(map(id, fitted)) & set(map(id, held))
    assert {point.kind for point in held} == {"prefill", "decode", "mixed"}
    with pytest.raises(ConfigError, match="too few points"):
        fit_machine([point for point in points() if point.kind == "decode"], MODEL, DEVICE, [])


def test_nominal_peaks_are_twice_the_best_rates() -> None:
    found = nominal(DEVICE, points(), MODEL)
    best = max(CostModel(MODEL, DEVICE, ENGINE).flops(point.work) / point.seconds for point in points())
    assert found.flops_per_s == pytest.approx(2 * best, rel=0.05)


def test_cycles_are_of_iterations_that_follow_at_once() -> None:
    row = ((5, 6),)
    ran = [Iteration(t, t + 0.01, row) for t in (0.0, 0.012, 0.024, 1.0, 1.012, 2.0)]
    first, second = phases(ran, [(1, 0.0, 0.9, 0.03), (4, 0.9, 3.0, None)])
    assert [cycle.seconds for cycle in first.cycles] == pytest.approx([0.012, 0.012])
    assert (first.users, first.service_s, len(second.cycles), second.service_s) == (1, 0.01, 1, None)
    with pytest.raises(MeasurementFailed, match="8 users"):
        phases(ran, [(8, 5.0, 6.0, None)])


def test_processor_time_of_processes_with_any_name() -> None:
    def stat(pid: int) -> str:
        return f"{pid} (a (b) c) S 1 1 1 0 -1 0 0 0 0 0 {100 * pid} 50 0 0 20 0"

    tick = live_cycles.os.sysconf("SC_CLK_TCK")
    assert live_cycles._processor_s([1, 2], stat) == pytest.approx((150 + 250) / tick)
    assert services([replace(phase, service_s=None) for phase in live()]) == (0.0, 0.0)
