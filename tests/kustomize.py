"""What `kubectl apply -k FOLDER` would send, as kustomize renders it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

Resource = dict[str, Any]

_OPTIONS = re.compile(r"\bcohort-options(-[a-z0-9]{10})?\b")
"""The config map, to whose name kustomize appends a hash of what it holds, so that a change restarts the pods."""


def render(folder: Path) -> list[Resource]:
    """All resources of a kustomization, the config map without the hash. Skips the test where kustomize is not."""
    program = shutil.which("kustomize") or shutil.which("kubectl")
    if program is None:
        pytest.skip("neither kustomize nor kubectl is installed")
    command = [program, "kustomize" if program.endswith("kubectl") else "build", folder]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    [suffix] = set(_OPTIONS.findall(text))
    assert suffix, "no name of the config map got its hash"
    return list(yaml.safe_load_all(_OPTIONS.sub("cohort-options", text)))


def key(resource: Resource) -> tuple[str, str]:
    return resource["kind"], resource["metadata"]["name"]


def documents(path: Path) -> list[Resource]:
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def pod_spec(resource: Resource) -> Resource | None:
    """The pods that a resource makes; None for one that makes none."""
    spec = resource.get("spec", {}).get("template", {}).get("spec")
    return spec if isinstance(spec, dict) else None


def pod_specs(resource: Resource) -> list[Resource]:
    """Likewise of a kind that makes different ones: of a LeaderWorkerSet the leader's and the others'."""
    group = resource.get("spec", {}).get("leaderWorkerTemplate", {})
    both = [group[name]["spec"] for name in ("leaderTemplate", "workerTemplate") if name in group]
    return both or [spec for spec in [pod_spec(resource)] if spec]
