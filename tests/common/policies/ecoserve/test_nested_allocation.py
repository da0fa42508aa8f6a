"""Lending: the paper's Figure 9 in blocks of 4, every order of leaving, and a slot model against random lives."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.errors import InvariantViolated
from cohort.common.policies.ecoserve.nested_allocation import NestedAllocator
from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.sequences import preempt, resume, start
from cohort.common.sequence import Phase, Sequence
from tests.common.policies.baselines.drive import BLOCK, sequence
from tests.common.policies.ecoserve.drive import nested


def running(kv: NestedAllocator, name: str, prompt: int, length: int = 0, max_tokens: int = 200) -> Sequence:
    """Prompt computed, first token sampled; blocks for `length` more positions."""
    made = sequence(name, prompt, max_tokens=max_tokens)
    assert start(made, kv)
    made.computed = prompt
    made.tokens.append(1)
    if length:
        assert kv.claim(made, prompt + length)
    return made


def test_it_lends() -> None:
    sharing = nested(4).sharing
    assert sharing is not None and not sharing.on_demand  # the scheduler says which sequence lends


def test_figure_9a_the_second_half_of_32_tokens_is_lent_to_16() -> None:
    kv = nested(10)
    host = running(kv, "r1", 4, 32)  # blocks 0 | 1 … 8: tokens from position 4 on
    guest = running(kv, "r2", 4)
    assert kv.free_blocks == 0
    assert kv.lend(host, guest, first_block=5, positions=4 + 16)
    assert list(kv.blocks(guest.key))[1:] == list(kv.blocks(host.key))[5:9]
    assert kv.free_blocks == 0
    kv.check()
    for _ in range(16):
        assert kv.extend(host, host.computed + 1) and kv.extend(guest, guest.computed + 1)
        host.computed += 1
        guest.computed += 1
        kv.check()
    assert not kv.extend(host, host.computed + 1)  # the middle is reached
    assert kv.borrowers(host, 5) == [guest]
    kv.release(guest.key)
    assert kv.extend(host, host.computed + 1)
    assert kv.free_blocks == 1  # only the guest's own block
    kv.release(host.key)
    assert kv.free_blocks == 10
    kv.check()


def test_figure_9b_dolls_in_dolls_and_any_order_of_leaving() -> None:
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0], [0, 2, 1], [2, 0, 1]):
        kv = nested(12)
        one = running(kv, "r1", 4, 32)
        two, three = running(kv, "r2", 4), running(kv, "r3", 4)
        assert kv.lend(one, two, 5, 4 + 16)
        assert kv.lend(two, three, 3, 4 + 8)  # the second half of what was lent to r2
        assert kv.borrowers(one, 5) == [two]
        assert kv.borrowers(one, 7) == [three, two]
        assert [kv.first_lent(one, begin, 99) for begin in (0, 6, 9)] == [5, 6, None]
        assert [kv.first_lent(two, 0, 3), kv.first_lent(two, 0, 4), kv.first_lent(three, 0, 9)] == [None, 3, None]
        everybody = [one, two, three]
        for index in order:
            kv.release(everybody[index].key)
            kv.check()
        assert kv.free_blocks == 12


def test_a_borrower_outlives_its_lender() -> None:
    kv = nested(12)
    host, guest = running(kv, "h", 4, 32), running(kv, "g", 4)
    assert kv.lend(host, guest, 5, 20)
    kv.release(host.key)
    assert kv.free_blocks == 12 - 5
    guest.computed = 20
    kv.check()


def test_slots_in_use_or_lacking_are_not_lent() -> None:
    kv = nested(20)
    host, guest, other = running(kv, "h", 4, 32), running(kv, "g", 4), running(kv, "o", 4)
    assert not kv.lend(host, guest, 7, 20)  # beyond its table
    assert not kv.lend(host, guest, 5, 4)  # lacks nothing
    host.computed = 21
    assert not kv.lend(host, guest, 5, 12)  # KV of the lender is there
    host.computed = 20
    assert kv.lend(host, guest, 5, 12)
    assert not kv.lend(host, other, 6, 12)  # lent already
    kv.check()


def test_borrowed_blocks_are_no_prefix_for_others() -> None:
    kv = nested(20, caching=True)
    host, guest = running(kv, "h", 8, 32), running(kv, "g", 8)
    assert kv.lend(host, guest, 6, 16)
    guest.tokens += [1] * 8
    guest.computed = 16
    kv.committed(guest)
    kv.release(guest.key)
    assert kv.cached_blocks == 2  # its own two
    kv.release(host.key)
    assert kv.cached_blocks == 2  # the lender's are known by nothing that a borrower had there
    kv.check()


def test_a_late_borrower_goes_to_host_memory_and_returns() -> None:
    kv = nested(13, host=8)
    host, guest = running(kv, "h", 4, 32), running(kv, "g", 4)
    assert kv.lend(host, guest, 5, 20)
    guest.tokens += [1] * 6
    guest.computed = 10
    taken = list(kv.blocks(guest.key))[:3]
    plan = IterationPlan()
    preempt(guest, kv, plan, "swap")
    assert [(copy.direction, copy.device) for copy in kv.take_copies()] == [("out", tuple(taken))]
    assert kv.borrowers(host, 5) == []
    assert kv.extend(host, 24) and kv.extend(host, 36)
    kv.check()
    assert resume(guest, kv)
    assert not set(kv.blocks(guest.key)) & set(kv.blocks(host.key))
    kv.check()


def test_the_check_finds_a_lender_in_a_lent_block() -> None:
    kv = nested(12)
    host, guest = running(kv, "h", 4, 32), running(kv, "g", 4)
    assert kv.lend(host, guest, 5, 20)
    host.computed = 21
    with pytest.raises(InvariantViolated, match="is lent by h"):
        kv.check()


@dataclass
class Life:
    """`true`: positions it really needs beyond its prompt, whatever was predicted."""

    sequence: Sequence
    true: int
    owned: list[tuple[int, int]] = field(default_factory=list)


@given(
    lives=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(1, 60)), min_size=2, max_size=10),
    choices=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 20)), max_size=60),
    host_blocks=st.sampled_from([0, 5, 60]),
)
def test_no_slot_is_ever_owned_by_two_live_tokens(
    lives: list[tuple[int, int, int]], choices: list[tuple[int, int, int]], host_blocks: int
) -> None:
    """Random prompts, predictions and true lengths; lending, stepping, finishing, evicting in random order. Beside the
    allocator a list of slots in which every live token stands once: no sequence may write where another's is."""
    kv = nested(40, host_blocks)
    slots: dict[int, tuple[str, int]] = {}
    alive: list[Life] = []

    def slot(life: Life, position: int) -> int:
        return int(kv.blocks(life.sequence.key)[position // BLOCK]) * BLOCK + position % BLOCK

    def write(life: Life, position: int) -> None:
        where = slot(life, position)
        assert where not in slots, f"{life.sequence.key} writes over {slots[where]}"
        slots[where] = (life.sequence.key, position)

    def forget(life: Life) -> None:
        for where in [where for where, (key, _) in slots.items() if key == life.sequence.key]:
            del slots[where]

    for index, (prompt, predicted, true) in enumerate(lives):
        made = sequence(f"s{index}", prompt, max_tokens=200)
        if start(made, kv):
            life = Life(made, prompt + true)
            for position in range(prompt):
                write(life, position)
            made.computed = prompt
            made.tokens.append(1)
            kv.claim(made, prompt + predicted)
            alive.append(life)
    for first, second, what in choices:
        if not alive:
            break
        life, other = alive[first % len(alive)], alive[second % len(alive)]
        running_both = life.sequence.phase is other.sequence.phase is Phase.RUNNING
        if what < 8 and life is not other and running_both:
            kv.lend(life.sequence, other.sequence, what, other.sequence.computed + 4 * (1 + first % 3))
        elif what < 17 and life.sequence.phase is Phase.RUNNING:
            for _ in range(what - 7):
                if life.sequence.computed >= life.true or not kv.extend(life.sequence, life.sequence.computed + 1):
                    break
                write(life, life.sequence.computed)
                life.sequence.computed += 1
                life.sequence.tokens.append(1)
        elif what == 17 and life.sequence.phase is Phase.RUNNING:
            forget(life)
            preempt(life.sequence, kv, IterationPlan(), "swap")
            if life.sequence.phase is Phase.WAITING:
                alive.remove(life)
        elif what == 18 and life.sequence.phase is Phase.SWAPPED:
            if resume(life.sequence, kv):
                for position in range(life.sequence.computed):
                    write(life, position)
        elif what >= 19:
            forget(life)
            kv.release(life.sequence.key)
            alive.remove(life)
        kv.check()
    for life in alive:
        kv.release(life.sequence.key)
    kv.check()
    assert kv.free_blocks == 40
    assert kv.host_free_blocks == host_blocks
