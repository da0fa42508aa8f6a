"""Physical KV blocks of one memory: their owners, which are free, which hold a prefix worth keeping.

Pure bookkeeping. A block is owned (reference count ≥ 1), cached (count 0, but its content is known by hash and can be
taken over by a request with the same prefix), or free. Sharing happens only on full, hashed blocks, which are
not written any more.

    free ──allocate──▶ owned ──release──▶ free            (content unknown)
                         ▲ └───release──▶ cached ──evict──▶ owned by the next allocation
                         └────reuse────────┘
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from cohort.common.errors import InvariantViolated, OutOfBlocks
from cohort.common.kv.free_blocks import FreeBlocks

BlockHash = bytes
HASH_BYTES = 16
ROOT_BYTES = 24
"""Length that differs from a hash's, so that no block's hash is a root."""


def block_hashes(
    tokens: Sequence[int], block_size: int, start_block: int = 0, parent: BlockHash = b""
) -> list[BlockHash]:
    """Return chained 128-bit hashes of the full blocks of `tokens` from `start_block` on.

    `parent`: the hash of the block before; of the first block a salt (see `prefix_root`), b"" for none. A hash names
    the block's content *and everything before it*, so equal hashes mean equal prefixes (BLAKE2b: a collision would be
    a wrong answer, so a real hash is worth its microsecond).
    """
    hashes = []
    for index in range(start_block, len(tokens) // block_size):
        chunk = array("q", tokens[index * block_size : (index + 1) * block_size]).tobytes()
        parent = hashlib.blake2b(chunk, digest_size=HASH_BYTES, key=parent).digest()
        hashes.append(parent)
    return hashes


def prefix_root(salt: str) -> BlockHash:
    """Return the parent of a prompt's first block; b"" without a salt. Chains of different salts share no hash, so no
    request can reuse, and thereby notice, what another salt's requests have computed."""
    return hashlib.blake2b(salt.encode(), digest_size=ROOT_BYTES).digest() if salt else b""


def of_group(digest: BlockHash, group: int) -> BlockHash:
    """Return the key of a block of one group of layers (`KvGeometry.groups`); groups never share keys."""
    return digest + bytes((group,)) if group else digest


class BlockPool:
    """Blocks 0 … num_blocks-1."""

    def __init__(self, num_blocks: int, *, caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self._caching = caching
        self._free = FreeBlocks(num_blocks)
        self._references = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._owned = 0
        self.evictions = 0

    @property
    def free_blocks(self) -> int:
        return self._free.count

    @property
    def cached_blocks(self) -> int:
        return len(self._cached)

    def cached(self) -> Iterable[int]:
        """Return the cached blocks, least recently released first."""
        return self._cached.keys()

    @property
    def available(self) -> int:
        """Blocks an allocation can have: free ones, and cached ones without an owner."""
        return self._free.count + len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with reference count 1 and unknown content, ascending, neighbours where possible:
        they will travel together. Raises `OutOfBlocks`, changing nothing."""
        free = self._free.count
        if count > free + len(self._cached):
            raise OutOfBlocks(f"{count} blocks wanted, {self.available} available of {self.num_blocks}")
        blocks = self._free.take(count if count < free else free)
        evicted = count - len(blocks)
        if evicted:
            for _ in range(evicted):
                block, _ = self._cached.popitem(last=False)
                self._forget_hash(block)
                blocks.append(block)
            self.evictions += evicted
            blocks.sort()
        references = self._references
        for block in blocks:
            assert references[block] == 0, f"block {block} is given out and has {references[block]} owners"
            references[block] = 1
        self._owned += count
        assert len(blocks) == count, f"{len(blocks)} blocks are given out, {count} were wanted"
        assert self._adds_up, self._sums
        return blocks

    def lookup(self, hashes: Sequence[BlockHash], group: int = 0) -> list[int]:
        """Find a group's blocks that hold the longest known beginning of this chain. Takes no ownership."""
        found = []
        for digest in hashes:
            block = self._block_of.get(of_group(digest, group))
            if block is None:
                break
            found.append(block)
        return found

    def lookup_windows(
        self, hashes: Sequence[BlockHash], freed: Sequence[Callable[[int], int]]
    ) -> tuple[int, list[list[int]]]:
        """Find the longest beginning of this chain that every group of layers can continue. Return its length in
        blocks, and each group's blocks that later tokens see. `freed` of each group: how many of n leading blocks they
        do not see, so that those need not be known. Takes no ownership."""
        known, end = self._block_of, len(hashes)
        while end:
            for group, of_first in enumerate(freed):
                first = of_first(end)
                # Nothing behind a gap is seen by what comes. Where everything is, the first gap bounds the beginning;
                # where a window is, the last one: what ends between two gaps may be as long as the window.
                places = range(first, end) if first == 0 else range(end - 1, first - 1, -1)
                gap = next((index for index in places if of_group(hashes[index], group) not in known), None)
                if gap is not None:
                    end = gap
                    break
            else:
                return end, [
                    [known[of_group(digest, group)] for digest in hashes[of_first(end) : end]]
                    for group, of_first in enumerate(freed)
                ]
        return 0, [[] for _ in freed]

    def reuse(self, blocks: Sequence[int]) -> None:
        """Add an owner to blocks found by `lookup`."""
        for block in blocks:
            if self._references[block] == 0:
                assert block in self._cached, f"block {block} is reused and neither owned nor cached"
                del self._cached[block]
                self._owned += 1
            self._references[block] += 1
        assert self._adds_up, self._sums

    def owned_among(self, blocks: Sequence[int]) -> int:
        """Return the number of these blocks that are owned already; reusing one costs no available block."""
        return sum(1 for block in blocks if self._references[block] > 0)

    def remember(self, block: int, digest: BlockHash) -> None:
        """Record the content of an owned, full block. Content that is known already keeps its first block."""
        if not self._caching or self._hash_of[block] is not None or digest in self._block_of:
            return
        assert self._references[block] > 0, f"block {block} is remembered and has no owner"
        self._hash_of[block] = digest
        self._block_of[digest] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Give up ownership, last block first, so that the tail of a prefix is evicted before its beginning."""
        freed = []
        for block in reversed(blocks):
            references = self._references[block] - 1
            if references < 0:
                raise InvariantViolated(f"block {block} released more often than owned")
            self._references[block] = references
            if references == 0:
                self._owned -= 1
                if self._hash_of[block] is not None:
                    self._cached[block] = None
                else:
                    freed.append(block)
        self._free.add(freed)
        assert self._adds_up, self._sums

    def check(self, owned: Sequence[Sequence[int]]) -> None:
        """Compare the pool with the blocks that its owners report. Raises `InvariantViolated`."""
        expected = [0] * self.num_blocks
        for blocks in owned:
            for block in blocks:
                expected[block] += 1
        if expected != self._references:
            wrong = [b for b in range(self.num_blocks) if expected[b] != self._references[b]]
            raise InvariantViolated(f"reference counts differ from owners for blocks {wrong[:8]}")
        if not self._adds_up:
            raise InvariantViolated(self._sums)
        unowned = [block for block, count in enumerate(expected) if not count]
        if sorted([*self._free, *self._cached]) != unowned:
            raise InvariantViolated("free and cached blocks are not exactly the unowned ones")
        wrong = [block for digest, block in self._block_of.items() if self._hash_of[block] != digest]
        if wrong:
            raise InvariantViolated(f"blocks {wrong[:8]} are known by hashes they do not have")
        if None in [self._hash_of[block] for block in self._cached]:
            raise InvariantViolated("a cached block has no hash")

    @property
    def _adds_up(self) -> bool:
        return self._free.count + len(self._cached) + self._owned == self.num_blocks

    @property
    def _sums(self) -> str:
        return f"{self._free.count} free + {len(self._cached)} cached + {self._owned} owned != {self.num_blocks} blocks"

    def _forget_hash(self, block: int) -> None:
        digest = self._hash_of[block]
        if digest is not None:
            assert self._block_of[digest] == block, f"block {block} is known by a hash of {self._block_of[digest]}"
            del self._block_of[digest]
            self._hash_of[block] = None
