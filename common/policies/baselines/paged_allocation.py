"""Paged KV allocation: blocks on demand, prefixes shared, whole sequences swapped (vLLM's scheme).

The worker's default `KvAllocator`. Full blocks enter the prefix cache as soon as they are computed. Host blocks hold
swapped sequences. Where every layer has a sliding window, blocks wholly behind it are given back while the sequence
runs; their places in its table then hold `NO_BLOCK`, and the prefix cache still knows them.

    [ - | - | - | 7 | 9 | 4 ]        table; the first three were given back
                  └─window─┘

Where only some layers have one, they are in groups (`KvGeometry.groups`), and a sequence has a table for each group:
equally long, of blocks from one pool, each given back behind its own window. A prefix is cached as far as each group
has what later tokens see of it.

    [ 2 | 3 | 5 | 8 | 0 | 6 ]        the group of layers that see everything
    [ - | - | - | 7 | 9 | 4 ]        a group of layers with a window
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from cohort.common.errors import InvariantViolated
from cohort.common.kv.block_pool import BlockHash, BlockPool, block_hashes, of_group, prefix_root
from cohort.common.policies.kv_interface import NO_BLOCK, KvAllocator, KvCopy, SlotRefusal
from cohort.common.sequence import Row, Sequence
from cohort.common.types import Attempt, KvGeometry


@dataclass(slots=True)
class Table:
    """Blocks of a sequence in one group of layers."""

    blocks: list[int]
    host: list[int] = field(default_factory=list)
    freed: int = 0
    """Leading blocks that were given back, in `blocks` and in `host`."""

    @property
    def device_blocks(self) -> list[int]:
        return self.blocks[self.freed :] if self.freed else self.blocks

    @property
    def in_host(self) -> list[int]:
        return self.host[self.freed :] if self.freed else self.host


@dataclass(slots=True)
class Holding(Table):
    """Blocks of a sequence: its table in the first group, which mostly is the only one, and all others."""

    hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of the leading blocks that entered (or came from) the prefix cache."""
    more: list[Table] = field(default_factory=list)

    @property
    def tables(self) -> tuple[Table, ...]:
        return (self, *self.more) if self.more else (self,)

    @property
    def all_device_blocks(self) -> list[int]:
        """Device blocks of all groups, by position: released last one first, the tail of a prefix is evicted first."""
        if not self.more:
            return self.device_blocks
        tables = self.tables
        return [table.blocks[index] for index in range(len(self.blocks)) for table in tables if index >= table.freed]

    @property
    def all_in_host(self) -> list[int]:
        return [block for table in self.tables for block in table.in_host] if self.more else self.in_host

    @property
    def count(self) -> int:
        """Blocks on the device and in host memory."""
        return sum(
            [max(0, len(each.blocks) - each.freed) + max(0, len(each.host) - each.freed) for each in self.tables]
        )


class PagedAllocator(KvAllocator):
    grows_by_block = True
    sends_from_host = True

    def __init__(self, geometry: KvGeometry, num_blocks: int, host_blocks: int, *, prefix_caching: bool = True) -> None:
        self.geometry = geometry
        self._windows, self._groups = geometry.windows, geometry.num_groups
        self._gives_back = geometry.frees_behind_window
        self._simple = self._groups == 1 and not self._gives_back
        self._caching = prefix_caching
        self._pool = BlockPool(num_blocks, caching=prefix_caching)
        self._host = BlockPool(host_blocks, caching=False)
        self._held: dict[Attempt, Holding] = {}
        self._copies: list[KvCopy] = []
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._failures = 0
        self._given_back = 0

    def positions_wanted(self, sequence: Sequence) -> int:
        """Return the positions that get blocks at admission, and on the way back from host memory."""
        return sequence.target

    def admit(self, sequence: Sequence) -> int | None:
        most = _most_cached(sequence)
        return self._take(sequence.key, self._prefix(sequence), self.positions_wanted(sequence), most, 0)

    def cached_ahead(self, sequence: Sequence) -> int:
        hashes = self._prefix(sequence)
        if self._simple:
            return len(self._pool.lookup(hashes)) * self.geometry.block_size
        seen = [partial(self._freed_blocks, window) for window in self._windows]
        return self._pool.lookup_windows(hashes, seen)[0] * self.geometry.block_size

    def reserve(self, key: Attempt, tokens: Seq[int], positions: int, *, salt: str = "") -> int | None:
        most = min(positions, len(tokens))
        return self._take(key, self._hashes(tokens, most, salt), positions, most, positions)

    def _prefix(self, sequence: Sequence) -> list[BlockHash]:
        """Return the hashes of a sequence's blocks that may be cached, computed once while it has not started."""
        blocks, known = _most_cached(sequence) // self.geometry.block_size, sequence.prefix_hashes
        if known is None or len(known) != blocks:
            known = self._hashes(sequence.tokens, _most_cached(sequence), sequence.request.cache_salt)
            sequence.prefix_hashes = known
        return known

    def _hashes(self, tokens: Seq[int], most: int, salt: str) -> list[BlockHash]:
        size = self.geometry.block_size
        return block_hashes(tokens[: most // size * size], size, parent=prefix_root(salt)) if self._caching else []

    def _take(
        self, key: Attempt, hashes: list[BlockHash], positions: int, max_cached: int, arriving: int
    ) -> int | None:
        """Allocate blocks. `hashes`: of `max_cached` positions, which may be found. `arriving`: positions whose KV
        comes from elsewhere, none behind their windows."""
        if key in self._held:
            raise InvariantViolated(f"{key} already holds blocks")
        size = self.geometry.block_size
        if self._simple:
            freed, shared = [0], [self._pool.lookup(hashes)]
            cached = len(shared[0])
        elif arriving:
            freed = [self.geometry.blocks_before_window(arriving, window) for window in self._windows]
            known = [self._pool.lookup(hashes[first:], group) for group, first in enumerate(freed)]
            cached = min([first + len(blocks) for first, blocks in zip(freed, known, strict=True)])
            shared = [blocks[: max(0, cached - first)] for first, blocks in zip(freed, known, strict=True)]
        else:
            seen = [partial(self._freed_blocks, window) for window in self._windows]
            cached, shared = self._pool.lookup_windows(hashes, seen)
            freed = [cached - len(blocks) for blocks in shared]
        found = cached * size if any(shared) or not arriving else 0
        entries = self.geometry.entries(positions)
        wanted = [entries - max(first, cached) for first in freed]
        reused = [block for blocks in shared for block in blocks] if len(shared) > 1 else shared[0]
        # Shared blocks without an owner are among the available ones until they are taken.
        if sum(wanted) > self._pool.available - (len(reused) - self._pool.owned_among(reused)):
            self._failures += 1
            return None
        self._pool.reuse(reused)
        self._prefix_queries += max_cached
        self._prefix_hits += found
        fresh = iter(self._pool.allocate(sum(wanted)))
        tables = [
            [NO_BLOCK] * first + blocks + list(islice(fresh, count))
            for first, blocks, count in zip(freed, shared, wanted, strict=True)
        ]
        assert all(len(table) == entries for table in tables), (
            f"{key} has tables of {[*map(len, tables)]}, not {entries}"
        )
        assert found <= max_cached, f"{key} is to reuse {found} positions, {max_cached} at most"
        more = [Table(table, freed=first) for table, first in zip(tables[1:], freed[1:], strict=True)]
        self._held[key] = Holding(tables[0], freed=freed[0], hashes=hashes[:cached], more=more)
        return found

    def _freed_blocks(self, window: int, full: int) -> int:
        return self.geometry.blocks_before_window(full * self.geometry.block_size, window)

    def extend(self, sequence: Sequence, positions: int) -> bool:
        holding, size = self._held[sequence.key], self.geometry.block_size
        existing = len(holding.blocks)
        if positions <= existing * size:
            return True
        wanted = -(-positions // size) - existing  # `entries`, written out: every row comes here at every block
        if wanted * self._groups > self._pool.available:
            self._failures += 1
            return False
        self._lengthen(holding, wanted)
        return True

    def _lengthen(self, holding: Holding, entries: int) -> None:
        """Append `entries` blocks to every table; they are available."""
        assert entries > 0 and not holding.host, "a sequence that is in host memory, or wants nothing, is given blocks"
        blocks = self._pool.allocate(entries * self._groups)
        if not holding.more:
            holding.blocks.extend(blocks)
            return
        for index, table in enumerate(holding.tables):
            table.blocks.extend(blocks[index * entries : (index + 1) * entries])

    def extend_ahead(self, rows: Seq[Row]) -> SlotRefusal | None:
        size, held = self.geometry.block_size, self._held
        # Of rows of one token, only those at the first position of a block.
        growing = [row for row in rows if row.start % size == 0 or row.count > 1]
        growing = [row for row in growing if row.start + row.count > len(held[row.sequence.key].blocks) * size]
        if not growing:
            return None
        wanted = [self.geometry.entries(r.start + r.count) - len(held[r.sequence.key].blocks) for r in growing]
        if sum(wanted) * self._groups > self._pool.available:
            return "memory"
        for row, count in zip(growing, wanted, strict=True):
            self._lengthen(held[row.sequence.key], count)
        return None

    def committed(self, sequence: Sequence) -> None:
        if not self._caching and not self._gives_back:
            return
        holding = self._held.get(sequence.key)
        if holding is None:
            return
        room = len(holding.blocks) * self.geometry.block_size
        assert sequence.computed <= room, f"{sequence.key} has {sequence.computed} positions in blocks for {room}"
        if self._caching:
            self._remember(sequence, holding)
        if self._gives_back:
            for table, window in zip(holding.tables, self._windows, strict=True):
                freed = (
                    min(self.geometry.blocks_before_window(sequence.computed, window), len(table.blocks))
                    if window
                    else 0
                )
                if freed > table.freed:
                    self._give_back(sequence, table, freed)

    def _give_back(self, sequence: Sequence, table: Table, freed: int) -> None:
        """Release the first `freed` blocks, which no later token sees, and no transfer reads."""
        first = table.freed
        assert first < freed <= len(table.blocks), f"{sequence.key} gives back [{first}, {freed}) of its blocks"
        self._pool.release(table.blocks[first:freed])
        table.blocks[first:freed] = [NO_BLOCK] * (freed - first)
        table.freed = freed
        self._given_back += freed - first

    def _remember(self, sequence: Sequence, holding: Holding) -> None:
        """Enter full blocks into the prefix cache."""
        size = self.geometry.block_size
        known = len(holding.hashes)
        full = self.cacheable_blocks(sequence, sequence.computed // size)
        if full <= known:
            return
        parent = holding.hashes[-1] if holding.hashes else prefix_root(sequence.request.cache_salt)
        fresh = block_hashes(sequence.tokens[: full * size], size, known, parent)
        for group, table in enumerate(holding.tables):
            for index, digest in enumerate(fresh, known):
                if index >= table.freed:
                    self._pool.remember(table.blocks[index], of_group(digest, group))
        holding.hashes.extend(fresh)

    def cacheable_blocks(self, sequence: Sequence, full: int) -> int:
        """Return how many of the first `full` blocks may enter the prefix cache: all that no other sequence writes."""
        return full

    def release(self, key: Attempt) -> None:
        holding = self._held.pop(key, None)
        if holding is not None:
            self._pool.release(holding.all_device_blocks)
            self._host.release(holding.all_in_host)

    def swap_out(self, sequence: Sequence, *, concurrent: bool = False) -> bool:
        holding = self._held[sequence.key]
        assert not holding.host, f"{sequence.key} is in host memory already"
        end = self.geometry.entries(sequence.computed)
        used = [block for table in holding.tables for block in table.blocks[table.freed : end]]
        if len(used) > self._host.available:
            return False
        host = self._host.allocate(len(used))
        self._copies.append(KvCopy("out", "block", tuple(used), tuple(host), concurrent))
        self._pool.release(holding.all_device_blocks)
        places = iter(host)
        for table in holding.tables:
            table.blocks = []
            table.host = [NO_BLOCK] * table.freed + list(islice(places, end - table.freed))
        holding.hashes = []
        return True

    def swap_in(self, sequence: Sequence, *, concurrent: bool = False) -> bool:
        holding = self._held[sequence.key]
        assert not holding.blocks, f"{sequence.key} has blocks of the device"
        entries = self.geometry.entries(self.positions_wanted(sequence))
        wanted = [entries - table.freed for table in holding.tables]
        if sum(wanted) > self._pool.available:
            return False
        fresh = iter(self._pool.allocate(sum(wanted)))
        device: list[int] = []
        for table, count in zip(holding.tables, wanted, strict=True):
            blocks = list(islice(fresh, count))
            device += blocks[: len(table.in_host)]
            table.blocks = [NO_BLOCK] * table.freed + blocks
        host = holding.all_in_host
        assert len(device) == len(host), f"{sequence.key}: {len(host)} blocks come back into {len(device)}"
        self._copies.append(KvCopy("in", "block", tuple(device), tuple(host), concurrent))
        self._host.release(host)
        for table in holding.tables:
            table.host = []
        return True

    def take_copies(self) -> list[KvCopy]:
        copies, self._copies = self._copies, []
        return copies

    def blocks(self, key: Attempt) -> Seq[int]:
        return self._held[key].blocks

    def tables(self, key: Attempt) -> Seq[Seq[int]]:
        return [table.blocks for table in self._held[key].tables]

    def host_tables(self, key: Attempt) -> Seq[Seq[int]]:
        return [table.host for table in self._held[key].tables]

    def cached_table(self) -> Iterable[int]:
        return self._pool.cached()

    @property
    def total_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def free_blocks(self) -> int:
        return self._pool.free_blocks

    @property
    def cached_blocks(self) -> int:
        return self._pool.cached_blocks

    @property
    def host_blocks(self) -> int:
        return self._host.num_blocks

    @property
    def host_free_blocks(self) -> int:
        return self._host.available

    def owners(self) -> Mapping[Attempt, int]:
        return {key: holding.count for key, holding in self._held.items()}

    def holders(self) -> Collection[Attempt]:
        return self._held.keys()

    def held(self, key: Attempt) -> int:
        holding = self._held.get(key)
        return 0 if holding is None else holding.count

    @property
    def prefix_lookups(self) -> tuple[int, int]:
        return self._prefix_queries, self._prefix_hits

    def metrics(self) -> dict[str, float]:
        return {
            "prefix_queries_total": float(self._prefix_queries),
            "prefix_hits_total": float(self._prefix_hits),
            "allocation_failures_total": float(self._failures),
            "cache_evictions_total": float(self._pool.evictions),
            "window_blocks_total": float(self._given_back),
        }

    def check(self) -> None:
        for key, holding in self._held.items():
            for each in holding.tables:
                for table, first in ((each.blocks, holding.blocks), (each.host, holding.host)):
                    given_back = [index for index, block in enumerate(table) if block == NO_BLOCK]
                    if given_back != list(range(min(each.freed, len(table)))):
                        raise InvariantViolated(f"{key} has given back blocks {given_back} and counts {each.freed}")
                    if len(table) != len(first):
                        raise InvariantViolated(f"{key} has tables of {len(first)} and of {len(table)} blocks")
        self._pool.check([holding.all_device_blocks for holding in self._held.values()])
        self._host.check([holding.all_in_host for holding in self._held.values()])


def _most_cached(sequence: Sequence) -> int:
    """Return the positions that may come from the cache. At least one must be computed, or there are no logits to
    sample from; all, if all are wanted."""
    return 0 if sequence.computes_all else sequence.target - 1
