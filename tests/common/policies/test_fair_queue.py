"""Shares of a fair queue, against a literal reading of its rule and against the bounds that it promises."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.policies.fair_queue import FairQueue

WEIGHTS = {"a": 1, "b": 2, "c": 4, "d": 1}
LARGEST = 40


@dataclass
class Literal:
    """The same rule without heaps, in exact numbers: everything is looked at every time."""

    waiting: list[tuple[str, int, str, int]] = field(default_factory=list)
    """Owner, rank, name, cost."""
    finish: dict[str, Fraction] = field(default_factory=dict)
    start: dict[str, Fraction] = field(default_factory=dict)
    now: Fraction = Fraction(0)

    def add(self, owner: str, rank: int, name: str, cost: int) -> None:
        if not any(item[0] == owner for item in self.waiting):
            self.start[owner] = max(self.now, self.finish.get(owner, Fraction(0)))
        self.waiting.append((owner, rank, name, cost))

    def remove(self, name: str) -> None:
        self.waiting = [item for item in self.waiting if item[2] != name]

    def next(self) -> str | None:
        if not self.waiting:
            return None
        owner = min({item[0] for item in self.waiting}, key=lambda each: (self.start[each], each))
        item = min((each for each in self.waiting if each[0] == owner), key=lambda each: (each[1], each[2]))
        self.waiting.remove(item)
        self.now = self.start[owner]
        self.start[owner] = self.finish[owner] = self.now + Fraction(item[3], WEIGHTS[owner])
        return item[2]


adds = st.tuples(st.just("add"), st.sampled_from("abcd"), st.integers(0, 3), st.integers(1, LARGEST))
steps = st.lists(
    st.one_of(adds, adds, st.just(("next",)), st.tuples(st.just("remove"), st.integers(0, 60))), max_size=120
)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_it_is_the_literal_rule(script: list[tuple[Any, ...]]) -> None:
    queue, literal = FairQueue(), Literal()
    for number, step in enumerate(script):
        match step:
            case ("add", owner, rank, cost):
                queue.add(owner, f"{number:03}", rank=rank, cost=cost, weight=WEIGHTS[owner])
                literal.add(owner, rank, f"{number:03}", cost)
            case ("remove", place):
                name = f"{place:03}"
                assert queue.remove(name) == any(item[2] == name for item in literal.waiting)
                literal.remove(name)
            case _ if number % 2 and (first := queue.first(2)):
                queue.take(first[0])
                assert first[0] == literal.next()
            case _:
                assert queue.next() == literal.next()
        assert len(queue) == len(literal.waiting)
    ahead = queue.first(99)
    left = [queue.next() for _ in range(len(queue))]
    assert left == [literal.next() for _ in left] and queue.next() is None  # all that waits is served
    assert ahead == left[:99]


@settings(max_examples=200, deadline=None)
@given(steps)
def test_no_owner_gets_more_than_its_share_beside_one_that_waits(script: list[tuple[Any, ...]]) -> None:
    """In every stretch in which i waits throughout, whatever j does: S_j / w_j <= S_i / w_i + L / w_i + L / w_j, where
    S is what was served meanwhile and L the largest request. So nobody starves, and two that wait get equal shares."""
    queue = FairQueue()
    cost_of: dict[str, tuple[str, int]] = {}
    waits: dict[str, set[str]] = {owner: set() for owner in WEIGHTS}
    served = dict.fromkeys(WEIGHTS, 0)
    since: dict[str, list[dict[str, int]]] = {owner: [] for owner in WEIGHTS}
    """Of each owner that waits now, what all had been served at every moment since it began to wait."""
    for number, step in enumerate(script):
        name = f"{number:03}"
        if step[0] == "add":
            owner, cost = step[1], step[3]
            queue.add(owner, name, rank=step[2], cost=cost, weight=WEIGHTS[owner])
            cost_of[name] = owner, cost
            waits[owner].add(name)
        elif (gone := queue.next()) is not None:
            owner, cost = cost_of[gone]
            waits[owner].remove(gone)
            served[owner] += cost
        for i in WEIGHTS:
            for then in since[i]:
                own = (served[i] - then[i]) / WEIGHTS[i]
                for j in WEIGHTS:
                    theirs = (served[j] - then[j]) / WEIGHTS[j]
                    assert theirs <= own + LARGEST / WEIGHTS[i] + LARGEST / WEIGHTS[j] + 1e-6, (i, j)
            since[i] = [*since[i], dict(served)] if waits[i] else []


def served_of(queue: FairQueue, count: int) -> str:
    return "".join(str(queue.next())[0] for _ in range(count))


def test_weights_are_shares() -> None:
    queue = FairQueue()
    for number in range(40):
        queue.add("a", f"a{number:02}", rank=number, cost=10, weight=3)
        queue.add("b", f"b{number:02}", rank=number, cost=10, weight=1)
    went = served_of(queue, 40)
    assert (went.count("a"), went.count("b")) == (30, 10)


def test_an_owner_that_was_alone_owes_nothing_and_one_that_was_away_has_saved_nothing() -> None:
    queue = FairQueue()
    for number in range(60):
        queue.add("a", f"a{number:02}", rank=number, cost=10)
    served_of(queue, 30)
    for number in range(30):
        queue.add("b", f"b{number:02}", rank=number, cost=10)
    went = served_of(queue, 20)
    assert abs(went.count("a") - went.count("b")) <= 1


def test_an_owner_that_comes_back_has_saved_nothing_while_it_was_away() -> None:
    queue = FairQueue()
    queue.add("b", "b-first", rank=0, cost=10)
    assert queue.next() == "b-first"
    for number in range(60):
        queue.add("a", f"a{number:02}", rank=number, cost=10)
    served_of(queue, 30)
    for number in range(30):
        queue.add("b", f"b{number:02}", rank=number, cost=10)
    went = served_of(queue, 20)
    assert abs(went.count("a") - went.count("b")) <= 1


def test_what_is_given_back_is_served_to_its_owner() -> None:
    queue = FairQueue()
    for number in range(8):
        queue.add("a", f"a{number}", rank=number, cost=100 if number == 0 else 10)
        queue.add("b", f"b{number}", rank=number, cost=10)
    assert queue.next() == "a0"
    queue.give_back("a", 100)  # cancelled before it ran
    assert served_of(queue, 4) in ("abab", "abba")


def test_owners_without_requests_are_forgotten() -> None:
    queue = FairQueue()
    for number in range(2000):
        queue.add(f"owner {number}", str(number), rank=0, cost=1)
        assert queue.next() == str(number)
        queue.add("regular", f"r{number}", rank=0, cost=1)
        assert queue.next() == f"r{number}"
    assert len(queue._owners) < 200
