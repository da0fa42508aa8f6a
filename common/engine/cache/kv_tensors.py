"""The KV cache's memory: one tensor of blocks on the device, one of the same blocks on the host for swapping.

Owned by the model runner; the worker loop moves blocks with it, the transfer agent sends and receives its bytes.
Decides nothing: the block pool knows which request owns a block. One block over all layers is one contiguous
piece of memory, so a block travels (to the host, to another worker) in one copy, and neighbouring blocks in one run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cohort.common.errors import InvariantViolated
from cohort.common.types import KvGeometry
from cohort.kernels.cpu.panels import huge_zeros
from cohort.kernels.ops.slots import gather_slots, scatter_slots

_ROUNDED_BYTES = 1 << 30


class KvTensors:
    """Device blocks and host blocks, each [blocks, layers, 2, kv heads, block size, head dim] (K at 0, V at 1), or
    [blocks, layers, 1, kv heads, block size, 2 · head dim] of latents, which are both. `layers`: all, or a group's."""

    def __init__(
        self,
        geometry: KvGeometry,
        *,
        num_blocks: int,
        host_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        spare: bool = False,
        latent: bool = False,
        apart: bool = False,
    ) -> None:
        """`spare`: one block more behind the others, for padding rows of recorded steps; in none of the counts.
        `apart`: in FP8, scales and codes in planes."""
        parts = 1 if latent else 2
        width = 2 // parts * geometry.head_dim
        block = (geometry.block_layers, parts, geometry.num_kv_heads, geometry.block_size, width)
        self.geometry = geometry
        self.device = device
        self.block_bytes = geometry.block_bytes
        self._apart = apart

        # Zeros, not empty: a kernel may multiply a masked slot's content by weight zero, which NaN would survive. On
        # the CPU the zero pages cost nothing until they are written, and huge ones spare decode the address lookups.
        def in_host_memory(blocks: int) -> Tensor:
            return huge_zeros(blocks * geometry.block_bytes).view(dtype).view((blocks, *block))

        allocated = num_blocks + 1 if spare else num_blocks
        self.spare_block = num_blocks
        if device.type == "cpu":
            self.with_spare, self.host_blocks = in_host_memory(allocated), in_host_memory(host_blocks)
        else:
            self.with_spare = torch.zeros((allocated, *block), dtype=dtype, device=device)
            self.host_blocks = page_locked(host_blocks * geometry.block_bytes, device).view(dtype)
            self.host_blocks = self.host_blocks.view((host_blocks, *block))
        self.blocks = self.with_spare[:num_blocks]
        self.check()

    def check(self) -> None:
        """Check the layout that transfers rely on."""
        for pool in (self.blocks, self.host_blocks):
            if not pool.is_contiguous():
                raise InvariantViolated("a KV pool is not contiguous")
            if len(pool) and pool[0].numel() * pool.element_size() != self.block_bytes:
                raise InvariantViolated("a KV block does not weigh what its geometry says")

    # On a GPU the copies below are launched on the calling thread's stream, not awaited: `kv_copies` orders them.

    def copy_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Swap out: device block → host block for every (device, host) pair."""
        _copy_blocks(self.blocks, self.host_blocks, pairs)

    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Swap in: host block → device block for every (host, device) pair."""
        _copy_blocks(self.host_blocks, self.blocks, pairs)

    def run_view(self, first: int, count: int, *, host: bool = False) -> Tensor:
        """Return the bytes of `count` neighbouring blocks from `first`, uint8."""
        pool = self.host_blocks if host else self.blocks
        if not (first >= 0 and count > 0 and first + count <= len(pool)):
            raise InvariantViolated(f"blocks [{first}, {first + count}) are not in a pool of {len(pool)}")
        return pool[first : first + count].view(-1).view(torch.uint8)

    def gather(self, slots: Tensor) -> Tensor:
        """R12 · Gather the tokens in scattered slots (block · block size + slot), on the host.

        Shape [n, layers, 2, kv heads, head dim], of latents as their blocks have it. From a GPU they may still be on
        their way: they are there when the calling thread's stream is.
        """
        return self.to_host(self.staged(slots))

    def staged(self, slots: Tensor) -> Tensor:
        """Gather tokens, as `gather`, still on the device: the slots may be written over as soon as this is done."""
        _, layers, parts, heads, _, width = self.blocks.shape
        shape = (len(slots), layers, parts, heads, width)
        out = torch.empty(shape, dtype=self.blocks.dtype, device=self.device)
        gather_slots(self.blocks, slots.to(self.device, non_blocking=True), out, apart=self._apart)
        return out

    def staged_blocks(self, blocks: Sequence[int]) -> Tensor:
        """Gather whole blocks, as `staged` does slots. Raises `InvariantViolated`."""
        if blocks and not (min(blocks) >= 0 and max(blocks) < len(self.blocks)):
            raise InvariantViolated(f"blocks {min(blocks)} to {max(blocks)} are not in a pool of {len(self.blocks)}")
        return self.blocks[torch.tensor(blocks).to(self.device, non_blocking=True)]

    def to_host(self, staged: Tensor) -> Tensor:
        """Copy to pinned memory that the calling thread's stream fills; on a processor return what was given."""
        if self.device.type == "cpu":
            return staged
        host = torch.empty(staged.shape, dtype=staged.dtype, pin_memory=True)
        return host.copy_(staged, non_blocking=True)

    def scatter(self, tokens: Tensor, slots: Tensor) -> None:
        """Write tokens that `gather` returned to slots, which must differ from each other."""
        on_device, places = tokens.to(self.device, non_blocking=True), slots.to(self.device, non_blocking=True)
        scatter_slots(on_device, self.blocks, places, apart=self._apart)

    def copy_slots_out(self, device: Sequence[int], host: Sequence[int]) -> None:
        """R9, R12 · Copy a checkpoint token by token, device slot → host slot, in one gather and one scatter."""
        if device:
            self.scatter_on_host(self.gather(torch.tensor(device)), host)

    def copy_slots_in(self, device: Sequence[int], host: Sequence[int]) -> None:
        """Copy host slot → device slot; device slots must differ from each other."""
        if device:
            self.scatter(self.gather_on_host(host), torch.tensor(device))

    def gather_on_host(self, slots: Sequence[int]) -> Tensor:
        """Gather the tokens in slots of the host pool, as `gather` those of the device."""
        _, layers, parts, heads, _, width = self.host_blocks.shape
        shape = (len(slots), layers, parts, heads, width)
        tokens = torch.empty(shape, dtype=self.blocks.dtype, pin_memory=self.device.type == "cuda")
        gather_slots(self.host_blocks, torch.tensor(slots), tokens, apart=self._apart)
        return tokens

    def scatter_on_host(self, tokens: Tensor, slots: Sequence[int]) -> None:
        """Write tokens to slots of the host pool."""
        scatter_slots(tokens, self.host_blocks, torch.tensor(slots), apart=self._apart)

    def blocks_on_host(self, tokens: Tensor, blocks: Sequence[int]) -> None:
        """Write whole blocks to the host pool."""
        self.host_blocks[torch.tensor(blocks)] = tokens


def _copy_blocks(source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks; neighbouring pairs go as one copy."""
    start = 0
    while start < len(pairs):
        first_source, first_target = pairs[start]
        end = start + 1
        while end < len(pairs) and pairs[end] == (first_source + end - start, first_target + end - start):
            end += 1
        count = end - start
        if not (0 <= first_source <= len(source) - count and 0 <= first_target <= len(target) - count):
            raise InvariantViolated(f"copy of {count} blocks {first_source} → {first_target} leaves its pool")
        piece = source[first_source : first_source + count]
        target[first_target : first_target + count].copy_(piece, non_blocking=True)
        start = end


def page_locked(size: int, device: torch.device) -> Tensor:
    """Allocate `size` zero bytes of host memory that the device copies by itself.

    torch's own page-locked allocator rounds up to a power of two, which a pool of many gigabytes cannot afford; those
    are locked where they lie.
    """
    if size <= _ROUNDED_BYTES or device.type != "cuda":
        return torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda" and size > 0)
    memory = torch.zeros(size, dtype=torch.uint8)
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)):  # type: ignore[no-untyped-call]
        raise InvariantViolated(f"{size} bytes of host memory cannot be page-locked; lower kv.host_memory_bytes")
    return memory
