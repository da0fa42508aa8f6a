"""Containers on a box with GPUs, by hand: the entry point is run up to the process it becomes, as compose would for
each container; its configuration then takes part in the claims with GPUs that are not there."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cohort.common.config import Config, load_config
from cohort.common.devices.gpu_locks import DeviceClaims, Held
from cohort.common.engine.worker.devices import share_request
from cohort.common.types import Role
from tests.common.devices.fakes import gpus
from tests.containers import ENTRYPOINT, SERVICES


def container(folder: Path, service: str, host: str, **environment: str) -> tuple[str, str, Config]:
    """Program, instance and configuration of what `entrypoint` becomes in a container of that host name."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / host).mkdir(exist_ok=True)
    fake = folder / "bin" / "python"
    fake.write_text('#!/bin/sh\nfor word; do printf "%s\\n" "$word"; done\n')
    fake.chmod(0o755)
    done = subprocess.run(
        [ENTRYPOINT, *SERVICES[service]["command"]],
        env={
            "PATH": f"{fake.parent}:/usr/bin:/bin",
            "COHORT_RUN_DIR": str(folder / host),
            "COHORT_HOST": host,
            "COHORT_ACCELERATOR": "cuda",
            **environment,
        },
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    files = [Path(words[at + 1]) for at, word in enumerate(words) if word == "--config"]
    return words[2], words[words.index("--instance") + 1], load_config(files)


def started(folder: Path, visible: int, *, services: list[str], **environment: str) -> list[Held | None]:
    """The claims of these containers, one after the other."""
    claims, found = DeviceClaims(folder / "claims"), []
    for number, service in enumerate(services):
        program, instance, config = container(folder, service, f"host{number}", **environment)
        assert program in ("cohort.services.prefill_worker", "cohort.services.decode_worker")
        default = Role.DECODE if program.endswith("decode_worker") else Role.PREFILL
        found.append(claims.take(gpus(visible), share_request(config, instance, default, visible)))
    return found


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_one_variable_gives_every_gpu_a_worker_that_can_do_everything(tmp_path: Path, count: int) -> None:
    held = started(tmp_path, count, services=["worker"] * count, COHORT_GPUS=str(count))
    assert [each.gpu for each in held if each is not None] == list(range(count))
    assert {each.role for each in held if each is not None} == {Role.UNIFIED}


def test_more_workers_are_added_as_long_as_gpus_are_free(tmp_path: Path) -> None:
    """`--scale worker=9` on a box of eight, without a number of GPUs."""
    held = started(tmp_path, 8, services=["worker"] * 9)
    assert [each.gpu if each is not None else None for each in held] == [*range(8), None]


def test_a_number_of_gpus_is_kept_to(tmp_path: Path) -> None:
    held = started(tmp_path, 8, services=["worker"] * 3, COHORT_GPUS="2")
    assert [each.gpu if each is not None else None for each in held] == [0, 1, None]


def test_several_workers_on_a_gpu_where_that_is_wanted(tmp_path: Path) -> None:
    held = started(tmp_path, 2, services=["worker"] * 5, COHORT_GPUS="2", COHORT_WORKERS_PER_GPU="2")
    assert [each.gpu if each is not None else None for each in held] == [0, 1, 0, 1, None]


def test_a_preset_of_two_roles_has_both(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("policies: {placement: disaggregated, prefill_order: fcfs, iteration: continuous_batching}\n")
    held = started(tmp_path, 4, services=["worker"] * 4, COHORT_GPUS="4", COHORT_CONFIG=str(own))
    assert [each.role for each in held if each is not None] == [Role.PREFILL] * 2 + [Role.DECODE] * 2


def test_workers_named_by_role_share_one_gpu_or_have_one_each(tmp_path: Path) -> None:
    both = ["prefill_worker", "decode_worker"]
    (tmp_path / "one").mkdir()
    one = started(tmp_path / "one", 1, services=both)
    assert [(each.gpu, each.share, each.role) for each in one if each is not None] == [
        (0, 0, Role.PREFILL),
        (0, 1, Role.DECODE),
    ]
    (tmp_path / "two").mkdir()
    two = started(tmp_path / "two", 2, services=both)
    assert [(each.gpu, each.role) for each in two if each is not None] == [(0, Role.PREFILL), (1, Role.DECODE)]


def test_the_image_says_where_models_run_unless_the_configuration_does(tmp_path: Path) -> None:
    def device(service: str, **environment: str) -> str:
        return container(tmp_path, service, "host", **environment)[2].engine.device

    assert device("worker") == "cuda"
    assert device("prefill_worker_cpu", COHORT_ACCELERATOR="cpu") == "cpu"
    own = tmp_path / "own.yaml"
    own.write_text("engine: {device: 'cuda:1'}\n")
    assert device("worker", COHORT_CONFIG=str(own)) == "cuda:1"


def test_a_number_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        container(tmp_path, "worker", "host", COHORT_GPUS="all")
    assert refused.value.returncode == 2 and "COHORT_GPUS=all: write a number" in refused.value.stderr


def test_memory_sharing_has_every_gpu_worker() -> None:
    """CUDA IPC wants common process and IPC namespaces, and both GPUs seen by both."""
    text = (Path(ENTRYPOINT).parent / "cuda-ipc.yml").read_text(encoding="utf-8")
    overlay: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    for name in ("worker", "prefill_worker", "decode_worker"):
        assert overlay[name]["ipc"] == overlay[name]["pid"] == "service:namespaces"
        assert SERVICES[name]["deploy"]["resources"]["reservations"]["devices"][0]["count"] == "all"
