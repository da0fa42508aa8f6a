"""A memory that knows whose KV every slot holds: what the allocator's copies and the rows do to it."""

from __future__ import annotations

from typing import NamedTuple

from cohort.common.policies.bros.bidirectional_allocation import BidirectionalAllocator
from cohort.common.policies.kv_interface import KvCopy
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import Attempt, KvGeometry, Request, SamplingParams, TrafficClass

BLOCK = 4
GEOMETRY = KvGeometry(1, 1, 1, 1, BLOCK)


def request(
    name: str, prompt: int, traffic_class: TrafficClass = "rt", *, end: int | None = None, arrived_s: float = 0.0
) -> Sequence:
    tokens = [1] * prompt
    return Sequence(
        Request(
            Attempt(name, 1), "gateway", tokens, prompt, SamplingParams(max_tokens=64), 0.0, traffic_class=traffic_class
        ),
        list(tokens),
        end,
        0,
        arrived_s,
    )


class PreemptedBlock(NamedTuple):
    """A row of the paper's preemption table. `left` "" = the sequence that took the slots is gone."""

    block: int
    left: Attempt | str
    right: Attempt
    slots: int


def preemption_table(kv: BidirectionalAllocator) -> list[PreemptedBlock]:
    """R10 · Blocks some of whose best-effort slots are in host memory, read off what the allocator keeps per tenant."""
    rows = []
    for tenant in kv._reversed.values():
        for index in tenant.host:
            if index < len(tenant.blocks):
                block = tenant.blocks[index]
                side = kv._table.left(block)
                slots = kv._table.within(tenant.stored, index) - tenant.resident[index]
                rows.append(PreemptedBlock(block, side[0].name if side else "", tenant.name, slots))
    return rows


class Memory:
    """Brute force beside the allocator: slot → (key, position)."""

    def __init__(self, blocks: int, host_blocks: int) -> None:
        self.kv = BidirectionalAllocator(GEOMETRY, blocks, host_blocks)
        self.device: list[tuple[str, int] | None] = [None] * (blocks * BLOCK)
        self.host: list[tuple[str, int] | None] = [None] * (host_blocks * BLOCK)

    def slot(self, key: str, position: int) -> int:
        directions = self.kv.directions(key)
        offset = position % BLOCK
        if directions is not None and directions[position // BLOCK]:
            offset = BLOCK - 1 - offset
        return self.kv.blocks(key)[position // BLOCK] * BLOCK + offset

    def copy(self, copies: list[KvCopy]) -> None:
        for copy in copies:
            size = BLOCK if copy.unit == "block" else 1
            for device, host in zip(copy.device, copy.host, strict=True):
                for part in range(size):
                    d, h = device * size + part, host * size + part
                    if copy.direction == "out":
                        self.host[h] = self.device[d]
                    else:
                        self.device[d] = self.host[h]

    def step(self, rows: list[tuple[Sequence, int]]) -> list[KvCopy]:
        """The rows that were given blocks, after the iteration's copies; late copies come last, as they may."""
        copies = self.kv.take_copies()
        self.kv.check()
        self.copy([copy for copy in copies if not copy.concurrent])
        self.write(rows)
        self.copy([copy for copy in copies if copy.concurrent])
        self.commit(rows)
        return copies

    def write(self, rows: list[tuple[Sequence, int]]) -> None:
        """The rows are computed: each reads what it has, and writes its next positions."""
        for sequence, count in rows:
            for position in range(sequence.computed):
                found = self.device[self.slot(sequence.key, position)]
                assert found == (sequence.key, position), f"{sequence.key} reads {found} at {position}"
            for position in range(sequence.computed, sequence.computed + count):
                self.device[self.slot(sequence.key, position)] = (sequence.key, position)

    def commit(self, rows: list[tuple[Sequence, int]]) -> None:
        for sequence, count in rows:
            sequence.computed += count
            self.kv.committed(sequence)
        self.kv.check()

    def start(self, sequence: Sequence) -> bool:
        if self.kv.admit(sequence) is None:
            return False
        sequence.phase = Phase.RUNNING
        return True

    def run(self, sequence: Sequence, tokens: int = 1) -> list[KvCopy]:
        """Extend by so many tokens and compute them; must succeed."""
        sequence.tokens += [1] * (sequence.computed + tokens - sequence.known)
        assert self.kv.extend(sequence, sequence.computed + tokens)
        return self.step([(sequence, tokens)])

    def prefill(self, sequence: Sequence) -> list[KvCopy]:
        assert self.start(sequence)
        return self.step([(sequence, sequence.target)])
