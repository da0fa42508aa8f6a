"""The compose file, the image's entry point, and what Prometheus and Grafana are given.

No container engine is needed: the compose file is checked for structure, and the dashboard's metric names are compared
with the ones that exist. tests/security runs every command it gives by hand and looks at who gets in.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from cohort.common.config import load_config
from cohort.common.process import metrics

ROOT = Path(__file__).resolve().parent.parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROCESSES = ("gateway", "length_predictor", "bucketing_manager", "global_monitor", "workers")
PROCESSES += ("prefill_worker_cpu", "decode_worker_cpu")

# Keys of the compose specification that this file may use; anything else is a mistake.
TOP_KEYS = {"name", "services", "networks", "volumes"}
SERVICE_KEYS = {
    "build",
    "cap_drop",
    "command",
    "depends_on",
    "deploy",
    "environment",
    "healthcheck",
    "image",
    "init",
    "logging",
    "mem_limit",
    "networks",
    "pids_limit",
    "ports",
    "profiles",
    "pull_policy",
    "read_only",
    "restart",
    "security_opt",
    "shm_size",
    "stop_grace_period",
    "tmpfs",
    "volumes",
}
HEALTH_KEYS = {"test", "interval", "timeout", "retries", "start_period"}


def test_only_keys_of_the_specification():
    assert {key for key in COMPOSE if not key.startswith("x-")} == TOP_KEYS
    for name, service in SERVICES.items():
        assert set(service) <= SERVICE_KEYS, name
        assert set(service.get("healthcheck", {})) <= HEALTH_KEYS, name


def test_workers_on_gpus_are_in_one_container_and_others_in_one_each():
    assert set(PROCESSES) <= set(SERVICES)
    assert [name for name, service in SERVICES.items() if service.get("profiles") == ["gpu"]] == ["workers"]
    for name in ("prefill_worker_cpu", "decode_worker_cpu"):
        assert SERVICES[name]["profiles"] == ["cpu"] and "deploy" not in SERVICES[name]
    assert "replicas" not in SERVICES["workers"]["deploy"]  # a worker on eight GPUs is one, not eight that wait


def test_workers_see_all_gpus_the_claims_of_the_whole_host_and_memory_to_meet_in():
    service = SERVICES["workers"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    # A number would be the same first GPUs for every container.
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert "claims:/var/lib/cohort-claims" in service["volumes"]
    assert service["shm_size"] == "${COHORT_SHM:-8g}"  # Docker's 64 MB are too few for NCCL
    assert set(service["environment"]) >= {"COHORT_GPUS", "COHORT_WORKERS_PER_GPU", "COHORT_TENSOR_PARALLEL"}
    assert COMPOSE["volumes"]["claims"] == {"name": "cohort-gpu-claims"}  # not one for each project
    engine = load_config([ROOT / "configs" / "compose.yaml"]).engine
    assert engine.claim_dir == "/var/lib/cohort-claims" and engine.claim_wait_s >= 60
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    assert re.search(r"chown cohort:cohort .*/var/lib/cohort-claims", dockerfile)


def test_a_host_is_asked_for_no_more_descriptors_than_it_gives():
    """Processes raise their limit as far as they may."""
    assert not any("ulimits" in service for service in SERVICES.values())


def test_every_process_is_watched_restarted_and_given_time_to_drain():
    config = load_config([ROOT / "configs" / "compose.yaml"])
    for name, service in SERVICES.items():
        if name not in PROCESSES:
            continue
        assert service["restart"] == "unless-stopped"
        assert service["healthcheck"]["test"][0] == "CMD"
        assert service["depends_on"]["model"]["condition"] == "service_completed_successfully"
        drain_s = config.drain_s if name == "gateway" or "worker" in name else 5.0
        assert int(service["stop_grace_period"].removesuffix("s")) > drain_s + 5


def test_no_container_takes_the_host():
    """As much as the manifests give, of which the default model's largest process takes a fifth."""
    limits = {name: (service["pids_limit"], service["mem_limit"]) for name, service in SERVICES.items()}
    assert {pids for pids, _ in limits.values()} == {"${COHORT_PIDS:-4096}"}
    workers = {name: limit for name, (_, limit) in limits.items() if "worker" in name}
    gpu, cpu = "${COHORT_WORKER_MEMORY:-64g}", "${COHORT_WORKER_MEMORY:-8g}"
    assert workers == {name: cpu if name.endswith("_cpu") else gpu for name in workers} and len(workers) == 3
    others = {limit for name, (_, limit) in limits.items() if name not in workers and name != "model"}
    assert others == {"${COHORT_MEMORY:-6g}"}


def test_names_and_files_that_are_referred_to_exist():
    named_volumes, networks = set(COMPOSE["volumes"]), set(COMPOSE["networks"])
    for name, service in SERVICES.items():
        assert set(service["networks"]) <= networks
        assert set(service.get("depends_on", ())) <= set(SERVICES)
        for volume in service.get("volumes", ()):
            source = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":")[0]
            assert source in named_volumes or (ROOT / source).exists(), f"{name}: {volume}"
    assert (ROOT / SERVICES["gateway"]["build"]["dockerfile"]).exists()


def test_the_default_needs_no_option_and_cpu_one_file():
    def settings(path: Path) -> dict[str, str]:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
        return dict(line.split("=", 1) for line in lines)

    assert settings(ROOT / ".env") == {"COMPOSE_PROFILES": "gpu", "COHORT_ACCELERATOR": "cuda"}
    assert settings(ROOT / "docker" / "cpu.env") == {"COMPOSE_PROFILES": "cpu", "COHORT_ACCELERATOR": "cpu"}


def test_endpoints_are_the_services_host_names():
    endpoints = load_config([ROOT / "configs" / "compose.yaml"]).endpoints
    for endpoint in (endpoints.manager, endpoints.predictor, endpoints.monitor, endpoints.gateway):
        assert re.fullmatch(r"tcp://(\w+):\d+", endpoint)[1] in SERVICES  # type: ignore[index]


def test_docker_compose_accepts_it():
    """Where the plugin is installed it has the last word."""
    docker = shutil.which("docker")
    plugin = [docker or "docker", "compose", "version"]
    if docker is None or subprocess.run(plugin, capture_output=True, check=False).returncode != 0:
        pytest.skip("docker compose is not installed")
    for env in (".env", "docker/cpu.env"):
        command = [docker, "compose", "--env-file", env, "config", "--quiet"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 0, result.stderr


# -- dashboards --------------------------------------------------------------------------------------------------


def known_names() -> set[str]:
    registry = CollectorRegistry()
    for family in (metrics.RequestMetrics, metrics.EngineMetrics, metrics.TransferMetrics):
        family(metrics.MetricFactory(registry, model_name="m", instance="i"))
    other = CollectorRegistry()  # shares some names with the engine's
    metrics.SchedulerMetrics(metrics.MetricFactory(other, model_name="m", instance="i"))
    names: set[str] = set()
    for metric in [*registry.collect(), *other.collect()]:
        suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}[metric.type]
        names |= {metric.name + suffix for suffix in suffixes}
    exporter = (ROOT / "services" / "global_monitor" / "exporter.py").read_text(encoding="utf-8")
    for name in re.findall(r'"(cohort_\w+)"', exporter):
        names |= {name, f"{name}_total"}
    return names


def test_the_dashboard_asks_for_metrics_that_exist():
    dashboard = json.loads((ROOT / "docker/grafana/dashboards/cohort.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    expressions += [variable["definition"] for variable in dashboard["templating"]["list"]]
    asked = {name for expression in expressions for name in re.findall(r"\bcohort_\w+", expression)}
    assert len(asked) > 20
    assert asked - known_names() == set()


def test_the_dashboard_finds_its_data_source():
    provisioned = yaml.safe_load((ROOT / "docker/grafana/provisioning/datasources/prometheus.yaml").read_text())
    (source,) = provisioned["datasources"]
    dashboard = json.loads((ROOT / "docker/grafana/dashboards/cohort.json").read_text(encoding="utf-8"))
    used = {panel["datasource"]["uid"] for panel in dashboard["panels"] if "datasource" in panel}
    assert used == {source["uid"]}
    host, port = source["url"].removeprefix("http://").split(":")
    assert host in SERVICES and SERVICES[host]["ports"][0].endswith(f":{port}")
