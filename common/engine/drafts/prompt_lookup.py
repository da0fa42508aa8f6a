"""Prompt lookup: what followed the last tokens where they stood before, in the prompt or in the response itself.

Called by `drafting`. Finds text that is copied (summaries, edited code, quotations, tables), and
loops. Short n-grams alone are indexed, once, when a token behind them is known; longer matches are found by comparing
tokens where these stood. So a call looks at what is new and at a few places, never at the whole sequence again, and
where nothing stood before it costs one entry and one question. Algorithm: prompt lookup decoding (Saxena 2023), with an
index instead of a scan.

    tokens    … a b c d  x … q c d  y … a b c d         the bigram (c d) stood at two places; the older one is preceded
                      ▲          ▲                       by (a b) as well, so x follows
                      └─ before ─┘◀── most recent
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 4
SHORTEST = 2
"""A single token that stood before says too little of what follows."""
PLACES = 32
"""Most recent ones of an n-gram that are looked at: a bigram of a long text stands at hundreds."""


class PromptLookup:
    """The lookup of one sequence. Holds about 130 bytes for each of its tokens."""

    __slots__ = ("_before", "_ends", "_longest", "_shortest")

    def __init__(self, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        """Match n-grams from `longest` down to `shortest` tokens, the longest first."""
        if not 1 <= shortest <= longest:
            raise ValueError(
                f"n-grams of {shortest} to {longest} tokens: the shortest must be 1 or more, and no longer"
            )
        self._longest, self._shortest = longest, shortest
        self._ends: dict[tuple[int, ...], int] = {}
        """n-gram of `shortest` tokens → where its most recent occurrence ends, with a token behind it."""
        self._before = [0] * shortest
        """The end of the occurrence before, by where an occurrence ends; 0 = there is none."""

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Return what followed the longest match of the end of `tokens`, of equally long ones the most recent; among
        the latest `PLACES` at which its last tokens stood.

        An occurrence that overlaps the end is a period, which goes on: the copy may read what it has just written.
        """
        length, shortest, longest = len(tokens), self._shortest, self._longest
        ends, before = self._ends, self._before
        for end in range(len(before), length):
            key = tuple(tokens[end - shortest : end])
            before.append(ends.get(key, 0))
            ends[key] = end
        place = ends.get(tuple(tokens[-shortest:]), 0)
        if not place:
            return []
        end, matched = place, 0
        for _ in range(PLACES):
            size = shortest
            while size < longest and size < place and tokens[place - size - 1] == tokens[length - size - 1]:
                size += 1
            if size > matched:
                end, matched = place, size
            place = before[place]
            if matched == longest or not place:
                break
        found = list(tokens[end : end + max(limit, 0)])
        period = length - end
        while len(found) < limit:
            found.append(found[len(found) - period])
        return found
