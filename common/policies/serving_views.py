"""The manager's views of its workers, and which of them is least by some measure, kept up as they change.

    a report, a request sent, one withdrawn ──▶ ServingViews.touched ──▶ each Least: that view's key, nothing else

A choice among a thousand workers then costs what changed since the last one. The mapping is made anew when a worker
comes, goes or drains. Any other mapping of views names no changes: policies look at all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import Any

from cohort.common.policies.interface import InstanceView
from cohort.common.types import InstanceId, Request

_FORGOTTEN = 64
"""Changes or stale entries beyond which, if several times as many as workers, all is read anew."""

Key = Callable[[InstanceView], tuple[Any, ...]]


class ServingViews(dict[InstanceId, InstanceView]):
    """Workers that take requests, by name."""

    def __init__(self, views: Mapping[InstanceId, InstanceView]) -> None:
        super().__init__(views)
        self.touched: list[InstanceId] = []
        """Workers whose view changed, in turn, each as often as it did."""
        self.era = 0
        """Number of times that `touched` was emptied: who has not read it to its end reads all views."""

    def touch(self, name: InstanceId) -> None:
        """Note that a worker's view changed."""
        if name in self:
            self.touched.append(name)
            if len(self.touched) > 4 * len(self) + _FORGOTTEN:
                self.touched.clear()
                self.era += 1


class MinIndex:
    """View with the least key among `members`. A key ends with the view's name, so that no two are equal."""

    def __init__(
        self, key: Key, members: Callable[[InstanceView], bool] = lambda view: True, *, or_all: bool = False
    ) -> None:
        """`or_all`: where no view is a member, all are."""
        self._key, self._members, self._or_all = key, members, or_all
        self._views: ServingViews | None = None
        self._era = self._read = 0
        self._keys: dict[InstanceId, tuple[Any, ...]] = {}
        self._heap: list[tuple[Any, ...]] = []
        """Entries that are not in `_keys` are stale."""
        self._positions = self._tokens = 0

    def of(self, views: ServingViews) -> InstanceView | None:
        """Return the least member; None without members."""
        self._catch_up(views)
        heap, keys = self._heap, self._keys
        while heap:
            if keys[heap[0][-1]] == heap[0]:
                return views[heap[0][-1]]
            heappop(heap)
        return None

    def all_hold(self, views: ServingViews, request: Request) -> bool:
        """Return whether each member could hold the whole request: so could the least one."""
        self._catch_up(views)
        wanted = request.prompt_tokens + request.sampling.max_tokens
        return wanted <= self._tokens and request.max_positions <= self._positions

    def all_have(self, views: ServingViews, positions: int) -> bool:
        """Return whether each member's cache has `positions`."""
        self._catch_up(views)
        return positions <= self._positions

    def _catch_up(self, views: ServingViews) -> None:
        if views is not self._views or views.era != self._era:
            self._start(views)
            return
        touched = views.touched
        if self._read < len(touched):
            keys, heap, key = self._keys, self._heap, self._key
            for name in touched[self._read :]:
                former = keys.get(name)
                if former is not None and (now := key(views[name])) != former:
                    keys[name] = now
                    heappush(heap, now)
            self._read = len(touched)
            if len(heap) > 4 * len(keys) + _FORGOTTEN:
                self._rebuild()

    def _start(self, views: ServingViews) -> None:
        members: Iterable[InstanceView] = [view for view in views.values() if self._members(view)]
        if self._or_all and not members:
            members = views.values()
        self._views, self._era, self._read = views, views.era, len(views.touched)
        self._keys = {view.instance: self._key(view) for view in members}
        self._tokens = min([view.capacity.max_model_len for view in members], default=0)
        self._positions = min([view.capacity.positions for view in members], default=0)
        self._rebuild()

    def _rebuild(self) -> None:
        self._heap = list(self._keys.values())
        heapify(self._heap)
