"""Mixtures of experts over several ranks: each holds of every expert a part of its columns, and together they compute
transformers' tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cohort.common.engine.model_config import read_geometry
from cohort.common.engine.rank_shares import reduced_bytes
from tests.common.engine.driver import (
    Driver,
    check_schedule,
    make_runner,
    random_prompts,
    reference_generate,
    run_chunked,
    run_together,
)
from tests.common.engine.groups import group_runner
from tests.engine_models import VOCAB, save_random_model
from tests.examples import another_of_its_kind

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 256,
}


def mixtral() -> Any:
    return transformers.MixtralConfig(**SHAPE, intermediate_size=80, num_local_experts=5)


def qwen2_moe() -> Any:
    """Its shared expert has other columns than the others, and its layers without experts have others again."""
    return transformers.Qwen2MoeConfig(
        **SHAPE,
        intermediate_size=72,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=56,
        num_experts=6,
        mlp_only_layers=[1],
    )


def qwen3_moe() -> Any:
    """All experts of 4 tokens: a row has each of them."""
    return transformers.Qwen3MoeConfig(
        **SHAPE, intermediate_size=80, moe_intermediate_size=24, num_experts=8, norm_topk_prob=True
    )


def gpt_oss() -> Any:
    """Degree 2 leaves each rank's part of 64 columns whole groups of MXFP4."""
    return transformers.GptOssConfig(
        **SHAPE, intermediate_size=64, num_local_experts=6, num_experts_per_tok=3, sliding_window=7
    )


CONFIGS = {"mixtral": mixtral, "qwen2_moe": qwen2_moe, "qwen3_moe": qwen3_moe, "gpt_oss": gpt_oss}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save_random_model(CONFIGS[name](), tmp_path_factory.mktemp(name))
        return made[name]

    return folder


@pytest.mark.parametrize(
    ("name", "degree"),
    [
        ("qwen2_moe", 2),
        ("gpt_oss", 2),
        pytest.param("mixtral", 2, marks=another_of_its_kind()),
        pytest.param("qwen3_moe", 2, marks=another_of_its_kind()),
        pytest.param("mixtral", 4, marks=another_of_its_kind()),
        pytest.param("qwen2_moe", 4, marks=another_of_its_kind()),
        pytest.param("qwen3_moe", 8, marks=another_of_its_kind()),
        pytest.param("gpt_oss", 4, marks=another_of_its_kind()),
    ],
)
def test_greedy_equals_transformers(name: str, degree: int, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(name)
    expected = reference_generate(folder, random_prompts((1, 5, 33, 50)), 12)
    with group_runner(folder, degree) as runner:
        assert check_schedule(runner, expected, run_chunked(7), shuffle=3, reverse=True) <= 1
        assert check_schedule(runner, expected, run_together) <= 1
        ranks, geometry = runner.ranks, read_geometry(folder)
        assert ranks is not None
        before, driver = ranks.reduced_bytes, Driver(runner)
        driver.add("0", random_prompts([13])[0])
        driver.step([("0", 13)])
        assert ranks.reduced_bytes - before == geometry.num_layers * reduced_bytes(geometry, 4, 13)
