"""The component `rank-groups`: decode workers of several pods, as a LeaderWorkerSet. No controller has seen it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import msgspec
import pytest

from cohort.common.config import Config, load_config
from cohort.common.http import exposure
from cohort.common.process.service import drain_time_s
from cohort.services.launcher.plan import STOP_MARGIN_S
from tests.kustomize import Resource, documents, pod_specs, render
from tests.scripts.test_kubernetes import FOLDER, RELEASES, selects, started, workloads

COMPONENT = FOLDER / "components" / "rank-groups"
GROUP = {"LWS_LEADER_ADDRESS": "decode-group-0.decode-group.cohort", "LWS_GROUP_SIZE": "2"}
"""What the controller sets in every container of the first group."""
PORT = 5560

TEMPLATE = {
    "type": "object",
    "required": ["spec"],
    "additionalProperties": False,
    "properties": {"metadata": {}, "spec": {}},
}
# leaderworkerset.x-k8s.io/v1 as far as it is used; pods are checked as pods.
LEADER_WORKER_SET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["leaderWorkerTemplate"],
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "networkConfig": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["subdomainPolicy"],
                    "properties": {"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}},
                },
                "leaderWorkerTemplate": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["workerTemplate"],
                    "properties": {
                        "leaderTemplate": TEMPLATE,
                        "workerTemplate": TEMPLATE,
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {
                            "enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
                        },
                    },
                },
            },
        },
    },
}


@pytest.fixture(scope="module")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the guide has it."""
    folder = tmp_path_factory.mktemp("kubernetes")
    for name in ("base", "components"):
        shutil.copytree(FOLDER / name, folder / name)
    own = folder / "overlays" / "groups"
    own.mkdir(parents=True)
    (own / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nnamespace: cohort\n"
        "resources: [../../base]\ncomponents: [../../components/gpu, ../../components/rank-groups]\n"
        "images: [{name: cohort, newName: registry.example/cohort, newTag: cuda}]\n"
    )
    return own


@pytest.fixture(scope="module")
def resources(overlay: Path) -> list[Resource]:
    return render(overlay)


@pytest.fixture(scope="module")
def group(resources: list[Resource]) -> Resource:
    [found] = [each for each in resources if each["kind"] == "LeaderWorkerSet"]
    return found


def template(group: Resource, name: str) -> dict[str, Any]:
    found: dict[str, Any] = group["spec"]["leaderWorkerTemplate"][name]
    return found


def configured(resources: list[Resource], pod: Resource, index: int, tmp_path: Path) -> tuple[Config, list[str]]:
    """What the container's process would read, and its command line."""
    [config_map] = [each for each in resources if each["kind"] == "ConfigMap"]
    for name, text in config_map["data"].items():
        (tmp_path / name).write_text(text)
    [here] = pod["containers"]
    given = {"COHORT_ACCELERATOR": "cuda", "LWS_WORKER_INDEX": str(index), **GROUP}
    for variable in here["env"]:
        match variable:
            case {"name": name, "value": value}:
                placed = value.replace("/etc/cohort/options", str(tmp_path))
                given[name] = placed.replace("/run/cohort", f"{tmp_path}/r")
            case {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}:
                given[name] = {"status.podIP": f"10.1.2.{index}", "metadata.name": "decode-group-0"}[path]
    (tmp_path / "r").mkdir()
    words = [word.replace("/etc/cohort/options", str(tmp_path)) for word in here["args"]]
    done = started(words, given, tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    return load_config([Path(said[at + 1]) for at, word in enumerate(said) if word == "--config"]), said


def after(said: list[str], option: str) -> str:
    return said[said.index(option) + 1]


@pytest.mark.parametrize("release", RELEASES)
def test_the_group_fits_its_schema_and_its_pods_fit_kubernetes(
    resources: list[Resource], group: Resource, release: str
):
    jsonschema.validate(group, LEADER_WORKER_SET)
    for name in ("leaderTemplate", "workerTemplate"):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any"}, "spec": template(group, name)["spec"]}
        kubernetes_validate.validate(pod, release, strict=True)
    for each in resources:
        if each["kind"] == "NetworkPolicy":
            kubernetes_validate.validate(each, release, strict=True)


def test_the_schema_refuses_what_the_controller_does_not_know(group: Resource):
    spec = {**group["spec"]["leaderWorkerTemplate"], "restartPolicy": "RecreateGroup"}
    with pytest.raises(jsonschema.ValidationError, match="RecreateGroup"):
        jsonschema.validate({**group, "spec": {"leaderWorkerTemplate": spec}}, LEADER_WORKER_SET)


def test_pods_of_a_group_are_confined_as_a_worker_is(group: Resource):
    worker = workloads("nodes")["decode_worker"]["spec"]["template"]["spec"]
    [theirs] = worker["containers"]
    for pod in pod_specs(group):
        [here] = pod["containers"]
        assert here["image"] == "registry.example/cohort:cuda"
        for name in ("securityContext", "automountServiceAccountToken", "enableServiceLinks", "tolerations"):
            assert pod[name] == worker[name]
        for name in ("securityContext", "resources", "imagePullPolicy"):
            assert here[name] == theirs[name]
        mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in here["volumeMounts"]}
        assert mounts == {mount["mountPath"]: mount.get("readOnly", False) for mount in theirs["volumeMounts"]}
        assert {mount["name"] for mount in here["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        secrets = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
        assert secrets == [volume["secret"] for volume in worker["volumes"] if "secret" in volume]
    [leader] = template(group, "leaderTemplate")["spec"]["containers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert leader[probe] == theirs[probe]


def test_all_pods_of_a_group_are_one_worker(resources: list[Resource], group: Resource, tmp_path: Path):
    folders = [tmp_path / str(index) for index in (0, 1)]
    for folder in folders:
        folder.mkdir()
    leader, first = configured(resources, template(group, "leaderTemplate")["spec"], 0, folders[0])
    other, second = configured(resources, template(group, "workerTemplate")["spec"], 1, folders[1])
    assert first[2] == "cohort.services.decode_worker" and second[2] == "cohort.services.rank_host"
    dialled = msgspec.structs.replace(other.endpoints, ranks=after(second, "--leader"))
    other = msgspec.structs.replace(other, endpoints=dialled)  # as `rank_host` does
    for config in (leader, other):
        exposure.check_endpoints(config)
        [workers] = [each for each in config.workers if each.hosts > 1]
        assert workers is config.worker_group(after(first, "--instance"), workers.role)
        assert workers.hosts == group["spec"]["leaderWorkerTemplate"]["size"] == int(GROUP["LWS_GROUP_SIZE"])
        assert config.security.curve_secret_key_file == "/etc/cohort/keys/cluster.key"
    assert leader.endpoints.ranks == f"tcp://10.1.2.0:{PORT}"
    assert after(second, "--leader") == f"tcp://{GROUP['LWS_LEADER_ADDRESS']}:{PORT}"
    assert after(second, "--host") == "1" and other.endpoints.worker == "tcp://10.1.2.1:0"
    for pod in pod_specs(group):
        [here] = pod["containers"]
        assert int(here["resources"]["limits"]["nvidia.com/gpu"]) == workers.local_degree == leader.engine.gpus
        drain_s = drain_time_s(leader, "decode_worker")
        assert pod["terminationGracePeriodSeconds"] >= drain_s + STOP_MARGIN_S
    ports = {port["containerPort"] for port in template(group, "leaderTemplate")["spec"]["containers"][0]["ports"]}
    assert ports == {9100, PORT}
    assert group["metadata"]["name"] == GROUP["LWS_LEADER_ADDRESS"].split(".")[1]


def test_ranks_and_workers_reach_each_other_and_nobody_else_a_rank(resources: list[Resource], group: Resource):
    policies = [each["spec"] for each in resources if each["kind"] == "NetworkPolicy"]
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"]
        for each in resources
        if each["kind"] in ("StatefulSet", "Deployment")
    }
    pods["leader"] = template(group, "leaderTemplate")["metadata"]["labels"]
    pods["rank"] = template(group, "workerTemplate")["metadata"]["labels"]

    def passes(direction: str, side: str, here: str, there: str) -> bool:
        """On any port."""
        own = [each for each in policies if selects(each["podSelector"], pods[here])]
        rules = [rule for each in own for rule in each.get(direction, ()) if "ports" not in rule]
        return any(selects(peer["podSelector"], pods[there]) for rule in rules for peer in rule.get(side, ()))

    workers = {"prefill-worker", "decode-worker", "unified-worker", "leader"}
    for name in pods:
        free = passes("egress", "to", name, "rank") and passes("ingress", "from", "rank", name)
        assert free is (name in workers | {"rank"}), name
        back = passes("egress", "to", "rank", name) and passes("ingress", "from", name, "rank")
        assert back is (name in workers | {"rank"}), name


def test_config_maps_are_found_where_a_group_names_them(resources: list[Resource]):
    """kustomize gives them a suffix, and knows no LeaderWorkerSet."""
    [config_map] = [each for each in resources if each["kind"] == "ConfigMap"]
    assert config_map["data"].keys() == {"cluster.yaml", "options.yaml", "groups.yaml"}
    [names] = documents(COMPONENT / "names.yaml")
    [reference] = names["nameReference"]
    assert reference["kind"] == "ConfigMap"
    [group] = documents(COMPONENT / "decode-group.yaml")
    for each in reference["fieldSpecs"]:
        found: Any = [group]
        for step in each["path"].split("/"):
            found = [
                inner
                for outer in found
                for inner in (outer[step] if isinstance(outer.get(step), list) else [outer.get(step)])
                if inner is not None
            ]
        assert found == ["cohort-options"], each["path"]
