"""The simulator's groups of devices and the live worker's ranks: the same memory, the same messages."""

from __future__ import annotations

import math

import pytest

from cohort.common.config import load_config
from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.config.rank_shares import RankShare, reduced_bytes
from cohort.common.policies.cost_model import CostModel, ModelShape
from cohort.services.simulator.core.deployment import kv_blocks
from cohort.services.simulator.hardware.hardware import load_cluster, load_model

MODELS = ["llama-3-8b", "llama-2-70b", "qwen2.5-72b"]


def geometry_of(shape: ModelShape) -> ModelGeometry:
    return ModelGeometry(
        model_type="llama",
        family="llama",
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary,
        max_positions=shape.max_positions,
        norm_eps=1e-5,
        tie_embeddings=shape.tied_embeddings,
        activation="silu",
        eos_token_ids=(),
        checkpoint_dtype="bfloat16",
    )


def matrices(geometry: ModelGeometry) -> dict[str, tuple[int, int]]:
    """The shapes of a model's matrices, one layer's by their modules."""
    query, kv = geometry.num_heads * geometry.head_dim, geometry.num_kv_heads * geometry.head_dim
    hidden, inner = geometry.hidden_size, geometry.intermediate_size
    return {
        "q_proj": (query, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, query),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }


def parameters(share: RankShare) -> int:
    """Of one rank, by the part of every tensor that it reads."""

    def of(name: str, shape: tuple[int, int]) -> int:
        part = share.part(f"{name}.weight")
        assert part is not None
        assert part.of == shape[part.axis]
        return math.prod(shape) // part.of * part.extent

    whole = share.geometry
    layer = sum(of(name, shape) for name, shape in matrices(whole).items())
    table = (whole.vocab_size, whole.hidden_size)
    heads = of("embed_tokens", table) + (0 if whole.tie_embeddings else of("lm_head", table))
    return whole.num_layers * layer + heads


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("degree", [2, 4, 8])
def test_a_rank_holds_its_part_of_what_the_simulator_counts(name: str, degree: int) -> None:
    shape = load_model(name)
    shares = [RankShare(geometry_of(shape), rank, degree) for rank in range(degree)]
    assert [parameters(share) * shape.weight_bytes for share in shares] == [
        shape.weights_total_bytes // degree
    ] * degree
    block = shares[0].own.kv_geometry("bfloat16", 16).block_bytes
    assert block * degree == shape.kv_geometry(16).block_bytes


@pytest.mark.parametrize("name", [*MODELS, "deepseek-v2-lite"])  # of whose latents every rank has all
def test_both_have_as_many_blocks(name: str) -> None:
    shape = load_model(name)
    memory = 3 << 30
    config = load_config(overrides={"kv": {"memory_bytes": memory}})
    cluster = load_cluster("h200:1", {"tensor_parallel": 4})
    blocks, _ = kv_blocks(config, cluster, shape, shape.kv_geometry(config.kv.block_size))
    own = RankShare(geometry_of(shape), 0, 4).own.kv_geometry("bfloat16", config.kv.block_size)
    assert blocks == memory // (own.block_bytes * 4)


@pytest.mark.parametrize("degree", [2, 4])
def test_both_sum_as_many_bytes_over_the_ranks(degree: int) -> None:
    """What a live group sums is compared with `reduced_bytes` in tests/common/engine/ranks/test_tensor_parallel.py."""
    shape, cluster = load_model("llama-3-8b"), load_cluster("a100-80:1", {"tensor_parallel": degree})
    cost = CostModel(shape, cluster.device, cluster.stack, tensor_parallel=degree)
    assert 100 * cost.reduced_token_bytes == reduced_bytes(geometry_of(shape), shape.weight_bytes, 100)
    assert CostModel(shape, cluster.device, cluster.stack).reduced_token_bytes == 0
