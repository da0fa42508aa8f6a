"""Block pool: worked examples, then random histories against a brute-force model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cohort.common.errors import InvariantViolated, OutOfBlocks
from cohort.common.kv.block_pool import BlockPool, block_hashes


def test_blocks_come_in_ascending_order_so_that_they_travel_as_one_run() -> None:
    assert BlockPool(8).allocate(3) == [0, 1, 2]


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 blocks wanted, 1 available of 4"):
        pool.allocate(2)
    assert pool.free_blocks == 1


def test_released_known_blocks_stay_for_reuse_until_space_is_needed() -> None:
    pool = BlockPool(3)
    hashes = block_hashes([1, 2, 3, 4], 2)
    blocks = pool.allocate(2)
    for block, digest in zip(blocks, hashes, strict=True):
        pool.remember(block, digest)
    pool.release(blocks)
    assert (pool.free_blocks, pool.cached_blocks, pool.available) == (1, 2, 3)
    assert pool.lookup(hashes) == blocks
    pool.reuse(pool.lookup(hashes[:1]))
    taken = pool.allocate(2)  # the free one, then the cached tail
    assert pool.lookup(hashes) == blocks[:1]
    assert set(taken) == {2, blocks[1]}
    assert pool.evictions == 1


def test_the_tail_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3)
    hashes = block_hashes(list(range(6)), 2)
    blocks = pool.allocate(3)
    for block, digest in zip(blocks, hashes, strict=True):
        pool.remember(block, digest)
    pool.release(blocks)
    pool.allocate(1)
    assert pool.lookup(hashes) == blocks[:2]


def test_releasing_too_often_is_a_defect() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(InvariantViolated):
        pool.release(blocks)


def test_without_caching_nothing_is_remembered() -> None:
    pool = BlockPool(2, caching=False)
    blocks = pool.allocate(1)
    pool.remember(blocks[0], b"x")
    pool.release(blocks)
    assert pool.cached_blocks == 0


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5))
def test_equal_hashes_mean_equal_prefixes(one: list[int], other: list[int], size: int) -> None:
    ours, theirs = block_hashes(one, size), block_hashes(other, size)
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        end = (index + 1) * size
        assert (a == b) == (one[:end] == other[:end])


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 6), st.integers(0, 10))
def test_hashes_continue_a_chain(tokens: list[int], size: int, cut: int) -> None:
    whole = block_hashes(tokens, size)
    cut = min(cut, len(whole))
    assert whole[:cut] + block_hashes(tokens, size, cut, whole[cut - 1] if cut else b"") == whole


class PoolMachine(RuleBasedStateMachine):
    """Owners come and go; a dictionary says which owner should have which blocks, and which content each hash names."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.owned: list[list[int]] = []
        self.content: dict[int, bytes] = {}

    @rule(count=st.integers(0, 14))
    def allocate(self, count: int) -> None:
        held = {block for blocks in self.owned for block in blocks}
        if count > 12 - len(held):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not held & set(blocks)
        for block in blocks:
            self.content.pop(block, None)
        self.owned.append(blocks)

    @precondition(lambda self: any(self.owned))
    @rule(data=st.data(), name=st.integers(0, 6))
    def remember(self, data: st.DataObject, name: int) -> None:
        blocks = data.draw(st.sampled_from([blocks for blocks in self.owned if blocks]))
        block, digest = blocks[0], bytes([name])
        if block not in self.content and digest not in self.content.values():
            self.content[block] = digest
        self.pool.remember(block, digest)

    @rule(name=st.integers(0, 6))
    def reuse(self, name: int) -> None:
        found = self.pool.lookup([bytes([name])])
        assert found == [block for block, digest in self.content.items() if digest == bytes([name])]
        self.pool.reuse(found)
        self.owned.append(found)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.owned) - 1))
        self.pool.release(self.owned.pop(index))

    @invariant()
    def consistent(self) -> None:
        self.pool.check(self.owned)
        held = {block for blocks in self.owned for block in blocks}
        assert self.pool.available == 12 - len(held)


TestPool = PoolMachine.TestCase
