"""Which prompts were computed where: what the placement believes of the workers' prefix caches.

Workers do not report what they have cached. Recorded is the beginning of every placed prompt in chunks, each named by
a hash of it and of all before it; a worker's cache has dropped a chunk once as much was placed there since as the cache
holds. Only an estimate of time follows: the worker looks tokens up itself, by real hashes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from cohort.common.policies.interface import InstanceView
from cohort.common.types import InstanceId, Request

_SHORT, _SHORTS, _LONG = 128, 8, 512
"""Tokens of a chunk: so many of the first ones, and of all others. So much of a common prefix may go unnoticed."""
_CHUNKS = 65_536
"""Chunks remembered at most, of all workers together (some 20 MB)."""

Cached = dict[InstanceId, int]
"""Tokens of a prompt in each worker's cache; workers without any may be absent."""


@dataclass(slots=True)
class _Cache:
    """Cache of one worker. `taken`: positions placed there so far; `view`: names the process."""

    view: InstanceView
    positions: int
    taken: float = 0.0


class Chain:
    """Full chunks of a prompt: where each ends, and its hash, computed when asked for."""

    __slots__ = ("_hashes", "ends", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        tokens = len(request.tokens)
        self.ends = list(range(_SHORT, min(tokens, _SHORT * _SHORTS) + 1, _SHORT))
        self.ends += range(_SHORT * _SHORTS + _LONG, tokens + 1, _LONG)
        self._hashes: list[int] = []

    def __getitem__(self, index: int) -> int:
        hashes = self._hashes
        if index < len(hashes):
            return hashes[index]
        tokens, before = self.request.tokens, hash(self.request.cache_salt)
        if hashes:
            before = hashes[-1]
        for at in range(len(hashes), index + 1):
            chunk = tokens[self.ends[at - 1] if at else 0 : self.ends[at]]
            before = hash((before, chunk.tobytes())) if isinstance(chunk, array) else hash((before, *chunk))
            hashes.append(before)
        return before


class PrefixRecord:
    def __init__(self) -> None:
        self._holders: OrderedDict[tuple[str, int], dict[InstanceId, float]] = OrderedDict()
        """Salt and hash of a chunk → workers that computed it, and `taken` there by then."""
        self._caches: dict[InstanceId, _Cache] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def cached(self, chain: Chain) -> Cached:
        """Return the tokens of this prompt in each worker's cache; unnamed workers have none."""
        found: Cached = {}
        request = chain.request
        if request.sampling.computes_all:
            return found
        start = 0
        for index, end in enumerate(chain.ends):
            holders = self._holders.get((request.cache_salt, chain[index]))
            going_on = False
            for name, taken in holders.items() if holders else ():
                if found.get(name, 0) == start and self._lasts(name, taken):
                    found[name] = end
                    going_on = True
            if not going_on:
                break
            start = end
        most = len(request.tokens) - 1
        return {name: min(tokens, most) for name, tokens in found.items()}

    def placed(self, chain: Chain, view: InstanceView, new_positions: float) -> None:
        """Record a prompt that is computed there, and takes `new_positions` beside those it found."""
        name, salt = view.instance, chain.request.cache_salt
        cache = self._caches.get(name)
        if cache is None or cache.view is not view:  # another process of this name starts with an empty cache
            self.forget(name)
            cache = self._caches[name] = _Cache(view, view.capacity.positions)
        cache.taken += new_positions
        holders = self._holders
        for index in range(len(chain.ends)):
            key = (salt, chain[index])
            entry = holders.get(key)
            if entry is None:
                entry = holders[key] = {}
            else:
                holders.move_to_end(key)
            entry[name] = cache.taken
        while len(holders) > _CHUNKS:
            holders.popitem(last=False)

    def forget(self, name: InstanceId) -> None:
        """Forget a worker, whose cache is gone."""
        if self._caches.pop(name, None) is not None:
            for entry in self._holders.values():
                entry.pop(name, None)

    def only(self, views: Mapping[InstanceId, InstanceView]) -> None:
        """Forget workers that are not in `views`, or are another process there."""
        for name in [name for name, cache in self._caches.items() if views.get(name) is not cache.view]:
            self.forget(name)

    def _lasts(self, name: InstanceId, taken: float) -> bool:
        """Return whether a chunk is still cached. Between a request's placement and its release others take as many
        positions as are in use; then the free ones and the caches of all released before: the whole cache."""
        cache = self._caches.get(name)
        return cache is not None and cache.taken - taken < cache.positions
