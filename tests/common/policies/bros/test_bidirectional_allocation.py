"""Bidirectional blocks: the paper's Fig. 9, lazy checkpoints, ways back, drops, and every slot against brute force."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.errors import InvariantViolated
from cohort.common.policies.kv_interface import KvCopy
from cohort.common.sequence import Phase, Sequence
from tests.common.policies.bros.kv_world import BLOCK, Memory, PreemptedBlock, preemption_table, request


def test_fig_9_a_front_that_is_met_checkpoints_exactly_the_slots_it_overwrites() -> None:
    memory = Memory(blocks=2, host_blocks=4)
    be, rt = request("a", 6, "be"), request("B", 3)
    memory.prefill(be)
    assert memory.kv.blocks(be.key) == [0, 1]
    assert memory.kv.directions(be.key) == [1, 1]
    assert memory.kv.free_blocks == 0
    # Two slots of block 1 are empty: three of B overwrite a's last position there, and nothing else.
    assert memory.prefill(rt) == [KvCopy("out", "slot", (6,), (2,))]
    assert memory.kv.blocks(rt.key) == [1]
    assert memory.kv.directions(rt.key) is None
    assert preemption_table(memory.kv) == [PreemptedBlock(1, rt.key, be.key, 1)]
    assert memory.kv.checkpointed(be.key) == 1
    # One more token of B: a's first position of the block goes too.
    assert memory.run(rt) == [KvCopy("out", "slot", (7,), (3,))]
    assert memory.kv.checkpointed(be.key) == 2
    # B ends: its slots are free, a's come back in place.
    memory.kv.release(rt.key)
    assert preemption_table(memory.kv) == [PreemptedBlock(1, "", be.key, 2)]
    assert memory.run(be) == [KvCopy("in", "slot", (6, 7), (2, 3))]
    assert preemption_table(memory.kv) == []
    memory.kv.release(be.key)
    memory.kv.take_copies()
    assert (memory.kv.free_blocks, memory.kv.host_free_blocks, memory.kv.owners()) == (2, 4, {})


def test_nothing_is_copied_while_a_shared_block_has_room() -> None:
    memory = Memory(blocks=1, host_blocks=1)
    be, rt = request("be", 1, "be"), request("rt", 1)
    memory.prefill(be)
    assert memory.prefill(rt) == []
    assert memory.run(be) == []
    assert memory.run(rt) == []  # two and two: full
    assert memory.kv.metrics()["shared_blocks"] == 1
    assert memory.run(rt) == [KvCopy("out", "slot", (2,), (2,))]


def test_free_blocks_are_used_before_any_is_shared() -> None:
    memory = Memory(blocks=3, host_blocks=3)
    be, rt = request("be", 5, "be"), request("rt", 4)
    memory.prefill(be)
    memory.prefill(rt)
    assert memory.kv.blocks(rt.key) == [2]
    assert memory.kv.metrics()["shared_blocks_total"] == 0


def test_slots_that_are_still_taken_come_back_in_another_block() -> None:
    memory = Memory(blocks=3, host_blocks=3)
    be, other, rt = request("be", 6, "be"), request("other", 4), request("rt", 3)
    memory.prefill(be)
    memory.prefill(other)
    memory.prefill(rt)  # beside `be` in block 1
    assert memory.kv.blocks(rt.key) == [1]
    assert not memory.kv.extend(be, 7)  # nowhere to go
    memory.step([])
    memory.kv.release(other.key)
    copies = memory.run(be)
    assert memory.kv.blocks(be.key) == [0, 2]
    # The slot that was still there goes out with the copies that come first, then both come in.
    assert copies == [KvCopy("out", "slot", (7,), (3,)), KvCopy("in", "slot", (10, 11), (2, 3))]
    assert memory.kv.metrics()["shared_blocks"] == 0


def test_blocks_brought_back_beside_the_rows_are_there_for_the_next_iteration() -> None:
    memory = Memory(blocks=2, host_blocks=2)
    be, rt = request("be", 6, "be"), request("rt", 3)
    memory.prefill(be)
    memory.prefill(rt)
    memory.kv.release(rt.key)
    assert memory.kv.restore(be)
    assert memory.step([]) == [KvCopy("in", "slot", (6,), (2,), concurrent=True)]
    assert memory.run(be) == []


def test_a_best_effort_tail_grows_beside_a_real_time_request() -> None:
    memory = Memory(blocks=2, host_blocks=2)
    rt, be = request("rt", 1), request("be", 4, "be")
    memory.prefill(rt)
    memory.prefill(be)
    memory.run(be)
    assert memory.kv.blocks(be.key) == [1, 0]
    memory.run(be, 2)
    assert not memory.kv.extend(be, 8)  # the real-time request's slot is not his
    memory.step([])
    memory.run(rt)
    assert memory.kv.checkpointed(be.key) == 1


def test_a_tenant_served_in_an_iteration_is_not_preempted_in_it() -> None:
    memory = Memory(blocks=1, host_blocks=2)
    be, rt = request("be", 3, "be"), request("rt", 2)
    memory.prefill(be)
    be.tokens.append(1)
    assert memory.kv.extend(be, 4)
    assert memory.kv.admit(rt) is None
    memory.step([(be, 1)])
    assert memory.start(rt)


def test_without_host_memory_nothing_is_overwritten() -> None:
    memory = Memory(blocks=1, host_blocks=0)
    be, rt = request("be", 3, "be"), request("rt", 1)
    memory.prefill(be)
    memory.prefill(rt)  # the empty slot
    assert not memory.kv.extend(rt, 2)
    memory.kv.release(be.key)
    memory.run(rt)


@pytest.mark.parametrize("traffic_class", ["rt", "be"])
def test_a_dropped_request_comes_back_whole(traffic_class: str) -> None:
    memory = Memory(blocks=3, host_blocks=3)
    dropped = request("dropped", 6, "be" if traffic_class == "be" else "rt")
    memory.prefill(dropped)
    assert memory.kv.swap_out(dropped)
    assert len(memory.kv.take_copies()) in (1, 2)
    assert memory.kv.free_blocks == 3
    assert memory.kv.checkpointed(dropped.key) == 6
    memory = Memory(blocks=3, host_blocks=3)
    dropped = request("dropped", 6, "be" if traffic_class == "be" else "rt")
    memory.prefill(dropped)
    memory.kv.swap_out(dropped)
    memory.step([])
    taken = request("taken", 4)
    memory.prefill(taken)
    dropped.tokens.append(1)
    assert memory.kv.swap_in(dropped)
    memory.step([(dropped, 1)])
    assert memory.kv.checkpointed(dropped.key) == 0


def test_transferred_kv_is_exclusive_and_left_to_right() -> None:
    memory = Memory(blocks=4, host_blocks=4)
    leaving = request("leaving", 5, "be", end=5)
    memory.prefill(leaving)
    assert memory.kv.directions(leaving.key) is None
    assert memory.kv.reserve("coming", [1] * 5, 5) == 0
    assert memory.kv.directions("coming") is None
    assert memory.kv.lendable_blocks == 0
    rt = request("rt", 1)
    assert not memory.start(rt)


def test_admitting_twice_is_refused() -> None:
    memory = Memory(blocks=2, host_blocks=0)
    rt = request("rt", 1)
    memory.prefill(rt)
    with pytest.raises(InvariantViolated, match="already holds"):
        memory.kv.admit(rt)


@given(seed=st.integers(0, 2**32), blocks=st.integers(2, 9), host=st.sampled_from([0, 1, 3, 20]))
def test_no_slot_is_lost_stale_or_owned_twice(seed: int, blocks: int, host: int) -> None:
    """Random iterations of arrivals, growth, preemption, drops, returns and cancellation; `Memory.step` reads every
    position of every row back."""
    random = Random(seed)
    memory = Memory(blocks, host)
    alive: list[Sequence] = []
    for serial in range(40):
        rows: list[tuple[Sequence, int]] = []
        for _ in range(random.randint(0, 2)):
            fresh = request(
                f"r{serial}",
                random.randint(1, 9),
                random.choice(["rt", "be", "be"]),
                end=random.choice([None, None, None, 6]),
            )
            if not any(s.request_id == fresh.request_id for s in alive) and memory.start(fresh):
                alive.append(fresh)
                rows.append((fresh, random.randint(1, fresh.target)))
        in_rows = {row[0] for row in rows}
        for sequence in random.sample(alive, len(alive)):
            if sequence in in_rows:
                continue
            what = random.random()
            if sequence.phase is Phase.SWAPPED:
                if what < 0.5 and memory.kv.swap_in(sequence):
                    sequence.phase = Phase.RUNNING
                continue
            if what < 0.1 and memory.kv.swap_out(sequence):
                sequence.phase = Phase.SWAPPED
            elif what < 0.2:
                memory.kv.restore(sequence)
            elif what < 0.75:
                count = random.randint(1, 3)
                sequence.tokens += [1] * (sequence.computed + count - sequence.known)
                if memory.kv.extend(sequence, sequence.computed + count) and random.random() < 0.9:
                    rows.append((sequence, count))
        memory.step(rows)
        for sequence in list(alive):
            if random.random() < 0.1:
                memory.kv.release(sequence.key)
                alive.remove(sequence)
                memory.kv.check()
    for sequence in alive:
        memory.kv.release(sequence.key)
    memory.kv.take_copies()
    memory.kv.check()
    assert memory.kv.owners() == {}
    assert (memory.kv.free_blocks, memory.kv.host_free_blocks) == (blocks, host)
    assert BLOCK * blocks == len(memory.device)
