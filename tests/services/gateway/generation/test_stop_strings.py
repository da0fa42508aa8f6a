from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.services.gateway.generation.choice import StopAutomaton, StopStrings
from tests.counting import lines_run


def run(stops: list[str], chunks: list[str]) -> tuple[list[str], str | None]:
    watcher = StopStrings(StopAutomaton(stops))
    out = [watcher.feed(chunk) for chunk in chunks]
    return [*out, watcher.flush()], watcher.matched


def test_a_stop_string_split_over_chunks_never_leaks() -> None:
    assert run(["STOP"], ["one S", "T", "O", "P two"]) == (["one ", "", "", "", ""], "STOP")


def test_harmless_text_is_released_at_once() -> None:
    assert run(["STOP"], ["one S", "Tx", "ST", ""]) == (["one ", "STx", "", "", "ST"], None)


def test_no_stop_strings_hold_nothing_back() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], None)


def test_the_first_complete_one_counts() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == (["a", ""], "bc")


def test_of_two_complete_at_once_the_longer_one_counts() -> None:
    assert run(["b", "ab"], ["xab"]) == (["x", ""], "ab")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError):
        StopAutomaton([""])


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=4), st.lists(st.text("abc", max_size=5), max_size=8))
def test_equals_a_search_over_the_whole_text(stops: list[str], chunks: list[str]) -> None:
    out, matched = run(stops, chunks)
    text = "".join(chunks)
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        assert ("".join(out), matched) == (text, None)
        return
    end, negative = min(ends)
    assert ("".join(out), matched) == (text[: end + negative], text[end + negative : end])


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4), st.text("abc", max_size=12))
def test_holds_back_exactly_a_possible_stop_string(stops: list[str], text: str) -> None:
    watcher = StopStrings(StopAutomaton(stops))
    sent = ""
    for index, character in enumerate(text):
        sent += watcher.feed(character)
        if watcher.matched is not None:
            return
        seen = text[: index + 1]
        longest = max((size for stop in stops for size in range(len(stop)) if seen.endswith(stop[:size])), default=0)
        assert sent == seen[: len(seen) - longest]


def test_work_per_character_does_not_grow_with_the_stop_strings() -> None:
    # The worst case of a naive search: every character begins a long near-match.
    def fed(stops: list[str]) -> int:
        watcher = StopStrings(StopAutomaton(stops))

        def feed() -> None:
            for _ in range(5_000):
                watcher.feed("a")

        return lines_run(feed)

    assert fed(["a" * 1000 + "b"] * 16) == fed(["a" * 1000 + "b"]) <= fed(["ab"])
