"""A3 · The quad-tree over the prefix lengths of everything that waits in the KV pool.

    [1, 65536]                                    inner nodes: requests, blocks, when the first of them is due
    ├─ [1, 16384]  ├─ [16385, 32768]  ├─ …
    │  ├─ [1, 4096] ├─ [4097, 8192] …             every inner node has four equal children
    │  │  …
    └─ … [1, 64] [65, 128] …                      leaves: the requests themselves, in arrival order

Kept by `AlignedBinding`, read by the Density First Search. Knows nothing of workers or buffers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cohort.common.errors import InvariantViolated
from cohort.common.types import InstanceId, RequestId


@dataclass(frozen=True, slots=True)
class PooledRequest:
    """A request whose KV waits: `positions` of it (its prefix length) in `blocks` blocks at `holder`, since `since_s`.
    From `due_s` on it counts as starved (A8)."""

    request_id: RequestId
    positions: int
    blocks: int
    since_s: float
    due_s: float
    holder: InstanceId = ""


class Node(NamedTuple):
    """Level 0 is the root; node i of a level covers the i-th of its 4^level equal ranges."""

    level: int
    place: int


class QuadTree:
    """A3 · AlignedServe §3.3. Insert and remove touch one leaf and its ancestors: O(depth), a constant of the tree's
    shape, plus a heap operation in the leaf, O(log n).

    `longest`: prefixes beyond count as this long (the paper's 65,536). `leaf_tokens`: width of a leaf; the paper gives
    none. Differs from the paper: a node's timestamp is when the first request below it is due, not when it last gave a
    batch (A8).
    """

    ROOT = Node(0, 0)

    def __init__(self, *, longest: int = 65_536, leaf_tokens: int = 64) -> None:
        depth, width = 0, leaf_tokens
        while width < longest:
            width *= 4
            depth += 1
        self._depth = depth
        self._leaf_tokens = leaf_tokens
        self._requests = [[0] * 4**level for level in range(depth + 1)]
        self._blocks = [[0] * 4**level for level in range(depth + 1)]
        self._due_s = [[math.inf] * 4**level for level in range(depth + 1)]
        self._leaves: list[dict[RequestId, PooledRequest]] = [{} for _ in range(4**depth)]
        self._heaps: list[list[tuple[float, RequestId]]] = [[] for _ in range(4**depth)]
        self._leaf_of: dict[RequestId, int] = {}

    # -- changing ----------------------------------------------------------------------------------------------

    def insert(self, item: PooledRequest) -> None:
        """Raise `InvariantViolated` for a request that is here already."""
        if item.request_id in self._leaf_of:
            raise InvariantViolated(f"{item.request_id} is in the tree already")
        leaf = self.leaf_of(item.positions).place
        self._leaf_of[item.request_id] = leaf
        self._leaves[leaf][item.request_id] = item
        heapq.heappush(self._heaps[leaf], (item.due_s, item.request_id))
        self._climb(leaf, 1, item.blocks)

    def remove(self, request_id: RequestId) -> PooledRequest | None:
        """Remove the request and return it; None if it is not here."""
        leaf = self._leaf_of.pop(request_id, None)
        if leaf is None:
            return None
        item = self._leaves[leaf].pop(request_id)
        self._climb(leaf, -1, -item.blocks)
        return item

    def _climb(self, leaf: int, requests: int, blocks: int) -> None:
        index, due_s = leaf, self._leaf_due_s(leaf)
        for level in range(self._depth, -1, -1):
            self._requests[level][index] += requests
            self._blocks[level][index] += blocks
            if level < self._depth:
                due_s = min(self._due_s[level + 1][4 * index : 4 * index + 4])
            self._due_s[level][index] = due_s
            index //= 4

    def _leaf_due_s(self, leaf: int) -> float:
        heap, members = self._heaps[leaf], self._leaves[leaf]
        if len(heap) > 2 * len(members) + 8:  # mostly requests that left
            heap[:] = [(item.due_s, item.request_id) for item in members.values()]
            heapq.heapify(heap)
        while heap:
            due_s, request_id = heap[0]
            item = members.get(request_id)
            if item is not None and item.due_s == due_s:
                return due_s
            heapq.heappop(heap)
        return math.inf

    # -- reading -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._requests[0][0]

    def requests(self, node: Node) -> int:
        return self._requests[node.level][node.place]

    def blocks(self, node: Node) -> int:
        return self._blocks[node.level][node.place]

    def due_s(self, node: Node) -> float:
        """Return when the first request below the node is due; infinite if there is none."""
        return self._due_s[node.level][node.place]

    def is_leaf(self, node: Node) -> bool:
        return node.level == self._depth

    def children(self, node: Node) -> tuple[Node, ...]:
        return tuple(Node(node.level + 1, 4 * node.place + child) for child in range(4))

    def parent(self, node: Node) -> Node:
        return Node(node.level - 1, node.place // 4)

    def leaf_of(self, positions: int) -> Node:
        index = min(max(positions - 1, 0) // self._leaf_tokens, len(self._leaves) - 1)
        return Node(self._depth, index)

    def leaves(self, node: Node, *, backwards: bool = False) -> Iterator[Node]:
        """Yield the leaves below the node that are not empty, by length (or from the longest on)."""
        if self.requests(node) and self.is_leaf(node):
            yield node
        elif self.requests(node):
            children = self.children(node)
            for child in reversed(children) if backwards else children:
                yield from self.leaves(child, backwards=backwards)

    def items(self, node: Node) -> list[PooledRequest]:
        """Return all requests below the node, leaf by leaf; within a leaf the longest waiting first."""
        found: list[PooledRequest] = []
        for leaf in self.leaves(node):
            found += sorted(self._leaves[leaf.place].values(), key=lambda item: (item.since_s, item.request_id))
        return found

    def between(self, shortest: int, longest: int) -> Iterator[PooledRequest]:
        """Yield the requests with a prefix in [shortest, longest], by leaf; O(leaves in the range + found)."""
        for index in range(self.leaf_of(shortest).place, self.leaf_of(longest).place + 1):
            for item in self._leaves[index].values():
                if shortest <= item.positions <= longest:
                    yield item

    def check(self) -> None:
        """Raise `InvariantViolated` unless every counter is the sum, and every due time the least, of what is below."""
        for level in range(self._depth + 1):
            span = 4 ** (self._depth - level)
            for index in range(4**level):
                below = [item for leaf in self._leaves[index * span : (index + 1) * span] for item in leaf.values()]
                stored = (self._requests[level][index], self._blocks[level][index], self._due_s[level][index])
                true = (len(below), sum(i.blocks for i in below), min((i.due_s for i in below), default=math.inf))
                if stored != true:
                    raise InvariantViolated(f"node {level}/{index} says {stored}, holds {true}")
