"""The manifests of docker/kubernetes, rendered and read: no cluster is needed, and none has seen them here.

Every overlay is checked against Kubernetes' own schemas, unknown keys included. What they promise is compared with the
code: ports with the configuration, grace periods with drain times, policies with who dials whom.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import re
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from cohort.common.addresses import HOST_VARIABLE, advertised_host
from cohort.common.config import Config, load_config
from cohort.common.http import exposure
from cohort.common.process.service import drain_time_s
from cohort.services.launcher.plan import STOP_MARGIN_S
from tests.containers import ENTRYPOINT, ROOT
from tests.containers import SERVICES as COMPOSED
from tests.kustomize import Resource, documents, key, pod_spec, render
from tests.scripts.test_deployment import known_names

FOLDER = ROOT / "docker" / "kubernetes"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
WORKERS = ("prefill_worker", "decode_worker", "unified_worker")
ROLES = ("gateway", "length_predictor", "bucketing_manager", "global_monitor", *WORKERS)
PROGRAMS = {"unified_worker": "prefill_worker"}
"""Where it is not the role's own."""
GUIDE = (ROOT / "docs" / "guide" / "kubernetes.md").read_text(encoding="utf-8")

# The oldest release whose fields these are, and the newest that the schemas know.
RELEASES = ("1.30", kubernetes_validate.latest_version())

# Of the Prometheus operator, as far as it is used.
SERVICE_MONITOR = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "ServiceMonitor"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["selector", "endpoints"],
            "properties": {
                "selector": {"type": "object", "required": ["matchLabels"]},
                "endpoints": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "port": {"type": "string"},
                            "path": {"type": "string"},
                            "interval": {"type": "string", "pattern": r"^\d+(ms|s|m)$"},
                            "honorLabels": {"type": "boolean"},
                        },
                    },
                },
            },
        },
    },
}


@functools.cache
def rendered(overlay: str) -> list[Resource]:
    return render(FOLDER / "overlays" / overlay)


def of_kind(overlay: str, *kinds: str) -> dict[str, Resource]:
    return {each["metadata"]["name"]: each for each in rendered(overlay) if each["kind"] in kinds}


def workloads(overlay: str) -> dict[str, Resource]:
    """By role."""
    found = {name.replace("-", "_"): each for name, each in of_kind(overlay, "Deployment", "StatefulSet").items()}
    assert set(found) == set(ROLES)
    return found


def container(workload: Resource) -> dict[str, Any]:
    pod = pod_spec(workload)
    assert pod is not None
    [only] = pod["containers"]
    assert isinstance(only, dict)
    return only


def pod_labels(workload: Resource) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def ports(workload: Resource) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(workload)["ports"]}


def configured(overlay: str, role: str, tmp_path: Path) -> Config:
    """What the container's process would read: its arguments and environment go through the entry point, and `python`
    is a program that shows its own."""
    workload = workloads(overlay)[role]
    config_map = of_kind(overlay, "ConfigMap")["cohort-options"]["data"]
    for name, text in config_map.items():
        (tmp_path / name).write_text(text)
    here = container(workload)
    given = {"COHORT_ACCELERATOR": "cpu" if overlay == "cpu" else "cuda"}
    for variable in here["env"]:
        match variable:
            case {"name": name, "value": value}:
                given[name] = value.replace("/etc/cohort/options", str(tmp_path)).replace(
                    "/run/cohort", f"{tmp_path}/r"
                )
            case {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}:
                given[name] = {"status.podIP": "10.1.2.3", "metadata.name": f"{workload['metadata']['name']}-0"}[path]
            case {"name": name, "valueFrom": {"secretKeyRef": {"key": word}}}:
                given[name] = f"secret {word}"
    words = [word.replace("/etc/cohort/options", str(tmp_path)) for word in here["args"]]
    volume = tmp_path / "r"
    volume.mkdir()
    volume.chmod(0o777)  # as an emptyDir is
    done = started(words, given, tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[2] == f"cohort.services.{PROGRAMS.get(role, role)}"
    if role in WORKERS:
        name = f"{workload['metadata']['name']}-0"
        assert said[said.index("--instance") + 1] == name and name.startswith(role.partition("_")[0])
    assert stat.S_IMODE((volume / "own").stat().st_mode) == 0o700
    return load_config([Path(said[at + 1]) for at, word in enumerate(said) if word == "--config"])


def started(words: list[str], environment: dict[str, str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """The entry point, with a `python` that shows its arguments, a line each."""
    fake = tmp_path / "bin" / "python"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nfor word; do printf "%s\\n" "$word"; done\n')
    fake.chmod(0o755)
    given = {"COHORT_RUN_DIR": str(tmp_path / "run"), **environment, "PATH": f"{fake.parent}:/usr/bin:/bin"}
    return subprocess.run([ENTRYPOINT, *words], env=given, capture_output=True, text=True, timeout=10)


@pytest.fixture(scope="module", autouse=True)
def schemas_are_read_once() -> Iterator[None]:
    """What all kinds have in common is megabytes."""
    with pytest.MonkeyPatch.context() as patch:
        utils = kubernetes_validate.utils
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_own_schemas_accept_every_resource(overlay: str, release: str):
    for resource in rendered(overlay):
        if resource["kind"] == "ServiceMonitor":
            jsonschema.validate(resource, SERVICE_MONITOR)
        else:
            kubernetes_validate.validate(resource, release, strict=True)


def test_the_schemas_refuse_a_key_that_is_misspelt():
    workload = json.loads(json.dumps(workloads("cpu")["gateway"]))
    container(workload)["readynessProbe"] = container(workload).pop("readinessProbe")
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(workload, RELEASES[0], strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_file_is_part_of_an_overlay_or_names_why_not(overlay: str):
    used = {path for spec in FOLDER.rglob("kustomization.yaml") for path in mentioned(spec)}
    files = {path for path in FOLDER.rglob("*.yaml") if path.name != "kustomization.yaml"}
    assert {path.name for path in files - used} == {"prometheus-adapter.values.yaml"}
    assert len({key(each) for each in rendered(overlay)}) == len(rendered(overlay))


def mentioned(spec: Path) -> set[Path]:
    [content] = documents(spec)
    names = [
        *content.get("resources", ()),
        *content.get("configurations", ()),
        *(patch["path"] for patch in content.get("patches", ())),
    ]
    names += [name for wanted in content.get("configMapGenerator", ()) for name in wanted["files"]]
    return {(spec.parent / name).resolve() for name in names}


# -- confinement -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_confined_as_the_compose_file_confines(overlay: str):
    pods = [pod for each in rendered(overlay) if (pod := pod_spec(each))]
    assert len(pods) >= len(ROLES)
    for pod in pods:
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        # No pod knows a token of the API server, but for a monitor that orders workers (test_kubernetes_planner.py).
        assert pod["automountServiceAccountToken"] is ("serviceAccountName" in pod)
        context = pod["securityContext"]
        assert context["runAsNonRoot"] and context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {context["runAsUser"], context["runAsGroup"], context["fsGroup"]} == {64118}
        for each in pod["containers"]:
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "privileged": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"cpu", "memory"} <= set(each["resources"]["requests"]) and "memory" in each["resources"]["limits"]
        allowed = {"emptyDir", "configMap", "secret", "persistentVolumeClaim"}
        assert all(len(allowed & set(volume)) == 1 for volume in pod["volumes"])
    labels = of_kind(overlay, "Namespace")["cohort"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_secret_is_referred_to_and_never_written(overlay: str):
    assert of_kind(overlay, "Secret") == {}
    wanted = set()
    for workload in workloads(overlay).values():
        pod = pod_spec(workload)
        assert pod is not None
        wanted |= {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
        for variable in container(workload)["env"]:
            if secret := variable.get("valueFrom", {}).get("secretKeyRef"):
                wanted.add(secret["name"])
    assert wanted == {"cohort-cluster-key", "cohort-api-key"}
    for name in wanted:
        assert f"create secret generic {name} " in GUIDE


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_a_process_writes_has_a_volume(overlay: str, role: str, tmp_path: Path):
    config = configured(overlay, role, tmp_path)
    here = container(workloads(overlay)[role])
    writable = [mount["mountPath"] for mount in here["volumeMounts"] if not mount.get("readOnly")]
    written = [config.state.folder] if role in ("gateway", "length_predictor", *WORKERS) else []
    if role.endswith("_worker"):
        cache = next(variable["value"] for variable in here["env"] if variable["name"] == "COHORT_CACHE_DIR")
        written += [config.engine.claim_dir, cache]
    for path in written:
        assert any(f"{path}/".startswith(f"{folder}/") for folder in writable), path
    keys = Path(config.security.curve_secret_key_file)
    assert str(keys.parent) in {mount["mountPath"] for mount in here["volumeMounts"]}
    assert f"--from-file={keys.name}" in GUIDE
    if role in ("gateway", *WORKERS):
        assert config.model.path.startswith("/models/")
        assert "/models" in {mount["mountPath"] for mount in here["volumeMounts"]}


# -- the same processes as everywhere --------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_process_is_started_as_the_compose_file_starts_it(
    overlay: str, role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here = container(workloads(overlay)[role])
    composed = COMPOSED[role]["command"] if role in COMPOSED else [role]
    assert here["args"][: len(composed)] == composed and "command" not in here
    config = configured(overlay, role, tmp_path)
    exposure.check_endpoints(config)
    monkeypatch.setenv("COHORT_HOST", "10.1.2.3")
    assert {"name": HOST_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}} in here["env"]
    assert advertised_host(config, config.metrics.host) == "10.1.2.3"
    if role == "gateway":
        exposure.check_api(config)
        assert config.gateway.api_keys == ("env:COHORT_API_KEY",)
    if role.endswith("_worker"):
        assert config.endpoints.worker == "tcp://10.1.2.3:0"
        assert (config.engine.workers_per_gpu, config.engine.gpus) == (1, 1)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_endpoints_are_services_that_lead_to_the_process(overlay: str, tmp_path: Path):
    config, services = configured(overlay, "bucketing_manager", tmp_path), of_kind(overlay, "Service")
    owners = {"predictor": "length_predictor", "monitor": "global_monitor", "gateway": "gateway"}
    for name, role in owners.items():
        host, port = getattr(config.endpoints, name).removeprefix("tcp://").split(":")
        service, workload = services[host]["spec"], workloads(overlay)[role]
        assert service["publishNotReadyAddresses"] is True  # processes become ready through each other
        assert service["selector"].items() <= pod_labels(workload).items()
        [target] = [each["targetPort"] for each in service["ports"] if each["port"] == int(port)]
        assert ports(workload)[target] == int(port)
        assert workload["spec"]["replicas"] == 1 and service.get("clusterIP") != "None"  # its address stays
    assert ports(workloads(overlay)["gateway"])["http"] == config.gateway.port
    assert ports(workloads(overlay)["global_monitor"])["http"] == config.monitor.port
    assert not services["gateway"]["spec"].get("publishNotReadyAddresses")  # clients: ready ones alone


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_label_selects_the_pods_of_one_workload(overlay: str):
    by_role = workloads(overlay)
    for role, workload in by_role.items():
        selector = workload["spec"]["selector"]["matchLabels"]
        assert [other for other in by_role if selector.items() <= pod_labels(by_role[other]).items()] == [role]
    budgets = of_kind(overlay, "PodDisruptionBudget")
    wanted = {"workers": set(WORKERS), "managers": {"bucketing_manager"}}
    assert set(budgets) == set(wanted)
    for name, roles in wanted.items():
        spec = budgets[name]["spec"]
        assert {role for role in by_role if selects(spec["selector"], pod_labels(by_role[role]))} == roles
        assert spec["maxUnavailable"] == 1 and sum(by_role[role]["spec"].get("replicas", 2) for role in roles) >= 2


@pytest.mark.parametrize("role", ROLES)
def test_a_process_is_asked_where_it_answers_and_has_time_to_drain(role: str, tmp_path: Path):
    workload, config = workloads("cpu")[role], configured("cpu", role, tmp_path)
    here, pod = container(workload), pod_spec(workload)
    assert pod is not None
    for probe, path in (("startupProbe", "/health"), ("livenessProbe", "/health"), ("readinessProbe", "/ready")):
        asked = here[probe]["httpGet"]
        assert asked["path"] == path
        own = {"gateway": config.gateway.port, "global_monitor": config.monitor.port}
        metrics_port = int(here["args"][here["args"].index("--metrics-port") + 1]) if role not in own else own[role]
        assert ports(workload)[asked["port"]] == metrics_port
    assert here["startupProbe"]["periodSeconds"] * here["startupProbe"]["failureThreshold"] >= 120
    before_s = 0.0
    if hook := here.get("lifecycle"):
        program, seconds = hook["preStop"]["exec"]["command"]
        assert program == "sleep"
        before_s = float(seconds)
    assert (before_s > 0) == (role == "gateway")
    assert (
        pod["terminationGracePeriodSeconds"]
        >= before_s + drain_time_s(config, PROGRAMS.get(role, role)) + STOP_MARGIN_S
    )


def test_no_process_runs_twice_under_one_name():
    for role in ("gateway", "length_predictor", "bucketing_manager", "global_monitor"):
        workload = workloads("nodes")[role]
        assert workload["kind"] == "StatefulSet" or workload["spec"]["strategy"] == {"type": "Recreate"}


# -- who may talk to whom --------------------------------------------------------------------------------------------

FREE_PORT = 40123  # workers choose theirs
WORKER_DIALS = {
    ("bucketing_manager", 5551),
    ("global_monitor", 5553),
    ("gateway", 5554),
    *((worker, port) for worker in WORKERS for port in (9100, FREE_PORT)),
}
DIALS = {
    "gateway": {("bucketing_manager", 5551), ("length_predictor", 5552), ("global_monitor", 5553)},
    "length_predictor": {("global_monitor", 5553)},
    "bucketing_manager": {("global_monitor", 5553)},
    "global_monitor": {
        ("bucketing_manager", 5551),
        ("gateway", 8000),
        *((role, 9100) for role in ROLES if role not in ("gateway", "global_monitor")),
    },
    **{worker: WORKER_DIALS for worker in WORKERS},
}


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items()


def matches(peer: dict[str, Any], pod: dict[str, str], namespace: str, address: str) -> bool:
    if "ipBlock" in peer:
        return bool(address) and ipaddress.ip_address(address) in ipaddress.ip_network(peer["ipBlock"]["cidr"])
    if "namespaceSelector" in peer:
        named = selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": namespace})
        return named and selects(peer.get("podSelector", {}), pod)
    return namespace == "cohort" and selects(peer["podSelector"], pod)


def passes(
    rules: list[dict[str, Any]], side: str, pod: dict[str, str], namespace: str, port: int, address: str = ""
) -> bool:
    """Whether rules admit a pod, or what is no pod at an `address`."""
    for rule in rules:
        peers = rule.get(side)
        known = peers is None or any(matches(peer, pod, namespace, address) for peer in peers)
        if known and (
            "ports" not in rule or any(each["port"] == port and each["protocol"] == "TCP" for each in rule["ports"])
        ):
            return True
    return False


def admitted(
    overlay: str, source: dict[str, str], target: dict[str, str], port: int, namespace: str = "cohort"
) -> bool:
    """Whether the policies let a pod open a TCP connection; one of another namespace is not held back itself."""
    policies = [each["spec"] for each in of_kind(overlay, "NetworkPolicy").values()]
    out = [rule for each in policies if selects(each["podSelector"], source) for rule in each.get("egress", ())]
    into = [rule for each in policies if selects(each["podSelector"], target) for rule in each.get("ingress", ())]
    leaves = namespace != "cohort" or passes(out, "to", target, "cohort", port)
    return leaves and passes(into, "from", source, namespace, port)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_policies_let_through_what_processes_dial_and_nothing_else(overlay: str):
    by_role = workloads(overlay)
    for source, dialled in DIALS.items():
        for target in ROLES:
            for port in {*ports(by_role[target]).values(), FREE_PORT, 22}:
                wanted = (target, port) in dialled or (port == 22 and {source, target} <= set(WORKERS))
                labels = pod_labels(by_role[source]), pod_labels(by_role[target])
                assert admitted(overlay, *labels, port) == wanted, (source, target, port)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_strangers_reach_the_api_and_prometheus_the_monitor(overlay: str):
    for role, workload in workloads(overlay).items():
        for port in {*ports(workload).values(), FREE_PORT}:
            labels = pod_labels(workload)
            assert admitted(overlay, {}, labels, port, "elsewhere") == ((role, port) == ("gateway", 8000))
            wanted = (role, port) in {("gateway", 8000), ("global_monitor", 8001)}
            assert admitted(overlay, {}, labels, port, "monitoring") == wanted
            assert not admitted(overlay, {}, labels, port) or (role, port) == ("gateway", 8000)
    policies = of_kind(overlay, "NetworkPolicy").values()
    assert any(each["spec"]["podSelector"] == {} and not each["spec"].get("ingress") for each in policies)
    assert all(each["spec"]["policyTypes"] for each in policies)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_names_come_from_the_clusters_dns_alone(overlay: str):
    policies = [each["spec"] for each in of_kind(overlay, "NetworkPolicy").values()]
    for workload in workloads(overlay).values():
        labels = pod_labels(workload)
        out = [rule for each in policies if selects(each["podSelector"], labels) for rule in each.get("egress", ())]
        assert passes(out, "to", {"k8s-app": "kube-dns"}, "kube-system", 53)
        assert not passes(out, "to", {"k8s-app": "metrics-server"}, "kube-system", 53)
        assert not passes(out, "to", {"k8s-app": "kube-dns"}, "elsewhere", 53)
        assert passes(out, "to", {}, "", 53, "169.254.20.10") and not passes(out, "to", {}, "", 53, "8.8.8.8")


# -- overlays --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_worker_has_one_gpu_or_the_threads_that_it_asks_for(overlay: str, tmp_path: Path):
    for role in WORKERS:
        resources = container(workloads(overlay)[role])["resources"]
        if overlay == "cpu":
            (tmp_path / role).mkdir()
            config = configured(overlay, role, tmp_path / role)
            assert config.engine.threads == int(resources["requests"]["cpu"])
            assert config.engine.device == "cpu" and "nvidia.com/gpu" not in resources["limits"]
        else:
            assert resources["limits"]["nvidia.com/gpu"] == "1"


def test_workers_on_many_nodes_are_spread_and_share_models():
    assert of_kind("nodes", "PersistentVolumeClaim")["models"]["spec"]["accessModes"] == ["ReadWriteMany"]
    for role in ("prefill_worker", "decode_worker"):
        workload = workloads("nodes")[role]
        pod = pod_spec(workload)
        assert pod is not None
        [spread] = pod["topologySpreadConstraints"]
        assert selects(spread["labelSelector"], pod_labels(workload))


def test_autoscalers_go_by_metrics_that_exist():
    [rules] = documents(FOLDER / "components" / "autoscaling" / "prometheus-adapter.values.yaml")
    queries = {rule["name"]["as"]: rule["metricsQuery"] for rule in rules["rules"]["external"]}
    scaled = of_kind("nodes", "HorizontalPodAutoscaler")
    assert {name.replace("-", "_") for name in scaled} == {"prefill_worker", "decode_worker"}
    used = set()
    for name, scaler in scaled.items():
        target = workloads("nodes")[scaler["spec"]["scaleTargetRef"]["name"].replace("-", "_")]
        assert target["metadata"]["name"] == name and "replicas" not in target["spec"]
        used |= {metric["external"]["metric"]["name"] for metric in scaler["spec"]["metrics"]}
    assert used == set(queries)
    assert {found for query in queries.values() for found in re.findall(r"\bcohort_\w+", query)} <= known_names()
    # Workers are named after their pods, which the query of the decode workers' KV relies on.
    [name] = [
        each for each in container(workloads("nodes")["decode_worker"])["env"] if each["name"] == "COHORT_INSTANCE"
    ]
    assert name["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"


def test_prometheus_finds_the_monitors_metrics():
    monitor = of_kind("nodes", "ServiceMonitor")["cohort"]["spec"]
    service = of_kind("nodes", "Service")["global-monitor"]
    assert selects(monitor["selector"], service["metadata"]["labels"])
    [endpoint] = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["honorLabels"] is True
