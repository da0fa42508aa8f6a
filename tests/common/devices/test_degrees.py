"""How many devices a worker gets: the fewest that hold the model, and only numbers that its heads divide by."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from cohort.common.config import Config, load_config
from cohort.common.devices.degrees import settle_degrees
from cohort.common.devices.division import divide
from cohort.common.engine.config.model_config import ExpertsGeometry
from cohort.common.errors import ConfigError
from tests.common.devices.fakes import GIB
from tests.common.engine.config.test_device_memory import LLAMA_8B

LLAMA_70B = dataclasses.replace(
    LLAMA_8B, num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, intermediate_size=28672
)
MIXTRAL = dataclasses.replace(
    LLAMA_8B,
    family="moe",
    model_type="mixtral",
    experts=ExpertsGeometry(8, 2, 14336, normalised=True, layers=(True,) * LLAMA_8B.num_layers),
)
NINE = dataclasses.replace(LLAMA_8B, num_heads=9, num_kv_heads=3, intermediate_size=1536, hidden_size=576)


def config(degree: int | str, device: str = "cuda", **engine: Any) -> Config:
    return load_config(
        overrides={
            "workers": [{"role": "unified", "tensor_parallel": degree}],
            "model": {"weights": "random"},
            "engine": {"device": device, **engine},
        }
    )


def settled(config: Config, geometry: Any, memories: list[int]) -> int:
    (group,) = settle_degrees(config, Path("llama"), geometry, memories).workers
    assert group.tensor_parallel != "auto"
    return group.tensor_parallel


@pytest.mark.parametrize(
    ("geometry", "gib", "degree"),
    [
        (LLAMA_8B, 80, 1),
        (LLAMA_8B, 16, 2),
        (LLAMA_70B, 141, 2),
        (LLAMA_70B, 80, 2),
        (LLAMA_70B, 48, 4),
        (LLAMA_70B, 24, 8),
        (MIXTRAL, 141, 1),
        (MIXTRAL, 80, 2),
        (MIXTRAL, 40, 4),
    ],
)
def test_auto_is_the_fewest_gpus_that_hold_the_model(geometry: Any, gib: int, degree: int) -> None:
    assert settled(config("auto"), geometry, [gib * GIB] * 8) == degree


def test_every_rank_needs_memory_for_its_recorded_steps() -> None:
    """Where that is not to be had, none may be recorded."""
    memories = [40 * GIB] * 8
    assert settled(config("auto"), LLAMA_70B, memories) == 8
    assert settled(config("auto", cuda_graph_memory_bytes=0), LLAMA_70B, memories) == 4


def test_auto_leaves_the_refusal_to_a_worker_of_one_gpu() -> None:
    assert settled(config("auto"), LLAMA_70B, [24 * GIB] * 4) == 1


def test_auto_on_a_cpu_is_one() -> None:
    assert settled(config("auto", "cpu"), LLAMA_70B, []) == 1


def test_auto_keeps_to_the_gpus_of_the_pipeline() -> None:
    assert settled(config("auto", gpus=2), LLAMA_70B, [40 * GIB] * 8) == 1
    assert settled(config("auto", gpus=2), LLAMA_70B, [141 * GIB] * 8) == 2


def test_a_number_is_taken_as_it_is() -> None:
    assert settled(config(4, "cpu"), LLAMA_8B, []) == 4
    assert settled(config(2), LLAMA_8B, [80 * GIB] * 2) == 2


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel: 2: llama: 9 query heads .* degrees for this model: 1, 3"):
        settled(config(2, "cpu"), NINE, [])


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel: 4: every rank .* 2 can be used"):
        settled(config(4), LLAMA_8B, [80 * GIB] * 2)


def test_a_box_is_divided_into_groups() -> None:
    pairs = load_config(
        overrides={
            "workers": [
                {"role": "prefill", "count": 0, "tensor_parallel": 2},
                {"role": "decode", "count": 0, "tensor_parallel": 2},
            ],
            "engine": {"device": "cuda"},
        },
        preset="disaggregated",
    )
    division = divide(pairs, 8)
    assert [(group.role.value, group.count, group.degree) for group in division.workers] == [
        ("prefill", 2, 2),
        ("decode", 2, 2),
    ]
    assert division.sharers == 1


def test_standbys_are_groups_too() -> None:
    division = divide(
        load_config(
            overrides={
                "workers": [{"role": "unified", "count": 0, "tensor_parallel": 4}],
                "engine": {"device": "cuda"},
            },
            preset="cohort",
        ),
        8,
    )
    assert [(group.count, group.degree) for group in division.workers] == [(2, 4)]
    assert division.sharers == 1
