"""E7 · Blocks with a stack of claims: a sequence lends blocks it has allocated but not used yet, and gets them back.

The `KvAllocator` of the preset `ecoserve`: the paged allocator, from which a prompt gets exactly its blocks and a
decode those of its predicted length at once (E2), plus lending.

    claims of a block, bottom to top        lender ─ borrower ─ borrower's borrower
                                                                └── the only one that may have KV in it

Called by `TimeSynced`, which decides which sequence borrows which blocks until when. For schedulers that never lend it
is the paged allocator. Never moves KV, never decides which borrower is late.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from cohort.common.errors import InvariantViolated
from cohort.common.policies.baselines.paged_allocation import PagedAllocator, Table
from cohort.common.policies.kv_interface import BlockSharing, SlotRefusal
from cohort.common.sequence import Row, Sequence
from cohort.common.types import Attempt, KvGeometry


@dataclass(frozen=True, slots=True)
class _Claim:
    """`index`: the block's index in the sequence's table."""

    sequence: Sequence
    index: int


class NestedAllocator(PagedAllocator, BlockSharing):
    """A lent block counts once: claims of lender and borrowers refer to the same block, which is free when the last of
    them is gone, in any order."""

    def __init__(self, geometry: KvGeometry, num_blocks: int, host_blocks: int, *, prefix_caching: bool = True) -> None:
        super().__init__(geometry, num_blocks, host_blocks, prefix_caching=prefix_caching)
        self._claims: dict[int, list[_Claim]] = {}
        """Claims on each block that has several, bottom to top."""
        self._lent = 0

    @property
    def sharing(self) -> BlockSharing:
        return self

    def claim(self, sequence: Sequence, positions: int) -> bool:
        """Allocate blocks for positions [0, positions), some of which may be lent at the moment; return False without
        a change if there is no room."""
        return super().extend(sequence, positions)

    def extend(self, sequence: Sequence, positions: int) -> bool:
        """Extend as in the interface; also False while a borrower has a block of the positions to be computed."""
        extended = super().extend(sequence, positions)
        return extended and (not self._claims or self._own(sequence, sequence.computed, positions))

    def extend_ahead(self, rows: Seq[Row]) -> SlotRefusal | None:
        """Refuse a lender whose block is still with a borrower (E7), which may have rows in the step in flight and in
        the next: the lender waits for a decision (E8)."""
        if self._claims and not all(self._own(row.sequence, row.start, row.start + row.count) for row in rows):
            return "shared"
        return super().extend_ahead(rows)

    def _own(self, sequence: Sequence, start: int, end: int) -> bool:
        """Return whether the sequence may write positions [start, end)."""
        return self.first_lent(sequence, start // self.geometry.block_size, self.geometry.blocks_for(end)) is None

    def lend(self, lender: Sequence, borrower: Sequence, first_block: int, positions: int) -> bool:
        """E7 · Lend `borrower` what it lacks for [0, positions) from the lender's table, from `first_block` on.

        Return False without a change if it lacks nothing, the lender's table ends before, or the lender has KV in one
        of these blocks or has lent it already.
        """
        assert lender is not borrower, f"{lender.key} would borrow from itself"
        table, own = self._held[lender.key].blocks, self._held[borrower.key].blocks
        wanted = self.geometry.blocks_for(positions) - len(own)
        last = first_block + wanted
        if wanted < 1 or last > len(table) or lender.computed > first_block * self.geometry.block_size:
            return False
        if self.first_lent(lender, first_block, last) is not None:
            return False
        blocks = table[first_block:last]
        self._pool.reuse(blocks)
        for offset, block in enumerate(blocks):
            stack = self._claims.setdefault(block, [_Claim(lender, first_block + offset)])
            assert stack[-1].sequence is lender, f"{lender.key} lends block {block} of {stack[-1].sequence.key}"
            stack.append(_Claim(borrower, len(own) + offset))
        own.extend(blocks)
        assert len(own) == self.geometry.blocks_for(positions), f"{borrower.key} has {len(own)} blocks of {positions}"
        self._lent += wanted
        return True

    def borrowers(self, lender: Sequence, index: int) -> list[Sequence]:
        """Return the sequences above the lender in the block at `index` of its table, top first; empty: it may write
        there."""
        stack = self._claims.get(self._held[lender.key].blocks[index])
        if stack is None:
            return []
        above: list[Sequence] = []
        for claim in reversed(stack):
            if claim.sequence is lender:
                return above
            above.append(claim.sequence)
        raise InvariantViolated(f"{lender.key} has no claim on a block of its own")

    def first_lent(self, lender: Sequence, begin: int, end: int) -> int | None:
        """Return the index of the first block in [begin, end) of its table that the lender has lent; None if none."""
        if not self._claims:
            return None
        for index, block in enumerate(self._held[lender.key].blocks[begin:end], begin):
            stack = self._claims.get(block)
            if stack is not None and stack[-1].sequence is not lender:
                return index
        return None

    def lent_blocks(self) -> Iterable[int]:
        return self._claims.keys()

    def cacheable_blocks(self, sequence: Sequence, full: int) -> int:
        """Return how many blocks may enter the prefix cache: none from the first borrowed one, which its lender will
        overwrite."""
        if not self._claims:
            return full
        holding = self._held[sequence.key]
        for index in range(len(holding.hashes), full):
            if index >= holding.freed and holding.blocks[index] in self._claims:
                return index
        return full

    def _give_back(self, sequence: Sequence, table: Table, freed: int) -> None:
        self._remove_claims(sequence.key, table.blocks[table.freed : freed])
        super()._give_back(sequence, table, freed)

    def release(self, key: Attempt) -> None:
        holding = self._held.get(key)
        if holding is not None:
            self._remove_claims(key, holding.device_blocks)
        super().release(key)

    def swap_out(self, sequence: Sequence, *, concurrent: bool = False) -> bool:
        blocks = list(self._held[sequence.key].device_blocks)
        swapped = super().swap_out(sequence, concurrent=concurrent)
        if swapped:
            self._remove_claims(sequence.key, blocks)
        return swapped

    def _remove_claims(self, key: Attempt, blocks: list[int]) -> None:
        for block in blocks if self._claims else ():
            stack = self._claims.get(block)
            if stack is not None:
                stack[:] = [claim for claim in stack if claim.sequence.key != key]
                if len(stack) == 1:
                    del self._claims[block]

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "lent_blocks": float(len(self._claims)), "lent_blocks_total": float(self._lent)}

    def check(self) -> None:
        """Check also that no slot is owned by two live tokens: only the top claim of a block may have KV in it."""
        super().check()
        size = self.geometry.block_size
        for block, stack in self._claims.items():
            if len(stack) < 2:
                raise InvariantViolated(f"block {block} is lent without a borrower")
            for claim in stack:
                holding = self._held.get(claim.sequence.key)
                if holding is None or holding.blocks[claim.index : claim.index + 1] != [block]:
                    raise InvariantViolated(f"block {block} is claimed by {claim.sequence.key}, which does not hold it")
            for claim in stack[:-1]:
                if claim.sequence.computed > claim.index * size:
                    raise InvariantViolated(
                        f"block {block} is lent by {claim.sequence.key}, which has {claim.sequence.computed} positions"
                    )
        owners: dict[int, int] = {}
        for holding in self._held.values():
            hashed = max(len(holding.hashes), holding.freed)
            for block in holding.blocks[hashed:]:
                owners[block] = owners.get(block, 0) + 1
        for block, count in owners.items():
            if count > 1 and len(self._claims.get(block, ())) < count:
                raise InvariantViolated(f"block {block} has {count} writers, and not all of them have a claim")
