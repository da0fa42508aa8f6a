"""Bidirectional KV allocation (R7-R12): real-time requests move into best-effort requests' blocks from the other end.

The `KvAllocator` of BROS. Real-time requests fill blocks left to right, best-effort ones right to left. While blocks
are free every request has its own. When none is, a real-time request shares a best-effort one's block
(FindPreemptBlock). Slots about to be overwritten, where the two fronts meet, are copied to host memory. They come back
when the best-effort request runs again: in place if the other is gone, else in another block.

Works under any iteration scheduler: `extend` brings all of a request back, `take_copies` returns what has to be copied
before the rows run. A tenant served since the last `take_copies` keeps its slots until the next. KV for or from another
worker is exclusive and left to right: transfers move whole blocks. There is no prefix cache, as slots change hands.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from cohort.common.errors import InvariantViolated
from cohort.common.kv.shared_blocks import SharedBlocks, Tenant
from cohort.common.policies.kv_interface import BlockSharing, KvAllocator, KvCopy, SlotRefusal
from cohort.common.sequence import Row, Sequence
from cohort.common.types import Attempt, KvGeometry

_KINDS: tuple[tuple[Literal["out", "in"], Literal["block", "slot"], bool], ...] = (
    ("out", "block", False),
    ("out", "slot", False),
    ("in", "block", False),
    ("in", "slot", False),
    ("in", "block", True),
    ("in", "slot", True),
)
"""Kinds of copies in the order in which they run: direction, unit, whether beside the rows."""


class CopyList:
    """The copies of one iteration, consolidated (R12): at most one of each kind.

    Slots that move out may be overwritten by slots that come in, so outgoing copies run first. A host block given back
    in an iteration is not used again before the next, and no request served in an iteration loses slots in it.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._pairs: dict[tuple[str, str, bool], tuple[list[int], list[int]]] = {kind: ([], []) for kind in _KINDS}

    def add(self, direction: str, device: list[int], host_block: int, *, concurrent: bool = False) -> None:
        """Add a copy between slots of one device block and the same places of a host block. `concurrent`: no row of
        this iteration touches them."""
        if len(device) == self._size:
            blocks, hosts = self._pairs[direction, "block", concurrent]
            blocks.append(device[0] // self._size)
            hosts.append(host_block)
        else:
            slots, hosts = self._pairs[direction, "slot", concurrent]
            slots.extend(device)
            hosts.extend(host_block * self._size + slot % self._size for slot in device)

    def take(self) -> list[KvCopy]:
        """Return everything since the last time, in the order in which it has to run."""
        taken: list[KvCopy] = []
        for direction, unit, concurrent in _KINDS:
            device, host = self._pairs[direction, unit, concurrent]
            if device:
                taken.append(KvCopy(direction, unit, tuple(device), tuple(host), concurrent=concurrent))
                device.clear()
                host.clear()
        return taken


@dataclass(slots=True)
class _Change:
    """Change that gives a tenant positions: blocks for `moved` and new indexes, and the slots that it overwrites."""

    moved: list[int]
    found: list[int]
    overwritten: list[tuple[Tenant, int, int]]
    """Reversed tenant, its block index, offsets that stay resident."""


class BidirectionalAllocator(KvAllocator, BlockSharing):
    on_demand = True

    def __init__(self, geometry: KvGeometry, num_blocks: int, host_blocks: int) -> None:
        self.geometry = geometry
        self._size = geometry.block_size
        self._table = SharedBlocks(num_blocks, self._size)
        self._tenants: dict[Attempt, Tenant] = {}
        self._reversed: dict[Attempt, Tenant] = {}
        self._host_total = host_blocks
        self._host_free = list(range(host_blocks - 1, -1, -1))
        self._host_returned: list[int] = []
        """Host blocks that are free from the next iteration on: copies of this one may still name them."""
        self._preemptable: Iterator[int] | None = None
        """Blocks that can be shared, in the order in which they are taken; None before the iteration's first search."""
        self._served: set[Tenant] = set()
        self._running: set[Tenant] = set()
        """Tenants of the last decided iteration: they write up to what they claim, which is not stored yet."""
        self._spared: set[Tenant] = set()
        """Tenants into whose blocks no other moves in this iteration."""
        self._spared_blocks = 0
        self._copies = CopyList(self._size)
        self._checkpointed_total = self._restored_total = self._failures = 0

    # -- taking ------------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> int | None:
        exclusive = sequence.end is not None
        reversed_ = sequence.request.traffic_class == "be" and not exclusive
        return self._enter(Tenant(sequence.key, reversed_, exclusive), sequence.target)

    def reserve(self, key: Attempt, tokens: Seq[int], positions: int, *, salt: str = "") -> int | None:
        return self._enter(Tenant(key, False, True), positions)

    def _enter(self, tenant: Tenant, positions: int) -> int | None:
        if tenant.name in self._tenants:
            raise InvariantViolated(f"{tenant.name} already holds blocks")
        if not self._grow(tenant, positions):
            return None
        self._tenants[tenant.name] = tenant
        if tenant.reversed:
            self._reversed[tenant.name] = tenant
        return 0

    def extend(self, sequence: Sequence, positions: int) -> bool:
        """Extend as in the interface, and bring back the part of [0, positions) that lies in host memory."""
        tenant = self._tenants[sequence.key]
        if positions == tenant.stored + 1 <= len(tenant.blocks) * self._size and not tenant.host:
            # Almost always: one more slot of the last block, and a free one.
            index = tenant.stored // self._size
            if index == len(tenant.blocks) - 1 and self._fits(tenant, index, positions):
                tenant.claimed = positions
                self._served.add(tenant)
                return True
        return self._grow(tenant, positions)

    def _fits(self, tenant: Tenant, index: int, positions: int) -> bool:
        """Return whether the first `positions` of this block lie outside the other tenant's slots."""
        block, within = tenant.blocks[index], positions - index * self._size
        if tenant.reversed:
            return self._table.left_extent(block) + within <= self._size
        side = self._table.right(block)
        return side is None or within + self._relied_on(*side) <= self._size

    def extend_ahead(self, rows: Seq[Row]) -> SlotRefusal | None:
        """Take free slots in the rows' blocks, and free blocks. If the two sides of a block have met, the next slot
        costs a copy (R9), or the row waits: "shared"."""
        before: list[tuple[Tenant, int]] = []
        growing: list[Tenant] = []
        refused: SlotRefusal | None = None
        for row in rows:
            tenant, end = self._tenants[row.sequence.key], row.start + row.count
            held, needed = len(tenant.blocks), self.geometry.blocks_for(end)
            growing += [tenant] * (needed - held)
            before.append((tenant, tenant.claimed))
            indexes = range(row.start // self._size, min(held, needed))
            if tenant.host or not all([self._left_free(tenant, index, end) for index in indexes]):
                refused = "shared"
                break
            # Now, so that the other side of its block is checked against it.
            tenant.claimed = max(end, tenant.claimed)
        else:
            found = self._table.find_free(len(growing))
            refused = None if len(found) == len(growing) else "memory"
        if refused is not None:
            for tenant, claimed in before:
                tenant.claimed = claimed
            return refused
        for tenant, block in zip(growing, found, strict=True):
            self._table.attach(tenant, len(tenant.blocks), block)
        return None

    def _left_free(self, tenant: Tenant, index: int, positions: int) -> bool:
        """Return `_fits` while rows are computed that are not stored yet."""
        block, within = tenant.blocks[index], self._table.within(positions, index)
        side = self._table.right(block)
        if tenant.reversed or side is None:
            return not tenant.reversed or self._table.left_extent(block) + within <= self._size
        other, at = side
        taken = self._table.within(other.claimed, at) if other in self._running else self._relied_on(other, at)
        return within + taken <= self._size

    def restore(self, sequence: Sequence) -> bool:
        """Bring back what lies in host memory while an iteration runs in which the sequence has no row (R12)."""
        tenant = self._tenants[sequence.key]
        return self._grow(tenant, max(tenant.stored, sequence.target), concurrent=True)

    def committed(self, sequence: Sequence) -> None:
        tenant = self._tenants.get(sequence.key)
        if tenant is None or not tenant.blocks:
            return
        first, room = tenant.stored // self._size, len(tenant.blocks) * self._size
        assert sequence.computed <= room, f"{tenant.name} has {sequence.computed} positions in blocks for {room}"
        tenant.stored = sequence.computed
        for index in range(first, self.geometry.blocks_for(tenant.stored)):
            tenant.resident[index] = self._table.within(tenant.stored, index)

    def take_copies(self) -> list[KvCopy]:
        """R12 · Return all copies since the last time, and start an iteration in which no tenant is served yet."""
        self._running, self._served = self._served, self._running
        self._served.clear()
        self._spared.clear()
        self._spared_blocks = 0
        self._preemptable = None
        self._host_free += self._host_returned
        self._host_returned.clear()
        return self._copies.take()

    # -- one change --------------------------------------------------------------------------------------------

    def _grow(self, tenant: Tenant, positions: int, *, concurrent: bool = False) -> bool:
        """Give a tenant positions [0, positions), all on the device; return False without a change if there is no
        room."""
        change = self._find(tenant, positions)
        if change is None:
            self._failures += 1
            return False
        found = iter(change.found)
        for index in change.moved:
            self._checkpoint(tenant, index, 0)
            self._table.detach(tenant, index)
            self._table.attach(tenant, index, next(found))
        for block in found:
            self._table.attach(tenant, len(tenant.blocks), block)
        for victim, index, retained in change.overwritten:
            self._checkpoint(victim, index, retained)
        for index in sorted(tenant.host):
            self._bring_back(tenant, index, concurrent)
        tenant.claimed = max(positions, tenant.stored)
        assert tenant.claimed <= len(tenant.blocks) * self._size, f"{tenant.name} claims {tenant.claimed} positions"
        assert not tenant.host and not tenant.away, f"{tenant.name}: {tenant.away} positions are still in host memory"
        self._served.add(tenant)
        if change.found and tenant in self._spared:
            self._count_spared()
        return True

    def _find(self, tenant: Tenant, positions: int) -> _Change | None:
        """Return the necessary change; None if blocks or host blocks are missing."""
        table, held = self._table, len(tenant.blocks)
        count = max(held, self.geometry.blocks_for(max(positions, tenant.stored)))
        if not tenant.reversed and count == held and not tenant.host and positions <= tenant.claimed:
            return _Change([], [], [])
        moved = self._in_the_way(tenant, positions) if tenant.reversed else []
        wanted = len(moved) + count - held
        found = table.find_free(wanted)
        if len(found) < wanted and not tenant.exclusive:
            if tenant.reversed:
                found += self._shareable_blocks(positions, count, moved, held, wanted - len(found))
            else:
                found += self._preempt(wanted - len(found))
        if len(found) < wanted:
            return None
        overwritten = [] if tenant.reversed else self._overwritten(tenant, positions, found)
        if overwritten is None:
            return None
        pushed = [(tenant, index) for index in moved if tenant.resident[index]]
        pushed += [(victim, index) for victim, index, _ in overwritten]
        if sum(1 for owner, index in pushed if index not in owner.host) > len(self._host_free):
            return None
        return _Change(moved, found, overwritten)

    def _preempt(self, wanted: int) -> list[int]:
        """Find blocks to share (R8, FindPreemptBlock). They are ordered once an iteration; tenants that were served or
        shared since are skipped."""
        table = self._table
        if self._preemptable is None:
            self._preemptable = table.find_preemptable(self._open_to_sharing())
        candidates, found = self._preemptable, []
        for block in candidates:
            side = table.right(block)
            if side is not None and table.left(block) is None and side[0] not in self._served:
                found.append(block)
                if len(found) == wanted:
                    break
        # They stay the first ones, in case they are not taken.
        self._preemptable = chain(tuple(found), candidates)
        return found

    def _open_to_sharing(self) -> list[Tenant]:
        closed = self._served | self._spared
        return [tenant for tenant in self._reversed.values() if tenant not in closed]

    def _in_the_way(self, tenant: Tenant, positions: int) -> list[int]:
        """List the block indexes of a reversed tenant where a left tenant holds slots that it needs."""
        held = len(tenant.blocks)
        suspects = {*tenant.host, *range(min(tenant.stored // self._size, held), held)}
        table, end = self._table, max(positions, tenant.stored)
        return sorted(
            index
            for index in suspects
            if index < held and table.left_extent(tenant.blocks[index]) + table.within(end, index) > self._size
        )

    def _shareable_blocks(self, positions: int, count: int, moved: list[int], held: int, missing: int) -> list[int]:
        """Return a last block beside a real-time request's, if only the last block is missing."""
        last_is_new = count > held or (bool(moved) and moved[-1] == count - 1)
        if missing != 1 or not last_is_new:
            return []
        left = (t for t in self._tenants.values() if not t.reversed)
        block = self._table.find_shareable(left, self._table.within(positions, count - 1))
        return [] if block is None else [block]

    def _overwritten(self, tenant: Tenant, positions: int, found: list[int]) -> list[tuple[Tenant, int, int]] | None:
        """R9 · Return the tenants whose slots a left tenant is about to overwrite; None if one was served in this
        iteration."""
        lost = []
        first = min(tenant.claimed // self._size, len(tenant.blocks))
        blocks = [*tenant.blocks[first:], *found]
        for index, block in enumerate(blocks, first):
            side = self._table.right(block)
            if side is None:
                continue
            victim, victim_index = side
            retained = self._size - self._table.within(positions, index)
            if retained < self._relied_on(victim, victim_index):
                if victim in self._served:
                    return None
                lost.append((victim, victim_index, retained))
        return lost

    def _relied_on(self, tenant: Tenant, index: int) -> int:
        """Return how many offsets of a reversed tenant's block must not be overwritten without a copy, or at all if it
        was served."""
        if tenant in self._served:
            return self._table.within(tenant.claimed, index)
        return tenant.resident[index]

    def _checkpoint(self, tenant: Tenant, index: int, retained: int) -> None:
        """R9 · Copy offsets [retained, resident) of a block to host memory and count them as gone."""
        resident = tenant.resident[index]
        if resident <= retained:
            return
        if index not in tenant.host:
            assert self._host_free, f"no host block for {tenant.name}"
            tenant.host[index] = self._host_free.pop()
        slots = self._table.slots(tenant, tenant.blocks[index], retained, resident)
        self._copies.add("out", slots if not tenant.reversed else slots[::-1], tenant.host[index])
        tenant.resident[index] = retained
        tenant.away += resident - retained
        self._checkpointed_total += resident - retained

    def _bring_back(self, tenant: Tenant, index: int, concurrent: bool) -> None:
        """R9, R10 · Copy the slots of one block from host memory into the block that the tenant has now."""
        host, resident = tenant.host.pop(index), tenant.resident[index]
        used = self._table.within(tenant.stored, index)
        assert resident <= used, f"{tenant.name}: {resident} of {used} positions are there, and some come back"
        slots = self._table.slots(tenant, tenant.blocks[index], resident, used)
        self._copies.add("in", slots if not tenant.reversed else slots[::-1], host, concurrent=concurrent)
        self._host_returned.append(host)
        tenant.resident[index] = used
        tenant.away -= used - resident
        self._restored_total += used - resident

    # -- giving back -------------------------------------------------------------------------------------------

    def release(self, key: Attempt) -> None:
        tenant = self._tenants.pop(key, None)
        if tenant is None:
            return
        self._reversed.pop(key, None)
        self._served.discard(tenant)
        self._running.discard(tenant)
        self._leave(tenant)
        self._host_returned += tenant.host.values()
        assert self.host_free_blocks <= self._host_total, f"{self.host_free_blocks} of {self._host_total} are free"

    def swap_out(self, sequence: Sequence, *, concurrent: bool = False) -> bool:
        """R11 · Drop a sequence to host memory. `concurrent` is for parked KV, which never comes here."""
        tenant = self._tenants[sequence.key]
        held = [index for index, resident in enumerate(tenant.resident) if resident]
        if sum(1 for index in held if index not in tenant.host) > len(self._host_free):
            return False
        for index in held:
            self._checkpoint(tenant, index, 0)
        self._served.discard(tenant)
        self._leave(tenant)
        return True

    def swap_in(self, sequence: Sequence, *, concurrent: bool = False) -> bool:
        return self._grow(self._tenants[sequence.key], sequence.target, concurrent=concurrent)

    def _leave(self, tenant: Tenant) -> None:
        self._preemptable = None
        for index in reversed(range(len(tenant.blocks))):
            self._table.detach(tenant, index)
        tenant.blocks = []
        assert not tenant.shared, f"{tenant.name} has left and shares {tenant.shared} blocks"
        tenant.resident = []
        tenant.claimed = 0
        if self._spared:
            self._count_spared()

    # -- sharing -----------------------------------------------------------------------------------------------

    @property
    def sharing(self) -> BlockSharing:
        return self

    def claim(self, sequence: Sequence, positions: int) -> bool:
        return self.extend(sequence, positions)

    # -- what is there -----------------------------------------------------------------------------------------

    def blocks(self, key: Attempt) -> Seq[int]:
        return self._tenants[key].blocks

    def directions(self, key: Attempt) -> Seq[int] | None:
        """Return the directions of its blocks (R13); None: all are filled left to right."""
        tenant = self._tenants[key]
        return [1] * len(tenant.blocks) if tenant.reversed else None

    def checkpointed(self, key: Attempt) -> int:
        """R10 · Return the positions that are in host memory only; 0 for a sequence that holds nothing."""
        tenant = self._tenants.get(key)
        return 0 if tenant is None else tenant.away

    @property
    def lendable_blocks(self) -> int:
        """Blocks that a real-time request could share, now or after this iteration."""
        return self._table.right_blocks - self._table.shared_blocks - self._spared_blocks

    def lent_blocks(self) -> Iterable[int]:
        table = self._table
        held = {block for tenant in self._tenants.values() if tenant.shared for block in tenant.blocks}
        return [block for block in held if table.left(block) is not None and table.right(block) is not None]

    def spare(self, keys: Iterable[Attempt]) -> None:
        """Protect these in this iteration: no tenant moves into their blocks. One that shares a block with them already
        may continue there."""
        self._spared = {tenant for key in keys if (tenant := self._reversed.get(key)) is not None}
        self._count_spared()
        self._preemptable = None

    def crowding(self, sequence: Sequence) -> Set[Attempt]:
        tenant = self._tenants.get(sequence.key)
        if tenant is None or tenant.reversed or not tenant.blocks:
            return frozenset()
        end = min(sequence.target, len(tenant.blocks) * self._size)
        lost = self._overwritten(tenant, end, []) or []
        missing = sum(1 for victim, index, _ in lost if index not in victim.host) > len(self._host_free)
        return {victim.name for victim, _, _ in lost} if missing else frozenset()

    def _count_spared(self) -> None:
        self._spared_blocks = sum(len(tenant.blocks) - tenant.shared for tenant in self._spared)

    @property
    def total_blocks(self) -> int:
        return self._table.num_blocks

    @property
    def free_blocks(self) -> int:
        return self._table.free_blocks

    @property
    def cached_blocks(self) -> int:
        return 0

    @property
    def host_blocks(self) -> int:
        return self._host_total

    @property
    def host_free_blocks(self) -> int:
        return len(self._host_free) + len(self._host_returned)

    def owners(self) -> Mapping[Attempt, int]:
        return {key: len(tenant.blocks) + len(tenant.host) for key, tenant in self._tenants.items()}

    def holders(self) -> Collection[Attempt]:
        return self._tenants.keys()

    def held(self, key: Attempt) -> int:
        tenant = self._tenants.get(key)
        return 0 if tenant is None else len(tenant.blocks) + len(tenant.host)

    def metrics(self) -> dict[str, float]:
        return {
            "allocation_failures_total": float(self._failures),
            "shared_blocks": float(self._table.shared_blocks),
            "shared_blocks_total": float(self._table.shared_total),
            "checkpointed_slots": float(sum(tenant.away for tenant in self._tenants.values())),
            "checkpointed_slots_total": float(self._checkpointed_total),
            "restored_slots_total": float(self._restored_total),
        }

    def check(self) -> None:
        self._table.check(self._tenants.values(), self._relied_on)
        hosts = [block for tenant in self._tenants.values() for block in tenant.host.values()]
        if sorted([*hosts, *self._host_free, *self._host_returned]) != list(range(self._host_total)):
            raise InvariantViolated("host blocks are not exactly the held and the free ones")
        for tenant in self._tenants.values():
            away = 0
            for index in range(self.geometry.blocks_for(tenant.stored)):
                resident = tenant.resident[index] if index < len(tenant.blocks) else 0
                missing = self._table.within(tenant.stored, index) - resident
                away += missing
                if (missing > 0) != (index in tenant.host):
                    raise InvariantViolated(f"{tenant.name}: block {index} misses {missing} positions")
            if away != tenant.away:
                raise InvariantViolated(f"{tenant.name}: {away} positions are away, {tenant.away} are counted")
