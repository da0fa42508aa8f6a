"""The policy interface of the KV cache: which blocks and slots a sequence has, what is copied between device and host.

Asked by the worker machine and, while it decides, by its `IterationScheduler`. Bookkeeping only: no tensors, no I/O.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from cohort.common.sequence import Row, Sequence
from cohort.common.types import Attempt, KvGeometry

NO_BLOCK = -1
"""Entry of a table for a block that was given back, behind the sequence's window (`KvGeometry.window`)."""

SlotRefusal = Literal["memory", "shared"]
"""Reason why rows have no slots before the step in flight has ended: blocks lack; a slot is, or may become, another
sequence's, so that only a decision can make it the row's own."""

STAGED_BYTES = 64 << 20
"""Max bytes going out in an iteration that a GPU gathers on the device, to send them beside the rows."""


@dataclass(frozen=True, slots=True)
class KvCopy:
    """Whole blocks or single slots to be moved between device and host memory, in step with the plan. `unit` "block":
    ids are block ids. "slot": ids are block·block_size + slot. A plan's copies run in their order, all before its rows;
    those `concurrent` may run while the rows are computed, because no row touches what they move (R12). Rows may write
    over what goes out before them; with a copy of it on the device they need not wait for the host link
    (`can_overlap`)."""

    direction: Literal["out", "in"]
    unit: Literal["block", "slot"]
    device: tuple[int, ...]
    host: tuple[int, ...]
    concurrent: bool = False

    def bytes_of(self, geometry: KvGeometry) -> int:
        return len(self.device) * geometry.block_bytes // (1 if self.unit == "block" else geometry.block_size)


def can_overlap(copies: Seq[KvCopy], geometry: KvGeometry) -> bool:
    """R12 · Return whether what goes out before the rows of a plan can be sent beside them, by an engine that gathers
    it on the device: nothing comes in before the rows, which might have just gone out, and it is not too much."""
    first = [copy for copy in copies if not copy.concurrent]
    if any(copy.direction == "in" for copy in first):
        return False
    return sum(copy.bytes_of(geometry) for copy in first) <= STAGED_BYTES


class BlockSharing(ABC):
    """Blocks that two sequences use at once: the capability of an allocator that BROS (R8-R12) and EcoServe (E7) ask.
    Either the allocator shares by itself when no block is free (`on_demand`), or its scheduler says which sequence
    lends what to whom (`lend`). The other way's questions have their neutral answers."""

    on_demand = False
    """Flag: the allocator itself moves sequences into each other's blocks, and saves the slots it overwrites."""

    # On demand (R8-R12).

    @property
    def lendable_blocks(self) -> int:
        """R8 · Held blocks that the allocator could share, now or in an iteration in which their owners do not run."""
        return 0

    def spare(self, keys: Iterable[Attempt]) -> None:
        """Move nothing into the blocks of these in this iteration; sequences that share one may go on."""
        return

    def checkpointed(self, key: Attempt) -> int:
        """R10 · Return a sequence's positions that are in host memory only; 0 for one that holds nothing."""
        return 0

    def restore(self, sequence: Sequence) -> bool:
        """R12 · Bring back what is checkpointed, while an iteration runs without the sequence. False: no blocks, no
        change."""
        return False

    def crowding(self, sequence: Sequence) -> Set[Attempt]:
        """R9 · Return owners of slots that the sequence would write over next and host memory has no place for."""
        return frozenset()

    # By the scheduler (E7).

    def lend(self, lender: Sequence, borrower: Sequence, first_block: int, positions: int) -> bool:
        """E7 · Lend `borrower` what it lacks for [0, positions), from `first_block` of the lender's table on. False: no
        change."""
        return False

    def borrowers(self, lender: Sequence, index: int) -> list[Sequence]:
        """Return sequences that must leave block `index` of the lender's table before it writes there, latest first."""
        return []

    def first_lent(self, lender: Sequence, begin: int, end: int) -> int | None:
        """Return the index of the first block of the lender's table, in [begin, end), that has borrowers."""
        return None

    def lent_blocks(self) -> Iterable[int]:
        """Return blocks that two sequences use at the moment. For monitoring."""
        return ()

    @abstractmethod
    def claim(self, sequence: Sequence, positions: int) -> bool:
        """Extend a sequence, where some of the blocks may be lent at the moment."""


class KvAllocator(ABC):
    """Block bookkeeping of one worker's cache; no tensors. Position p of a request lies in `blocks(key)[p //
    block_size]`; where layers are in groups (`KvGeometry.groups`), that is where the first group has it, and `tables`
    has the others'. All tables of a sequence are equally long. Copies between device and host memory are collected, in
    the order in which they have to run, until the host takes them: once per decision, with everything in them that it
    and the host itself asked for."""

    geometry: KvGeometry
    grows_by_block = False
    """Flag: `extend` changes nothing but at the first position of a block, `committed` nothing but when one is full,
    and `extend` succeeds while blocks are free or cached. Virtual-time hosts then run iterations as one."""
    sends_from_host = False
    """Flag: swapped-out sequences lie in `host_tables`, whole blocks in order: parked KV can go to host memory and be
    handed over from there (A2, A9). Else it stays on the device."""

    @abstractmethod
    def admit(self, sequence: Sequence) -> int | None:
        """Give a WAITING sequence its first blocks, including what its policy reserves. Return the positions whose KV
        the prefix cache already holds, or None when blocks are missing."""

    def cached_ahead(self, sequence: Sequence) -> int:
        """Return the positions that `admit` would find in the prefix cache now."""
        return 0

    @abstractmethod
    def reserve(self, key: Attempt, tokens: Seq[int], positions: int, *, salt: str = "") -> int | None:
        """Take blocks for KV that will arrive from elsewhere: like `admit`, for `positions` positions; none for what
        lies behind their window. `salt`: the request's `cache_salt`."""

    @abstractmethod
    def extend(self, sequence: Sequence, positions: int) -> bool:
        """Give blocks for positions [0, positions); False and no change when blocks are missing."""

    def extend_ahead(self, rows: Seq[Row]) -> SlotRefusal | None:
        """Give slots to the rows of the step behind the one in flight, in which all of their sequences have rows too,
        so that `computed` is behind. Only slots that are the sequence's own or lie in free blocks: nothing is copied or
        taken from another sequence, and the next decision's `extend` finds or takes the same. Else return why not."""
        return "shared"

    @abstractmethod
    def committed(self, sequence: Sequence) -> None:
        """Note that `sequence.computed` moved: cache full blocks, give back those behind the window."""

    @abstractmethod
    def release(self, key: Attempt) -> None:
        """Free everything it holds on the device and in host memory; unknown ids are ignored."""

    @abstractmethod
    def swap_out(self, sequence: Sequence, *, concurrent: bool = False) -> bool:
        """Free its device blocks for host blocks; False and no change when host blocks are missing. `concurrent`: no
        row of the iteration touches what the copy moves (`KvCopy.concurrent`)."""

    @abstractmethod
    def swap_in(self, sequence: Sequence, *, concurrent: bool = False) -> bool:
        """Undo `swap_out`; False and no change when device blocks are missing."""

    @abstractmethod
    def take_copies(self) -> list[KvCopy]:
        """Return all copies since the last time, in order. Ends the iteration, whose sequences lose nothing before."""

    # Several questions instead of one table: `blocks` is asked for every row of every iteration, others hardly ever.

    @abstractmethod
    def blocks(self, key: Attempt) -> Seq[int]:
        """Return the first group's device blocks by position, `NO_BLOCK` perhaps first; the own list, not a copy."""

    def tables(self, key: Attempt) -> Seq[Seq[int]]:
        """Return the device blocks of every group of layers."""
        return (self.blocks(key),)

    def host_tables(self, key: Attempt) -> Seq[Seq[int]]:
        """Return host blocks by position, of every group of layers, the leading ones perhaps `NO_BLOCK`; empty unless
        the sequence's KV lies in host memory (`sends_from_host`)."""
        return ((),)

    def directions(self, key: Attempt) -> Seq[int] | None:
        """Return per block 0 = filled left to right, 1 = right to left; None = all 0 (R13)."""
        return None

    def cached_table(self) -> Iterable[int]:
        """Return blocks without an owner that hold a reusable prefix. For monitoring."""
        return ()

    @property
    def sharing(self) -> BlockSharing | None:
        """Sharing of blocks; None: a block belongs to one sequence, or to a prefix that several have."""
        return None

    @property
    @abstractmethod
    def total_blocks(self) -> int: ...

    @property
    @abstractmethod
    def free_blocks(self) -> int:
        """Blocks that are free and not in the prefix cache."""

    @property
    @abstractmethod
    def cached_blocks(self) -> int:
        """Blocks without an owner in the prefix cache; they can be taken like free ones."""

    @property
    @abstractmethod
    def host_blocks(self) -> int: ...

    @property
    @abstractmethod
    def host_free_blocks(self) -> int: ...

    @abstractmethod
    def owners(self) -> Mapping[Attempt, int]:
        """Return blocks held per sequence, host blocks included; empty when nothing is left over."""

    def holders(self) -> Collection[Attempt]:
        return self.owners().keys()

    def held(self, key: Attempt) -> int:
        """Return a sequence's blocks as in `owners`; 0 for one that holds nothing."""
        return self.owners().get(key, 0)

    @property
    def prefix_lookups(self) -> tuple[int, int]:
        """Positions looked for in the prefix cache, and those of them that it had, since the start."""
        return 0, 0

    def metrics(self) -> dict[str, float]:
        """Return own metrics by name; those that only grow end in `_total`."""
        return {}

    @abstractmethod
    def check(self) -> None:
        """Raise `InvariantViolated` unless allocated + free = total and no block has an owner it does not know."""
