"""Slots of the step behind the one in flight, in blocks that are filled from both ends: those that are left free."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.sequence import Row, Sequence
from tests.common.policies.bros.kv_world import BLOCK, Memory, request


def behind(sequence: Sequence, count: int) -> Row:
    """The decode row that follows a row of so many tokens, which is in flight."""
    return Row(sequence, sequence.computed + count, 1)


def sharing(rt: int, be: int) -> tuple[Memory, Sequence, Sequence]:
    """One block, with so many positions of either side stored."""
    memory = Memory(blocks=1, host_blocks=1)
    left, right = request("rt", rt), request("be", be, "be")
    memory.prefill(right)
    memory.prefill(left)
    assert memory.kv.blocks(left.key) == memory.kv.blocks(right.key)
    return memory, left, right


def begin(memory: Memory, *sequences: Sequence) -> list[tuple[Sequence, int]]:
    """A step of one token for each, in flight."""
    for sequence in sequences:
        sequence.tokens += [1] * (sequence.computed + 1 - sequence.known)
        assert memory.kv.extend(sequence, sequence.computed + 1)
    assert memory.kv.take_copies() == []
    return [(sequence, 1) for sequence in sequences]


@pytest.mark.parametrize("first", ["left", "right"])
def test_the_last_free_slot_of_a_block_is_one_side_s_only(first: str) -> None:
    memory, left, right = sharing(1, 1)
    rows = begin(memory, right)  # writes the third of four slots
    mine, other = (right, left) if first == "right" else (left, right)
    before = [tenant.claimed for tenant in memory.kv._tenants.values()]
    both = [behind(mine, int(mine is right)), behind(other, int(other is right))]
    assert memory.kv.extend_ahead(both) == "shared"
    assert [tenant.claimed for tenant in memory.kv._tenants.values()] == before
    assert memory.kv.extend_ahead(both[:1]) is None
    assert memory.kv.extend_ahead(both[1:]) == "shared"
    memory.write(rows)
    memory.commit(rows)


def test_a_slot_that_is_written_now_is_taken_although_it_is_not_stored_yet() -> None:
    memory, left, right = sharing(2, 1)
    begin(memory, right)
    assert memory.kv.extend_ahead([behind(left, 0)]) == "shared"


def test_a_slot_that_only_a_copy_would_free_waits_for_a_decision() -> None:
    memory, left, right = sharing(1, 3)
    memory.kv.take_copies()
    assert memory.kv.extend_ahead([behind(left, 0)]) == "shared"
    assert memory.kv.checkpointed(right.key) == 0
    left.tokens.append(1)
    assert memory.kv.extend(left, 2)
    assert memory.kv.checkpointed(right.key) == 1


def test_new_blocks_are_free_ones_never_another_s() -> None:
    memory = Memory(blocks=3, host_blocks=4)
    left, right = request("rt", BLOCK), request("be", BLOCK, "be")
    memory.prefill(right)
    memory.prefill(left)
    assert memory.kv.extend_ahead([behind(left, 0), behind(right, 0)]) == "memory"
    assert memory.kv.free_blocks == 1
    assert memory.kv.extend_ahead([behind(right, 0)]) is None
    assert memory.kv.extend_ahead([behind(left, 0)]) == "memory", "though it could move into the other's"
    memory.kv.check()


def _live(seed: int, blocks: int, host: int) -> Counter[str]:
    """Random iterations, and rows planned ahead behind each without copies, while it is in flight; some are of
    sequences that end meanwhile. `Memory.write` reads every position of every row back."""
    random, memory, heard = Random(seed), Memory(blocks, host), Counter[str]()
    alive: list[Sequence] = []
    for serial in range(40):
        rows: list[tuple[Sequence, int]] = []
        fresh = request(f"r{serial}", random.randint(1, 9), random.choice(["rt", "be"]))
        if random.random() < 0.6 and memory.start(fresh):
            alive.append(fresh)
            rows.append((fresh, random.randint(1, fresh.target)))
        for sequence in random.sample(alive, len(alive)):
            if sequence is not fresh and random.random() < 0.7:
                count = random.randint(1, 2)
                sequence.tokens += [1] * (sequence.computed + count - sequence.known)
                if memory.kv.extend(sequence, sequence.computed + count):
                    rows.append((sequence, count))
        copies = memory.kv.take_copies()
        memory.copy(copies)
        over: list[Sequence] = []
        while rows:
            live = [row for row in rows if row[0] not in over]
            following = [behind(*row) for row in random.sample(live, random.randint(0, len(live)))]
            if copies:
                following = []
            elif following:
                refused = memory.kv.extend_ahead(following)
                heard[refused or "ahead"] += 1
                following = [] if refused else following
            memory.kv.check()
            memory.write(rows)
            memory.commit(live)
            for sequence in over:  # computed in vain
                memory.kv.release(sequence.key)
                alive.remove(sequence)
            rows = [(row.sequence, 1) for row in following]
            over = [sequence for sequence, _ in rows if random.random() < 0.1]
            for sequence, _ in live:
                sequence.tokens += [1] * (sequence.computed + 1 - sequence.known)
        for sequence in [each for each in alive if random.random() < 0.1]:
            memory.kv.release(sequence.key)
            alive.remove(sequence)
    for sequence in alive:
        memory.kv.release(sequence.key)
    memory.kv.check()
    assert memory.kv.owners() == {}
    return heard


@given(seed=st.integers(0, 2**32), blocks=st.integers(2, 9), host=st.sampled_from([0, 3, 20]))
def test_no_row_planned_ahead_writes_where_another_s_kv_is(seed: int, blocks: int, host: int) -> None:
    _live(seed, blocks, host)


def test_such_lives_grant_and_refuse() -> None:
    heard = sum((_live(seed, 5, 20) for seed in range(20)), Counter[str]())
    assert min(heard["ahead"], heard["shared"], heard["memory"]) > 20, heard
