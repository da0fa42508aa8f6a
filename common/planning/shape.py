"""The shape of a pipeline: how many workers of which role and degree; and which shapes may come next.

Called by `machine.py` for candidates and by hosts that carry a change out. Decides nothing about which one is better.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from cohort.common.types import Role

Family = Literal["colocated", "split"]
"""Workers that prefill and decode; or some of either kind."""
Kind = tuple[Role, int]
"""Role and degree (ranks) of a worker."""


class Group(msgspec.Struct, frozen=True, array_like=True, order=True):
    """`count` workers of `degree` ranks each."""

    role: Role
    degree: int
    count: int


class Shape(msgspec.Struct, frozen=True):
    """`groups` in order of role and degree, each with at least one worker: equal shapes are equal structs."""

    groups: tuple[Group, ...] = ()

    @staticmethod
    def of(counts: Mapping[Kind, int]) -> Shape:
        return Shape(tuple(sorted(Group(role, degree, n) for (role, degree), n in counts.items() if n > 0)))

    @property
    def counts(self) -> dict[Kind, int]:
        return {(group.role, group.degree): group.count for group in self.groups}

    @property
    def roles(self) -> dict[Role, int]:
        """Number of workers by role, in the order of the groups."""
        found: dict[Role, int] = {}
        for group in self.groups:
            found[group.role] = found.get(group.role, 0) + group.count
        return found

    @property
    def workers(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def devices(self) -> int:
        """Ranks of all workers together."""
        return sum(group.count * group.degree for group in self.groups)

    @property
    def serves(self) -> bool:
        """Prompts and decodes both have a worker of their role."""
        return any(group.role.prefills for group in self.groups) and any(group.role.decodes for group in self.groups)

    @property
    def family(self) -> Family | None:
        """Family of a shape that serves; None for a mixed or incomplete one."""
        unified = {group.role is Role.UNIFIED for group in self.groups}
        if not self.serves or len(unified) != 1:
            return None
        return "colocated" if unified == {True} else "split"

    def with_(self, kind: Kind, change: int) -> Shape:
        counts = self.counts
        return Shape.of({**counts, kind: counts.get(kind, 0) + change})

    def __str__(self) -> str:
        parts = [f"{g.count} {g.role.value}" + (f" x {g.degree}" if g.degree > 1 else "") for g in self.groups]
        return " + ".join(parts) or "no workers"


class Bounds(msgspec.Struct, frozen=True):
    """`degrees` with known iteration times. `max_devices` 0: no bound. `kinds` that can be ordered; empty: any."""

    min_workers: int
    max_workers: int
    families: tuple[Family, ...] = ("colocated", "split")
    degrees: tuple[int, ...] = (1,)
    max_devices: int = 0
    kinds: tuple[Kind, ...] = ()

    def allows(self, shape: Shape) -> bool:
        return (
            self.min_workers <= shape.workers <= self.max_workers
            and (not self.max_devices or shape.devices <= self.max_devices)
            and shape.family in self.families
            and all(group.degree in self.degrees for group in shape.groups)
            and (not self.kinds or all(kind in self.kinds for kind in shape.counts))
        )


def neighbours(shape: Shape, bounds: Bounds) -> list[Shape]:
    """Return the shapes that one change leads to, within the bounds, the fewest devices first. A change adds one or two
    workers of a kind, removes one, gives one another role or degree, or replaces all by the other family."""
    kinds = [(role, degree) for role in Role for degree in bounds.degrees]
    found: set[Shape] = set()
    for kind in kinds:
        found |= {shape.with_(kind, 1), shape.with_(kind, 2), shape.with_(kind, -1)}
        for other in shape.counts:
            if other != kind:
                found |= {shape.with_(other, -1).with_(kind, 1)}
                # The same devices in larger groups, or in smaller ones.
                (_, degree), (_, wider) = kind, other
                found |= {shape.with_(other, -1).with_(kind, wider // degree) if wider % degree == 0 else shape}
                found |= {shape.with_(other, -(degree // wider)).with_(kind, 1) if degree % wider == 0 else shape}
    for degree in bounds.degrees:
        found |= set(_other_families(shape, degree))
    allowed = [each for each in found if each != shape and bounds.allows(each)]
    return sorted(allowed, key=lambda each: (each.devices, str(each)))


def _other_families(shape: Shape, degree: int) -> Iterable[Shape]:
    """Yield shapes of one degree, colocated and split, with as many devices as now."""
    total = shape.devices // degree
    yield Shape.of({(Role.UNIFIED, degree): total})
    for prefills in {1, total // 3, total // 2, total - 1}:
        if 0 < prefills < total:
            yield Shape.of({(Role.PREFILL, degree): prefills, (Role.DECODE, degree): total - prefills})


class Steps(msgspec.Struct, frozen=True):
    """Workers to add and to drain on the way from one shape to another."""

    add: tuple[Kind, ...]
    drain: tuple[Kind, ...]


def steps(before: Shape, after: Shape) -> Steps:
    old, new = before.counts, after.counts
    add = [kind for kind, count in sorted(new.items()) for _ in range(count - old.get(kind, 0))]
    drain = [kind for kind, count in sorted(old.items()) for _ in range(count - new.get(kind, 0))]
    return Steps(tuple(add), tuple(drain))
