"""The table of running sequences decides as one sequence after another would, whatever happens to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from cohort.common.policies.baselines.batch_builder import BatchBuilder
from cohort.common.policies.cohort import cohort_batching
from cohort.common.policies.cohort.cohort_batching import CohortBatching
from cohort.common.policies.interface import IterationPlan, News, Ran
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import Slo
from tests.common.policies.baselines.drive import cache, rows
from tests.common.policies.cohort.one_by_one import OneByOne, table
from tests.common.policies.cohort.promised import promised
from tests.common.policies.cohort.test_cohort_batching import scheduler


class _Rows(BatchBuilder):
    """Asks for each row."""

    def continue_all(self, decoding: list[Sequence]) -> bool:
        return False


@contextmanager
def row_by_row() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cohort_batching, "BatchBuilder", _Rows)
        yield


class Worker:
    """A scheduler with its sequences, of which another one has twins."""

    def __init__(self, policy: CohortBatching, kv: KvAllocator) -> None:
        self.policy, self.kv = policy, kv
        self.live: dict[str, Sequence] = {}
        self.revised: list[Sequence] = []
        self._ran: Ran | None = None

    def arrive(self, now_s: float, sequence: Sequence, *, decodes: bool) -> None:
        """It comes with its KV and its first token, if it `decodes` and there is room."""
        if decodes and self.kv.admit(sequence) is not None:
            sequence.phase, sequence.computed = Phase.RUNNING, sequence.known
            sequence.tokens.append(1)
        self.live[sequence.request_id] = sequence
        self.policy.add(now_s, sequence)

    def leave(self, now_s: float, name: str) -> None:
        sequence = self.live.pop(name)
        self.kv.release(sequence.key)
        self.policy.remove(now_s, sequence)

    def decide(self, now_s: float) -> IterationPlan:
        plan = self.policy.decide(now_s, self.kv, News(self._ran, self.revised))
        plan.copies = self.kv.take_copies()
        self._ran, self.revised = None, []
        return plan

    def run(self, plan: IterationPlan, ended_s: float, latency_s: float, gone: str) -> None:
        """Compute, as `worker.note_computed`. `gone`: sequence that leaves amid the iteration."""
        self._ran = Ran(plan, ended_s, (latency_s,)) if plan.rows or plan.copies else None
        if gone in self.live:
            self.leave(ended_s, gone)
        for row in plan.rows:
            sequence = row.sequence
            if sequence.request_id not in self.live:
                continue
            sequence.computed = row.start + row.count
            if sequence.prefill_done_s is None and sequence.computed >= len(sequence.request.tokens):
                sequence.prefill_done_s = ended_s
            if sequence.computed == sequence.known:
                sequence.tokens.append(1)
                sequence.last_token_s = ended_s
            self.kv.committed(sequence)
            if sequence.output_tokens >= sequence.request.sampling.max_tokens:
                self.leave(ended_s, sequence.request_id)


def made(random: Random, name: str, now_s: float) -> Sequence:
    slo = random.choice((Slo(0.5, 0.05), Slo(0.3, 0.02), Slo(2.0, 0.1), Slo(1.0), Slo(deadline_s=2.0), Slo()))
    sequence = promised(
        name,
        random.choice((1, 7, 20, 60, 300)),
        arrived_s=random.choice((now_s, now_s - random.random())),
        max_tokens=random.randint(1, 30),
        traffic_class=random.choice(("rt", "rt", "be")),
        priority=random.choice((0, 0, 1)),
        known=random.choice((0, 0, 0, 3)),
        waited_s=random.choice((0.0, 0.2)),
        choices=random.choice((1, 1, 1, 12)),
    )
    sequence.request = structs.replace(sequence.request, slo=slo)
    sequence.predicted = random.choice((1.0, 8.0, random.uniform(1.0, 40.0)))
    return sequence


def victims(plan: IterationPlan) -> list[tuple[str, str]]:
    return [(preempt.sequence.request_id, preempt.how) for preempt in plan.preempted]


@given(
    st.integers(0, 2**32),
    st.sampled_from([12, 25, 60, 400]),
    st.sampled_from([3, 8, 40]),
    st.sampled_from(["recompute", "swap"]),
)
@example(1, 25, 8, "swap")
@example(2, 12, 3, "recompute")
@example(3, 400, 40, "recompute")
def test_decisions_are_those_of_one_sequence_after_another(seed: int, blocks: int, max_rows: int, how: str) -> None:
    fast, slow = (
        Worker(scheduler(rows_=max_rows, tokens=120, how=how), cache(blocks, blocks if how == "swap" else 0))
        for _ in range(2)
    )
    slow.policy._running = OneByOne()
    random, now_s = Random(seed), 1.0
    for number in range(80):
        for index in range(random.choice((0, 0, 1, 3))):
            state, decodes = random.getstate(), random.random() < 0.2
            for worker in (fast, slow):
                random.setstate(state)
                worker.arrive(now_s, made(random, f"r{number}-{index}", now_s), decodes=decodes)
        if fast.live and random.random() < 0.2:
            name, predicted = random.choice(sorted(fast.live)), random.uniform(1.0, 60.0)
            for worker in (fast, slow):
                worker.live[name].predicted = predicted
                worker.revised.append(worker.live[name])
        plan = fast.decide(now_s)
        slow.policy._started.update(dict.fromkeys(slow.policy._started, -1))  # all are ranked anew
        with row_by_row():
            expected = slow.decide(now_s)
        assert rows(plan) == rows(expected)
        assert [(p.sequence.key, p.how) for p in plan.preempted] == [
            (p.sequence.key, p.how) for p in expected.preempted
        ]
        assert plan.estimated_s == expected.estimated_s
        assert [s.key for s in fast.policy._prompts] == [s.key for s in slow.policy._prompts]
        assert fast.policy.metrics() == slow.policy.metrics()
        latency_s = max(0.001, plan.estimated_s) * random.uniform(0.7, 1.5)
        gone = random.choice(sorted(fast.live)) if fast.live and random.random() < 0.1 else ""
        now_s += latency_s
        for worker, each in ((fast, plan), (slow, expected)):
            worker.run(each, now_s, latency_s, gone)
        fast.kv.check()


def test_a_table_grows_and_forgets() -> None:
    many = [promised(f"r{index:03}", 4, tpot_s=0.05 + index / 1000) for index in range(200)]
    running = table(reversed(many))
    assert running.sequences == many and len(running) == 200 and many[7] in running
    assert running.tokens_per_s(0.01) == pytest.approx(sum(1 / each.request.slo.tpot_s for each in many))
    for each in many[:150]:
        assert running.remove(each)
    assert not running.remove(many[0]) and running.sequences == many[150:]
    running.read(0.0)
    assert running.strictest_s(running.ranked(), late=True) == pytest.approx(0.2)
