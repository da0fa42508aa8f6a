"""What `kubectl apply -k FOLDER` would send, for as much of kustomize as docker/kubernetes uses.

Resources and components, a namespace, config maps from files, strategic merge patches with a target, images, replicas.
Anything else in a kustomization is an error here. Names of config maps have no suffix (kustomize appends a hash of what
they hold, so that a change restarts the pods), so `configurations`, which say where names are, do
nothing. A test compares the result with kubectl's own where that is installed.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]

# Lists whose elements are merged by name, and by which one; all others are replaced.
MERGE_KEYS = {
    "containers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "topologySpreadConstraints": "topologyKey",
}
CLUSTER_WIDE = {"Namespace"}
SCALED = {"Deployment", "StatefulSet"}
KEYS = {
    "apiVersion",
    "kind",
    "namespace",
    "resources",
    "components",
    "configMapGenerator",
    "patches",
    "images",
    "replicas",
    "configurations",
}


def render(folder: Path) -> list[Resource]:
    """All resources of a kustomization, in no order that means something. Raises `ValueError` for what it cannot do."""
    return _render(folder.resolve(), [])


def key(resource: Resource) -> tuple[str, str]:
    return resource["kind"], resource["metadata"]["name"]


def documents(path: Path) -> list[Resource]:
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def merged(base: Any, patch: Any, name: str = "") -> Any:
    """Strategic merge: mappings by key, named lists by name, None removes."""
    if isinstance(base, dict) and isinstance(patch, dict):
        result = dict(base)
        for field, value in patch.items():
            if value is None:
                result.pop(field, None)
            else:
                result[field] = merged(result[field], value, field) if field in result else copy.deepcopy(value)
        return result
    if isinstance(base, list) and isinstance(patch, list) and (by := MERGE_KEYS.get(name)) is not None:
        known = {element[by]: element for element in base}
        for element in patch:
            known[element[by]] = merged(known[element[by]], element) if element[by] in known else copy.deepcopy(element)
        return list(known.values())
    return copy.deepcopy(patch)


def _render(folder: Path, inherited: list[Resource]) -> list[Resource]:
    [spec] = documents(folder / "kustomization.yaml")
    if unknown := set(spec) - KEYS:
        raise ValueError(f"{folder}: this renderer knows no {', '.join(sorted(unknown))}")
    resources = list(inherited)
    for name in spec.get("resources", ()):
        path = folder / name
        resources += _render(path, []) if path.is_dir() else documents(path)
    for name in spec.get("components", ()):
        resources = _render(folder / name, resources)
    for wanted in spec.get("configMapGenerator", ()):
        _generate(folder, wanted, resources)
    for patch in spec.get("patches", ()):
        resources = _patched(resources, folder / patch["path"], patch["target"])
    for image in spec.get("images", ()):
        for pod in (pod for resource in resources for pod in pod_specs(resource)):
            for container in pod["containers"]:
                if container["image"] == image["name"]:
                    container["image"] = f"{image['newName']}:{image['newTag']}"
    for wanted in spec.get("replicas", ()):
        [scaled] = [each for each in resources if each["metadata"]["name"] == wanted["name"] and each["kind"] in SCALED]
        scaled["spec"]["replicas"] = wanted["count"]
    if namespace := spec.get("namespace"):
        for resource in resources:
            if resource["kind"] not in CLUSTER_WIDE:
                resource["metadata"]["namespace"] = namespace
    return resources


def pod_spec(resource: Resource) -> Resource | None:
    """The pods that a resource makes; None for one that makes none."""
    spec = resource.get("spec", {}).get("template", {}).get("spec")
    return spec if isinstance(spec, dict) else None


def pod_specs(resource: Resource) -> list[Resource]:
    """Likewise of a kind that makes different ones: of a LeaderWorkerSet the leader's and the others'."""
    group = resource.get("spec", {}).get("leaderWorkerTemplate", {})
    both = [group[name]["spec"] for name in ("leaderTemplate", "workerTemplate") if name in group]
    return both or [spec for spec in [pod_spec(resource)] if spec]


def _generate(folder: Path, wanted: Resource, resources: list[Resource]) -> None:
    data = {name: (folder / name).read_text(encoding="utf-8") for name in wanted["files"]}
    if wanted.get("behavior") == "merge":
        [known] = [each for each in resources if key(each) == ("ConfigMap", wanted["name"])]
        known["data"].update(data)
    else:
        resources.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": wanted["name"]}, "data": data})


def _patched(resources: list[Resource], path: Path, target: dict[str, str]) -> list[Resource]:
    [patch] = documents(path)
    body = {field: value for field, value in patch.items() if field not in ("apiVersion", "kind", "metadata")}
    chosen = [
        re.fullmatch(target["kind"], each["kind"]) and re.fullmatch(target.get("name", ".*"), each["metadata"]["name"])
        for each in resources
    ]
    if not any(chosen):
        raise ValueError(f"{path}: is for {target}, and there is none")
    return [merged(each, body) if hit else each for each, hit in zip(resources, chosen, strict=True)]
