"""Blocks that two requests may share, filled from both ends (R7): which request holds which side, and where free slots
are found.

    slot      0   1   2   3   4   5   6   7
            ┌───┬───┬───┬───┬───┬───┬───┬───┐
            │ A0  A1  A2 →  │   │ ←  b2  b1  b0 │     A fills left to right, b right to left
            └───┴───┴───┴───┴───┴───┴───┴───┘

Pure bookkeeping for the bidirectional allocator: knows slots, not requests' meaning. A `Tenant` is one request's share
of the cache. Offset j of its block i is position i · block size + j; it lies in slot j, or in slot size − 1 − j of a
reversed tenant. Of a reversed tenant's block the offsets [0, resident) are there; those behind, which a left tenant
took over, lie in host memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from cohort.common.errors import InvariantViolated
from cohort.common.types import Attempt


@dataclass(slots=True, eq=False)
class Tenant:
    """`exclusive`: its blocks are read or written as a whole by transfers, so they are not shared.

    `claimed`: positions whose slots are its own from now on. `stored`: positions that have KV. `host`: block index →
    host block, exactly where offsets [resident, used) are in host memory and nowhere else.
    """

    name: Attempt
    reversed: bool
    exclusive: bool
    blocks: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    host: dict[int, int] = field(default_factory=dict)
    claimed: int = 0
    stored: int = 0
    away: int = 0
    """Number of positions that are in host memory only."""
    shared: int = 0
    """Number of the tenant's blocks whose other side belongs to another tenant."""


Side = tuple[Tenant, int]
"""A tenant, and the index of the block among the tenant's."""


class SharedBlocks:
    """Blocks 0 … num_blocks-1 of `size` slots, each with at most one left and one right tenant."""

    def __init__(self, num_blocks: int, size: int) -> None:
        self.num_blocks = num_blocks
        self.size = size
        # Popped from the end: ascending ids, so a request's blocks tend to be neighbours.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._left: list[Side | None] = [None] * num_blocks
        self._right: list[Side | None] = [None] * num_blocks
        self.left_blocks = 0
        self.right_blocks = 0
        self.shared_blocks = 0
        self.shared_total = 0

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def left(self, block: int) -> Side | None:
        return self._left[block]

    def right(self, block: int) -> Side | None:
        return self._right[block]

    def within(self, positions: int, index: int) -> int:
        """Return how many of a tenant's first `positions` lie in its block `index`."""
        return min(max(positions - index * self.size, 0), self.size)

    def left_extent(self, block: int) -> int:
        """Return the number of slots, from the left, that belong to the left tenant."""
        side = self._left[block]
        return 0 if side is None else self.within(side[0].claimed, side[1])

    # -- finding -----------------------------------------------------------------------------------------------

    def find_free(self, count: int) -> list[int]:
        """Return the next `count` free blocks, or all if there are fewer. Takes none."""
        return self._free[: -count - 1 : -1] if count else []

    def find_shareable(self, tenants: Iterable[Tenant], slots: int) -> int | None:
        """R8 · Find the left tenants' last block with most empty slots, `slots` or more: FindBlock if none is free."""
        best, most = None, slots - 1
        for tenant in tenants:
            if tenant.exclusive or not tenant.blocks:
                continue
            block = tenant.blocks[-1]
            empty = self.size - self.left_extent(block)
            if empty > most and self._right[block] is None:
                best, most = block, empty
        return best

    def find_preemptable(self, tenants: Iterable[Tenant]) -> Iterator[int]:
        """R8 · Find right tenants' unshared blocks, those with most empty slots first: FindPreemptBlock.

        Differs from the paper, which does not say in which order full blocks come. Here tenants that already miss slots
        come first, then those with least KV, so that few requests are hit and little has to come back.

        The order is that of the first `next`; `tenants` keep their blocks until the last.
        """
        left, hit, partial = self._left, [], []
        for tenant in tenants:
            blocks, resident = tenant.blocks, tenant.resident
            if not blocks:
                continue
            hit.append((-tenant.away, tenant.stored, tenant.name, tenant))
            if resident[-1] < self.size and left[blocks[-1]] is None:
                partial.append((resident[-1], blocks[-1]))
            for index in tenant.host:
                if index < len(blocks) - 1 and left[blocks[index]] is None:
                    partial.append((resident[index], blocks[index]))
        partial.sort()
        hit.sort()
        seen = {block for _, block in partial}
        yield from (block for _, block in partial)
        for _, _, _, tenant in hit:
            for block in reversed(tenant.blocks):
                if block not in seen and self._left[block] is None:
                    yield block

    # -- taking and giving back --------------------------------------------------------------------------------

    def attach(self, tenant: Tenant, index: int, block: int) -> None:
        """Give the tenant one side of this block. With `index` = its number of blocks it grows by one."""
        sides, others = (self._right, self._left) if tenant.reversed else (self._left, self._right)
        if sides[block] is not None:
            raise InvariantViolated(f"block {block}: {tenant.name}'s side is taken by {sides[block][0].name}")  # type: ignore[index]
        other = others[block]
        assert index <= len(tenant.blocks), f"{tenant.name} has {len(tenant.blocks)} blocks and gets its {index}th"
        assert other is None or not (tenant.exclusive or other[0].exclusive), (
            f"block {block} is to be shared by {tenant.name} and {other[0].name}, one of which shares none"
        )
        if other is None:
            if self._free and self._free[-1] == block:
                self._free.pop()
            else:
                self._free.remove(block)
        else:
            self.shared_blocks += 1
            self.shared_total += 1
            tenant.shared += 1
            other[0].shared += 1
        sides[block] = (tenant, index)
        self.right_blocks += tenant.reversed
        self.left_blocks += not tenant.reversed
        assert self._adds_up, self._sums
        if index == len(tenant.blocks):
            tenant.blocks.append(block)
            tenant.resident.append(0)
        else:
            tenant.blocks[index] = block
            tenant.resident[index] = 0

    def detach(self, tenant: Tenant, index: int) -> None:
        """Give the tenant's side of its block back. The caller changes the tenant's own lists."""
        block = tenant.blocks[index]
        sides, others = (self._right, self._left) if tenant.reversed else (self._left, self._right)
        side, other = sides[block], others[block]
        assert side is not None and side[0] is tenant and side[1] == index, f"block {block} is not {tenant.name}'s"
        sides[block] = None
        self.right_blocks -= tenant.reversed
        self.left_blocks -= not tenant.reversed
        if other is None:
            self._free.append(block)
        else:
            self.shared_blocks -= 1
            tenant.shared -= 1
            other[0].shared -= 1
            assert min(tenant.shared, other[0].shared) >= 0, f"{tenant.name} or {other[0].name} shared none"
        assert self._adds_up, self._sums

    @property
    def _adds_up(self) -> bool:
        return len(self._free) + self.left_blocks + self.right_blocks - self.shared_blocks == self.num_blocks

    @property
    def _sums(self) -> str:
        return (
            f"{len(self._free)} free + {self.left_blocks} with a left + {self.right_blocks} with a right tenant - "
            f"{self.shared_blocks} shared != {self.num_blocks} blocks"
        )

    def slots(self, tenant: Tenant, block: int, first: int, end: int) -> list[int]:
        """Return the slot ids (block · size + slot) of the tenant's offsets [first, end) in a block."""
        assert 0 <= first <= end <= self.size, f"{tenant.name}: offsets [{first}, {end}) of a block of {self.size}"
        base = block * self.size
        if tenant.reversed:
            return [base + self.size - 1 - offset for offset in range(first, end)]
        return [base + offset for offset in range(first, end)]

    def check(self, tenants: Iterable[Tenant], extent: Callable[[Tenant, int], int]) -> None:
        """Raise `InvariantViolated` unless both sides are exactly the tenants', apart, and the rest is free.

        `extent(tenant, index)`: slots from the right that a reversed tenant relies on.
        """
        left: list[Side | None] = [None] * self.num_blocks
        right: list[Side | None] = [None] * self.num_blocks
        held = list(tenants)
        for tenant in held:
            sides = right if tenant.reversed else left
            for index, block in enumerate(tenant.blocks):
                if sides[block] is not None:
                    raise InvariantViolated(f"block {block} has two tenants on one side")
                sides[block] = (tenant, index)
        if left != self._left or right != self._right:
            raise InvariantViolated("sides differ from what the tenants hold")
        free = [block for block in range(self.num_blocks) if left[block] is None and right[block] is None]
        if sorted(self._free) != free:
            raise InvariantViolated("free blocks are not exactly those without tenants")
        shared = 0
        shares: Counter[Attempt] = Counter()
        for block in range(self.num_blocks):
            one, other = left[block], right[block]
            if one is None or other is None:
                continue
            shared += 1
            shares.update((one[0].name, other[0].name))
            if one[0].exclusive or other[0].exclusive:
                raise InvariantViolated(f"block {block} is shared although it is exclusive")
            if self.left_extent(block) + extent(*other) > self.size:
                raise InvariantViolated(f"block {block}: {one[0].name} and {other[0].name} overlap")
        for tenant in held:
            if tenant.shared != shares[tenant.name]:
                raise InvariantViolated(f"{tenant.name} shares {shares[tenant.name]} blocks, counted {tenant.shared}")
        if shared != self.shared_blocks:
            raise InvariantViolated(f"{shared} blocks are shared, {self.shared_blocks} are counted")
        if not self._adds_up:
            raise InvariantViolated(self._sums)
        if self.right_blocks != sum(side is not None for side in right):
            raise InvariantViolated(f"{self.right_blocks} blocks with a right tenant are counted, there are others")
