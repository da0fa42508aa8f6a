"""DeepSeek-V2 and V3: configuration, latents in the cache, routing; equality of their answers is in `test_families`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from cohort.common.engine.config.model_config import LatentGeometry, ModelGeometry, read_geometry
from cohort.common.engine.models.experts import GroupedRouter
from cohort.common.engine.weights.linear import Linear
from cohort.common.errors import ModelError
from cohort.kernels.cpu import native
from tests.common.engine.driver import (
    BLOCK_SIZE,
    Driver,
    check_schedule,
    make_runner,
    random_prompts,
    reference_generate,
    run_chunked,
)
from tests.common.engine.models.test_families import forward
from tests.engine_models import CONFIGS

MODELS = ["deepseek2", "deepseek2-groups", "deepseek3", "deepseek3-apart"]


def _geometry(tmp_path: Path, **config: Any) -> ModelGeometry:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_geometry(tmp_path)


def test_a_token_weighs_one_latent(tmp_path: Path) -> None:
    """DeepSeek-V2-Lite's 512 + 64 numbers a layer, not keys and values of every head."""
    geometry = _geometry(tmp_path, model_type="deepseek_v2", num_experts_per_tok=6, num_hidden_layers=27)
    assert geometry.latent == LatentGeometry(512, 64, 128, 128, 1536, interleaved=True)
    assert geometry.kv_token_bytes("bfloat16") == 27 * 576 * 2
    assert geometry.rotary_dim == 64


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_absent_keys_take_the_defaults_of_transformers(tmp_path: Path, model_type: str) -> None:
    given = {"num_experts_per_tok": 6} if model_type == "deepseek_v2" else {}  # V2's default is none at all
    geometry = _geometry(tmp_path, model_type=model_type, **given)
    config = transformers.AutoConfig.for_model(model_type, **given)
    latent, experts = geometry.latent, geometry.experts
    assert latent is not None and experts is not None and experts.routing is not None
    assert geometry.family == "deepseek"
    assert (geometry.vocab_size, geometry.max_positions) == (config.vocab_size, config.max_position_embeddings)
    assert (geometry.num_layers, geometry.num_heads) == (config.num_hidden_layers, config.num_attention_heads)
    assert (geometry.hidden_size, geometry.intermediate_size) == (config.hidden_size, config.intermediate_size)
    assert (latent.rank, latent.rotated) == (config.kv_lora_rank, config.qk_rope_head_dim)
    assert (latent.plain, latent.value, latent.query_rank) == (
        config.qk_nope_head_dim,
        config.v_head_dim,
        config.q_lora_rank,
    )
    assert geometry.attention_scale == (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    assert (experts.count, experts.per_token) == (config.n_routed_experts, config.num_experts_per_tok)
    assert experts.inner_size == config.moe_intermediate_size
    assert experts.shared_inner_size == config.moe_intermediate_size * config.n_shared_experts
    assert experts.layers.count(False) == config.first_k_dense_replace
    assert (experts.routing.groups, experts.routing.chosen) == (config.n_group or 1, config.topk_group or 1)
    assert experts.routing.scale == config.routed_scaling_factor
    assert geometry.eos_token_ids == (config.eos_token_id,)


def _router(kind: Any, config: Any, tmp_path: Path) -> tuple[Any, GroupedRouter]:
    """transformers' and ours, over the same weights."""
    torch.manual_seed(5)
    theirs = kind(config)
    torch.nn.init.normal_(theirs.weight)
    correction = None
    if kind is DeepseekV3TopkRouter:
        theirs.e_score_correction_bias.normal_(0.0, 0.3)
        correction = theirs.e_score_correction_bias
    config.save_pretrained(tmp_path)
    mixture = read_geometry(tmp_path).experts
    assert mixture is not None and mixture.routing is not None
    routing = mixture.routing
    ours = GroupedRouter(
        Linear(theirs.weight.detach()),
        correction,
        mixture.per_token,
        routing.groups,
        routing.chosen,
        mixture.normalised,
        routing.scale,
    )
    return theirs, ours


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("deepseek2", DeepseekV2TopkRouter),
        ("deepseek2-groups", DeepseekV2TopkRouter),
        ("deepseek3", DeepseekV3TopkRouter),
    ],
)
def test_routing_is_that_of_transformers(name: str, kind: Any, tmp_path: Path) -> None:
    theirs, ours = _router(kind, CONFIGS[name](), tmp_path)
    x = torch.randn((200, 48), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        _, weights, experts = theirs(x)
        experts, places = experts.sort(dim=-1)
        found, found_weights = ours.route(x)
        assert torch.equal(found, experts)
        torch.testing.assert_close(found_weights, weights.gather(1, places))
        alone = [ours.route(x[row : row + 1]) for row in range(0, 200, 17)]
    for row, (one, one_weights) in zip(range(0, 200, 17), alone, strict=True):
        assert torch.equal(one[0], found[row])
        assert torch.equal(one_weights[0], found_weights[row])


@pytest.mark.parametrize("name", MODELS)
def test_a_row_computes_the_same_bits_in_every_batch(name: str, model_folder: Callable[[str], Path]) -> None:
    runner = make_runner(model_folder(name))
    prompts = random_prompts((40, 3, 17, 26))
    rows = []
    for together in (prompts, *([prompt] for prompt in prompts)):
        driver = Driver(runner)
        for index, prompt in enumerate(together):
            driver.add(str(index), prompt)
        rows.append(forward(runner, driver, [(str(index), len(prompt)) for index, prompt in enumerate(together)]))
    assert all(torch.equal(row, alone) for row, (alone,) in zip(rows[0], rows[1:], strict=True))


def test_latents_move_to_host_memory_and_back(model_folder: Callable[[str], Path]) -> None:
    """Blocks and single slots, as other models' keys and values."""
    runner = make_runner(model_folder("deepseek3"))
    assert runner.kv.blocks.shape[2:] == (1, 1, BLOCK_SIZE, 32)
    assert runner.kv.block_bytes == 3 * 32 * BLOCK_SIZE * 4
    runner.kv.blocks.normal_()
    before = runner.kv.blocks.clone()
    runner.kv.copy_out([(3, 1), (5, 0)])
    slots = torch.tensor([2 * BLOCK_SIZE + 1, 7 * BLOCK_SIZE + 6])
    kept = runner.kv.gather(slots)
    assert torch.equal(kept[0, :, 0, 0], before[2, :, 0, 0, 1])
    runner.kv.blocks.zero_()
    runner.kv.copy_in([(1, 3), (0, 5)])
    assert torch.equal(runner.kv.blocks[3], before[3])
    assert torch.equal(runner.kv.blocks[5], before[5])
    runner.kv.copy_slots_out([3 * BLOCK_SIZE + 2, 5 * BLOCK_SIZE + 1], [4 * BLOCK_SIZE, 6 * BLOCK_SIZE + 3])
    runner.kv.copy_slots_in([BLOCK_SIZE + 7, 9 * BLOCK_SIZE], [6 * BLOCK_SIZE + 3, 4 * BLOCK_SIZE])
    assert torch.equal(runner.kv.blocks[1, :, 0, 0, 7], before[5, :, 0, 0, 1])
    assert torch.equal(runner.kv.blocks[9, :, 0, 0, 0], before[3, :, 0, 0, 2])


def test_without_compiled_kernels(model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "ops_for", lambda tensor: None)
    monkeypatch.setattr(native, "operators", lambda: None)
    folder = model_folder("deepseek3")
    expected = reference_generate(folder, random_prompts((5, 33)), 8)
    assert check_schedule(make_runner(folder), expected, run_chunked(7)) <= 1


@pytest.mark.parametrize("name", ["deepseek2", "deepseek3"])
def test_a_missing_tensor_is_named(name: str, model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = model_folder(name)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_routed_experts": 12}))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"mlp\.experts\.[68]\.gate_proj\.weight"):
        make_runner(tmp_path)


@pytest.mark.parametrize("edit", [{"hidden_act": "gelu"}, {"topk_method": "unknown"}, {"moe_layer_freq": 2}])
def test_values_that_the_lean_form_does_not_compute_are_refused(
    edit: dict[str, Any], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers' layers hand keys and values of two widths to their attention, which the generic path refuses."""
    folder = model_folder("deepseek2")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | edit))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert read_geometry(tmp_path).family == "generic"
    with pytest.raises(ModelError, match="deepseek_v2 cannot be served"):
        make_runner(tmp_path)


def test_random_weights(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model_folder("deepseek3") / "config.json").read_text())
    runner = make_runner(tmp_path, weights="random")
    driver = Driver(runner)
    driver.add("r", random_prompts([9])[0])
    (logits,) = forward(runner, driver, [("r", 9)])
    assert bool(torch.isfinite(logits).all())
