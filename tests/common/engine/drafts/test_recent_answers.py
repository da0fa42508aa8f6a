"""The automaton against a scan of its texts, and what drafters make of it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.engine.drafts.interface import Drafter
from cohort.common.engine.drafts.recent_answers import SHORTEST, AnswerLookup, AnswerMemory, RecentAnswers
from cohort.common.engine.drafts.suffix_automaton import ROOT, SuffixAutomaton

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


def test_what_followed_in_another_response() -> None:
    memory = AnswerMemory()
    first: Drafter = memory.drafter("a")
    first.observe([1, 2, 3, 50, 51, 52, 53, 54], prompt_tokens=3)
    assert memory.drafter("a").propose([9, 50, 51, 52], 8) == [53, 54]
    assert memory.drafter("a").propose([9, 51, 52], 8) == []  # fewer tokens than SHORTEST
    assert memory.drafter("a").propose([1, 2, 3], 8) == []  # a prompt is not kept
    assert memory.drafter("b").propose([9, 50, 51, 52], 8) == []
    assert SHORTEST == 3


def test_the_sequence_itself_comes_first() -> None:
    memory = AnswerMemory()
    memory.drafter("").observe([50, 51, 52, 53], 0)
    assert memory.drafter("").propose([50, 51, 52, 7, 50, 51, 52], 1) == [7]


def test_the_more_recent_response_is_followed() -> None:
    memory = AnswerMemory()
    memory.drafter("").observe([1, 2, 3, 4], 0)
    memory.drafter("").observe([1, 2, 3, 5], 0)
    assert memory.drafter("").propose([1, 2, 3], 1) == [5]


def test_old_responses_and_old_keys_are_forgotten() -> None:
    chance, memory = random.Random(0), AnswerMemory(capacity_tokens=400, keys=2)
    old = [1000, 1001, 1002, 1003]
    memory.drafter("a").observe(old, 0)
    assert memory.drafter("a").propose(old[:3], 1) == [1003]
    for _ in range(40):
        memory.drafter("a").observe([chance.randrange(500) for _ in range(30)], 0)
        answers = memory._answers["a"]
        assert sum(len(each) for each in answers.generations) <= 400
    assert memory.drafter("a").propose(old[:3], 1) == []
    memory.drafter("a").observe(old, 0)
    memory.drafter("b")
    memory.drafter("c")
    assert memory.drafter("a").propose(old[:3], 1) == []


def test_a_drafter_goes_on_over_generations() -> None:
    answers = RecentAnswers(capacity_tokens=40)
    answers.add([1, 2, 3, 4, 5, 6, 7, 8])
    drafter = AnswerLookup(answers)
    assert drafter.propose([9, 1, 2, 3], 2) == [4, 5]
    answers.add(list(range(20, 35)))  # another generation
    assert len(answers.generations) == 2
    assert drafter.propose([9, 1, 2, 3, 4], 2) == [5, 6]
    assert drafter.propose([9, 1, 2, 3, 4, 20, 21, 22], 2) == [23, 24]


def test_a_response_longer_than_the_memory_leaves_its_end() -> None:
    answers = RecentAnswers(capacity_tokens=20)
    answers.add(range(100))
    assert AnswerLookup(answers).propose([96, 97, 98], 3) == [99]
    assert AnswerLookup(answers).propose([50, 51, 52], 3) == []


@pytest.mark.parametrize(("capacity", "keys"), [(3, 1), (100, 0)])
def test_sizes_that_hold_nothing_are_refused(capacity: int, keys: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        AnswerMemory(capacity, keys)
