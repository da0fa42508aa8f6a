"""Workers ordered by replicas of StatefulSets, from an API server that answers as Kubernetes' does.

The pods' part (scheduler, kubelet, worker) is `Pods`: what becomes of a pod is said by the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import structlog

from cohort.common.clock import SystemClock
from cohort.common.config import Config, load_config
from cohort.common.errors import CohortError, ConfigError
from cohort.common.messages import Farewell
from cohort.common.planning.settings import planner_settings
from cohort.common.planning.shape import Shape, neighbours
from cohort.common.types import Role
from cohort.services.global_monitor.aggregate import Cluster, Status
from cohort.services.global_monitor.kubernetes_api import KubernetesApi, in_pod
from cohort.services.global_monitor.kubernetes_orders import (
    ATTEMPTS,
    KubernetesOrders,
    ReplicasNotChanged,
    orderable,
    stateful_sets,
)
from cohort.services.global_monitor.planner import planner_state, present
from tests.containers import ROOT
from tests.kubernetes_double import ApiServer, Object, crashing, pending
from tests.kustomize import documents
from tests.services.global_monitor.test_planner import Rig, beat, config, unified
from tests.support.steady_loop import use_loop_time

UNIFIED = (Role.UNIFIED, 1)
[ROLE] = [
    each
    for each in documents(ROOT / "docker" / "kubernetes" / "components" / "planner" / "rights.yaml")
    if each["kind"] == "Role"
]


def options(**planner: object) -> Config:
    return config(**{"start_timeout_s": 0.15, "max_workers": 4, **planner})


class Pods:
    """What becomes of pods, as replicas change."""

    def __init__(self, server: ApiServer, cluster: Cluster) -> None:
        self.server = server
        self.cluster = cluster
        self.fate = "ready"
        self.ended: list[str] = []
        self.tasks: set[asyncio.Task[None]] = set()
        for name, found in server.sets.items():
            self.scaled(name, 0, found.replicas)
        server.on_scaled = self.scaled

    def scaled(self, name: str, before: int, after: int) -> None:
        for ordinal in range(before, after):
            self.begin(f"{name}-{ordinal}")
        for ordinal in range(after, before):
            task = asyncio.create_task(self.end(f"{name}-{ordinal}"))
            self.tasks.add(task)

    def begin(self, pod: str) -> None:
        match self.fate:
            case "ready":
                self.server.add_pod(pod, phase="Running")
                self.hear(pod)
            case "pending":
                self.server.add_pod(pod, **pending("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."))
            case "crashing":
                self.server.add_pod(pod, **crashing(4, exit_code=78))
                self.hear(pod, ready=False)
            case "loading":
                self.server.add_pod(pod, phase="Running")
                self.hear(pod, ready=False)
            case _:
                assert self.fate == "none"

    def hear(self, pod: str, *, ready: bool = True) -> None:
        role = "decode_worker" if pod.startswith("decode") else "prefill_worker"
        self.cluster.on_heartbeat(SystemClock().now_s(), beat(pod, ready=ready, role=role))

    async def end(self, pod: str) -> None:
        if (process := self.cluster.processes.get(pod)) is not None and process.status is Status.UP:
            self.hear(pod, ready=False)
            await asyncio.sleep(0.02)
            self.cluster.on_farewell(SystemClock().now_s(), Farewell(pod, 1))
        await asyncio.sleep(0.02)
        self.server.pods.pop(pod, None)
        self.ended.append(pod)


class Bench:
    """Orders to a server of its own."""

    def __init__(self, server: ApiServer, folder: Path, environ: dict[str, str]) -> None:
        self.server = server
        self.folder = folder
        self.cluster = Cluster(silence_s=1e9, history_s=1e9)
        self.pods = Pods(server, self.cluster)
        self.environ = environ
        self.orders = self.made(options())

    def made(self, given: Config, call_s: float = 5.0) -> KubernetesOrders:
        api = KubernetesApi.of_pod(self.environ, self.folder)
        api = KubernetesApi(api._url, self.folder, call_s=call_s)
        log = structlog.get_logger()
        return KubernetesOrders(given, api, self.cluster, SystemClock(), log, poll_s=0.01, end_s=-29.6)

    @property
    def replicas(self) -> dict[str, int]:
        return {name: found.replicas for name, found in self.server.sets.items()}


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr("cohort.services.global_monitor.kubernetes_orders._PAUSE_S", 0.01)
    use_loop_time(monkeypatch)
    server = ApiServer(ROLE, unified_worker=1, prefill_worker=0, decode_worker=0)
    environ = await server.start(tmp_path)
    made = Bench(server, tmp_path, environ)
    yield made
    await server.stop()


# -- adding ----------------------------------------------------------------------------------------------------------


async def test_a_worker_more_is_a_replica_more_and_serves(bench: Bench):
    assert await bench.orders.add(UNIFIED) == "unified-worker-1"
    assert await bench.orders.add((Role.DECODE, 1)) == "decode-worker-0"  # from none
    assert bench.server.writes == [("unified-worker", 2), ("decode-worker", 1)]
    assert present(options(), bench.cluster)[0] == Shape.of({UNIFIED: 2, (Role.DECODE, 1): 1})


@pytest.mark.parametrize(
    ("fate", "why"),
    [
        (
            "pending",
            r"not ready within 0.15 s: no node takes the pod \(Unschedulable\): .*3 Insufficient nvidia.com/gpu",
        ),
        ("none", r"not ready within 0.15 s: no pod of that name was made"),
        ("loading", r"not ready within 0.15 s: the pod is Running, and its worker is not ready"),
    ],
)
async def test_a_worker_that_does_not_come_is_put_back_and_said_why(bench: Bench, fate: str, why: str):
    bench.pods.fate = fate
    with pytest.raises(ReplicasNotChanged, match=f"unified-worker-1 was {why}"):
        await bench.orders.add(UNIFIED)
    assert bench.server.writes == [("unified-worker", 2), ("unified-worker", 1)]


async def test_a_worker_that_crashes_again_and_again_is_not_waited_for(bench: Bench):
    bench.pods.fate = "crashing"
    why = r"unified-worker-1 does not get ready: .*CrashLoopBackOff, ended last with status 78 \(Error\)"
    async with asyncio.timeout(5):
        with pytest.raises(ReplicasNotChanged, match=why):
            await bench.made(options(start_timeout_s=300)).add(UNIFIED)
    assert bench.replicas["unified-worker"] == 1


async def test_a_replica_that_is_wanted_already_is_the_one_that_comes(bench: Bench):
    """Ordered before the monitor was started again, or by somebody else."""
    bench.pods.fate = "loading"
    before = asyncio.create_task(bench.orders.add(UNIFIED))
    async with asyncio.timeout(5):
        while not bench.server.writes:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    before.cancel()
    adding = asyncio.create_task(bench.made(options()).add(UNIFIED))
    await asyncio.sleep(0.05)
    bench.pods.hear("unified-worker-1")
    assert await adding == "unified-worker-1" and bench.server.writes == [("unified-worker", 2)]
    bench.pods.fate = "pending"
    bench.server.scale("unified-worker", 3)
    with pytest.raises(ReplicasNotChanged, match=r"unified-worker-2 was not ready .* Insufficient"):
        await bench.orders.add(UNIFIED)
    assert bench.replicas["unified-worker"] == 2  # nothing is left that nobody waits for


async def test_one_in_the_middle_that_is_away_is_waited_for_and_not_removed(bench: Bench):
    bench.server.scale("unified-worker", 2)
    bench.cluster.processes["unified-worker-0"].status = Status.DOWN
    with pytest.raises(ReplicasNotChanged, match="unified-worker-0 was not ready"):
        await bench.orders.add(UNIFIED)
    assert bench.replicas["unified-worker"] == 2


async def test_another_degree_takes_another_stateful_set(bench: Bench):
    with pytest.raises(ReplicasNotChanged, match=r"no StatefulSet has workers like 1 unified x 2 \(planner.shapes\)"):
        await bench.orders.add((Role.UNIFIED, 2))
    assert bench.server.calls == []


# -- draining --------------------------------------------------------------------------------------------------------


async def test_a_drained_worker_is_gone_with_its_pod(bench: Bench):
    bench.server.scale("unified-worker", 2)
    await bench.orders.drain("unified-worker-1")
    assert bench.pods.ended == ["unified-worker-1"] and bench.server.writes == [("unified-worker", 1)]


async def test_only_the_last_of_a_stateful_set_can_go(bench: Bench):
    bench.server.scale("unified-worker", 2)
    with pytest.raises(ReplicasNotChanged, match="removes its last pod, and unified-worker-0 is not: unified-worker-1"):
        await bench.orders.drain("unified-worker-0")
    with pytest.raises(ReplicasNotChanged, match="prefill-0 is no pod of the StatefulSets prefill-worker, decode-"):
        await bench.orders.drain("prefill-0")
    bench.cluster.processes["unified-worker-1"].status = Status.DOWN
    with pytest.raises(ReplicasNotChanged, match="unified-worker-0 is the only worker"):
        await bench.orders.drain("unified-worker-0")
    assert bench.server.writes == []


async def test_replicas_behind_it_that_never_came_go_too(bench: Bench):
    bench.server.scale("unified-worker", 2)
    bench.pods.fate = "pending"
    bench.server.scale("unified-worker", 3)
    await bench.orders.drain("unified-worker-1")
    assert bench.server.writes == [("unified-worker", 1)]


async def test_a_worker_that_stays_is_said_to(bench: Bench):
    bench.server.scale("unified-worker", 2)
    bench.server.on_scaled = lambda name, before, after: None
    with pytest.raises(ReplicasNotChanged, match=r"unified-worker-1 was not gone within 0.4 s; .* has 1 replicas"):
        await bench.orders.drain("unified-worker-1")


# -- others who write, and a server that fails ------------------------------------------------------------------------


async def test_a_version_that_is_old_is_read_again(bench: Bench):
    touches = iter(range(ATTEMPTS - 1))
    bench.server.before_write = lambda name: bench.server.touch(name) if next(touches, None) is not None else None
    assert await bench.orders.add(UNIFIED) == "unified-worker-1"
    assert bench.server.writes == [("unified-worker", 2)]


async def test_conflicts_without_end_are_an_error(bench: Bench):
    bench.server.before_write = bench.server.touch
    with pytest.raises(CohortError, match=r"unified-worker was changed meanwhile: Operation cannot be fulfilled"):
        await bench.orders.add(UNIFIED)
    assert bench.server.calls.count("patch statefulsets/unified-worker/scale") == ATTEMPTS


async def test_what_somebody_else_wrote_is_not_overwritten(bench: Bench):
    def other(name: str) -> None:
        bench.server.before_write = lambda name: None
        bench.server.scale(name, 5)

    bench.server.before_write = other
    with pytest.raises(ReplicasNotChanged, match="from 1 to 2 replicas, and somebody else made it 5; an autoscaler"):
        await bench.orders.add(UNIFIED)
    assert bench.server.writes == []


async def test_an_answer_that_is_lost_makes_no_second_worker(bench: Bench):
    bench.server.lost_answers = 1
    assert await bench.orders.add(UNIFIED) == "unified-worker-1"
    assert bench.server.writes == [("unified-worker", 2)]


async def test_a_server_without_an_answer_is_asked_again_and_given_up(bench: Bench):
    bench.server.unavailable = 2
    assert await bench.orders.add(UNIFIED) == "unified-worker-1"
    bench.server.unavailable = 1000
    with pytest.raises(
        CohortError, match=r"answers get statefulsets/scale unified-worker with 503: etcd has no leader"
    ):
        await bench.orders.drain("unified-worker-1")
    bench.server.unavailable, bench.server.slow_s = 0, 5.0
    with pytest.raises(CohortError, match=r"cannot be reached \(no answer within 0.05 s\); do network policies let"):
        await bench.made(options(), call_s=0.05).add(UNIFIED)
    await bench.server.stop()
    with pytest.raises(CohortError, match=r"cannot be reached \(.*onnect.*do network policies let this pod out"):
        await bench.orders.add(UNIFIED)


async def test_a_token_is_read_anew(bench: Bench):
    bench.server.token = "renewed"
    with pytest.raises(CohortError, match=f"the API server does not take the token in {bench.folder}: Unauthorized"):
        await bench.orders.add(UNIFIED)
    (bench.folder / "token").write_text("renewed")
    assert await bench.orders.add(UNIFIED) == "unified-worker-1"


async def test_another_servers_certificate_is_refused(bench: Bench, tmp_path_factory: pytest.TempPathFactory):
    other = ApiServer(ROLE, unified_worker=1)
    environ = await other.start(tmp_path_factory.mktemp("other"))
    api = KubernetesApi.of_pod(environ, bench.folder)
    with pytest.raises(CohortError, match="CERTIFICATE_VERIFY_FAILED"):
        await api.scale("unified-worker")
    assert other.calls == []
    await other.stop()


# -- rights, and what is configured -----------------------------------------------------------------------------------


def without(resource: str, *verbs: str) -> Object:
    """The Role, less these verbs of one resource."""
    role: Object = msgspec.json.decode(msgspec.json.encode(ROLE))
    for rule in role["rules"]:
        if resource in rule["resources"]:
            rule["verbs"] = [verb for verb in rule["verbs"] if verb not in verbs]
    return role


async def test_the_components_role_is_enough_and_nothing_is_written_to_know_it(bench: Bench):
    await bench.orders.check()
    asked = [f"statefulsets/{name}/scale" for name in stateful_sets(options()).values()]
    assert bench.server.calls == [call for each in asked for call in (f"get {each}", f"patch {each}?dryRun=All")]
    assert bench.server.writes == []


@pytest.mark.parametrize(
    ("role", "why"),
    [
        (
            without("statefulsets/scale", "get"),
            "planner.shapes wants prefill workers: a Role must let .* get statefulsets/scale p",
        ),
        (
            without("statefulsets/scale", "patch"),
            r"planner.shapes wants prefill workers: a Role must let .* patch statefulsets/sc",
        ),
    ],
)
async def test_a_right_that_is_missing_is_named_at_the_start(bench: Bench, role: Object, why: str):
    bench.server.role = role
    with pytest.raises(ConfigError, match=why):
        await bench.orders.check()


async def test_a_stateful_set_that_is_missing_is_named_at_the_start(bench: Bench):
    del bench.server.sets["decode-worker"]
    with pytest.raises(ConfigError, match="wants decode workers: there is no statefulsets/scale decode-worker in name"):
        await bench.orders.check()
    await bench.made(options(shapes=["colocated"])).check()


async def test_a_server_that_is_away_at_the_start_may_answer_later(bench: Bench):
    bench.server.unavailable = 1
    await bench.orders.check()
    assert bench.server.calls == ["get statefulsets/prefill-worker/scale"]


async def test_without_the_right_to_read_pods_workers_come_and_go_all_the_same(bench: Bench):
    bench.server.role = without("pods", "get")
    assert await bench.orders.add(UNIFIED) == "unified-worker-1"
    await bench.orders.drain("unified-worker-1")
    bench.pods.fate = "pending"
    with pytest.raises(ReplicasNotChanged, match=r"why, is not known: a Role must let .* get pods unified-worker-1"):
        await bench.orders.add(UNIFIED)
    assert bench.replicas["unified-worker"] == 1


def test_a_pod_without_a_service_account_is_told_what_to_add(tmp_path: Path):
    assert not in_pod({}) and in_pod({"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    with pytest.raises(ConfigError, match=r"no token, ca.crt, namespace in .*components/planner, or set advise"):
        KubernetesApi.of_pod({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)


def test_bounds_that_nothing_names_are_refused():
    with pytest.raises(ConfigError, match=r"planner\.max_workers: say how many"):
        orderable(options(max_workers=0))


def test_candidates_are_made_of_what_can_be_ordered():
    both = options(shapes=["split"])
    before = Shape.of({(Role.PREFILL, 1): 1, (Role.DECODE, 1): 1})
    bounds = planner_settings(both, kinds=orderable(both)).bounds
    found = neighbours(before, bounds)
    assert found and all(Role.UNIFIED not in each.roles for each in found)
    # A degree that only one role has is not made of the other one.
    groups = [{"role": "prefill", "tensor_parallel": 2}, {"role": "decode"}]
    wide = load_config(
        overrides={"workers": groups, "planner": {"max_workers": 4, "shapes": ["split"]}}, preset="cohort"
    )
    bounds = planner_settings(wide, kinds=orderable(wide)).bounds
    assert bounds.kinds == ((Role.PREFILL, 2), (Role.DECODE, 1)) and bounds.degrees == (1, 2)
    kinds = {
        kind
        for each in neighbours(Shape.of({(Role.PREFILL, 2): 1, (Role.DECODE, 1): 1}), bounds)
        for kind in each.counts
    }
    assert kinds == set(bounds.kinds)


@pytest.mark.parametrize(
    ("instance", "role"),
    [
        ("unified-worker-3", Role.UNIFIED),
        ("decode-worker-0", Role.DECODE),
        ("prefill-0", Role.PREFILL),
        ("worker-7f", Role.PREFILL),
    ],
)
def test_a_pods_worker_has_the_role_that_its_name_begins_with(instance: str, role: Role):
    assert load_config().worker_role(instance, Role.PREFILL) is role
    cluster = Cluster(silence_s=1e9, history_s=1e9)
    cluster.on_heartbeat(1.0, beat(instance))
    assert present(load_config(), cluster)[0].roles == {role: 1}


# -- the planner ------------------------------------------------------------------------------------------------------


async def test_the_planner_grows_and_shrinks_by_replicas(bench: Bench):
    rig = Rig(config())
    rig.planner._orders = bench.orders
    rig.planner._cluster = rig.cluster = bench.cluster
    rig.shares = {unified(1): 0.5, unified(2): 0.98}

    async def until(what: str, count: int) -> None:
        async with asyncio.timeout(10):
            while rig.planner.machine.counts[what] < count or rig.planner.machine._changing is not None:
                await rig.run(1)
                await asyncio.sleep(0.005)

    await until("changed", 1)
    assert bench.replicas["unified-worker"] == 2
    rig.shares = {unified(1): 0.99, unified(2): 0.99}
    await until("changed", 2)
    assert bench.server.writes == [("unified-worker", 2), ("unified-worker", 1)]
    assert [each.action for each in planner_state(rig.planner).decisions] == ["changed", "changed"]
    # No GPU is left: what is tried next has failed, and says so; the worker that there is stays.
    rig.shares = {unified(1): 0.5, unified(2): 0.98}
    bench.pods.fate = "pending"
    await until("failed", 1)
    state = planner_state(rig.planner)
    assert "Insufficient nvidia.com/gpu" in state.decisions[0].why and state.shape == "1 unified"
    assert bench.replicas["unified-worker"] == 1
