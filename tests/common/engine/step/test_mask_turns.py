"""Whose mask is computed next: shares, and a cheap mask's wait, counted in masks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.engine.step.mask_turns import Mask, MaskTurns


class Thread:
    """One thread that computes masks in virtual time, and the grammars in the order in which it began them."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.turns = MaskTurns(lambda: self.now_s)
        self.begun: list[str] = []
        self.waiting = 0

    def add(self, grammar: str, cost_s: float, meanwhile: Callable[[], object] = int) -> Future[Mask]:
        """`meanwhile`: what happens while it is computed."""
        self.waiting += 1

        def compute() -> Mask:
            self.begun.append(grammar)
            self.waiting -= 1
            meanwhile()
            self.now_s += cost_s
            return np.zeros(1, dtype=np.int32), cost_s

        return self.turns.add(grammar, cost_s, compute)

    def run(self, most: int = 10_000) -> None:
        while self.waiting and most:
            self.turns.compute_next()
            most -= 1


def test_a_cheap_mask_passes_all_costly_ones_but_the_one_that_is_computed() -> None:
    """128 choices of one request, and 40 requests with a grammar each."""
    for grammars in (["dear"] * 128, [f"dear{index}" for index in range(40)]):
        thread = Thread()
        thread.add(grammars[0], 0.04, partial(thread.add, "plain", 0.0001))
        for grammar in grammars[1:]:
            thread.add(grammar, 0.04)
        thread.run()
        assert thread.begun.index("plain") == 1 and len(thread.begun) == len(grammars) + 1


@given(
    costs=st.lists(st.sampled_from([0.005, 0.01, 0.03, 0.04]), min_size=1, max_size=30),
    choices=st.integers(1, 8),
    plain=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    seed=st.integers(0, 2**32),
)
def test_a_cheap_mask_waits_for_one_costly_one_beside_the_one_that_is_computed(
    costs: list[float], choices: int, plain: list[int], seed: int
) -> None:
    """Costly grammars always have a mask that waits; cheap ones come while the masks of these numbers are computed."""
    thread, random, due = Thread(), Random(seed), deque(sorted(plain))
    waits: list[int] = []

    def count(since: int) -> None:
        waits.append(sum(not grammar.startswith("plain") for grammar in thread.begun[since:]))

    def follow(grammar: str, cost_s: float) -> None:
        if len(thread.begun) < 150 and random.random() < 0.9:
            thread.add(grammar, cost_s, partial(follow, grammar, cost_s))
        while due and due[0] <= len(thread.begun):
            due.popleft()
            thread.add(f"plain{len(due) % 3}", 0.00005, partial(count, len(thread.begun)))

    for index, cost_s in enumerate(costs):
        for _ in range(choices):
            thread.add(f"{index}", cost_s, partial(follow, f"{index}", cost_s))
    thread.run()
    assert not waits or max(waits) <= 1


@given(st.lists(st.sampled_from([0.0001, 0.001, 0.01, 0.04]), min_size=2, max_size=12), st.integers(0, 2**32))
def test_grammars_that_wait_all_the_time_have_equal_shares(costs: list[float], seed: int) -> None:
    """Up to a longest mask of each; so none waits for ever, whatever the others cost."""
    thread, random = Thread(), Random(seed)
    had = dict.fromkeys(range(len(costs)), 0.0)

    def follow(index: int) -> None:
        had[index] += costs[index]
        thread.add(f"{index}", costs[index], partial(follow, index))

    for index in [*random.sample(range(len(costs)), len(costs)), *had]:  # one waits while another is computed
        thread.add(f"{index}", costs[index], partial(follow, index))
    for _ in range(40):
        thread.run(most=50)
        assert max(had.values()) - min(had.values()) <= 2 * max(costs) + 1e-9


def test_a_costly_mask_is_not_passed_for_ever_by_new_grammars() -> None:
    thread = Thread()
    for _ in range(2):
        thread.add("dear", 0.04)

    def follow() -> None:
        if len(thread.begun) < 5000:
            thread.add(f"plain{len(thread.begun)}", 0.0005, follow)

    thread.add("plain", 0.0005, follow)
    thread.run()
    assert thread.begun.index("dear") <= 400


def test_masks_of_one_grammar_go_in_the_order_of_their_arrival_and_a_failure_is_the_answers() -> None:
    turns = MaskTurns(lambda: 0.0)
    order: list[int] = []

    def compute(number: int) -> Mask:
        order.append(number)
        if number == 1:
            raise ValueError("no mask")
        return np.array([number], dtype=np.int32), 0.0

    masks = [turns.add("same", 1.0 / (1 + number), partial(compute, number)) for number in range(3)]
    for _ in masks:
        turns.compute_next()
    assert order == [0, 1, 2] and masks[2].result()[0].tolist() == [2]
    with pytest.raises(ValueError, match="no mask"):
        masks[1].result()
