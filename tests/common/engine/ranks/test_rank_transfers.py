"""KV between workers of several ranks goes from rank to rank: every byte once, checked, and over whatever happens."""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path

import pytest
import torch

from cohort.common.engine.config.rank_shares import kv_heads_of
from cohort.common.engine.ranks.kv_parts import KvPart, addresses_of, joint_address, part_tag, parts_between
from cohort.common.errors import TransferError
from cohort.common.kv.lease import tag_of
from cohort.common.machines.effects import Run
from tests.common.engine.rank_ends import Worker, workers
from tests.common.engine.transfer_ends import BLOCKS, LEASE, extents, scattered, until
from tests.examples import another_of_its_kind

DEGREES = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (4, 2), (4, 4)]


# -- which part goes where -----------------------------------------------------------------------------------------


DIVIDED = [
    (kv_heads, senders, receivers)
    for kv_heads in (1, 2, 4, 8, 12)
    for senders, receivers in product((1, 2, 3, 4, 6, 8, 12), repeat=2)
    if all(kv_heads % degree == 0 or degree % kv_heads == 0 for degree in (senders, receivers))
]


@pytest.mark.parametrize(("kv_heads", "senders", "receivers"), DIVIDED)
def test_every_rank_gets_each_of_its_heads_once_from_a_rank_that_has_it(
    kv_heads: int, senders: int, receivers: int
) -> None:
    parts = parts_between(kv_heads, senders, receivers)
    for receiver in range(receivers):
        own = [part for part in parts if part.receiver == receiver]
        assert [part.place for part in own] == list(range(len(own)))
        got = [head for part in own for head in range(*part.heads)]
        assert got == list(range(*kv_heads_of(kv_heads, receiver, receivers)))
    for part in parts:
        first, end = kv_heads_of(kv_heads, part.sender, senders)
        assert first <= part.heads[0] < part.heads[1] <= end
    if senders == receivers:
        assert [(part.sender, part.receiver) for part in parts] == [(rank, rank) for rank in range(senders)]


def test_copies_of_a_head_share_the_sending() -> None:
    """Eight ranks of two heads: each receiver has a sender of its own."""
    assert [(part.sender, part.receiver) for part in parts_between(2, 8, 4)] == [(0, 0), (2, 1), (4, 2), (6, 3)]
    assert parts_between(2, 4, 1) == (KvPart(0, 0, (0, 1), 0), KvPart(2, 0, (1, 2), 1))


def test_tags_of_parts_differ_from_each_other_and_from_those_of_other_runs() -> None:
    parts = parts_between(8, 8, 1)
    tags = {part_tag(tag_of(LEASE, run), part) for run in (0, 1, (1 << 18) - 1) for part in parts}
    assert len(tags) == 24 and tag_of(LEASE, 1) in tags
    with pytest.raises(TransferError, match="no room for 2 parts"):
        part_tag(tag_of(LEASE, 1 << 18), parts[1])


def test_an_address_is_that_of_all_ranks() -> None:
    assert addresses_of(joint_address([b"a", b"", b"c"])) == (b"a", b"", b"c")
    for wrong in (b"", b"tcp://h:1", joint_address([])):
        with pytest.raises(TransferError):
            addresses_of(wrong)


# -- bytes ---------------------------------------------------------------------------------------------------------


async def over(a: Worker, b: Worker, runs: int) -> None:
    await until(lambda: len(a.sent) == runs and len(b.received) == runs and not a.busy and not b.busy)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("degrees", DEGREES, ids=lambda degrees: f"{degrees[0]} to {degrees[1]}")
async def test_blocks_arrive_whole_on_every_rank(tmp_path: Path, degrees: tuple[int, int], kv_heads: int) -> None:
    """Neighbours as they lie, then scattered ones gathered; copied heads (2 on 4 ranks) on all that have them."""
    async with workers(tmp_path, kv_heads, degrees) as (a, b):
        for runs in (extents(3, 4), scattered(8)):
            before = [b.block(index) for index in range(BLOCKS)]
            a.sent.clear()
            b.received.clear()
            a.send_to(b, runs)
            await over(a, b, len(runs))
            assert a.sent == b.received == [None] * len(runs)
            arrived = {run.target + i: run.source + i for run in runs for i in range(run.num_blocks)}
            for index in range(BLOCKS):
                expected = a.block(arrived[index]) if index in arrived else before[index]
                assert torch.equal(b.block(index), expected)
            b.check_copies(arrived)
        assert a.memory.own.memory._cut == b.memory.own.memory._cut == {}


async def test_rank_0_moves_its_own_heads_alone(tmp_path: Path) -> None:
    """Between equal degrees a quarter of the bytes; of the larger group also between unequal ones."""
    for degrees, of_sender, of_receiver in (((4, 4), 4, 4), ((4, 2), 4, 2), ((2, 4), 2, 4), ((1, 4), 1, 4)):
        folder = tmp_path / f"{degrees[0]}to{degrees[1]}"
        folder.mkdir()
        async with workers(folder, 4, degrees) as (a, b):
            a.send_to(b, extents(3, 4))
            await over(a, b, 3)
            moved = 12 * a.geometry.block_bytes
            assert (a.own.link_bytes, b.own.link_bytes) == (moved // of_sender, moved // of_receiver)


async def test_without_sums_the_receiver_still_knows_how_many_ranks_send(tmp_path: Path) -> None:
    async with workers(tmp_path, 4, (4, 2), checksums=False) as (a, b):
        a.send_to(b, extents(2, 4))
        await over(a, b, 2)
        assert b.received == [None] * 2
        assert all(torch.equal(b.block(4 + i), a.block(i)) for i in range(4))
        assert [run.checksum >> 34 for run in a.announced[0].runs] == [3, 3]


@pytest.mark.parametrize("degrees", [(2, 2), (4, 2), (1, 2)])
async def test_host_blocks_are_sent_by_the_ranks_that_have_them(tmp_path: Path, degrees: tuple[int, int]) -> None:
    async with workers(tmp_path, 4, degrees) as (a, b):
        a.send_to(b, [Run(0, 1, 7, 2)], from_host=True)
        await over(a, b, 1)
        assert b.received == [None]
        assert all(torch.equal(b.block(7 + i), a.block(1 + i, host=True)) for i in range(2))


# -- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", DEGREES, ids=lambda degrees: f"{degrees[0]} to {degrees[1]}")
async def test_another_sum_than_was_announced_is_noticed(tmp_path: Path, degrees: tuple[int, int]) -> None:
    """And what came gathered is not placed."""
    async with workers(tmp_path, 4, degrees) as (a, b):
        a.spoil = 1
        before = [b.block(index) for index in range(BLOCKS)]
        a.send_to(b, scattered(3))
        await over(a, b, 3)
        assert all(error is not None and "differ from what was sent" in error for error in b.received)
        assert all(torch.equal(b.block(index), before[index]) for index in range(BLOCKS))


@pytest.mark.parametrize(
    "degrees", [(4, 2), (2, 4), *(pytest.param(each, marks=another_of_its_kind()) for each in [(2, 2), (1, 2), (2, 1)])]
)
async def test_what_the_receiver_does_not_take_fails_in_time(tmp_path: Path, degrees: tuple[int, int]) -> None:
    async with workers(tmp_path, 4, degrees, run_timeout_s=0.3) as (a, b):
        a.other = None
        a.send_to(b, extents(2, 4))
        await until(lambda: len(a.sent) == 2 and not a.busy)
        assert all(error is not None and "not taken within 0.3 s" in error for error in a.sent)
        b.agent.receive(a.expected())
        await until(lambda: len(b.received) == 2 and not b.busy)
        assert None not in b.received
        assert a.memory._keys == b.memory._keys == {}


@pytest.mark.parametrize("degrees", [(2, 2), (4, 2), (2, 4), (1, 2), (2, 1)])
async def test_a_cancelled_transfer_reports_every_run_and_lets_go(tmp_path: Path, degrees: tuple[int, int]) -> None:
    async with workers(tmp_path, 4, degrees) as (a, b):
        a.other = None
        a.send_to(b, extents(2, 4))
        await until(lambda: bool(a.announced))
        await asyncio.sleep(0.05)
        a.agent.cancel(LEASE)
        await until(lambda: len(a.sent) == 2 and not a.busy)
        b.agent.receive(a.expected())
        await asyncio.sleep(0.05)
        b.agent.cancel(LEASE)
        await until(lambda: len(b.received) == 2 and not b.busy)
        assert None not in a.sent and None not in b.received  # by the cancel, or by the other end's word of its own
        assert a.memory._keys == b.memory._keys == {}
        # … and the next transfer finds nothing of it.
        a.other, runs = b, [Run(7, 0, 12, 4)]
        for said in (a.sent, b.received):
            said.clear()
        a.send_to(b, runs)
        await over(a, b, 1)
        assert a.sent == b.received == [None]
        assert all(torch.equal(b.block(12 + i), a.block(i)) for i in range(4))


@pytest.mark.parametrize("lost", ["sender", "receiver"])
async def test_a_rank_that_is_lost_fails_the_transfer(tmp_path: Path, lost: str) -> None:
    """What goes on beside it ends; the worker itself ends by its supervisor's hand."""
    async with workers(tmp_path, 4, (2, 2), run_timeout_s=0.5) as (a, b):
        (a if lost == "sender" else b).ranks[0].lose()
        await asyncio.sleep(0.1)
        a.send_to(b, extents(2, 4))
        await until(lambda: len(a.sent) == 2 and not a.busy)
        assert None not in a.sent
        if lost == "receiver":
            await until(lambda: len(b.received) == 2 and not b.busy)
            assert all("rank 1" in (error or "") or "rank of this worker" in (error or "") for error in b.received)
        else:
            assert not a.announced  # its sums cannot be made
