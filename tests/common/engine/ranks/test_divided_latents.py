"""DeepSeek over several ranks: heads, MLPs and experts are divided, latents are on all of them, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.config.rank_shares import RankShare, degrees, reduced_bytes
from cohort.common.engine.weights.weights import open_weights
from cohort.kernels.cpu import native
from tests.common.engine.driver import (
    BLOCK_SIZE,
    check_schedule,
    make_runner,
    random_prompts,
    reference_generate,
    run_chunked,
    run_together,
)
from tests.common.engine.joint_ranks import joint_runner
from tests.common.engine.ranks.test_divided_codes import told
from tests.common.engine.ranks.test_tensor_parallel import deepseek_of_eight
from tests.engine_models import save_random_model
from tests.examples import another_of_its_kind
from tests.quantised_models import write


@pytest.fixture(scope="module")
def eight_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(deepseek_of_eight(), tmp_path_factory.mktemp("deepseek"))


@pytest.fixture
def folder_of(model_folder: Callable[[str], Path], eight_heads: Path) -> Callable[[str], Path]:
    return lambda name: eight_heads if name == "eight-heads" else model_folder(name)


def test_a_rank_has_its_heads_and_the_whole_cache(eight_heads: Path) -> None:
    geometry = read_geometry(eight_heads)
    assert degrees(geometry, 8) == [1, 2, 4, 8]
    share = RankShare(geometry, 3, 4)
    assert geometry.latent is not None and geometry.experts is not None and share.own.experts is not None
    assert (share.own.num_heads, share.own.num_kv_heads, share.own.latent) == (2, 1, geometry.latent)
    assert share.own.kv_geometry("bfloat16", BLOCK_SIZE) == geometry.kv_geometry("bfloat16", BLOCK_SIZE)
    layer, width = "model.layers.1.self_attn.", geometry.latent.plain + geometry.latent.rotated
    query, values = share.part(f"{layer}q_b_proj.weight"), share.part(f"{layer}o_proj.weight")
    assert query is not None and values is not None
    assert (query.axis, query.of, query.ranges) == (0, 8 * width, ((6 * width, 8 * width),))
    assert (values.axis, values.of, values.extent) == (1, 8 * geometry.latent.value, 2 * geometry.latent.value)
    for name in ("q_a_proj.weight", "kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight"):
        assert share.part(layer + name) is None
    assert share.part("model.layers.1.mlp.gate.e_score_correction_bias") is None
    shared = share.part("model.layers.1.mlp.shared_experts.down_proj.weight")
    assert shared is not None and shared.of == geometry.experts.shared_inner_size


@pytest.mark.parametrize(
    ("name", "degree"),
    [
        ("eight-heads", 4),
        ("deepseek2-groups", 2),  # with biases, of which the one of the sum is added once
        pytest.param("deepseek2", 3, marks=another_of_its_kind()),
        pytest.param("deepseek3", 2, marks=another_of_its_kind()),
        pytest.param("deepseek3-apart", 2, marks=another_of_its_kind()),
    ],
)
def test_greedy_equals_transformers(name: str, degree: int, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(name)
    expected = reference_generate(folder, random_prompts((1, 5, 33)), 8)
    runner, joint = joint_runner(folder, degree)
    assert check_schedule(runner, expected, run_chunked(7), shuffle=3, reverse=True) <= 1
    assert check_schedule(runner, expected, run_together) <= 1
    assert joint.caches[0].abs().sum() > 0 and len(joint.caches) == degree
    assert all(torch.equal(cache, joint.caches[0]) for cache in joint.caches)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=another_of_its_kind())])
def test_published_codes_are_divided(dtype: str, tmp_path: Path) -> None:
    """Experts and MLPs in groups of 32 columns, which 16-bit models keep: of five groups rank 0 of four has two.
    Attention's matrices are widened, and cut by heads."""
    if dtype == "bfloat16" and native.operators() is None:
        pytest.skip("no compiled kernels here")
    config = deepseek_of_eight()
    config.v_head_dim, config.intermediate_size, config.moe_intermediate_size = 16, 160, 160
    written = write(save_random_model(config, tmp_path / "plain"), tmp_path, "fp8-blocks")
    (prompt,), geometry = random_prompts((36,), seed=5), read_geometry(written.folder)
    assert degrees(geometry, 8) == [1, 2, 4]
    assert [RankShare(geometry, rank, 4).own.intermediate_size for rank in range(4)] == [64, 32, 32, 32]
    alone = told(make_runner(written.folder, dtype=dtype), prompt)
    found = told(joint_runner(written.folder, 4, dtype=dtype)[0], prompt)
    if dtype == "float32":
        assert (found - alone).abs().max() < 1e-3
    else:
        exact = told(make_runner(written.dequantised), prompt)
        assert (found - alone).square().mean() < 2.25 * (alone - exact).square().mean()


@another_of_its_kind()
def test_experts_in_one_tensor_are_divided(eight_heads: Path, tmp_path: Path) -> None:
    """As transformers saves them where it is told not to convert them back."""
    model = transformers.AutoModelForCausalLM.from_pretrained(eight_heads, dtype=torch.float32)
    model.save_pretrained(tmp_path, save_original_format=False)
    with open_weights(tmp_path, "files", None) as files:
        assert "model.layers.1.mlp.experts.gate_up_proj" in files
    expected = reference_generate(eight_heads, random_prompts((1, 33)), 8)
    assert check_schedule(joint_runner(tmp_path, 4)[0], expected, run_chunked(7)) <= 1


def test_what_is_summed_is_what_is_planned_with(eight_heads: Path) -> None:
    runner, joint = joint_runner(eight_heads, 2)
    told(runner, random_prompts([13])[0])
    geometry = runner.geometry
    for rank in joint.ranks:
        assert rank.allreduce_bytes == geometry.num_layers * reduced_bytes(geometry, 4, 13)
