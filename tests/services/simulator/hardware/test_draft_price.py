"""What a draft model takes in simulated time: its own steps, also where nothing comes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cohort.common.policies.cost_model import StepWork, prefill_pairs
from cohort.common.sequence import Sequence
from cohort.common.types import Attempt, Request, SamplingParams
from cohort.services.simulator.core.sim_options import SimOptions
from cohort.services.simulator.hardware.acceptance import DraftRates
from cohort.services.simulator.hardware.draft_price import DraftingTime, MeasuredPrice, ModelledPrice
from cohort.services.simulator.hardware.hardware import load_model
from tests.services.simulator.lab import Recorded, cluster, config, workload

ALONE = workload(*((2.0 * i, 60 + 17 * i, 60 + 5 * i) for i in range(8)))
MODEL = load_model("llama-2-13b")
SMALL = replace(MODEL, name="smaller", layers=2)


class Counted:
    """Takes a second for each position, a hundredth for each that is attended to; remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[StepWork] = []

    def step_s(self, work: StepWork) -> float:
        self.asked.append(work)
        return work.tokens + (work.prefill_context + work.decode_context) / 100


def _sequence(name: str, tokens: int) -> Sequence:
    request = Request(Attempt(name, 0), "g", [1] * tokens, tokens, SamplingParams(max_tokens=400), 0.0)
    return Sequence(request, list(request.tokens), None, 0, 0.0)


def test_a_step_for_each_draft_of_the_deepest_row_behind_what_lacks() -> None:
    cost, short, long = Counted(), _sequence("short", 10), _sequence("long", 700)
    price = ModelledPrice(cost, lambda sequence: True)  # type: ignore[arg-type]
    taken = price.take([(short, 3), (long, 1)])
    assert cost.asked == [
        StepWork(512, 1, 0, prefill_pairs(0, 512), 512),
        StepWork(187, 1, 0, prefill_pairs(512, 187), 699),
        StepWork(2, 2, 2, 0, 0, 2, 710, 700),
        StepWork(1, 1, 1, 0, 0, 1, 11, 11),
        StepWork(1, 1, 1, 0, 0, 1, 12, 12),
    ]
    assert taken == pytest.approx(DraftingTime(2 + 7.1 + 1.11 + 1.12, 512 + 5.12 + 187 + 6.99))
    long.tokens += [2] * 5
    cost.asked.clear()
    price.take([(long, 1)])
    assert cost.asked == [StepWork(1, 1, 1, 0, 0, 1, 705, 705)], "the rest is there"
    assert price.take([]) == DraftingTime()
    assert MeasuredPrice(0.25).take([(short, 3), (long, 1)]) == DraftingTime(0.75)


def _run(mode: str = "model", **options: object) -> Recorded:
    sim = Recorded(config(speculation={"mode": mode}), cluster(1), MODEL, ALONE, SimOptions(**options))  # type: ignore[arg-type]
    sim.run()
    return sim


def _drafting(**options: object) -> Recorded:
    return _run(acceptance=0.8, **options)


def test_a_draft_model_that_takes_no_less_than_the_model_is_given_up() -> None:
    free, small, own = _drafting(), _drafting(draft_model=SMALL), _drafting(draft_model=MODEL)
    ends = [sim.clients.last_end_s for sim in (free, small, own)]
    assert ends[0] < ends[1] < ends[2]
    assert free.workers[0].tally.drafting_s == 0.0 < small.workers[0].tally.drafting_s
    counters = [sum(sim.workers[0].machine.counters.drafted_tokens.values()) for sim in (free, small, own)]
    assert counters[0] >= counters[1] > 3 * counters[2] > 0, "it has to be tried, and is asked again from time to time"
    plain = _run("off")
    assert ends[1] < plain.clients.last_end_s and ends[2] <= 1.05 * plain.clients.last_end_s
    assert small.workers[0].machine.kv.total_blocks < plain.workers[0].machine.kv.total_blocks


def test_a_measured_price_and_recorded_rates() -> None:
    rates = (DraftRates(0.5, 0.9), DraftRates(1.0, 0.1))
    free, dear = _run(draft_rates=rates), _run(draft_rates=rates, draft_s=5e-3)
    drafted = [sum(sim.workers[0].machine.counters.drafted_tokens.values()) for sim in (free, dear)]
    assert drafted[0] > drafted[1]
    assert free.clients.last_end_s < dear.clients.last_end_s
