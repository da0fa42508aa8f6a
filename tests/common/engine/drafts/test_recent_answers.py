"""The automaton against a scan of its texts, and what drafters make of it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.engine.drafts.recent_answers import ROOT, SHORTEST, AnswerLookup, AnswerMemory, SuffixAutomaton
from cohort.common.engine.runner.drafting import Drafter

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=25), max_size=5)


def _stands_in(piece: Sequence[int], texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What follows each occurrence."""
    size = len(piece)
    return [
        list(text[at + size :])
        for text in texts
        for at in range(len(text) - size + 1)
        if list(text[at : at + size]) == list(piece)
    ]


@given(
    texts=TEXTS, tokens=st.lists(st.integers(0, 3), max_size=30), limit=st.integers(1, 6), shortest=st.integers(1, 3)
)
def test_the_longest_suffix_that_stands_in_a_text(
    texts: list[list[int]], tokens: list[int], limit: int, shortest: int
) -> None:
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.add(text)
    match = (ROOT, 0)
    for count, token in enumerate(tokens, start=1):
        match = automaton.advance(*match, token)
        known = tokens[:count]
        longest = next(size for size in range(count, -1, -1) if size == 0 or _stands_in(known[-size:], texts))
        assert match[1] == longest
        found = automaton.following(*match, limit, shortest)
        goes_on = [
            size for size in range(shortest, longest + 1) if any(rest for rest in _stands_in(known[-size:], texts))
        ]
        if not goes_on:
            assert found == []
        elif found:
            ends = [rest[:limit] for size in goes_on for rest in _stands_in(known[-size:], texts)]
            assert found in ends
        else:  # every class on the way has its last occurrence at the end of a text
            assert any(not rest for rest in _stands_in(known[-max(goes_on) :], texts))


@given(texts=TEXTS, more=TEXTS, tokens=st.lists(st.integers(0, 2), min_size=1, max_size=20), split=st.integers(0, 20))
def test_a_match_outlives_texts_that_are_added(
    texts: list[list[int]], more: list[list[int]], tokens: list[int], split: int
) -> None:
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.add(text)
    match = (ROOT, 0)
    for count, token in enumerate(tokens):
        if count == split:
            for text in more:
                automaton.add(text)
        match = automaton.advance(*match, token)
        present = texts if count < split else texts + more
        length = match[1]
        assert length == 0 or _stands_in(tokens[count + 1 - length : count + 1], present)
        found = automaton.following(*match, 3, 1)
        assert not found or any(
            rest[:3] == found
            for size in range(1, length + 1)
            for rest in _stands_in(tokens[count + 1 - size : count + 1], present)
        )


@given(texts=TEXTS, cuts=st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_a_text_in_parts_is_the_text(texts: list[list[int]], cuts: list[int]) -> None:
    whole, parts = SuffixAutomaton(), SuffixAutomaton()
    for text in texts:
        whole.add(text)
        first = 0
        for part in [*cuts, len(text)]:
            parts.extend(text[first : first + part])
            first += part
        parts.end()
    for name in SuffixAutomaton.__slots__:
        assert getattr(whole, name) == getattr(parts, name)


def _memory(*answers: Sequence[int], key: str = "a", **sizes: int) -> AnswerMemory:
    memory = AnswerMemory(**sizes)
    for answer in answers:
        memory.learn(key, answer)
    memory.take_in(10_000)
    return memory


def _proposed(memory: AnswerMemory, tokens: Sequence[int], limit: int, key: str = "a") -> list[int]:
    drafter: Drafter = AnswerLookup(memory, key)
    return drafter.propose(tokens, limit)


def test_what_followed_in_another_response() -> None:
    memory = _memory([50, 51, 52, 53, 54])
    assert _proposed(memory, [9, 50, 51, 52], 8) == [53, 54]
    assert _proposed(memory, [9, 51, 52], 8) == []  # fewer tokens than SHORTEST
    assert _proposed(memory, [9, 50, 51, 52], 8, key="b") == []
    assert SHORTEST == 3


def test_how_much_was_matched_is_told() -> None:
    drafter = AnswerLookup(_memory([50, 51, 52, 53, 54]), "a")
    assert (drafter.propose([50, 51, 52], 1), drafter.matched) == ([53], 3)
    assert (drafter.propose([50, 51, 52, 53], 1), drafter.matched) == ([54], 4)


def test_the_more_recent_response_is_followed() -> None:
    assert _proposed(_memory([1, 2, 3, 4], [1, 2, 3, 5]), [1, 2, 3], 1) == [5]


def test_a_response_is_taken_in_by_parts() -> None:
    memory = AnswerMemory()
    memory.learn("a", range(100))
    memory.learn("b", range(200, 210))
    memory.take_in(40)
    assert _proposed(memory, [20, 21, 22], 2) == [23, 24]
    assert _proposed(memory, [37, 38, 39], 2) == []
    memory.take_in(63)
    assert _proposed(memory, [37, 38, 39], 2) == [40, 41]
    assert _proposed(memory, [200, 201, 202], 2, key="b") == []
    memory.take_in(63)
    assert _proposed(memory, [200, 201, 202], 2, key="b") == [203, 204]
    for _ in range(100):  # more than may wait
        memory.learn("a", [1])
    assert len(memory._waiting) == 64


@given(
    learned=st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 2), max_size=12)), max_size=12),
    asked=st.lists(st.integers(0, 2), min_size=3, max_size=10),
    keys=st.integers(1, 3),
    step=st.integers(1, 9),
)
def test_a_key_sees_its_own_responses_alone(
    learned: list[tuple[str, list[int]]], asked: list[int], keys: int, step: int
) -> None:
    """Whatever others were answered, and within the bounds: of tokens for each key, and of keys."""
    memory = AnswerMemory(capacity_tokens=24, keys=keys)
    for key, answer in learned:
        memory.learn(key, answer)
        memory.take_in(step)
        assert len(memory._answers) <= keys
        assert all(sum(map(len, each.generations)) <= 24 for each in memory._answers.values())
    for key in "abc":
        own = [answer for by, answer in learned if by == key]
        found = _proposed(memory, asked, 4, key)
        assert not found or any(
            rest[: len(found)] == found
            for size in range(SHORTEST, len(asked) + 1)
            for rest in _stands_in(asked[-size:], own)
        )


def test_old_responses_and_old_keys_are_forgotten() -> None:
    old = [1000, 1001, 1002, 1003]
    chance, memory = random.Random(0), _memory(old, capacity_tokens=400, keys=2)
    assert _proposed(memory, old[:3], 1) == [1003]
    for _ in range(40):
        memory.learn("a", [chance.randrange(500) for _ in range(30)])
        memory.take_in(1000)
        assert sum(len(each) for each in memory._answers["a"].generations) <= 400
    assert _proposed(memory, old[:3], 1) == []
    for key in "abac":  # the second time it is used
        memory.learn(key, old)
        memory.take_in(1000)
    assert [_proposed(memory, old[:3], 1, key) for key in "abc"] == [[1003], [], [1003]]


def test_a_drafter_goes_on_over_generations() -> None:
    memory = _memory([1, 2, 3, 4, 5, 6, 7, 8], capacity_tokens=40)
    drafter = AnswerLookup(memory, "a")
    assert drafter.propose([9, 1, 2, 3], 2) == [4, 5]
    memory.learn("a", list(range(20, 35)))  # another generation
    memory.take_in(100)
    assert len(memory._answers["a"].generations) == 2
    assert drafter.propose([9, 1, 2, 3, 4], 2) == [5, 6]
    assert drafter.propose([9, 1, 2, 3, 4, 20, 21, 22], 2) == [23, 24]


def test_a_response_longer_than_the_memory_leaves_its_end() -> None:
    memory = _memory(range(100), capacity_tokens=20)
    assert _proposed(memory, [96, 97, 98], 3) == [99]
    assert _proposed(memory, [50, 51, 52], 3) == []


@pytest.mark.parametrize(("capacity", "keys"), [(3, 1), (100, 0)])
def test_sizes_that_hold_nothing_are_refused(capacity: int, keys: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        AnswerMemory(capacity, keys)
