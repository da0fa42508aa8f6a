"""The planner on Kubernetes: what its component adds, and what it needs of the options beside it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import structs

from cohort.common.planning.settings import planner_settings
from cohort.common.planning.shape import Shape, neighbours
from cohort.common.types import Role
from cohort.services.global_monitor.kubernetes_orders import orderable, stateful_sets
from tests.kustomize import documents, key, pod_spec, render
from tests.scripts.test_kubernetes import (
    FOLDER,
    GUIDE,
    OVERLAYS,
    WORKERS,
    configured,
    of_kind,
    passes,
    pod_labels,
    rendered,
    selects,
    workloads,
)

PLANNED = "planned"


def components(overlay: str) -> set[str]:
    [spec] = documents(FOLDER / "overlays" / overlay / "kustomization.yaml")
    return {Path(each).name for each in spec.get("components", ())}


def options(overlay: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(of_kind(overlay, "ConfigMap")["cohort-options"]["data"]["options.yaml"])
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_one_at_most_writes_replicas(overlay: str):
    """An autoscaler would set back what the planner does, and the planner what the autoscaler does."""
    assert not {"planner", "autoscaling"} <= components(overlay)
    acts = options(overlay).get("planner", {}).get("mode") == "act"
    assert acts == ("planner" in components(overlay)) == (overlay == PLANNED)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_monitor_alone_knows_the_api_server_and_only_where_it_orders_workers(overlay: str):
    pods = {each["metadata"]["name"]: pod for each in rendered(overlay) if (pod := pod_spec(each))}
    known = {name for name, pod in pods.items() if "serviceAccountName" in pod or pod["automountServiceAccountToken"]}
    assert known == ({"global-monitor"} if overlay == PLANNED else set())
    rights = of_kind(overlay, "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding", "ServiceAccount")
    assert set(rights) == known


def test_the_account_may_scale_the_workers_and_no_more():
    by_kind = {each["kind"]: each for each in rendered(PLANNED) if each["metadata"]["name"] == "global-monitor"}
    account, binding, role = (by_kind[kind] for kind in ("ServiceAccount", "RoleBinding", "Role"))
    pod = pod_spec(workloads(PLANNED)["global_monitor"])
    assert pod is not None and pod["serviceAccountName"] == account["metadata"]["name"]
    assert account["automountServiceAccountToken"] is False
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "global-monitor"}
    [subject] = binding["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": "global-monitor", "namespace": "cohort"}
    scaled = {role.replace("_", "-") for role in WORKERS}
    assert [{**rule, "resourceNames": set(rule.get("resourceNames", ()))} for rule in role["rules"]] == [
        {
            "apiGroups": ["apps"],
            "resources": ["statefulsets/scale"],
            "resourceNames": scaled,
            "verbs": ["get", "patch"],
        },
        {"apiGroups": [""], "resources": ["pods"], "resourceNames": set(), "verbs": ["get"]},
    ]


def test_the_monitor_alone_may_leave_for_the_api_server():
    policies = [each["spec"] for each in of_kind(PLANNED, "NetworkPolicy").values()]
    for role, workload in workloads(PLANNED).items():
        labels = pod_labels(workload)
        out = [rule for each in policies if selects(each["podSelector"], labels) for rule in each.get("egress", ())]
        for port in (443, 6443):
            assert not passes(out, "to", {}, "elsewhere", port) and not passes(out, "to", {}, "", port, "8.8.8.8")
            for address in ("10.96.0.1", "172.18.0.2", "192.168.49.2", "fd00::1"):
                assert passes(out, "to", {}, "", port, address) == (role == "global_monitor")
        assert not passes(out, "to", {}, "", 22, "10.96.0.1")


def test_an_overlay_names_the_api_servers_address(tmp_path: Path):
    """By the patch of the guide."""
    [patch] = re.findall(r"^patches:.*\n(?: .*\n)+", GUIDE, re.M)
    overlay = tmp_path / "own"
    overlay.mkdir()
    planned = os.path.relpath(FOLDER / "overlays" / PLANNED, overlay)
    (overlay / "kustomization.yaml").write_text(f"resources: [{planned}]\n{patch}")
    [policy] = [each for each in render(overlay) if key(each) == ("NetworkPolicy", "api-server")]
    out = policy["spec"]["egress"]
    for port in (443, 6443):
        assert passes(out, "to", {}, "", port, "10.1.2.3") and not passes(out, "to", {}, "", port, "10.1.2.4")


def test_replicas_that_the_planner_says_are_not_in_the_manifests(tmp_path: Path):
    """Applied again they would go back. Those that it never has workers of are none."""
    config = configured(PLANNED, "global_monitor", tmp_path)
    counts = {role: workloads(PLANNED)[f"{role.value}_worker"]["spec"].get("replicas") for role in Role}
    assert counts == {Role.UNIFIED: None, Role.PREFILL: 0, Role.DECODE: 0} and config.planner.shapes == ("colocated",)
    # The component itself leaves all of them to the planner, for overlays that plan both families.
    [spec] = documents(FOLDER / "components" / "planner" / "kustomization.yaml")
    [none] = documents(FOLDER / "components" / "planner" / "no-replicas.yaml")
    left = {patch["target"]["name"] for patch in spec["patches"] if patch["path"] == "no-replicas.yaml"}
    both = structs.replace(config.planner, shapes=("colocated", "split"))
    assert left == set(stateful_sets(structs.replace(config, planner=both)).values())
    assert none["spec"] == {"replicas": None}


def test_what_the_monitor_reads_there_can_be_planned(tmp_path: Path):
    config = configured(PLANNED, "global_monitor", tmp_path)
    assert stateful_sets(config) == {Role.UNIFIED: workloads(PLANNED)["unified_worker"]["metadata"]["name"]}
    settings = planner_settings(config, kinds=orderable(config))
    assert settings.mode == "act" and config.on_gpu
    one = Shape.of({(Role.UNIFIED, 1): 1})
    assert neighbours(one, settings.bounds) == [one.with_((Role.UNIFIED, 1), more) for more in (1, 2)]
    # A pod gets its time to drain before the planner gives it up, and gateways tell of their requests.
    pod = pod_spec(workloads(PLANNED)["unified_worker"])
    assert pod is not None and config.drain_s < pod["terminationGracePeriodSeconds"] < config.drain_s + 60
    (tmp_path / "gateway").mkdir()
    assert configured(PLANNED, "gateway", tmp_path / "gateway").planner == config.planner
