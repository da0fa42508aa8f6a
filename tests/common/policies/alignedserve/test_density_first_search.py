"""Alg. 1: each case by hand, then what must hold for any pool."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.alignedserve.density_first_search import density_first_search, starved_batch
from cohort.common.policies.alignedserve.quad_tree import PooledRequest, QuadTree


def tree_of(*groups: tuple[int, int, int]) -> QuadTree:
    """Groups of (how many, prefix length, blocks each); ids name length and place."""
    tree = QuadTree(longest=1024, leaf_tokens=16)
    for count, positions, blocks in groups:
        for index in range(count):
            name = f"{positions}/{index}"
            tree.insert(PooledRequest(name, positions, blocks, since_s=float(index), due_s=100.0 + index))
    return tree


def lengths(items: Iterable[PooledRequest]) -> list[int]:
    return [item.positions for item in items]


def search(tree: QuadTree, max_blocks: int, min_requests: int, max_requests: int = 1000) -> list[PooledRequest]:
    return density_first_search(tree, max_blocks=max_blocks, min_requests=min_requests, max_requests=max_requests)


def test_an_empty_pool_gives_no_batch() -> None:
    assert search(tree_of(), 100, 2) == []


def test_case_1_a_match_that_fits_and_suffices_is_the_batch() -> None:
    assert lengths(search(tree_of((3, 10, 1), (2, 900, 20)), 43, 5)) == [10, 10, 10, 900, 900]


def test_at_the_root_few_are_enough() -> None:
    assert lengths(search(tree_of((1, 10, 1), (1, 900, 50)), 100, 36)) == [10, 900]


def test_case_2_the_densest_child_is_searched() -> None:
    # [1, 256] holds four, [257, 512] five, and all of them are too large together.
    tree = tree_of((4, 10, 10), (5, 300, 20))
    assert lengths(search(tree, 100, 4)) == [300] * 5


def test_case_3_too_few_are_joined_by_the_nearest_neighbours() -> None:
    # In [1, 64] the three at 20 are densest; two at 5 are on their left, two at 60 farther on their right.
    tree = tree_of((2, 5, 10), (3, 20, 10), (2, 60, 10), (1, 1000, 100))
    assert lengths(search(tree, 60, 5)) == [20, 20, 20, 5, 5]
    # Six: the nearest of those on the right as well, the first to come.
    assert lengths(search(tree, 60, 6)) == [20, 20, 20, 5, 5, 60]
    # Never more blocks than B_max, whichever requests are missing.
    assert lengths(search(tree, 50, 6)) == [20, 20, 20, 5, 5]


def test_left_siblings_from_right_to_left_and_right_ones_from_left_to_right() -> None:
    tree = tree_of((1, 1, 10), (1, 20, 10), (3, 36, 10), (1, 60, 10), (9, 1000, 100))
    # The search goes to the nine at 1000; one of them fits B_max. Without them it starts in [1, 64].
    assert lengths(search(tree, 100, 3)) == [1000]
    small = tree_of((1, 1, 10), (1, 20, 10), (3, 36, 10), (1, 60, 10))
    assert lengths(search(small, 50, 5)) == [36, 36, 36, 20, 60]


def test_a_leaf_too_large_gives_its_oldest() -> None:
    tree = tree_of((8, 10, 10))
    assert [item.request_id for item in search(tree, 30, 2)] == ["10/0", "10/1", "10/2"]


def test_no_more_than_an_iteration_has_rows() -> None:
    # All twelve fit B_max; with eight rows the search goes on to the fuller half, and in a leaf takes the oldest.
    tree = tree_of((5, 10, 1), (7, 900, 1))
    assert len(search(tree, 100, 2)) == 12
    assert lengths(search(tree, 100, 2, 8)) == [900] * 7
    assert [item.request_id for item in search(tree, 100, 2, 3)] == ["900/0", "900/1", "900/2"]


def test_a_request_larger_than_a_batch_runs_alone() -> None:
    assert lengths(search(tree_of((1, 1000, 500)), 100, 2)) == [1000]


def test_no_request_is_starved_before_the_threshold() -> None:
    assert starved_batch(tree_of((3, 10, 1)), 99.0, max_blocks=100, min_requests=2, max_requests=9) == []


def test_the_starved_subtree_goes_before_the_dense_one() -> None:
    tree = tree_of((20, 10, 5))
    tree.insert(PooledRequest("old", 900, 30, 0.0, due_s=7.0))
    assert lengths(search(tree, 100, 4)) == [10] * 20
    starved = starved_batch(tree, 8.0, max_blocks=100, min_requests=1, max_requests=9)
    assert [item.request_id for item in starved] == ["old"]


Requests = list[tuple[int, int, float]]


@given(
    requests=st.lists(st.tuples(st.integers(1, 1200), st.integers(1, 40), st.floats(0, 100)), min_size=1, max_size=50),
    max_blocks=st.integers(1, 300),
    min_requests=st.integers(1, 20),
    now_s=st.floats(0, 120),
    more_rows=st.integers(0, 40),
)
def test_any_pool(requests: Requests, max_blocks: int, min_requests: int, now_s: float, more_rows: int) -> None:
    max_requests = min_requests + more_rows
    tree = QuadTree(longest=1024, leaf_tokens=16)
    for index, (positions, blocks, due_s) in enumerate(requests):
        tree.insert(PooledRequest(f"r{index}", positions, blocks, float(index), due_s))
    earliest = min(due_s for _, _, due_s in requests)
    starved = starved_batch(tree, now_s, max_blocks=max_blocks, min_requests=min_requests, max_requests=max_requests)
    assert bool(starved) == (earliest <= now_s)
    if starved:
        assert any(item.due_s == earliest for item in starved), "the request that is due first is in its batch"
    for batch in (search(tree, max_blocks, min_requests, max_requests), starved):
        assert len(batch) <= max_requests
        assert len({item.request_id for item in batch}) == len(batch)
        assert sum(item.blocks for item in batch) <= max_blocks or len(batch) == 1
    found = search(tree, max_blocks, min_requests, max_requests)
    assert found, "a pool that holds a request gives a batch"
    everybody = sum(blocks for _, blocks, _ in requests)
    if everybody <= max_blocks and len(requests) <= max_requests:
        assert len(found) == len(requests)
    if len(found) < min(min_requests, len(requests)):  # only memory may keep it from being enough
        rest = [item.blocks for item in tree.items(QuadTree.ROOT) if item not in found]
        assert sum(item.blocks for item in found) + max(rest) > max_blocks
