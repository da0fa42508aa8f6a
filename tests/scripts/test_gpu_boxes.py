"""The container with all workers of a box with GPUs, by hand: the entry point is run up to the launcher that it
becomes, as compose would; its configuration is then settled for GPUs that are not there, and its workers claim theirs.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cohort.common.config import Config, load_config
from cohort.common.devices.gpu_locks import DeviceClaims, Held
from cohort.common.engine.worker.devices import TorchGpu, share_request, take_together
from cohort.common.types import Role
from cohort.services.launcher.box import on_box
from tests.common.devices.fakes import gpus
from tests.containers import ENTRYPOINT, SERVICES


def container(folder: Path, service: str, **environment: str) -> tuple[list[str], Config]:
    """The command that `entrypoint` becomes, and its configuration."""
    (folder / "bin").mkdir(exist_ok=True)
    fake = folder / "bin" / "python"
    fake.write_text('#!/bin/sh\nfor word; do printf "%s\\n" "$word"; done\n')
    fake.chmod(0o755)
    done = subprocess.run(
        [ENTRYPOINT, *SERVICES[service]["command"]],
        env={
            "PATH": f"{fake.parent}:/usr/bin:/bin",
            "COHORT_RUN_DIR": str(folder / "run"),
            "COHORT_HOST": "box",
            "COHORT_ACCELERATOR": "cuda",
            **environment,
        },
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    return words, load_config([Path(words[at + 1]) for at, word in enumerate(words) if word == "--config"])


def settled(folder: Path, visible: int, **environment: str) -> Config:
    """The workers' configuration, as the launcher has it on a box with so many GPUs."""
    words, config = container(folder, "workers", **environment)
    assert words[2] == "cohort.services.launcher" and words[words.index("--only") + 1] == "workers"
    model = folder / "none"  # no model, whose size would be looked at
    return on_box(config, gpus(visible), workers_given=True, model=model)


def claimed(folder: Path, config: Config, visible: int) -> list[tuple[int, ...] | None]:
    """The GPUs that each of the box's workers claims, one after the other."""
    claims, found = DeviceClaims(folder / "claims"), []
    cards = [TorchGpu(number, gpu.uuid, gpu.name, gpu.memory_bytes) for number, gpu in enumerate(gpus(visible))]
    held: list[Held] = []  # a claim ends with its object
    for instance, role in config.instance_roles.items():
        request = share_request(config, instance, role, visible)
        taken = take_together(claims, cards, request, config.worker_group(instance).local_degree)
        held += [each.share for each in taken]
        found.append(tuple(each.gpu.index for each in taken) or None)
    return found


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_every_gpu_has_a_worker_that_can_do_everything(tmp_path: Path, count: int) -> None:
    config = settled(tmp_path, count)
    assert claimed(tmp_path, config, count) == [(number,) for number in range(count)]
    assert set(config.instance_roles.values()) == {Role.UNIFIED}


def test_a_number_of_gpus_is_kept_to(tmp_path: Path) -> None:
    assert claimed(tmp_path, settled(tmp_path, 8, COHORT_GPUS="2"), 8) == [(0,), (1,)]


def test_several_workers_on_a_gpu_where_that_is_wanted(tmp_path: Path) -> None:
    config = settled(tmp_path, 2, COHORT_GPUS="2", COHORT_WORKERS_PER_GPU="2")
    assert sorted(claimed(tmp_path, config, 2)) == [(0,), (0,), (1,), (1,)]  # type: ignore[type-var]


@pytest.mark.parametrize(("degree", "expected"), [("8", [tuple(range(8))]), ("4", [(0, 1, 2, 3), (4, 5, 6, 7)])])
def test_a_worker_on_several_gpus_is_one_and_takes_them_all(
    tmp_path: Path, degree: str, expected: list[tuple[int, ...]]
) -> None:
    config = settled(tmp_path, 8, COHORT_TENSOR_PARALLEL=degree)
    assert claimed(tmp_path, config, 8) == expected


def test_a_preset_of_two_roles_has_both(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("policies: {placement: disaggregated, prefill_order: fcfs, iteration: continuous_batching}\n")
    config = settled(tmp_path, 4, COHORT_CONFIG=str(own))
    assert list(config.instance_roles.values()) == [Role.PREFILL] * 2 + [Role.DECODE] * 2
    config = settled(tmp_path, 8, COHORT_CONFIG=str(own), COHORT_TENSOR_PARALLEL="4")
    assert list(config.instance_roles.values()) == [Role.PREFILL, Role.DECODE]
    assert claimed(tmp_path, config, 8) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_workers_of_an_own_configuration_win(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("workers: [{role: unified, count: 3}]\n")
    assert list(settled(tmp_path, 8, COHORT_CONFIG=str(own)).instance_roles.values()) == [Role.UNIFIED] * 3


def test_several_gateways_are_a_launchers(tmp_path: Path) -> None:
    words, config = container(tmp_path, "gateway", COHORT_GATEWAYS="3")
    assert words[2] == "cohort.services.launcher" and words[words.index("--only") + 1] == "gateways"
    assert config.gateway.processes == 3
    words, config = container(tmp_path, "gateway")
    assert words[2] == "cohort.services.gateway" and "--only" not in words and config.gateway.processes == 1


def test_the_image_says_where_models_run_unless_the_configuration_does(tmp_path: Path) -> None:
    assert container(tmp_path, "workers")[1].engine.device == "cuda"
    assert container(tmp_path, "prefill_worker_cpu", COHORT_ACCELERATOR="cpu")[1].engine.device == "cpu"
    own = tmp_path / "own.yaml"
    own.write_text("engine: {device: 'cuda:1'}\n")
    assert container(tmp_path, "workers", COHORT_CONFIG=str(own))[1].engine.device == "cuda:1"


@pytest.mark.parametrize(
    ("service", "name"),
    [("workers", "COHORT_GPUS"), ("workers", "COHORT_WORKERS_PER_GPU"), ("gateway", "COHORT_GATEWAYS")],
)
def test_a_number_that_is_none_is_refused(tmp_path: Path, service: str, name: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        container(tmp_path, service, **{name: "all"})
    assert refused.value.returncode == 2 and f"{name}=all: write a number" in refused.value.stderr
