from __future__ import annotations

from pathlib import Path

import pytest

from cohort.common.addresses import metrics_port
from cohort.common.config import (
    Config,
    EngineConfig,
    GatewayConfig,
    ManagerConfig,
    MetricsConfig,
    MonitorConfig,
    PolicyConfig,
    WorkerGroup,
    load_config,
)
from cohort.common.errors import ConfigError
from cohort.common.types import Role
from cohort.services.launcher.plan import StopStage, http_base, plan, resolve


def never() -> int:
    raise AssertionError("no port was asked to be chosen")


def test_the_default_is_six_processes_with_a_port_each():
    plans = plan(Config())
    assert [(p.instance, p.folder, p.port) for p in plans] == [
        ("gateway", "gateway", 8000),
        ("predictor", "length_predictor", 8010),
        ("manager", "bucketing_manager", 8011),
        ("monitor", "global_monitor", 8001),
        ("prefill-0", "prefill_worker", 8012),
        ("decode-0", "decode_worker", 8013),
    ]
    assert [p.instance for p in plans if p.stage is StopStage.GATEWAY] == ["gateway"]
    assert [p.instance for p in plans if p.stage is StopStage.WORKERS] == ["prefill-0", "decode-0"]


def test_a_pipeline_without_a_worker_is_refused():
    with pytest.raises(ConfigError, match="workers: there is none"):
        plan(Config(workers=()))


def test_ports_agree_with_the_processes_own_choice():
    config = Config(workers=(WorkerGroup(Role.PREFILL, 2), WorkerGroup(Role.DECODE), WorkerGroup(Role.UNIFIED)))
    for process in plan(config):
        if process.passes_metrics_port:
            assert process.port == metrics_port(config, process.folder, process.instance)


def test_several_gateways_share_a_port_and_have_one_each_for_readiness_and_metrics():
    config = Config(gateway=GatewayConfig(processes=3))
    gateways = [p for p in plan(config) if p.stage is StopStage.GATEWAY]
    assert [(p.instance, p.port, p.shared) for p in gateways] == [
        ("gateway", 8014, ("127.0.0.1", 8000)),
        ("gateway-1", 8015, ("127.0.0.1", 8000)),
        ("gateway-2", 8016, ("127.0.0.1", 8000)),
    ]
    for process in gateways:
        assert process.passes_metrics_port and process.port == metrics_port(config, process.folder, process.instance)
        assert process.ready_url == f"http://127.0.0.1:{process.port}/ready"
    assert len({p.port for p in plan(config)}) == len(plan(config))


def test_managers_that_stand_by_have_ports_beside_all_others():
    config = Config(manager=ManagerConfig(standbys=2), gateway=GatewayConfig(processes=2))
    managers = [p for p in plan(config) if p.stage is StopStage.MANAGER]
    assert [(p.instance, p.folder, p.port) for p in managers] == [
        ("manager", "bucketing_manager", 8011),
        ("manager-1", "bucketing_manager", 8016),
        ("manager-2", "bucketing_manager", 8017),
    ]
    assert all(p.port == metrics_port(config, p.folder, p.instance) for p in managers)
    assert len({p.port for p in plan(config)}) == len(plan(config))


def test_a_unified_worker_runs_the_prefill_program():
    workers = [p for p in plan(Config(workers=(WorkerGroup(Role.UNIFIED),))) if p.stage is StopStage.WORKERS]
    assert [(p.instance, p.folder) for p in workers] == [("unified-0", "prefill_worker")]


def test_the_ranks_of_a_worker_share_its_threads():
    def threads(given: int, cores: int) -> tuple[str, bool]:
        group = WorkerGroup(Role.UNIFIED, threads=given, tensor_parallel=2)
        (worker,) = [p for p in plan(Config(workers=(group,)), cores) if p.stage is StopStage.WORKERS]
        return worker.environment["OMP_NUM_THREADS"], "OMP_WAIT_POLICY" in worker.environment

    assert threads(4, 4) == ("2", False)
    assert threads(4, 3) == ("2", True)
    assert threads(1, 1) == ("1", True)  # one each, of one core


def test_settling_options_keeps_the_degrees():
    config = Config(workers=(WorkerGroup(Role.UNIFIED, 2, tensor_parallel=4),))
    settled = resolve(config, model=Path("/m"), cores=8, free_port=lambda: 1)
    assert [(group.count, group.degree) for group in settled.workers] == [(2, 4)]


def test_the_command_can_be_typed_by_a_person():
    predictor = plan(Config())[1]
    assert predictor.command("python", Path("/r/resolved.yaml"), Path("/r")) == [
        "python",
        "-P",
        "-m",
        "cohort.services.length_predictor",
        "--config",
        "/r/resolved.yaml",
        "--instance",
        "predictor",
        "--run-dir",
        "/r",
        "--metrics-port",
        "8010",
    ]


@pytest.mark.parametrize(
    ("groups", "engine_threads", "cores", "expected"),
    [
        ((WorkerGroup(Role.PREFILL), WorkerGroup(Role.DECODE)), 0, 8, [4, 4]),
        ((WorkerGroup(Role.PREFILL), WorkerGroup(Role.DECODE)), 0, 1, [1, 1]),
        ((WorkerGroup(Role.PREFILL), WorkerGroup(Role.DECODE)), 0, 2, [2, 2]),
        ((WorkerGroup(Role.PREFILL, 2, 3), WorkerGroup(Role.DECODE)), 0, 9, [3, 3, 3]),
        ((WorkerGroup(Role.PREFILL), WorkerGroup(Role.DECODE, 1, 1)), 2, 8, [2, 1]),
    ],
)
def test_threads_are_settled_for_everyone(groups, engine_threads, cores, expected):
    apart = PolicyConfig(placement="disaggregated")
    config = Config(workers=groups, engine=EngineConfig(threads=engine_threads), policies=apart)
    settled = resolve(config, model=Path("/m"), cores=cores, free_port=never)
    workers = [p for p in plan(settled) if p.stage is StopStage.WORKERS]
    assert [int(p.environment["OMP_NUM_THREADS"]) for p in workers] == expected
    assert settled.model.path == "/m"


def test_workers_that_share_cores_yield_while_they_wait():
    config = resolve(load_config(preset="disaggregated"), model=Path("/m"), cores=2, free_port=never)
    policies = [p.environment.get("OMP_WAIT_POLICY") for p in plan(config, 2) if p.stage is StopStage.WORKERS]
    assert policies == ["passive", "passive"]
    assert all("OMP_WAIT_POLICY" not in p.environment for p in plan(config, 4))


def test_workers_that_stand_by_for_each_other_have_all_cores_and_need_not_yield():
    config = Config()
    assert config.gathers
    for cores in (1, 2, 8):
        workers = [
            p
            for p in plan(resolve(config, model=Path("/m"), cores=cores, free_port=never), cores)
            if p.stage is StopStage.WORKERS
        ]
        assert [int(p.environment["OMP_NUM_THREADS"]) for p in workers] == [cores, cores]
        assert all("OMP_WAIT_POLICY" not in p.environment for p in workers)


def test_ports_given_as_zero_are_settled():
    config = Config(gateway=GatewayConfig(port=0), monitor=MonitorConfig(port=0), metrics=MetricsConfig(base_port=0))
    settled = resolve(config, model=Path("/m"), cores=2, free_port=lambda: 40_000)
    assert (settled.gateway.port, settled.monitor.port, settled.metrics.base_port) == (40_000, 40_001, 40_010)


def test_where_a_server_on_all_interfaces_is_reached():
    assert http_base("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert http_base("10.0.0.7", 80) == "http://10.0.0.7:80"
