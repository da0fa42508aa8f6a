"""Orders for workers on Kubernetes: replicas of their StatefulSets (`planning/orders.py`). Called by `planner.py`.

    add    ──▶ replicas + 1 ──▶ NAME-n says that it is ready           else replicas as before, and what held it up
    drain  ──▶ replicas - 1 ──▶ NAME-n is silent and its pod gone      by SIGTERM, within terminationGracePeriodSeconds

A pod's worker is named after its pod, and a StatefulSet removes its last pod alone. A replica that is wanted already
and does not serve (ordered before the monitor was started again, or by somebody else) is what `add` waits for: there
are never two that are not there. Replicas are written only over the version that was read: never over what somebody
else wrote meanwhile.
"""

from __future__ import annotations

import asyncio

from structlog.stdlib import BoundLogger

from cohort.common.clock import Clock
from cohort.common.config import Config
from cohort.common.errors import CohortError, ConfigError
from cohort.common.planning.shape import Kind, Shape
from cohort.common.types import InstanceId, Role
from cohort.services.global_monitor.aggregate import Cluster, Status
from cohort.services.global_monitor.kubernetes_api import ApiError, KubernetesApi, Scale

POLL_S = 2.0
ATTEMPTS = 5
"""Attempts to write replicas while others write, or no answer comes."""
END_S = 60.0
"""Longest time after its drain until a pod is gone: KV handed on, the process ended, its GPU given back."""
_PAUSE_S = 0.5
_CRASHES = 3
"""A worker that ended so often will not get ready."""


class ReplicasNotChanged(CohortError):
    """A StatefulSet could not be given another number of workers, or its worker did not come or go."""


def stateful_sets(config: Config) -> dict[Role, str]:
    """Return the StatefulSets of the roles that planned shapes have."""
    needed = {"split": (Role.PREFILL, Role.DECODE), "colocated": (Role.UNIFIED,)}
    roles = [role for family, roles in needed.items() if family in config.planner.shapes for role in roles]
    return {role: f"{role}-worker" for role in roles}


def orderable(config: Config) -> tuple[Kind, ...]:
    """Return the kinds of workers, of one degree for each role. Raises `ConfigError` if nothing bounds their number."""
    if not config.planner.max_workers:
        raise ConfigError(
            "planner.max_workers: say how many workers there may be; on Kubernetes the configuration does not tell how "
            "many there are"
        )
    return tuple((role, config.worker_group("", role).degree) for role in stateful_sets(config))


class KubernetesOrders:
    def __init__(
        self,
        config: Config,
        api: KubernetesApi,
        cluster: Cluster,
        clock: Clock,
        log: BoundLogger,
        *,
        poll_s: float = POLL_S,
        end_s: float = END_S,
    ) -> None:
        """`cluster`: what the monitor knows of workers. `poll_s`: between two polls of one that comes or goes."""
        self._sets = stateful_sets(config)
        self._kinds = orderable(config)
        self._start_s = config.planner.start_timeout_s
        self._end_s = config.drain_s + end_s
        self._api = api
        self._cluster = cluster
        self._clock = clock
        self._log = log
        self._poll_s = poll_s

    async def check(self) -> None:
        """Check that orders would be taken. Raises `ConfigError` if something is missing; no answer is no error."""
        for role, name in self._sets.items():
            try:
                scale = await self._api.scale(name)
                await self._api.set_replicas(name, scale.spec.replicas, scale.metadata.resource_version, dry=True)
            except ApiError as error:
                if error.passes:
                    self._log.warning("planner_orders_unsure", reason=str(error))
                    return
                if error.status != 409:
                    raise ConfigError(f"planner.shapes wants {role} workers: {error}") from error

    async def add(self, kind: Kind) -> InstanceId:
        """Add a worker; return once it serves. Raises `ReplicasNotChanged`, `ApiError`."""
        if kind not in self._kinds:
            raise ReplicasNotChanged(f"no StatefulSet has workers like {Shape.of({kind: 1})} (planner.shapes)")
        name = self._sets[kind[0]]
        replicas = (await self._read(name)).spec.replicas
        missing = [each for each in _pods(name, replicas) if not self._serves(each)]
        if missing:
            instance, last = missing[-1], f"{name}-{replicas - 1}"
            self._log.info("planner_waits_for_replica", worker=instance, replicas=replicas)
        else:
            instance = last = f"{name}-{replicas}"
            if self._up(instance):
                raise ReplicasNotChanged(f"{instance} is still there, though {name} has {replicas} replicas")
            await self._write(name, replicas, replicas + 1)
            replicas += 1
        try:
            await self._until_ready(instance)
        except ReplicasNotChanged as failure:
            if instance == last:
                await self._put_back(name, replicas, failure)
            raise
        return instance

    async def drain(self, instance: InstanceId) -> None:
        """Drain a worker; return once it is gone. Raises `ReplicasNotChanged`, `ApiError`."""
        name, _, number = instance.rpartition("-")
        if name not in self._sets.values() or not number.isdecimal():
            names = ", ".join(self._sets.values())
            raise ReplicasNotChanged(f"{instance} is no pod of the StatefulSets {names} (planner.shapes)")
        remaining = int(number)
        replicas = (await self._read(name)).spec.replicas
        if replicas > remaining:
            later = [each for each in _pods(name, replicas)[remaining + 1 :] if self._up(each)]
            if later:
                raise ReplicasNotChanged(
                    f"a StatefulSet removes its last pod, and {instance} is not: {later[-1]} is behind it"
                )
            workers = [each for each in self._cluster.up() if each.ready and each.role.endswith("_worker")]
            if not any(each.instance != instance for each in workers):
                raise ReplicasNotChanged(f"{instance} is the only worker")
            await self._write(name, replicas, remaining)
        await self._until_removed(instance, name)

    # -- replicas --------------------------------------------------------------------------------------------------

    async def _read(self, name: str) -> Scale:
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._api.scale(name)
            except ApiError as error:
                if not error.passes:
                    raise
            await asyncio.sleep(_PAUSE_S)
        return await self._api.scale(name)

    async def _write(self, name: str, before: int, after: int) -> None:
        """Write replicas `after` if they are `before`. A lost answer is noticed by what is read next."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                scale = await self._api.scale(name)
                if scale.spec.replicas == after:
                    return
                if scale.spec.replicas != before:
                    raise ReplicasNotChanged(
                        f"{name} should go from {before} to {after} replicas, and somebody else made it "
                        f"{scale.spec.replicas}; an autoscaler beside the planner?"
                    )
                await self._api.set_replicas(name, after, scale.metadata.resource_version)
            except ApiError as error:
                if not (error.passes or error.status == 409) or attempt == ATTEMPTS:
                    raise
                await asyncio.sleep(_PAUSE_S)
            else:
                self._log.info("planner_scaled", stateful_set=name, before=before, after=after)
                return

    async def _put_back(self, name: str, replicas: int, failure: ReplicasNotChanged) -> None:
        try:
            await self._write(name, replicas, replicas - 1)
        except CohortError as error:
            raise ReplicasNotChanged(f"{failure}; nor could it be put back: {error}") from error

    # -- workers ---------------------------------------------------------------------------------------------------

    async def _until_ready(self, instance: InstanceId) -> None:
        deadline_s = self._clock.now_s() + self._start_s
        while not self._serves(instance):
            trouble, hopeless = await self._problem(instance)
            if self._serves(instance):
                break
            if hopeless or self._clock.now_s() >= deadline_s:
                within = "does not get ready" if hopeless else f"was not ready within {self._start_s:g} s"
                raise ReplicasNotChanged(f"{instance} {within}: {trouble}")
            await asyncio.sleep(self._poll_s)

    async def _problem(self, instance: InstanceId) -> tuple[str, bool]:
        """Return what holds the pod up, and whether that is for good."""
        try:
            pod = await self._api.pod(instance)
        except ApiError as error:
            if error.status == 404:
                return "no pod of that name was made (a quota, or an admission rule?)", False
            return f"why, is not known: {error}", False
        return pod.problem, pod.crashes >= _CRASHES

    async def _until_removed(self, instance: InstanceId, name: str) -> None:
        deadline_s = self._clock.now_s() + self._end_s
        while self._up(instance) or await self._pod_exists(instance):
            if self._clock.now_s() >= deadline_s:
                replicas = (await self._read(name)).spec.replicas
                raise ReplicasNotChanged(
                    f"{instance} was not gone within {self._end_s:g} s; {name} has {replicas} replicas"
                )
            await asyncio.sleep(self._poll_s)

    async def _pod_exists(self, instance: InstanceId) -> bool:
        """Return whether the pod exists and so holds its GPU. Where pods may not be read, heartbeats alone count."""
        try:
            await self._api.pod(instance)
        except ApiError as error:
            return error.passes
        return True

    def _up(self, instance: InstanceId) -> bool:
        process = self._cluster.processes.get(instance)
        return process is not None and process.status is Status.UP

    def _serves(self, instance: InstanceId) -> bool:
        return self._up(instance) and self._cluster.processes[instance].ready


def _pods(name: str, replicas: int) -> list[InstanceId]:
    return [f"{name}-{ordinal}" for ordinal in range(replicas)]
