"""Two transfer agents with caches of their own, over a link that a test holds in its hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from cohort.common.engine.cache.kv_tensors import KvTensors
from cohort.common.engine.ranks.group_memory import GroupMemory
from cohort.common.engine.ranks.rank_memory import RankMemory
from cohort.common.engine.ranks.rank_transfers import RankTransfers
from cohort.common.engine.transfer import transfer_memory
from cohort.common.engine.transfer.transfer_agent import TransferAgent, TransferOptions
from cohort.common.errors import TransferTimeout
from cohort.common.machines.effects import ReceiveRuns, Run, SendRuns
from cohort.common.messages import KvChunk
from cohort.common.process.metrics import MetricFactory, TransferMetrics
from cohort.common.types import Attempt, KvGeometry

GEOMETRY = KvGeometry(num_layers=3, num_kv_heads=2, head_dim=4, dtype_bytes=4, block_size=8)
LARGE_BLOCKS = KvGeometry(num_layers=32, num_kv_heads=8, head_dim=16, dtype_bytes=4, block_size=8)
"""256 KiB each."""
BLOCKS = 24
LEASE = 7
TIMEOUT_S = 0.3


class Clock:
    def now_s(self) -> float:
        return time.monotonic()


class HeldLink:
    """Sends meet receives by tag; the bytes move when the test lets them."""

    name = "held"

    def __init__(self, peers: dict[bytes, HeldLink], address: bytes) -> None:
        self._peers, self._address = peers, address
        peers[address] = self
        self.posted: dict[int, tuple[memoryview, asyncio.Future[None]]] = {}
        self.going: list[int] = []  # tags under way, in the order they began
        self.most = 0  # at once
        self._now = 0
        self.fails: dict[int, Exception] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.flip = False
        self.forgotten: list[bytes] = []

    def address(self) -> bytes:
        return self._address

    async def send(self, peer: bytes, tag: int, buffer: Any, *, timeout_s: float) -> None:
        self.going.append(tag)
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            async with asyncio.timeout(timeout_s):
                await self.gate.wait()
                if tag in self.fails:
                    raise self.fails[tag]
                there = self._peers[peer]
                while tag not in there.posted:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                target, done = there.posted.pop(tag)
                source = memoryview(buffer).cast("B")
                assert len(source) == len(target)
                target[:] = source
                if self.flip:
                    target[3] ^= 1
                done.set_result(None)
        except TimeoutError:
            raise TransferTimeout("not taken") from None
        finally:
            self._now -= 1

    async def receive(self, tag: int, buffer: Any, *, timeout_s: float) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.posted[tag] = (memoryview(buffer).cast("B"), done)
        try:
            async with asyncio.timeout(timeout_s):
                await done
        except TimeoutError:
            raise TransferTimeout("did not arrive") from None
        finally:
            self.posted.pop(tag, None)

    def path(self, peer: bytes) -> str:
        return "held"

    def forget(self, peer: bytes) -> None:
        self.forgotten.append(peer)

    async def close(self) -> None:
        return None


class End:
    """One worker's agent, its cache and what it reported."""

    def __init__(
        self,
        link: Any,
        *,
        on_device: bool = False,
        runs_at_once: int = 16,
        checksums: bool = True,
        geometry: KvGeometry = GEOMETRY,
    ) -> None:
        device = torch.device("cpu")
        self.kv = KvTensors(geometry, num_blocks=BLOCKS, host_blocks=4, dtype=torch.float32, device=device)
        self.kv.blocks.copy_(torch.randn_like(self.kv.blocks))
        own = RankTransfers(RankMemory(self.kv, (0, geometry.num_kv_heads)), {})
        self.memory = GroupMemory(own, (), geometry)
        self.memory.on_device = own.memory.cache.on_device = on_device
        self.link = link
        self.sent: list[str | None] = []
        self.received: list[str | None] = []
        self.announced: list[KvChunk] = []
        self.other: End | None = None
        self.agent = TransferAgent(
            {link.name: link},
            self.memory,
            TransferOptions(TIMEOUT_S, checksums, runs_at_once),
            clock=Clock(),
            metrics=TransferMetrics(MetricFactory(CollectorRegistry(), model_name="m", instance="w")),
            announce=self._announce,
            on_sent=lambda lease, error: self.sent.append(error),
            on_received=lambda lease, round_, error: self.received.append(error),
        )

    def _announce(self, peer: str, chunk: KvChunk) -> None:
        self.announced.append(chunk)
        if self.other is not None:
            runs = tuple(Run(run.tag, 0, run.first_block, run.num_blocks, run.checksum) for run in chunk.runs)
            self.other.agent.receive(ReceiveRuns(chunk.lease_id, chunk.round, chunk.link, runs, "here"))

    def send_to(self, other: End | bytes, runs: Sequence[Run]) -> None:
        """`other`: its end, or its address."""
        address = other if isinstance(other, bytes) else other.link.address()
        self.agent.send(SendRuns("there", Attempt("r", 0), LEASE, 0, self.link.name, address, tuple(runs)))

    @property
    def free_slots(self) -> int:
        return self.agent._send_slots.free + self.agent._receive_slots.free


ALL_SLOTS = 2 * transfer_memory.SLOTS


def held_ends(**options: Any) -> tuple[End, End]:
    peers: dict[bytes, HeldLink] = {}
    a, b = End(HeldLink(peers, b"a"), **options), End(HeldLink(peers, b"b"), **options)
    a.other = b
    return a, b


def scattered(count: int) -> list[Run]:
    """Single blocks, none beside another at either end."""
    return [Run(tag, 2 * tag, BLOCKS - 1 - 2 * tag, 1) for tag in range(count)]


def extents(count: int, blocks: int) -> list[Run]:
    return [Run(tag, tag * blocks, (count - 1 - tag) * blocks, blocks) for tag in range(count)]


async def until(holds: Callable[[], bool], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def check_arrived(a: End, b: End, runs: Sequence[Run]) -> None:
    for run in runs:
        source = a.kv.blocks[run.source : run.source + run.num_blocks]
        assert torch.equal(b.kv.blocks[run.target : run.target + run.num_blocks], source)


def check_over(a: End, b: End, runs: int) -> None:
    """Every run reported once at both ends, nothing left in staging memory or under way."""
    assert (len(a.sent), len(b.received)) == (runs, runs)
    assert (a.free_slots, b.free_slots) == (ALL_SLOTS, ALL_SLOTS)
    assert not a.agent._tasks and not b.agent._tasks
