"""Prompt lookup against a scan of the whole sequence, in any order of growth."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.engine.drafts.prompt_lookup import PLACES, PromptLookup


def _scanned(tokens: Sequence[int], limit: int, longest: int, shortest: int) -> list[int]:
    """Place by place: the definition, in O(tokens · sizes)."""

    def matched(end: int) -> int:
        sizes = [n for n in range(1, longest + 1) if n <= end and tokens[end - n : end] == tokens[len(tokens) - n :]]
        return max(sizes, default=0)

    places = [end for end in range(len(tokens) - 1, 0, -1) if matched(end) >= shortest][:PLACES]
    if not places:
        return []
    end = max(places, key=lambda place: (matched(place), place))
    extended = list(tokens)
    for place in range(limit):
        extended.append(extended[end + place])
    return extended[len(tokens) :]


def test_copies_what_followed() -> None:
    drafter = PromptLookup()
    prompt = [10, 11, 12, 13, 14, 15, 16, 1, 2, 3]
    assert drafter.propose([*prompt, 11, 12], 3) == [13, 14, 15]
    assert drafter.propose([*prompt, 11, 12, 13], 10) == [14, 15, 16, 1, 2, 3, 11, 12, 13, 14]


def test_the_longest_match_comes_first_then_the_most_recent() -> None:
    tokens = [1, 2, 3, 4, 50, 9, 3, 4, 60, 1, 2, 3, 4]
    assert PromptLookup().propose(tokens, 1) == [50]
    assert PromptLookup(longest=2).propose(tokens, 1) == [60]
    assert PromptLookup(longest=2).propose([3, 4, 1, 3, 4, 2, 3, 4], 1) == [2]


def test_a_period_goes_on() -> None:
    assert PromptLookup().propose([7, 8, 9, 7, 8, 9, 7], 5) == [8, 9, 7, 8, 9]
    assert PromptLookup().propose([5, 5, 5], 4) == [5, 5, 5, 5]


def test_nothing_stood_before() -> None:
    assert PromptLookup().propose([], 4) == []
    assert PromptLookup().propose([1], 4) == []
    assert PromptLookup().propose([1, 2, 3, 4], 4) == []
    assert PromptLookup(longest=3, shortest=3).propose([1, 2, 9, 1, 2], 4) == []
    assert PromptLookup().propose([1, 2, 3, 1, 2], 0) == []


def test_of_many_places_the_latest_are_looked_at() -> None:
    tokens = [1, 2, 3, 4, 60, *([9, 3, 4] * (PLACES - 2)), 8, 1, 2, 3, 4]
    assert PromptLookup().propose(tokens, 1) == [60]
    assert PromptLookup().propose([*tokens[:5], 9, 3, 4, 9, 3, 4, *tokens[5:]], 1) == [8]


def test_another_sequence_is_unknown() -> None:
    assert PromptLookup().propose([1, 2, 3, 1, 2], 1) == [3]
    assert PromptLookup().propose([1, 2], 4) == []


@pytest.mark.parametrize(("longest", "shortest"), [(4, 0), (2, 3)])
def test_sizes_that_match_nothing_are_refused(longest: int, shortest: int) -> None:
    with pytest.raises(ValueError, match="n-grams"):
        PromptLookup(longest, shortest)


@given(
    tokens=st.lists(st.integers(0, 3), max_size=60),
    growths=st.lists(st.integers(1, 12), max_size=20),
    limit=st.integers(0, 9),
    sizes=st.tuples(st.integers(1, 3), st.integers(0, 3)),
)
def test_equals_a_scan_however_the_sequence_grows(
    tokens: list[int], growths: list[int], limit: int, sizes: tuple[int, int]
) -> None:
    shortest, longest = sizes[0], sizes[0] + sizes[1]
    drafter = PromptLookup(longest, shortest)
    length = 0
    for growth in [*growths, len(tokens)]:
        length = min(length + growth, len(tokens))
        known = tokens[:length]
        assert drafter.propose(known, limit) == _scanned(known, limit, longest, shortest)
    assert PromptLookup(longest, shortest).propose(array("q", tokens), limit) == drafter.propose(tokens, limit)


class _Counted(list[int]):
    """Counts the elements that are read."""

    read = 0

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        found = super().__getitem__(at)
        self.read += len(found) if isinstance(at, slice) else 1
        return found


def test_a_token_more_does_not_read_the_sequence_again() -> None:
    tokens = _Counted([*range(5000), *([7, 8, 9] * 500)])
    drafter = PromptLookup()
    drafter.propose(tokens, 4)
    for following, most in ((range(100), 20), ([8, 9, 7, 1] * 25, 2 * PLACES + 20)):  # nothing stood before; much did
        before = tokens.read
        for token in following:
            tokens.append(token)
            drafter.propose(tokens, 4)
        assert (tokens.read - before) / 100 < most
