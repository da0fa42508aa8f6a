"""A4 · Density First Search: the next batch from the quad-tree, as large as memory allows, of a narrow range of prefix
lengths. Called by `AlignedBinding`. Removes nothing from the tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from cohort.common.policies.alignedserve.quad_tree import Node, PooledRequest, QuadTree


def density_first_search(
    tree: QuadTree, *, max_blocks: int, min_requests: int, max_requests: int
) -> list[PooledRequest]:
    """A4 · AlignedServe Alg. 1: Return requests of one narrow range: at most B_max blocks of KV and, if the tree has
    them, at least R_min requests. Empty only if the tree is.

    Differs from the paper: a batch has at most `max_requests`, the rows of an iteration: a pool of short requests fits
    B_max long before it fits an iteration. Widening stops at R_min, the nearest leaf of both sides first (the paper
    scans all left siblings, then all right ones). A leaf that does not fit gives the requests that fit, by due time. A
    single request larger than B_max is a batch.
    """
    # Of equally dense children the shorter: it holds more requests a block.
    return _search(tree, tree.requests, max_blocks, min_requests, max_requests)


def starved_batch(
    tree: QuadTree, now_s: float, *, max_blocks: int, min_requests: int, max_requests: int
) -> list[PooledRequest]:
    """A8 · AlignedServe §3.5: Return the batch around the request that is due first; empty if none is due.

    The search descends to the child with the earliest due time instead of the fullest, so the batch is aligned too.
    """
    if tree.due_s(QuadTree.ROOT) > now_s:
        return []
    return _search(tree, lambda node: -tree.due_s(node), max_blocks, min_requests, max_requests)


def _search(
    tree: QuadTree, attraction: Callable[[Node], float], max_blocks: int, min_requests: int, max_requests: int
) -> list[PooledRequest]:
    node = QuadTree.ROOT
    while tree.blocks(node) > max_blocks or tree.requests(node) > max_requests:
        if tree.is_leaf(node):
            by_due = sorted(tree.items(node), key=lambda item: (item.due_s, item.since_s, item.request_id))
            return _until_full(by_due, max_blocks)[:max_requests]
        node = max(tree.children(node), key=attraction)  # case 2
    # Case 1: they fit. At the root also when they are few: under low load a batch does not wait to fill.
    if tree.requests(node) >= min_requests or node == QuadTree.ROOT:
        return tree.items(node)
    # Case 3: too few to be worth a batch.
    return _widen(tree, node, tree.items(node), max_blocks, min_requests, max_requests)


def _widen(
    tree: QuadTree, node: Node, chosen: list[PooledRequest], max_blocks: int, min_requests: int, max_requests: int
) -> list[PooledRequest]:
    """Add the node's neighbours, nearest first, until there are enough or no more fit; then its parent's."""
    headroom = max_blocks - sum(item.blocks for item in chosen)
    while node != QuadTree.ROOT and len(chosen) < min_requests:
        for leaf in _nearest_leaves(tree, node):
            for item in tree.items(leaf):
                if item.blocks > headroom or len(chosen) == max_requests:
                    return chosen
                chosen.append(item)
                headroom -= item.blocks
            if len(chosen) >= min_requests:
                return chosen
        node = tree.parent(node)
    return chosen


def _nearest_leaves(tree: QuadTree, node: Node) -> Iterator[Node]:
    """Yield the leaves of the node's siblings, the nearest first."""
    siblings = tree.children(tree.parent(node))
    span = 4 ** (tree.leaf_of(1).level - node.level)
    first, last = node.place * span, node.place * span + span - 1
    left = (leaf for sibling in reversed(siblings) if sibling < node for leaf in tree.leaves(sibling, backwards=True))
    right = (leaf for sibling in siblings if sibling > node for leaf in tree.leaves(sibling))
    return heapq.merge(left, right, key=lambda leaf: first - leaf.place if leaf.place < first else leaf.place - last)


def _until_full(items: Iterable[PooledRequest], max_blocks: int) -> list[PooledRequest]:
    chosen: list[PooledRequest] = []
    headroom = max_blocks
    for item in items:
        if chosen and item.blocks > headroom:
            break
        chosen.append(item)
        headroom -= item.blocks
    return chosen
