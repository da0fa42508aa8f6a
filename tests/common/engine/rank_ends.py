"""Workers of any degree for transfer tests: caches without a model, ranks on threads, links over real sockets.

A rank beside the first runs what its process would run (`rank_transfers.serve`), with its end of the socket pair.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from cohort.common.engine.cache.kv_tensors import KvTensors
from cohort.common.engine.config.rank_shares import kv_heads_of
from cohort.common.engine.ranks.group_memory import GroupLink, GroupMemory
from cohort.common.engine.ranks.rank_memory import RankMemory
from cohort.common.engine.ranks.rank_messages import RankLost
from cohort.common.engine.ranks.rank_orders import OpenLinks
from cohort.common.engine.ranks.rank_transfers import RankTransfers, serve
from cohort.common.engine.ranks.remote_rank import RemoteRank
from cohort.common.engine.transfer.transfer_agent import TransferAgent, TransferOptions
from cohort.common.machines.effects import ReceiveRuns, Run, SendRuns
from cohort.common.messages import KvChunk
from cohort.common.process.metrics import MetricFactory, TransferMetrics
from cohort.common.transport.zmq_link import ZmqLink
from cohort.common.types import Attempt, KvGeometry
from tests.common.engine.transfer_ends import BLOCKS, LEASE, Clock

HOST_BLOCKS = 4


def geometry_of(kv_heads: int) -> KvGeometry:
    return KvGeometry(num_layers=3, num_kv_heads=kv_heads, head_dim=4, dtype_bytes=4, block_size=8)


class _Rank:
    """One beside the first."""

    def __init__(self, rank: int, kv: KvTensors, heads: tuple[int, int]) -> None:
        self.kv = kv
        ours, self._theirs = socket.socketpair()
        self.end = RemoteRank(rank, ours)
        self._ours = ours
        self._thread = threading.Thread(target=self._run, args=(kv, heads), daemon=True)
        self._thread.start()

    def _run(self, kv: KvTensors, heads: tuple[int, int]) -> None:
        with suppress(RankLost):
            asyncio.run(serve(kv, heads, self._theirs))

    def lose(self) -> None:
        self._theirs.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.end.close()
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._ours.close()


class AgentEnd:
    """A worker's transfer agent, and what it reported."""

    def __init__(self, own: RankTransfers, others: Sequence[RemoteRank], geometry: KvGeometry) -> None:
        self.sent: list[str | None] = []
        self.received: list[str | None] = []
        self.announced: list[KvChunk] = []
        self.other: AgentEnd | None = None
        self.spoil = 0
        self.own, self.geometry = own, geometry
        self.memory = GroupMemory(own, others, geometry)
        self.link = GroupLink(own.links["zmq"], self.memory)

    def start(self, *, checksums: bool = True, run_timeout_s: float = 20.0) -> None:
        self.agent = TransferAgent(
            {"zmq": self.link},
            self.memory,
            TransferOptions(run_timeout_s, checksums, runs_at_once=4),
            clock=Clock(),
            metrics=TransferMetrics(MetricFactory(CollectorRegistry(), model_name="m", instance="w")),
            announce=self._announce,
            on_sent=lambda lease, error: self.sent.append(error),
            on_received=lambda lease, round_, error: self.received.append(error),
        )

    def _announce(self, peer: str, chunk: KvChunk) -> None:
        self.announced.append(chunk)
        if self.other is not None:
            self.other.agent.receive(self.expected(self.spoil))

    def expected(self, spoil: int = 0) -> ReceiveRuns:
        """What the receiver of the last transfer is to post; `spoil`: bits of its sums to change."""
        chunk = self.announced[-1]
        runs = tuple(Run(run.tag, 0, run.first_block, run.num_blocks, run.checksum ^ spoil) for run in chunk.runs)
        return ReceiveRuns(chunk.lease_id, chunk.round, chunk.link, runs)

    def send_to(self, other: AgentEnd, runs: Sequence[Run], *, from_host: bool = False) -> None:
        address = other.link.address()
        self.agent.send(SendRuns("there", Attempt("r", 0), LEASE, 0, "zmq", address, tuple(runs), from_host))

    @property
    def busy(self) -> bool:
        return bool(self.agent._tasks)


class Worker(AgentEnd):
    """One over the caches of its ranks; `blocks` has all heads of every block."""

    def __init__(self, kv_heads: int, degree: int, folder: Path) -> None:
        heads = [kv_heads_of(kv_heads, rank, degree) for rank in range(degree)]
        blocks = torch.randn((BLOCKS + HOST_BLOCKS, 3, 2, kv_heads, 8, 4))
        self.heads, self.folder = heads, folder
        self.caches = [_cache(blocks, each) for each in heads]
        self.ranks = [_Rank(rank, self.caches[rank], heads[rank]) for rank in range(1, degree)]
        links: dict[str, Any] = {"zmq": ZmqLink(f"ipc://{folder}/0.sock")}
        own = RankTransfers(RankMemory(self.caches[0], heads[0]), links)
        super().__init__(own, [each.end for each in self.ranks], geometry_of(kv_heads))

    async def open(self) -> None:
        for rank, each in enumerate(self.ranks, start=1):
            bind = f"ipc://{self.folder}/{rank}.sock"
            await each.end.open(OpenLinks(each.end.number(), ("zmq",), bind, "", "", False, True))
            assert each.end.addresses == {"zmq": bind.encode()}

    async def close(self) -> None:
        await self.agent.close()
        for rank in self.ranks:
            await asyncio.to_thread(rank.close)

    def block(self, index: int, *, host: bool = False) -> Tensor:
        """Over all heads, each taken from the first rank that has it."""
        found = torch.full((3, 2, self.geometry.num_kv_heads, 8, 4), torch.nan)
        for kv, (first, end) in reversed(list(zip(self.caches, self.heads, strict=True))):
            found[:, :, first:end] = (kv.host_blocks if host else kv.blocks)[index]
        return found

    def check_copies(self, indexes: Iterable[int]) -> None:
        """Ranks with the same heads have the same bytes."""
        for index in indexes:
            whole = self.block(index)
            for kv, (first, end) in zip(self.caches, self.heads, strict=True):
                assert torch.equal(kv.blocks[index], whole[:, :, first:end])


def _cache(blocks: Tensor, heads: tuple[int, int]) -> KvTensors:
    kv = KvTensors(
        geometry_of(heads[1] - heads[0]),
        num_blocks=BLOCKS,
        host_blocks=HOST_BLOCKS,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    kv.blocks.copy_(blocks[:BLOCKS, :, :, heads[0] : heads[1]])
    kv.host_blocks.copy_(blocks[BLOCKS:, :, :, heads[0] : heads[1]])
    return kv


@asynccontextmanager
async def workers(
    folder: Path, kv_heads: int, degrees: tuple[int, int], *, checksums: bool = True, run_timeout_s: float = 20.0
) -> AsyncIterator[tuple[Worker, Worker]]:
    """Sender and receiver."""
    made = []
    for degree, name in zip(degrees, "ab", strict=True):
        (folder / name).mkdir()
        made.append(Worker(kv_heads, degree, folder / name))
        await made[-1].open()
        made[-1].start(checksums=checksums, run_timeout_s=run_timeout_s)
    a, b = made
    a.other = b
    try:
        yield a, b
    finally:
        for worker in made:
            await worker.close()
