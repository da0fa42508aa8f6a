"""Groups of layers in the paged allocator: a table for each, all of one pool, against a model that knows every slot."""

from __future__ import annotations

from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.kv.block_pool import block_hashes, of_group
from cohort.common.kv.layer_groups import in_groups
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.kv_interface import NO_BLOCK, KvCopy
from cohort.common.sequence import Sequence
from cohort.common.types import KvGeometry
from tests.common.policies.baselines.drive import sequence

SIZE = 4
WINDOWS = [(0, 6), (0, 3, 3), (0, 9, 5), (11, 4), (0, 0)]


def geometry(groups: tuple[int, ...]) -> KvGeometry:
    return KvGeometry(len(groups), 1, 1, 1, SIZE, groups=groups)


class Slots:
    """What every block of a cache holds, as an engine writes it: for each group and position something of its own."""

    def __init__(self, kv: PagedAllocator) -> None:
        self.kv = kv
        self.device: dict[int, list[object]] = {block: [None] * SIZE for block in range(kv.total_blocks)}
        self.host: dict[int, list[object]] = {block: [None] * SIZE for block in range(kv.host_blocks)}

    def write(self, each: Sequence, first: int, end: int) -> None:
        for group, table in enumerate(self.kv.tables(each.key)):
            for position in range(first, end):
                self.device[table[position // SIZE]][position % SIZE] = (group, *each.tokens[: position + 1])

    def move(self, copies: list[KvCopy]) -> None:
        for copy in copies:
            for device, host in zip(copy.device, copy.host, strict=True):
                if copy.direction == "out":
                    self.host[host] = list(self.device[device])
                else:
                    self.device[device] = list(self.host[host])

    def check(self, each: Sequence) -> None:
        """The next token of this sequence finds all that it sees, in every group."""
        tables = self.kv.tables(each.key)
        assert len({len(table) for table in tables}) == 1
        for group, (table, window) in enumerate(zip(tables, self.kv.geometry.windows, strict=True)):
            for position in range(max(0, each.computed + 1 - window) if window else 0, each.computed):
                expected = (group, *each.tokens[: position + 1])
                assert self.device[table[position // SIZE]][position % SIZE] == expected


def longest_cached(kv: PagedAllocator, tokens: list[int]) -> int:
    """By trying every length: what the tokens behind it see is known, in all groups."""
    hashes = block_hashes(tokens[:-1], SIZE)
    known = kv._pool._block_of
    fitting = [
        full
        for full in range(len(hashes) + 1)
        if all(
            of_group(hashes[index], group) in known
            for group, window in enumerate(kv.geometry.windows)
            for index in range(kv.geometry.blocks_before_window(full * SIZE, window), full)
        )
    ]
    return max(fitting) * SIZE


@settings(deadline=None)
@given(st.sampled_from(WINDOWS), st.integers(0, 2**32), st.booleans())
def test_every_token_finds_what_it_sees(groups: tuple[int, ...], seed: int, caching: bool) -> None:
    """Sequences of few different beginnings come, are computed in chunks, preempted, sent on, and end."""
    random = Random(seed)
    kv = PagedAllocator(geometry(groups), 22 * len(groups), 9 * len(groups), prefix_caching=caching)
    slots, running, swapped = Slots(kv), list[Sequence](), list[Sequence]()
    beginnings = [[random.randrange(50) for _ in range(40)] for _ in range(2)]
    for number in range(70):
        action = random.choice(["come", "arrive", "compute", "compute", "compute", "out", "in", "end"])
        each = random.choice(running) if running else None
        before = {one.key: [list(table) for table in kv.tables(one.key)] for one in running}
        available = kv.free_blocks + kv.cached_blocks
        match action:
            case "come" | "arrive":
                fresh = sequence(f"r{number}", random.randint(1, 40), max_tokens=60)
                fresh.tokens[:] = random.choice(beginnings)[: len(fresh.tokens) - 3] + [random.randrange(50)] * 3
                fresh.tokens[:] = fresh.tokens[: fresh.request.prompt_tokens]
                expected = longest_cached(kv, fresh.tokens) if caching else 0
                if action == "come":
                    found = kv.admit(fresh)
                    assert found in (None, expected)
                else:
                    found = kv.reserve(fresh.key, fresh.tokens, len(fresh.tokens))
                if found is None:
                    assert available < kv.geometry.blocks_for(len(fresh.tokens))
                else:
                    running.append(fresh)
                    fresh.computed = found
                    if action == "arrive":  # what is not cached comes from elsewhere, but for what is not wanted
                        for group, table in enumerate(kv.tables(fresh.key)):
                            for position in range(found, len(fresh.tokens)):
                                if table[position // SIZE] != NO_BLOCK:
                                    held = (group, *fresh.tokens[: position + 1])
                                    slots.device[table[position // SIZE]][position % SIZE] = held
                        fresh.computed = len(fresh.tokens)
                        kv.committed(fresh)
                        fresh.tokens.append(random.randrange(50))
            case "compute" if each is not None:
                end = min(len(each.tokens), each.computed + random.choice([1, 3, 11]))
                wanted = kv.geometry.blocks_for(end) - len(groups) * len(kv.blocks(each.key))
                assert kv.extend(each, end) == (wanted <= available)
                if wanted > available:
                    assert [list(table) for table in kv.tables(each.key)] == before[each.key]
                    continue
                slots.write(each, each.computed, end)
                each.computed = end
                kv.committed(each)
                if end == len(each.tokens):
                    each.tokens.append(random.randrange(50))
                entries = max(kv.geometry.entries(end), len(kv.blocks(each.key)))
                assert kv.held(each.key) == entries * len(groups) - kv.geometry.blocks_behind(end)
            case "out" if each is not None:
                if kv.swap_out(each):
                    running.remove(each)
                    swapped.append(each)
                    slots.move(kv.take_copies())
            case "in" if swapped:
                back = random.choice(swapped)
                if kv.swap_in(back):
                    swapped.remove(back)
                    running.append(back)
                    slots.move(kv.take_copies())
            case "end" if each is not None:
                running.remove(each)
                kv.release(each.key)
        kv.check()
        for one in running:
            slots.check(one)
    for one in (*running, *swapped):
        kv.release(one.key)
    assert kv.owners() == {}
    assert kv.free_blocks + kv.cached_blocks == kv.total_blocks
    kv.check()


def test_only_groups_with_a_window_give_back() -> None:
    kv = PagedAllocator(geometry((0, 6, 6)), 60, 0)
    each = sequence("a", 20, max_tokens=40)
    assert kv.admit(each) == 0
    assert kv.owners() == {each.key: 15}
    each.computed = 20
    kv.committed(each)
    assert [[block == NO_BLOCK for block in table] for table in kv.tables(each.key)] == [
        [False] * 5,
        [True] * 3 + [False] * 2,
        [True] * 3 + [False] * 2,
    ]
    assert kv.held(each.key) == kv.geometry.blocks_held(20) == 5 + 2 + 2
    assert kv.free_blocks + kv.cached_blocks == 51
    assert list(kv.blocks(each.key)) == list(kv.tables(each.key)[0])


def test_a_prefix_is_cached_as_far_as_every_group_has_it() -> None:
    """A group with a window lacks its last block: nothing can start there. It lacks an early one: nothing needs it."""
    kv = PagedAllocator(geometry((0, 6)), 40, 0)
    first = sequence("a", 33)
    kv.admit(first)
    first.computed = 33
    kv.committed(first)
    full, sliding = (list(table) for table in kv.tables(first.key))
    assert sliding[:6] == [NO_BLOCK] * 6
    kv.release(first.key)

    def again(name: str) -> int | None:
        one = sequence(name, 33)
        one.tokens[:] = first.tokens
        found = kv.admit(one)
        assert found is None or kv.tables(one.key)[0][: found // SIZE] == full[: found // SIZE]
        kv.release(one.key)
        return found

    assert again("b") == 32
    for block in [block for block in kv._pool._cached if kv._pool._hash_of[block] is not None]:
        if block not in (*full, *sliding[6:]):  # what the group with a window gave back while it ran
            kv._pool._forget_hash(block)
            del kv._pool._cached[block]
            kv._pool._free.add([block])
    assert again("c") == 32
    kv._pool._forget_hash(sliding[7])
    del kv._pool._cached[sliding[7]]
    kv._pool._free.add([sliding[7]])
    assert again("d") == 0  # one block less would need the one before those that are left
    kv.check()


@pytest.mark.parametrize(
    ("windows", "context", "times"),
    [
        ([0, 4096] * 21, 4096, 1.0),  # Gemma 2 9B
        ([0, 4096] * 21, 8192, 1.33),
        ([0] * 4 + [512] * 22, 2048, 2.54),  # Gemma 3 1B
        ([0] * 4 + [512] * 22, 8192, 4.68),
        ([0] * 5 + [1024] * 29, 2048, 1.68),  # Gemma 3 4B
        ([0] * 5 + [1024] * 29, 8192, 3.86),
        ([0, 128] * 12, 2048, 1.86),  # gpt-oss 20B
        ([0, 128] * 12, 131072, 1.98),
    ],
)
def test_how_many_times_as_many_sequences_fit(windows: list[int], context: int, times: float) -> None:
    """Sequences that have come to their context, in the same memory, in blocks of all layers and of groups."""
    whole = KvGeometry(len(windows), 1, 1, 1, 16)
    memory = 40 * whole.blocks_for(context) * whole.block_bytes

    def fitting(shape: KvGeometry) -> int:
        kv = PagedAllocator(shape, memory // shape.block_bytes, 0, prefix_caching=False)
        for number in count():
            each = sequence(f"r{number}", 1, max_tokens=context)
            if kv.reserve(each.key, [], context - 1) is None:
                return number
            each.computed = context - 1
            kv.committed(each)
        raise AssertionError

    assert fitting(whole) == 40
    assert fitting(in_groups(whole, windows)) / 40 == pytest.approx(times, abs=0.02)
