from __future__ import annotations

import msgspec
import pytest

from cohort.common.config import Config, load_config
from cohort.common.devices.division import auto_counts, divide, resolve_division
from cohort.common.types import Role


def box(preset: str, **engine: object) -> Config:
    return auto_counts(load_config(preset=preset, overrides={"engine": {"device": "cuda", **engine}}))


def counts(config: Config, visible: int) -> dict[str, int]:
    return {group.role.value: group.count for group in divide(config, visible).workers}


@pytest.mark.parametrize(
    ("preset", "visible", "workers", "sharers"),
    [
        # Roles are preferences: every GPU gets a worker that can do everything, and one GPU gets one.
        ("cohort", 1, {"unified": 1}, 1),
        ("cohort", 8, {"unified": 8}, 1),
        ("unified", 4, {"unified": 4}, 1),
        # Two roles: half and half, the odd one decodes; on one GPU they share.
        ("disaggregated", 1, {"prefill": 1, "decode": 1}, 2),
        ("disaggregated", 2, {"prefill": 1, "decode": 1}, 1),
        ("disaggregated", 3, {"prefill": 1, "decode": 2}, 1),
        ("alignedserve", 8, {"prefill": 4, "decode": 4}, 1),
        # Splitting needs two.
        ("dynaserve", 1, {"unified": 2}, 2),
        ("dynaserve", 8, {"unified": 8}, 1),
    ],
)
def test_a_box_is_divided_by_the_presets_roles(
    preset: str, visible: int, workers: dict[str, int], sharers: int
) -> None:
    config = box(preset)
    assert counts(config, visible) == workers
    assert divide(config, visible).sharers == sharers
    settled = resolve_division(config, visible)
    assert len(settled.instance_roles) == sum(workers.values())
    assert settled.engine.workers_per_gpu == sharers and not settled.divides


def test_what_a_file_counts_stays() -> None:
    config = load_config(overrides={"engine": {"device": "cuda"}, "workers": [{"role": "decode", "count": 3}]})
    assert divide(config, 2).workers == config.workers
    assert divide(config, 2).sharers == 2


def test_fewer_gpus_and_more_workers_on_each_can_be_asked_for() -> None:
    assert counts(box("cohort", gpus=2), 8) == {"unified": 2}
    assert counts(box("cohort", workers_per_gpu=2), 2) == {"unified": 4}
    assert counts(box("disaggregated", workers_per_gpu=2), 1) == {"prefill": 1, "decode": 1}
    assert counts(box("cohort", device="cuda:1"), 8) == {"unified": 1}


def test_auto_in_a_file_keeps_the_roles_beneath_it() -> None:
    for preset in ("disaggregated", "unified", "dynaserve"):
        plain, auto = load_config(preset=preset), load_config(preset=preset, overrides={"workers": "auto"})
        assert auto.divides and not plain.divides
        assert [group.role for group in auto.workers] == [group.role for group in plain.workers]
    assert [group.role for group in load_config(overrides={"workers": "auto"}).workers] == [Role.PREFILL, Role.DECODE]


def test_without_a_gpu_auto_is_one_device() -> None:
    settled = resolve_division(load_config(preset="cohort", overrides={"workers": "auto"}), 0)
    assert list(settled.instance_roles) == ["unified-0"]
    assert settled.engine.workers_per_gpu == 0
    assert msgspec.structs.replace(settled, workers=Config().workers) == load_config(preset="cohort")
