"""Queues by phase beside a scan of all sequences."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.policies.baselines.batch_builder import by_arrival
from cohort.common.policies.baselines.phase_queues import PhaseQueues
from cohort.common.policies.interface import IterationPlan, Preempt
from cohort.common.sequence import Phase, Row, Sequence
from tests.common.policies.baselines.drive import sequence
from tests.examples import examples

PHASES = (Phase.WAITING, Phase.RUNNING, Phase.SWAPPED)


@settings(max_examples=examples(0.5))
@given(seed=st.integers(0, 2**32))
def test_each_queue_is_what_a_scan_would_find(seed: int) -> None:
    random, queues = Random(seed), PhaseQueues()
    here: list[Sequence] = []
    for serial in range(40):
        what = random.random()
        if what < 0.5 or not here:
            here.append(sequence(f"s{serial}", 2, arrived_s=random.randint(0, 9), priority=random.randint(0, 1)))
            here[-1].phase = random.choice(PHASES)
            queues.add(here[-1])
        elif what < 0.6:
            queues.remove(here.pop(random.randrange(len(here))))
        elif what < 0.7:  # back from another worker, say
            again = random.choice(here)
            again.phase = random.choice(PHASES)
            queues.add(again)
        else:
            plan = IterationPlan()
            for one in random.sample(here, min(len(here), 3)):
                one.phase = random.choice(PHASES)
                if one.phase is Phase.RUNNING:
                    plan.rows.append(Row(one, 0, 1))
                else:
                    plan.preempted.append(Preempt(one, "swap"))
            queues.decided(plan)
        assert len(queues) == len(here)
        for phase in PHASES:
            assert list(queues.of(phase)) == sorted((s for s in here if s.phase is phase), key=by_arrival)
    queues.remove(sequence("never here", 2))
