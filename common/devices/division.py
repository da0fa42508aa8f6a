"""`workers: auto`: the number of workers of each role on a host's GPUs, and how many share one GPU. Pure.

Called by the launcher for `cohort serve`, and by every worker that is started on its own (containers); all get the same
answer from the same configuration and the same GPUs.

| the preset's roles, `gpus` = n | workers |
|---|---|
| any, where roles are preferences (`least_ttft`) | n × unified: every worker can do everything |
| one role | n of it, but no fewer than the preset has (`split` needs two) |
| prefill and decode | half and half; an odd GPU decodes |

The best ratio follows from the traffic's lengths, which are not known at start; `cohort advise` finds it. An odd GPU
decodes: a late first token is one wait, a slow decode is one for every token. With more roles than GPUs workers share
(two on one GPU halve its memory and hold the weights twice). A worker of several ranks (`tensor_parallel`, settled
before: `degrees.py`) takes that many GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from cohort.common.config import Config, WorkerGroup
from cohort.common.types import Role


@dataclass(frozen=True, slots=True)
class Division:
    """Workers of this host, and the number of them that share a GPU at most."""

    workers: tuple[WorkerGroup, ...]
    sharers: int


def divide(config: Config, visible: int) -> Division:
    """Divide the `visible` GPUs, of which `engine.gpus` or the one that `engine.device` names are used; 0 counts as one
    device. Groups that are not `auto` stay as they are."""
    gpus = used_gpus(config, visible)
    workers = _groups(config, gpus) if config.divides else config.workers
    ranks = sum(max(1, group.count) * group.local_degree for group in workers)
    return Division(workers, config.engine.workers_per_gpu or -(-ranks // gpus))


def used_gpus(config: Config, visible: int) -> int:
    """Return the number of GPUs that this configuration's workers use, one at least."""
    if ":" in config.engine.device:
        return 1
    return max(1, min(config.engine.gpus or visible, visible))


def resolve_division(config: Config, visible: int) -> Config:
    """Return the configuration with numbers for its workers and their share of a GPU, the same for every process."""
    division = divide(config, visible)
    engine = config.engine
    if config.on_gpu:
        engine = msgspec.structs.replace(engine, workers_per_gpu=division.sharers)
    return msgspec.structs.replace(config, workers=division.workers, engine=engine)


def auto_counts(config: Config) -> Config:
    """Return the configuration with the counts of its roles left to `divide`."""
    groups = tuple(msgspec.structs.replace(group, count=0) for group in config.workers)
    return msgspec.structs.replace(config, workers=groups)


def _groups(config: Config, gpus: int) -> tuple[WorkerGroup, ...]:
    degree = max(group.degree for group in config.workers)
    slots = max(1, gpus * max(1, config.engine.workers_per_gpu) // degree)
    threads = {group.threads for group in config.workers}
    if config.gathers:
        return (WorkerGroup(Role.UNIFIED, slots, threads.pop() if len(threads) == 1 else 0, degree),)
    groups = config.workers
    least = [_least(config, group.role) for group in groups]
    counts = _shares(least, max(slots, sum(least)), [group.role for group in groups])
    return tuple(msgspec.structs.replace(group, count=count) for group, count in zip(groups, counts, strict=True))


def _least(config: Config, role: Role) -> int:
    """Return the fewest workers of a group that the placement works with."""
    return 2 if config.policies.placement == "split" and role is Role.UNIFIED else 1


def _shares(weights: list[int], total: int, roles: list[Role]) -> list[int]:
    """Divide `total` in proportion to `weights`, each its weight at least. The rest decodes, or goes to the last."""
    counts = [max(weight, total * weight // sum(weights)) for weight in weights]
    rest = next((place for place, role in enumerate(roles) if role is Role.DECODE), len(roles) - 1)
    counts[rest] += total - sum(counts)
    return counts
