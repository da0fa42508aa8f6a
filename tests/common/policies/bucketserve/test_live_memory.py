"""Free blocks less growth less reservations, and how reservations end."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.bucketserve.live_memory import LiveMemory, _peak_entries
from cohort.common.types import QueuedWork, Role
from tests.common.policies.bucketserve.cluster import cluster, view


def work(name: str, prefill_left: int, context: int, decode_left: int) -> QueuedWork:
    return QueuedWork(name, prefill_left, context, decode_left)


def test_running_requests_grow_to_their_predicted_peak() -> None:
    # r1 has 10 tokens and 15 to come, r2 12 (still to be handed over) and 8. When r2 is about to leave, both have grown
    # by 8: 38 tokens, 28 more than the 10 that are there, 7 blocks. Before r1 leaves: 25.
    queue = [work("r1", 0, 10, 15), work("r2", 12, 0, 8)]
    memory = LiveMemory()
    handing_over = [work("r1", 0, 10, 0), work("r2", 12, 0, 0)]
    decode, prefill = view("d", Role.DECODE, free=50, queue=queue), view("p", Role.PREFILL, free=50, queue=handing_over)
    stand_in = view("q", Role.PREFILL, free=50, queue=queue)
    memory.update(0.0, cluster(decode, prefill, stand_in))
    assert memory.remaining_blocks(decode) == memory.remaining_blocks(stand_in) == 50 - 7
    # A prefill worker hands over before the response grows: r1 needs nothing more, r2 three blocks
    assert memory.remaining_blocks(prefill) == 50 - 0 - 3


@given(rows=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8), size=st.integers(1, 16))
def test_the_peak_equals_that_of_stepping_through_time(rows: list[tuple[int, int]], size: int) -> None:
    stepped = max(sum(-(-(tokens + step) // size) for tokens, left in rows if left >= step) for step in range(61))
    assert _peak_entries(rows, size) == stepped


def test_partial_blocks_count_where_windows_give_blocks_back_too() -> None:
    # Each row ends one token before its block does and has two to come: a block more for each, not one for both.
    rows = [work("r1", 0, 3, 2), work("r2", 0, 3, 2)]
    wide = view("d", Role.DECODE, free=50, queue=rows)
    wide.capacity = msgspec.structs.replace(wide.capacity, window=64)
    memory = LiveMemory()
    memory.update(0.0, cluster(wide))
    assert memory.remaining_blocks(wide) == 50 - 2


def test_requests_beyond_the_list_count_like_the_listed() -> None:
    crowded = view("d", Role.DECODE, free=50, running=3, queue=[work("r1", 0, 4, 8)])
    memory = LiveMemory()
    memory.update(0.0, cluster(crowded))
    assert memory.remaining_blocks(crowded) == 50 - 3 * 2


def test_a_reservation_counts_until_a_report_names_it() -> None:
    memory = LiveMemory()
    decode = view("d", Role.DECODE, free=50)
    memory.update(0.0, cluster(decode))
    assert memory.idle(decode)
    memory.reserve(0.0, "d", "r1", 7)
    memory.reserve(0.0, "d", "r2", 5)
    assert not memory.idle(decode)
    assert memory.remaining_blocks(decode) == 38
    decode = view("d", Role.DECODE, free=48, queue=[work("r1", 0, 8, 20)])
    memory.update(0.3, cluster(decode))
    assert memory.remaining_blocks(decode) == 48 - 5 - 5  # r1's growth, r2's promise
    memory.withdraw("r2")
    assert memory.remaining_blocks(decode) == 43


def test_a_reservation_that_no_report_names_ends() -> None:
    memory = LiveMemory()
    decode = view("d", Role.DECODE, free=50)
    memory.update(0.0, cluster(decode))
    memory.reserve(0.0, "d", "r1", 7)
    memory.update(1.9, cluster(decode))
    assert memory.remaining_blocks(decode) == 43
    memory.update(2.0, cluster(decode))
    assert memory.remaining_blocks(decode) == 50


def test_a_worker_that_left_takes_its_account_along() -> None:
    memory = LiveMemory()
    decode = view("d", Role.DECODE, free=50)
    memory.update(0.0, cluster(decode))
    memory.reserve(0.0, "d", "r1", 7)
    memory.update(0.1, cluster())
    memory.update(0.2, cluster(decode))
    assert memory.remaining_blocks(decode) == 50


def test_more_reserved_than_there_is_stays_visible() -> None:
    memory = LiveMemory()
    decode = view("d", Role.DECODE, free=1, queue=[work("r", 0, 4, 400)])
    memory.update(0.0, cluster(decode))
    assert memory.remaining_blocks(decode) == 1 - 100
