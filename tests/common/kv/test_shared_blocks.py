"""Sides of blocks: fronts, FindBlock and FindPreemptBlock."""

from __future__ import annotations

import pytest

from cohort.common.errors import InvariantViolated
from cohort.common.kv.shared_blocks import SharedBlocks, Tenant


def tenant(name: str, table: SharedBlocks, blocks: list[int], stored: int, *, be: bool) -> Tenant:
    made = Tenant(name, be, False)
    for index, block in enumerate(blocks):
        table.attach(made, index, block)
        made.resident[index] = table.within(stored, index)
    made.claimed = made.stored = stored
    return made


def check(table: SharedBlocks, *tenants: Tenant) -> None:
    table.check(tenants, lambda t, index: t.resident[index])


def test_a_block_is_filled_from_both_ends() -> None:
    table = SharedBlocks(3, 4)
    rt = tenant("rt", table, [0], 3, be=False)
    be = tenant("be", table, [1, 0], 5, be=True)
    assert table.slots(rt, 0, 0, 3) == [0, 1, 2]
    assert table.slots(be, 1, 0, 4) == [7, 6, 5, 4]
    assert table.slots(be, 0, 0, 1) == [3]
    assert table.left_extent(0) == 3
    assert (table.free_blocks, table.shared_blocks) == (1, 1)
    check(table, rt, be)
    table.detach(be, 1)
    be.blocks.pop()
    assert (table.free_blocks, table.shared_blocks) == (1, 0)


def test_fronts_that_overlap_are_noticed() -> None:
    table = SharedBlocks(2, 4)
    rt = tenant("rt", table, [0], 3, be=False)
    be = tenant("be", table, [0], 2, be=True)
    with pytest.raises(InvariantViolated, match="overlap"):
        check(table, rt, be)


def test_one_side_has_one_tenant() -> None:
    table = SharedBlocks(2, 4)
    tenant("rt", table, [0], 3, be=False)
    with pytest.raises(InvariantViolated, match="taken by rt"):
        tenant("other", table, [0], 1, be=False)


def test_the_block_with_most_empty_slots_is_preempted_first() -> None:
    table = SharedBlocks(8, 4)
    full = tenant("full", table, [0, 1], 8, be=True)
    half = tenant("half", table, [2, 3], 6, be=True)
    most = tenant("most", table, [4, 5], 5, be=True)
    # Last blocks by their free slots; then full ones of the tenant that has fewest.
    assert list(table.find_preemptable([full, half, most])) == [5, 3, 4, 2, 1, 0]


def test_a_tenant_that_misses_slots_is_preempted_before_others() -> None:
    table = SharedBlocks(8, 4)
    small = tenant("small", table, [0], 4, be=True)
    hit = tenant("hit", table, [1, 2], 8, be=True)
    hit.away, hit.host = 3, {1: 0}
    hit.resident[1] = 1
    assert list(table.find_preemptable([small, hit])) == [2, 1, 0]
    rt = tenant("rt", table, [2], 2, be=False)
    assert list(table.find_preemptable([small, hit])) == [1, 0]
    check(table, small, hit, rt)


def test_a_best_effort_tail_fits_beside_the_emptiest_real_time_one() -> None:
    table = SharedBlocks(4, 4)
    tight = tenant("tight", table, [0], 3, be=False)
    roomy = tenant("roomy", table, [1], 1, be=False)
    moving = Tenant("moving", False, True)
    table.attach(moving, 0, 2)
    moving.claimed = 1
    assert table.find_shareable([tight, roomy, moving], 1) == 1
    assert table.find_shareable([tight, roomy, moving], 3) == 1
    assert table.find_shareable([tight, roomy, moving], 4) is None


def test_free_blocks_come_in_ascending_order() -> None:
    table = SharedBlocks(4, 4)
    assert table.find_free(2) == [0, 1]
    assert table.find_free(0) == []
    assert table.find_free(9) == [0, 1, 2, 3]
