"""Stop strings over streamed text: nothing of one ever leaves, and nothing is held back longer than needed.

An Aho–Corasick automaton over all stop strings of a request. Its depth after a character is the length of the longest
suffix of the text that could still become a stop string: exactly what must be held back. Constant work per character,
amortised. Called by `choice.py`; pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Watches one stream. Of several stop strings the one that is complete first counts; of those complete at the
    same character, the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("an empty stop string stops everywhere")
        self._next, self._fail, self._depth, self._match = _automaton(stops)
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that can go out now. After a match (`matched`) nothing ever comes out again."""
        if self.matched is not None:
            return ""
        if len(self._next) == 1:
            return text
        pending = self._held + text
        state = self._state
        for index in range(len(self._held), len(pending)):
            character = pending[index]
            while state and character not in self._next[state]:
                state = self._fail[state]
            state = self._next[state].get(character, 0)
            if length := self._match[state]:
                end = index + 1
                self.matched = pending[end - length : end]
                self._held = ""
                return pending[: end - length]
        self._state = state
        keep = self._depth[state]
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def flush(self) -> str:
        """The stream ended: what was held back was no stop string."""
        held, self._held, self._state = self._held, "", 0
        return held


def _automaton(stops: Sequence[str]) -> tuple[list[dict[str, int]], list[int], list[int], list[int]]:
    """Trie edges, failure links, depths, and per state the length of the longest stop string that ends there."""
    edges: list[dict[str, int]] = [{}]
    depth = [0]
    match = [0]
    for stop in stops:
        state = 0
        for character in stop:
            if character not in edges[state]:
                edges.append({})
                depth.append(depth[state] + 1)
                match.append(0)
                edges[state][character] = len(edges) - 1
            state = edges[state][character]
        match[state] = len(stop)
    fail = [0] * len(edges)
    queue = deque(edges[0].values())
    while queue:  # breadth first: a failure link always points to a shallower, finished state
        state = queue.popleft()
        for character, child in edges[state].items():
            link = fail[state]
            while link and character not in edges[link]:
                link = fail[link]
            fail[child] = edges[link].get(character, 0)
            match[child] = match[child] or match[fail[child]]
            queue.append(child)
    return edges, fail, depth, match
