"""Which workers a placement looks at: all of a small cluster, a few of a large one.

    up to `MAX_DEVICES` devices ─▶ every worker
    more                 ─▶ where its prefix is cached, where its adapter is, those that were next to best last time,
                            the others in turn

The best of a few, some of them good a moment ago, is nearly the best of all (Mitzenmacher, Prabhakar, Shah: Load
balancing with memory, 2002). Workers that share a device are looked at together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cohort.common.policies.interface import InstanceView
from cohort.common.types import InstanceId

MAX_DEVICES = 8
"""Devices looked at for one request."""
_CACHED = 2
"""Max devices chosen for a cached part of the prompt."""
_MAX_WITH_ADAPTER = 2
"""Max devices chosen for their adapter."""
_REMEMBERED = 3
"""Max devices chosen because they were good for the request before."""


class Shortlist:
    def __init__(self) -> None:
        self._views: Mapping[InstanceId, InstanceView] = {}
        self._members = 0
        self._devices: list[list[InstanceId]] = []
        self._device_of: dict[InstanceId, int] = {}
        self._next = 0
        self._remembered: list[int] = []
        self._with_adapter: dict[str, list[InstanceId]] = {}
        """Workers that requests of an adapter went to last."""

    @property
    def devices(self) -> int:
        """Number of devices in the cluster."""
        return len(self._devices)

    @property
    def standbys(self) -> int:
        """Number of workers beside the first one of their device."""
        return self._members - len(self._devices)

    def changed(self, views: Mapping[InstanceId, InstanceView]) -> bool:
        """Take the cluster in; True if it changed. The manager makes a new mapping when a worker comes or goes."""
        if views is self._views and len(views) == self._members:
            return False
        self._views, self._members = views, len(views)
        devices: dict[str, list[InstanceId]] = {}
        for name, view in views.items():
            devices.setdefault(view.capacity.device or name, []).append(name)
        self._devices = list(devices.values())
        self._device_of = {name: index for index, names in enumerate(self._devices) for name in names}
        self._remembered.clear()
        return True

    def of(
        self, preferred: InstanceId | None, cached: Mapping[InstanceId, int], adapter: str = ""
    ) -> Mapping[InstanceId, InstanceView]:
        """Choose workers. `cached`: tokens of this prompt that workers have. `adapter`: its LoRA adapter; "" = none."""
        if len(self._devices) <= MAX_DEVICES:
            return self._views
        chosen: dict[int, None] = {}
        if preferred in self._device_of:
            chosen[self._device_of[preferred]] = None
        if cached:
            most = sorted(cached, key=lambda name: (-cached[name], name))[:_CACHED]
            chosen |= dict.fromkeys(self._device_of[name] for name in most if name in self._device_of)
        homes = self._with_adapter.get(adapter, ()) if adapter else ()
        chosen |= dict.fromkeys(self._device_of[name] for name in homes if name in self._device_of)
        chosen |= dict.fromkeys(self._remembered)
        while len(chosen) < MAX_DEVICES:
            chosen[self._next % len(self._devices)] = None
            self._next += 1
        views = self._views
        return {name: views[name] for index in chosen for name in self._devices[index]}

    def placed(self, adapter: str, name: InstanceId) -> None:
        """Note where a request with this adapter went."""
        homes = [name, *(each for each in self._with_adapter.get(adapter, ()) if each != name)]
        self._with_adapter[adapter] = homes[:_MAX_WITH_ADAPTER]

    def remember(self, names: Iterable[InstanceId]) -> None:
        """Note the best workers but the chosen one, best first."""
        if len(self._devices) > MAX_DEVICES:
            devices = dict.fromkeys(self._device_of[name] for name in names)
            self._remembered = list(devices)[:_REMEMBERED]
