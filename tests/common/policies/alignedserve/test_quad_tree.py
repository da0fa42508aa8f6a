"""The quad-tree against brute force."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.errors import InvariantViolated
from cohort.common.policies.alignedserve.quad_tree import Node, PooledRequest, QuadTree
from tests.examples import examples


def pooled(
    name: str, positions: int, blocks: int | None = None, due_s: float = 10.0, since_s: float = 0.0
) -> PooledRequest:
    return PooledRequest(name, positions, blocks if blocks is not None else -(-positions // 16), since_s, due_s)


def test_four_equal_children_share_the_papers_range() -> None:
    tree = QuadTree()
    for name, positions in (("a", 1), ("b", 16_384), ("c", 16_385), ("d", 65_536)):
        tree.insert(pooled(name, positions))
    assert [tree.requests(child) for child in tree.children(QuadTree.ROOT)] == [2, 1, 0, 1]
    assert tree.blocks(QuadTree.ROOT) == 1 + 1024 + 1025 + 4096


def test_longer_prefixes_clamp_to_the_end() -> None:
    tree = QuadTree()
    tree.insert(pooled("long", 1_000_000))
    assert tree.leaf_of(1_000_000) == tree.leaf_of(65_536)
    assert tree.requests(tree.children(QuadTree.ROOT)[3]) == 1


def test_a_node_is_due_when_the_first_below_it_is() -> None:
    tree = QuadTree(longest=1024, leaf_tokens=64)
    tree.insert(pooled("late", 10, due_s=9.0))
    tree.insert(pooled("soon", 900, due_s=2.0))
    assert (tree.due_s(QuadTree.ROOT), tree.due_s(Node(1, 0)), tree.due_s(Node(1, 1))) == (2.0, 9.0, math.inf)
    assert tree.remove("soon") is not None
    assert tree.due_s(QuadTree.ROOT) == 9.0


def test_the_longest_waiting_comes_first_within_a_leaf() -> None:
    tree = QuadTree()
    for name, since_s in (("b", 2.0), ("a", 1.0), ("c", 3.0)):
        tree.insert(pooled(name, 5, since_s=since_s))
    assert [item.request_id for item in tree.items(QuadTree.ROOT)] == ["a", "b", "c"]


def test_twice_in_and_never_in_are_errors() -> None:
    tree = QuadTree()
    tree.insert(pooled("a", 5))
    with pytest.raises(InvariantViolated):
        tree.insert(pooled("a", 6))
    assert tree.remove("b") is None


Step = tuple[str, int, int, float]


@settings(max_examples=examples(0.8))
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["insert", "remove"]), st.integers(0, 12), st.integers(1, 1400), st.floats(0, 50)),
        max_size=60,
    ),
    bounds=st.tuples(st.integers(1, 1400), st.integers(1, 1400)),
)
def test_counters_are_those_of_brute_force(steps: list[Step], bounds: tuple[int, int]) -> None:
    tree, plain = QuadTree(longest=1024, leaf_tokens=16), dict[str, PooledRequest]()
    for what, number, positions, due_s in steps:
        name = f"r{number}"
        if what == "insert" and name not in plain:
            plain[name] = pooled(name, positions, due_s=due_s)
            tree.insert(plain[name])
        elif what == "remove":
            assert tree.remove(name) == plain.pop(name, None)
        tree.check()
    assert len(tree) == len(plain)
    assert {item.request_id: item for item in tree.items(QuadTree.ROOT)} == plain
    low, high = min(bounds), max(bounds)
    between = {name for name, item in plain.items() if low <= item.positions <= high}
    assert {item.request_id for item in tree.between(low, high)} == between


def test_an_insertion_touches_one_path_whatever_the_tree_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """O(log n): the nodes written are those from one leaf to the root, with ten requests or with thousands."""
    climbs: list[int] = []
    climb = QuadTree._climb

    def spy(tree: QuadTree, leaf: int, requests: int, blocks: int) -> None:
        climbs.append(leaf)
        climb(tree, leaf, requests, blocks)

    monkeypatch.setattr(QuadTree, "_climb", spy)
    tree = QuadTree()
    for index in range(3000):
        tree.insert(pooled(f"r{index}", 1 + index * 17 % 65_536))
    tree.remove("r5")
    assert len(climbs) == 3000 + 1
