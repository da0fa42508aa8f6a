"""The copies of one iteration, collected and consolidated (R12): at most one of each kind.

Owned by the bidirectional allocator. Outgoing copies run first, then incoming ones: slots that move out in an
iteration may be overwritten by slots that come in. That order is right because a host block given back in an iteration
is not used again before the next, and because no request served in an iteration loses slots in it.
"""

from __future__ import annotations

from cohort.common.policies.kv_interface import KvCopy

_Pairs = tuple[list[int], list[int]]


class CopyList:
    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._out: _Pairs = ([], [])
        self._out_blocks: _Pairs = ([], [])
        self._in: _Pairs = ([], [])
        self._in_blocks: _Pairs = ([], [])
        self._beside: _Pairs = ([], [])
        self._beside_blocks: _Pairs = ([], [])

    def out(self, device: list[int], host_block: int) -> None:
        """Slots of one device block to the same places of a host block."""
        self._note(self._out, self._out_blocks, device, host_block)

    def back(self, device: list[int], host_block: int, *, beside: bool) -> None:
        """From the same places of a host block; `beside`: no row of this iteration touches them."""
        slots, blocks = (self._beside, self._beside_blocks) if beside else (self._in, self._in_blocks)
        self._note(slots, blocks, device, host_block)

    def _note(self, slots: _Pairs, blocks: _Pairs, device: list[int], host_block: int) -> None:
        if len(device) == self._size:
            blocks[0].append(device[0] // self._size)
            blocks[1].append(host_block)
        else:
            slots[0].extend(device)
            slots[1].extend(host_block * self._size + slot % self._size for slot in device)

    def take(self) -> list[KvCopy]:
        """Everything since the last time, in the order in which it has to run."""
        taken = [
            KvCopy("out", "block", *_tuples(self._out_blocks)),
            KvCopy("out", "slot", *_tuples(self._out)),
            KvCopy("in", "block", *_tuples(self._in_blocks)),
            KvCopy("in", "slot", *_tuples(self._in)),
            KvCopy("in", "block", *_tuples(self._beside_blocks), beside=True),
            KvCopy("in", "slot", *_tuples(self._beside), beside=True),
        ]
        return [copy for copy in taken if copy.device]


def _tuples(pairs: _Pairs) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The pairs as they are, and the lists empty again."""
    device, host = tuple(pairs[0]), tuple(pairs[1])
    pairs[0].clear()
    pairs[1].clear()
    return device, host
