"""The model that containers are named: the entry point with the program that settles it, and the files that say so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cohort.common.config import Config, load_config
from cohort.services.launcher.models import named_model
from tests.common.hub.conftest import cache as cache
from tests.common.hub.fake_hub import FETCHED, FILES, cached
from tests.containers import ENTRYPOINT, ROOT, SERVICES

COMPONENT = ROOT / "docker" / "kubernetes" / "components" / "hub-model"
FAKE = """#!/bin/sh
case "$*" in
    *named_model*) exec {python} "$@" ;;
esac
for word; do printf "%s\\n" "$word"; done
"""


@pytest.fixture
def snapshot(cache: Path) -> Path:
    return cached(cache, "org/name", {name: FILES[name] for name in FETCHED})


def entered(tmp_path: Path, role: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The entry point, whose process shows its arguments."""
    fake = tmp_path / "bin" / "python"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(FAKE.format(python=sys.executable))
    fake.chmod(0o755)
    given = {name: os.environ[name] for name in ("HF_HUB_CACHE", "COHORT_CACHE_DIR")}
    given |= {"PATH": f"{fake.parent}:/usr/bin:/bin", "COHORT_RUN_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [ENTRYPOINT, *SERVICES[role]["command"]]
    return subprocess.run(command, env={**given, **environment}, capture_output=True, text=True, check=False)


def configured(done: subprocess.CompletedProcess[str]) -> Config:
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    return load_config([Path(words[at + 1]) for at, word in enumerate(words) if word == "--config"])


@pytest.mark.pipeline
def test_processes_serve_what_the_environment_names(snapshot: Path, tmp_path: Path) -> None:
    """Over the configuration; who cannot see the cache knows the name all the same."""
    own = tmp_path / "own.yaml"
    own.write_text("model: {path: /models/other, max_model_len: 7}\n")
    named = {"COHORT_MODEL": "org/name", "COHORT_CONFIG": str(own), "HF_HUB_OFFLINE": "1"}
    model = configured(entered(tmp_path, "prefill_worker_cpu", **named)).model
    assert (model.path, model.served_name, model.max_model_len) == (str(snapshot), "org/name", 7)
    model = configured(entered(tmp_path, "bucketing_manager", **named, HF_HUB_CACHE="/nowhere")).model
    assert model.served_name == "org/name"
    done = entered(tmp_path, "gateway", **named, HF_HUB_CACHE="/nowhere")
    assert done.returncode == 2 and "COHORT_MODEL: org/name: no such folder" in done.stderr and not done.stdout
    lines = entered(tmp_path, "model", **named).stdout.splitlines()  # beside the kernels' words, in any order
    [said] = [line for line in lines if line.startswith("{")]
    assert json.loads(said)["model"] == {"path": str(snapshot), "served_name": "org/name"}


def test_a_folder_has_its_own_name(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    name = str(tmp_path / "models" / "mine")
    assert named_model.main([name]) == named_model.main([name, "--name-only"]) == 0
    whole, only = map(json.loads, capsys.readouterr().out.splitlines())
    assert whole["model"] == {"path": name, "served_name": "mine"} and only["model"] == {"served_name": "mine"}
    assert named_model.main([f"{name}-2"]) == 2
    assert "mine-2: no such folder or file" in capsys.readouterr().err


def test_only_the_first_container_may_fetch_and_none_writes_to_the_hosts_cache() -> None:
    for name, service in SERVICES.items():
        if not str(service["image"]).startswith("cohort:"):
            continue
        given = service["environment"]
        assert {"COHORT_MODEL", "COHORT_REVISION"} <= set(given)
        assert ({"COHORT_DOWNLOAD", "HF_TOKEN"} <= set(given)) is (name == "model")
        mounts = [mount.rpartition("}:")[2] for mount in service["volumes"] if "COHORT_HF_CACHE" in mount]
        assert mounts == ([] if name == "length_predictor" else [f"{given['HF_HUB_CACHE']}:ro"])


def test_the_component_of_kubernetes() -> None:
    """Its job fetches what its ConfigMap names, into the volume that processes read; the patch adds that map alone."""
    found: dict[str, dict[str, Any]] = {}
    for file in ("job.yaml", "model.yaml"):
        for resource in yaml.safe_load_all((COMPONENT / file).read_text(encoding="utf-8")):
            kubernetes_validate.validate(resource, "1.30", strict=True)
            found[resource["kind"]] = resource
    named = found["ConfigMap"]["data"]
    [fetches] = found["Job"]["spec"]["template"]["spec"]["containers"]
    own = {variable["name"] for variable in fetches["env"]}
    assert {"COHORT_DOWNLOAD", "HF_HUB_OFFLINE", "HF_TOKEN"} <= own
    assert fetches["args"] == ["$(COHORT_MODEL)", "--revision=$(COHORT_REVISION)", "--fetch"]
    [patch] = yaml.safe_load_all((COMPONENT / "process.yaml").read_text(encoding="utf-8"))
    [patched] = patch["spec"]["template"]["spec"]["containers"]
    assert patched == {"name": "cohort", "envFrom": fetches["envFrom"]}
    assert fetches["envFrom"] == [{"configMapRef": {"name": found["ConfigMap"]["metadata"]["name"]}}]
    assert any(named["HF_HUB_CACHE"].startswith(mount["mountPath"]) for mount in fetches["volumeMounts"])
    spec = yaml.safe_load((COMPONENT / "kustomization.yaml").read_text(encoding="utf-8"))
    assert spec["resources"] == ["model.yaml", "job.yaml"]
