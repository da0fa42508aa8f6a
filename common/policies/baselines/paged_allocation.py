"""Paged KV allocation: blocks on demand, prefixes shared, whole sequences swapped (vLLM's scheme).

The worker's default `KvAllocator`. A sequence takes the blocks its known tokens need and grows block by block; full
blocks enter the prefix cache as soon as they are computed. Host blocks hold swapped sequences.

Where every layer of the model has a sliding window, blocks that lie wholly behind it are given back while the sequence
runs; their places in its table then hold `NO_BLOCK`. Full blocks stay known to the prefix cache, as those of finished
sequences do.

    [ - | - | - | 7 | 9 | 4 ]        table; the first three were given back
                  └─window─┘
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from cohort.common.errors import InvariantViolated
from cohort.common.kv.block_pool import BlockHash, BlockPool, block_hashes, prefix_root
from cohort.common.policies.interface import Row
from cohort.common.policies.kv_interface import NO_BLOCK, KvAllocator, KvCopy, NoSlotAhead
from cohort.common.sequence import Sequence
from cohort.common.types import Attempt, KvGeometry


@dataclass(slots=True)
class Holding:
    blocks: list[int]
    hashes: list[BlockHash] = field(default_factory=list)
    """Of the leading blocks that entered (or came from) the prefix cache."""
    host: list[int] = field(default_factory=list)
    behind: int = 0
    """Leading blocks that were given back, in `blocks` and in `host`."""

    @property
    def device_blocks(self) -> list[int]:
        return self.blocks[self.behind :] if self.behind else self.blocks

    @property
    def in_host(self) -> list[int]:
        return self.host[self.behind :] if self.behind else self.host


class PagedAllocator(KvAllocator):
    grows_by_block = True
    sends_from_host = True

    def __init__(self, geometry: KvGeometry, num_blocks: int, host_blocks: int, *, prefix_caching: bool = True) -> None:
        self.geometry = geometry
        self._caching = prefix_caching
        self._pool = BlockPool(num_blocks, caching=prefix_caching)
        self._host = BlockPool(host_blocks, caching=False)
        self._held: dict[Attempt, Holding] = {}
        self._copies: list[KvCopy] = []
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._failures = 0
        self._given_back = 0

    # -- taking ------------------------------------------------------------------------------------------------

    def positions_wanted(self, sequence: Sequence) -> int:
        """Positions a sequence gets blocks for at admission and on its way back from host memory: what is known."""
        return sequence.target

    def admit(self, sequence: Sequence) -> int | None:
        # At least one position must be computed, or there are no logits to sample from; all, if all are wanted.
        max_cached = 0 if sequence.scores_prompt else sequence.target - 1
        salt = sequence.request.cache_salt
        return self._take(sequence.key, sequence.tokens, self.positions_wanted(sequence), max_cached, salt, 0)

    def reserve(self, key: Attempt, tokens: Seq[int], positions: int, *, salt: str = "") -> int | None:
        behind = self.geometry.blocks_behind(positions)
        return self._take(key, tokens, positions, min(positions, len(tokens)), salt, behind)

    def _take(
        self, key: Attempt, tokens: Seq[int], positions: int, max_cached: int, salt: str, behind: int
    ) -> int | None:
        """`behind`: leading blocks that are not wanted, cached or not."""
        if key in self._held:
            raise InvariantViolated(f"{key} already holds blocks")
        size = self.geometry.block_size
        cacheable = tokens[: max_cached // size * size]
        hashes = block_hashes(cacheable, size, parent=prefix_root(salt)) if self._caching else []
        if behind or not self.geometry.window:
            shared = self._pool.lookup(hashes[behind:])
            cached = behind + len(shared)
            found = cached * size if shared else 0
        else:
            cached, shared = self._pool.lookup_window(hashes, lambda full: self.geometry.blocks_behind(full * size))
            behind, found = cached - len(shared), cached * size
        wanted = self.geometry.blocks_for(positions) - cached
        # Shared blocks without an owner are among the available ones until they are taken.
        if wanted > self._pool.available - (len(shared) - self._pool.owned_among(shared)):
            self._failures += 1
            return None
        self._pool.reuse(shared)
        self._prefix_queries += max_cached
        self._prefix_hits += found
        table = [NO_BLOCK] * behind + shared + self._pool.allocate(wanted)
        self._held[key] = Holding(table, hashes[:cached], behind=behind)
        return found

    def extend(self, sequence: Sequence, positions: int) -> bool:
        holding = self._held[sequence.key]
        if positions <= len(holding.blocks) * self.geometry.block_size:
            return True
        wanted = self.geometry.blocks_for(positions) - len(holding.blocks)
        if wanted > self._pool.available:
            self._failures += 1
            return False
        holding.blocks.extend(self._pool.allocate(wanted))
        return True

    def extend_ahead(self, rows: Seq[Row]) -> NoSlotAhead | None:
        size, held = self.geometry.block_size, self._held
        # Of rows of one token, only those at the first position of a block.
        growing = [row for row in rows if row.start % size == 0 or row.count > 1]
        growing = [row for row in growing if row.start + row.count > len(held[row.sequence.key].blocks) * size]
        if not growing:
            return None
        wanted = [self.geometry.blocks_for(r.start + r.count) - len(held[r.sequence.key].blocks) for r in growing]
        if sum(wanted) > self._pool.available:
            return "memory"
        for row, count in zip(growing, wanted, strict=True):
            held[row.sequence.key].blocks.extend(self._pool.allocate(count))
        return None

    def committed(self, sequence: Sequence) -> None:
        if not self._caching and not self.geometry.window:
            return
        holding = self._held.get(sequence.key)
        if holding is None:
            return
        if self._caching:
            self._remember(sequence, holding)
        if self.geometry.window:
            behind = min(self.geometry.blocks_behind(sequence.computed), len(holding.blocks))
            if behind > holding.behind:
                self._give_back(sequence, holding, behind)

    def _give_back(self, sequence: Sequence, holding: Holding, behind: int) -> None:
        """Its first `behind` blocks, which no token to come sees. A transfer from here never reads them either: it
        sends what the last position's window needs, and that position is not behind this one."""
        first = holding.behind
        self._pool.release(holding.blocks[first:behind])
        holding.blocks[first:behind] = [NO_BLOCK] * (behind - first)
        holding.behind = behind
        self._given_back += behind - first

    def _remember(self, sequence: Sequence, holding: Holding) -> None:
        """Full blocks enter the prefix cache."""
        size = self.geometry.block_size
        known = len(holding.hashes)
        full = self.keepable(sequence, sequence.computed // size)
        if full <= known:
            return
        parent = holding.hashes[-1] if holding.hashes else prefix_root(sequence.request.cache_salt)
        fresh = block_hashes(sequence.tokens[: full * size], size, known, parent)
        for offset, digest in enumerate(fresh):
            if known + offset >= holding.behind:
                self._pool.remember(holding.blocks[known + offset], digest)
        holding.hashes.extend(fresh)

    def keepable(self, sequence: Sequence, full: int) -> int:
        """Of its first `full` blocks, how many may enter the prefix cache: all, as long as no other sequence writes
        there."""
        return full

    # -- giving back -------------------------------------------------------------------------------------------

    def release(self, key: Attempt) -> None:
        holding = self._held.pop(key, None)
        if holding is not None:
            self._pool.release(holding.device_blocks)
            self._host.release(holding.in_host)

    def swap_out(self, sequence: Sequence, *, beside: bool = False) -> bool:
        holding = self._held[sequence.key]
        behind, end = holding.behind, self.geometry.blocks_for(sequence.computed)
        used = holding.blocks[behind:end]
        if len(used) > self._host.available:
            return False
        host = self._host.allocate(len(used))
        self._copies.append(KvCopy("out", "block", tuple(used), tuple(host), beside))
        self._pool.release(holding.device_blocks)
        holding.blocks = []
        holding.hashes = []
        holding.host = [NO_BLOCK] * behind + host
        return True

    def swap_in(self, sequence: Sequence, *, beside: bool = False) -> bool:
        holding = self._held[sequence.key]
        wanted = self.geometry.blocks_for(self.positions_wanted(sequence)) - holding.behind
        if wanted > self._pool.available:
            return False
        blocks, host = self._pool.allocate(wanted), holding.in_host
        self._copies.append(KvCopy("in", "block", tuple(blocks[: len(host)]), tuple(host), beside))
        holding.blocks = [NO_BLOCK] * holding.behind + blocks
        self._host.release(host)
        holding.host = []
        return True

    def take_copies(self) -> list[KvCopy]:
        if not self._copies:
            return []
        copies, self._copies = self._copies, []
        return copies

    # -- what is there -----------------------------------------------------------------------------------------

    def blocks(self, key: Attempt) -> Seq[int]:
        return self._held[key].blocks

    def host_table(self, key: Attempt) -> Seq[int]:
        return self._held[key].host

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
        return {key: len(holding.device_blocks) + len(holding.in_host) for key, holding in self._held.items()}

    def held(self, key: Attempt) -> int:
        holding = self._held.get(key)
        return 0 if holding is None else len(holding.device_blocks) + len(holding.in_host)

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
            for table in (holding.blocks, holding.host):
                given_back = [index for index, block in enumerate(table) if block == NO_BLOCK]
                if given_back != list(range(min(holding.behind, len(table)))):
                    raise InvariantViolated(f"{key} has given back blocks {given_back} and counts {holding.behind}")
        self._pool.check([holding.device_blocks for holding in self._held.values()])
        self._host.check([holding.in_host for holding in self._held.values()])
