"""The whole configuration: one struct of sections, and which workers they ask for."""

from __future__ import annotations

import msgspec

from cohort.common.config import gateway as entry
from cohort.common.config import policies as systems
from cohort.common.config import serving
from cohort.common.config.kinds import Seconds, Section
from cohort.common.types import Role

GPU_WORKER_THREADS = 8


class Config(Section, frozen=True):
    name: str = "cohort"  # of the preset; shown by /version, in logs and metrics
    model: serving.ModelConfig = serving.ModelConfig()
    # groups: role (prefill, decode, unified), count, threads (0 = engine.threads), tensor_parallel, hosts; or `auto`
    workers: tuple[serving.WorkerGroup, ...] = (serving.WorkerGroup(Role.PREFILL), serving.WorkerGroup(Role.DECODE))
    engine: serving.EngineConfig = serving.EngineConfig()
    kv: serving.KvConfig = serving.KvConfig()
    gateway: entry.GatewayConfig = entry.GatewayConfig()
    keys: entry.KeysConfig = entry.KeysConfig()
    state: entry.StateConfig = entry.StateConfig()
    batch: entry.BatchConfig = entry.BatchConfig()
    responses: entry.ResponsesConfig = entry.ResponsesConfig()
    drain_s: Seconds = 30.0  # on SIGTERM: the longest that a gateway or worker takes to finish what runs
    speculation: serving.SpeculationConfig = serving.SpeculationConfig()
    predictor: serving.PredictorConfig = serving.PredictorConfig()
    manager: serving.ManagerConfig = serving.ManagerConfig()
    monitor: serving.MonitorConfig = serving.MonitorConfig()
    planner: serving.PlannerConfig = serving.PlannerConfig()
    transfer: serving.TransferConfig = serving.TransferConfig()
    endpoints: serving.EndpointsConfig = serving.EndpointsConfig()
    security: serving.SecurityConfig = serving.SecurityConfig()
    logging: serving.LoggingConfig = serving.LoggingConfig()
    metrics: serving.MetricsConfig = serving.MetricsConfig()
    recording: serving.RecordingConfig = serving.RecordingConfig()
    tracing: serving.TracingConfig = serving.TracingConfig()
    policies: systems.PolicyConfig = systems.PolicyConfig()
    cohort: systems.CohortConfig = systems.CohortConfig()
    bucketserve: systems.BucketServeConfig = systems.BucketServeConfig()
    bros: systems.BrosConfig = systems.BrosConfig()
    dynaserve: systems.DynaServeConfig = systems.DynaServeConfig()
    alignedserve: systems.AlignedServeConfig = systems.AlignedServeConfig()
    ecoserve: systems.EcoServeConfig = systems.EcoServeConfig()
    baselines: systems.BaselinesConfig = systems.BaselinesConfig()
    # settings of mechanisms, {cohort: {ordered: false}}: for measurements alone; common/policies/settings.py names them
    experiment: dict[str, dict[str, bool | int | float | str]] = msgspec.field(default_factory=dict)

    @property
    def instance_roles(self) -> dict[str, Role]:
        """Workers by instance id: prefill-0, decode-0, decode-1 …"""
        return {name: group.role for name, group in self._instances()}

    def worker_threads(self, instance: str, cores: int) -> int:
        """Return CPU threads of a worker: its group's, else the engine's, else `default_threads`."""
        group = dict(self._instances()).get(instance)
        return (group.threads if group else 0) or self.default_threads(cores)

    def rank_threads(self, instance: str, cores: int) -> int:
        """Return CPU threads of each rank of a worker: they share the worker's."""
        return max(1, self.worker_threads(instance, cores) // self.worker_group(instance).local_degree)

    def worker_group(self, instance: str, role: Role | None = None) -> serving.WorkerGroup:
        """Return a worker's group; for one that is not configured, as in a container, the first of its role."""
        if (group := dict(self._instances()).get(instance)) is not None:
            return group
        return next((group for group in self.workers if group.role is role), self.workers[0])

    def worker_role(self, instance: str, default: Role) -> Role:
        """Return a worker's role; for one that the configuration does not name, as in a container, the role that its
        name begins with (`unified-worker-0`), else `default`, its program's."""
        prefix = instance.partition("-")[0]
        return self.instance_roles.get(instance, Role(prefix) if prefix in list(Role) else default)

    def default_threads(self, cores: int) -> int:
        """Return the engine's threads, else an equal share of the cores, but at least two where there are two: prefill
        and decode workers are seldom both busy (docs/benchmarks.md). All cores where one worker computes at a time. A
        GPU's worker only prepares steps and copies: more than a few threads do not help it."""
        if self.on_gpu:
            return self.engine.threads or max(1, min(GPU_WORKER_THREADS, cores // max(1, len(self.instance_roles))))
        if self.engine.threads or self.gathers:
            return self.engine.threads or max(1, cores)
        return max(min(2, cores), cores // max(1, len(self.instance_roles)))

    @property
    def shares_fairly(self) -> bool:
        """Whether several API keys may ask, and share the cluster by their weights."""
        return self.keys.fair_sharing and bool(self.keys.file or len(set(self.gateway.api_keys)) > 1)

    @property
    def on_gpu(self) -> bool:
        """Whether `engine.device` names a GPU; not while it is `auto`, which launcher and entry point settle."""
        return self.engine.device.startswith("cuda")

    @property
    def divides(self) -> bool:
        """Whether `workers: auto` is not settled yet."""
        return any(group.count == 0 for group in self.workers)

    @property
    def gathers(self) -> bool:
        """Whether of the workers of one device one computes and the others stand by."""
        return self.policies.placement == "least_ttft"

    def _instances(self) -> list[tuple[str, serving.WorkerGroup]]:
        counts: dict[Role, int] = {}
        named = []
        for group in self.workers:
            for _ in range(max(1, group.count)):
                index = counts.get(group.role, 0)
                counts[group.role] = index + 1
                named.append((f"{group.role.value}-{index}", group))
        return named
