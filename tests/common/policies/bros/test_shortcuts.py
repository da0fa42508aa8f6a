"""The short ways of allocator and queues decide what long ones would: two hosts side by side, one whose allocator has
none, and queues that are counted and sorted anew."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.policies.bros.batch import is_decode
from cohort.common.policies.bros.bidirectional_allocation import BidirectionalAllocator
from cohort.common.policies.interface import IterationPlan
from cohort.common.sequence import Sequence
from tests.common.policies.baselines.drive import decide, ran
from tests.common.policies.bros.kv_world import GEOMETRY, request
from tests.common.policies.bros.test_slack_packing import packing
from tests.examples import examples


class LongWay(BidirectionalAllocator):
    """Every growth is looked for from scratch, every block that can be shared listed at once and counted anew."""

    def extend(self, sequence: Sequence, positions: int) -> bool:
        return self._grow(self._tenants[sequence.key], positions)

    def _preempt(self, wanted: int) -> list[int]:
        if self._preemptable is None:
            self._listed = list(self._table.find_preemptable(self._open_to_sharing()))
            self._preemptable = iter(())
        found = []
        for block in self._listed:
            side = self._table.right(block)
            if side is not None and self._table.left(block) is None and side[0] not in self._served:
                found.append(block)
        return found[:wanted]

    @property
    def lendable_blocks(self) -> int:
        return sum(
            1
            for tenant in self._reversed.values()
            for block in tenant.blocks
            if self._table.left(block) is None and tenant not in self._spared
        )

    def held(self, key: str) -> int:
        return self.owners().get(key, 0)


class Host:
    """One worker's packing and allocator, its clock, and what runs there."""

    def __init__(self, kv: BidirectionalAllocator, preemption: str, share: float) -> None:
        self.kv = kv
        self.policy = packing(preemption=preemption, cut=True, first=4, starve_s=3.0, every=3, share=share)
        self.now_s = 0.0
        self.alive: dict[str, tuple[Sequence, int]] = {}

    def arrive(self, name: str, prompt: int, output: int, kind: str) -> None:
        sequence = request(name, prompt, "rt" if kind == "rt" else "be", arrived_s=self.now_s)
        self.alive[sequence.key] = sequence, output
        self.policy.add(self.now_s, sequence)

    def leave(self, key: str) -> None:
        self.policy.remove(self.now_s, self.alive.pop(key)[0])
        self.kv.release(key)

    def check_queues(self) -> None:
        """What the queues know of all that decode, and their order, is what counting and sorting anew would find."""
        for sequence in self.policy._had_rows:
            self.policy._rt.changed(sequence)
        queues, groups = self.policy._rt, self.policy._groups
        decoding = {s.key: s.computed for s in queues.pending() if is_decode(s)}
        assert (queues.decodes.rows, queues.decodes.context) == (len(decoding), sum(decoding.values()))
        some = set(list(decoding)[::2])
        others = [computed for key, computed in decoding.items() if key not in some]
        assert queues.decodes.without(some) == (len(others), sum(others))
        in_order = sorted((groups.due_s(s), s.key) for s in queues.pending())
        assert [item[:2] for item in queues._by_due] == in_order

    def step(self) -> object:
        """One iteration; everything that was decided, with the blocks that rows have."""
        self.check_queues()
        plan = decide(self.policy, self.kv, self.now_s)
        self.kv.check()
        decided = _decided(plan, self.kv)
        self.now_s += max(0.001, plan.estimated_s)
        ran(self.policy, plan, self.now_s, plan.estimated_s)
        for row in plan.rows:
            sequence = row.sequence
            sequence.computed = row.start + row.count
            self.kv.committed(sequence)
            if sequence.computed == sequence.known:
                sequence.tokens.append(1)
                sequence.last_token_s = self.now_s
            if sequence.output_tokens >= self.alive[sequence.key][1]:
                self.leave(sequence.key)
        return decided


def _decided(plan: IterationPlan, kv: BidirectionalAllocator) -> object:
    rows = [(row.sequence.key, row.start, row.count, tuple(kv.blocks(row.sequence.key))) for row in plan.rows]
    return rows, [(drop.sequence.key, drop.how) for drop in plan.preempted], plan.copies, kv.metrics()


@settings(max_examples=examples(0.6))
@given(seed=st.integers(0, 2**32), blocks=st.integers(6, 24), host=st.sampled_from([0, 4, 60]))
def test_short_ways_decide_as_long_ones(seed: int, blocks: int, host: int) -> None:
    random = Random(seed)
    how = random.choice(["swap", "recompute"]), random.choice([0.0, 0.4])
    short = Host(BidirectionalAllocator(GEOMETRY, blocks, host), *how)
    long = Host(LongWay(GEOMETRY, blocks, host), *how)
    for serial in range(50):
        for part in range(random.choice([0, 0, 1, 2])):
            arrival = (f"r{serial}.{part}", random.randint(1, 16), random.randint(1, 12), random.choice(["rt", "be"]))
            short.arrive(*arrival)
            long.arrive(*arrival)
        if short.alive and random.random() < 0.05:
            key = random.choice(sorted(short.alive))
            short.leave(key)
            long.leave(key)
        assert short.step() == long.step()
    assert short.policy.metrics() == long.policy.metrics()
