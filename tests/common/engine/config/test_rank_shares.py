"""Shares of ranks: every number of the model is on exactly one rank, or on all where it must be."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cohort.common.engine.config.model_config import ExpertsGeometry, ModelGeometry, read_geometry
from cohort.common.engine.config.rank_shares import Columns, Part, RankShare, check_degree, degrees, why_not_divisible
from cohort.common.engine.ranks import sharded_weights
from cohort.common.engine.ranks.sharded_weights import ShardedRandom, ShardedWeights
from cohort.common.engine.weights.tensor_files import _Mapped
from cohort.common.engine.weights.weight_files import WeightFiles
from cohort.common.engine.weights.weights import RandomWeights, Weights
from cohort.common.errors import ConfigError, ModelError
from tests.common.engine.config.test_device_memory import LLAMA_8B

CPU = torch.device("cpu")


def test_the_shares_of_an_8b_model_on_four_ranks() -> None:
    share = RankShare(LLAMA_8B, 1, 4)
    own = share.own
    assert (own.num_heads, own.num_kv_heads, own.intermediate_size, own.vocab_size) == (8, 2, 3584, 32064)
    assert (share.kv_heads, share.vocabulary) == ((2, 4), (32064, 64128))
    assert share.part("model.layers.3.self_attn.k_proj.weight").ranges == ((256, 512),)  # type: ignore[union-attr]
    assert share.part("model.layers.3.self_attn.o_proj.weight").axis == 1  # type: ignore[union-attr]
    assert share.part("model.norm.weight") is None


def test_fewer_kv_heads_than_ranks_are_copied() -> None:
    geometry = dataclasses.replace(LLAMA_8B, num_kv_heads=2)
    shares = [RankShare(geometry, rank, 8) for rank in range(8)]
    assert [share.kv_heads for share in shares] == [(0, 1)] * 4 + [(1, 2)] * 4
    assert {share.own.num_kv_heads for share in shares} == {1}


def mixture(**change: Any) -> ExpertsGeometry:
    """Of layers of the model above that all have experts."""
    some = {"count": 8, "per_token": 2, "inner_size": 1024, "normalised": True, "layers": (True,) * LLAMA_8B.num_layers}
    return ExpertsGeometry(**{**some, **change})


@pytest.mark.parametrize(
    ("change", "degree", "reason"),
    [
        ({"num_heads": 9, "num_kv_heads": 3}, 2, "9 query heads do not divide by 2"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "3 KV heads neither divide by 2 nor divide it"),
        ({"intermediate_size": 1001}, 2, "an MLP of 1001 columns does not divide by 2"),
        ({"vocab_size": 9}, 4, "a vocabulary of 9 leaves the last of 4 ranks without a token"),
        ({"family": "gemma", "model_type": "gemma2"}, 2, "gemma2 runs in its gemma form"),
        ({"family": "moe", "experts": mixture(inner_size=1001)}, 2, "an expert of 1001 columns does not divide by 2"),
        (
            {"family": "moe", "experts": mixture(shared_inner_size=6)},
            4,
            "the shared expert of 6 columns does not divide by 4",
        ),
        (
            {"family": "moe", "intermediate_size": 9, "experts": mixture(layers=(True, False))},
            2,
            "an MLP of 9 columns does not divide by 2",
        ),
        (
            {"family": "gpt_oss", "experts": mixture(inner_size=96, mxfp4=True)},
            4,
            "an expert of 96 columns has 3 groups of 32 that share scales, for 4 ranks",
        ),
    ],
)
def test_what_does_not_divide_is_named(change: dict[str, Any], degree: int, reason: str) -> None:
    geometry = dataclasses.replace(LLAMA_8B, **change)
    assert reason in why_not_divisible(geometry, degree)
    assert why_not_divisible(geometry, 1) == ""
    with pytest.raises(ConfigError, match=f"tensor_parallel: {degree}: here: .*degrees for this model: 1"):
        check_degree(geometry, degree, "here")


def test_degrees_of_a_model() -> None:
    assert degrees(LLAMA_8B, 16) == [1, 2, 4, 8, 16]
    only_experts = dataclasses.replace(LLAMA_8B, family="moe", intermediate_size=9, experts=mixture())
    assert degrees(only_experts, 16) == [1, 2, 4, 8, 16]
    nine = dataclasses.replace(LLAMA_8B, num_heads=9, num_kv_heads=3, intermediate_size=1536)
    assert degrees(nine, 16) == [1, 3]


@pytest.mark.parametrize("columns", [Columns(2880, 32), Columns(200, 64), Columns(96, 1), Columns(96, 4)], ids=str)
def test_columns_are_divided_by_whole_groups(columns: Columns) -> None:
    """All of them, in order; no rank has more than one group more than another, and none more than the first."""
    for degree in range(1, 9):
        if columns.why_not_divisible(degree):
            assert (columns.together == 1 and columns.count % degree) or columns.groups < degree
            continue
        parts = [columns.of(rank, degree) for rank in range(degree)]
        assert [0, *(end for _, end in parts)] == [*(first for first, _ in parts), columns.count]
        assert all(first % columns.together == 0 for first, _ in parts)
        sizes = [end - first for first, end in parts]
        assert (
            min(sizes) > 0 and max(sizes) == sizes[0] and sizes[0] - sizes[-2 if degree > 1 else -1] <= columns.together
        )
    assert [Columns(2880, 32).of(rank, 4) for rank in range(4)] == [(0, 736), (736, 1472), (1472, 2176), (2176, 2880)]


def test_gpt_oss_divides_by_its_groups() -> None:
    """As it is published: 90 groups of 32 columns in every expert."""
    change: dict[str, Any] = {"family": "gpt_oss", "experts": mixture(inner_size=2880, mxfp4=True)}
    geometry = dataclasses.replace(LLAMA_8B, intermediate_size=2880, **change)
    assert degrees(geometry, 16) == [1, 2, 4, 8, 16]
    own = [RankShare(geometry, rank, 4).own.experts for rank in range(4)]
    assert [each.inner_size for each in own if each is not None] == [736, 736, 704, 704]
    blocks = RankShare(geometry, 2, 4).part("model.layers.0.mlp.experts.down_proj_blocks")
    gates = RankShare(geometry, 2, 4).part("model.layers.0.mlp.experts.gate_up_proj_blocks")
    assert blocks == Part(2, 90, ((46, 68),)) and gates == Part(1, 5760, ((2944, 4352),))


def read(files: Weights, geometry: ModelGeometry, name: str) -> torch.Tensor:
    """One of a layer's tensors in the shape that this geometry has."""
    query, kv = geometry.num_heads * geometry.head_dim, geometry.num_kv_heads * geometry.head_dim
    hidden, inner = geometry.hidden_size, geometry.intermediate_size
    rows = {"q_proj": query, "k_proj": kv, "v_proj": kv, "gate_proj": inner, "up_proj": inner}
    rows |= {"qkv_proj": query + 2 * kv, "gate_up_proj": 2 * inner, "o_proj": hidden, "down_proj": hidden}
    columns = {"o_proj": query, "down_proj": inner}
    module = name.split(".")[-2]
    shape = [rows[module], columns.get(module, hidden)] if name.endswith("weight") else [rows[module]]
    return files.read(name, shape, torch.float32, CPU)


def together(name: str, parts: Sequence[torch.Tensor], geometry: ModelGeometry, degree: int) -> torch.Tensor:
    """What the ranks have, put together as the file has it."""
    if name.endswith(("o_proj.bias", "down_proj.bias")):
        return torch.stack(list(parts)).sum(0)
    if name.split(".")[-2] in ("o_proj", "down_proj"):
        return torch.cat(list(parts), dim=1)
    sizes = [len(parts[0])]
    if "qkv" in name:
        size = geometry.head_dim
        sizes = [geometry.num_heads // degree * size, *[geometry.num_kv_heads // degree * size] * 2]
    if "gate_up" in name:
        sizes = [geometry.intermediate_size // degree] * 2
    cut = [part.split(sizes) for part in parts]
    return torch.cat([cut[rank][index] for index in range(len(sizes)) for rank in range(degree)])


@pytest.mark.parametrize("model", ["llama-bias-llama3", "phi3"])
@pytest.mark.parametrize("kind", ["files", "random"])
def test_all_shares_together_are_the_model(model: str, kind: str, model_folder: Callable[[str], Path]) -> None:
    folder = model_folder(model)
    geometry = read_geometry(folder)
    layer = "model.layers.1."
    modules = ["self_attn.o_proj", "mlp.down_proj"]
    modules += ["self_attn.qkv_proj", "mlp.gate_up_proj"] if geometry.fused_weights else ["self_attn.k_proj"]
    names = [f"{layer}{module}.weight" for module in modules]
    names += [f"{layer}{module}.bias" for module in modules] if geometry.mlp_bias else []
    shares = [RankShare(geometry, rank, 2) for rank in range(2)]
    whole: Weights = WeightFiles(folder) if kind == "files" else RandomWeights()
    for name in names:
        parts = []
        for share in shares:
            with ShardedWeights(folder, share) if kind == "files" else ShardedRandom(share) as files:
                parts.append(read(files, share.own, name))
        with whole as files:
            assert torch.equal(together(name, parts, geometry, 2), read(files, geometry, name)), name


@pytest.mark.parametrize(
    ("name", "short", "read_of_it"),
    [("self_attn.o_proj.weight", 0, 1), ("self_attn.o_proj.weight", 1024, 2), ("self_attn.k_proj.weight", 1024, 1)],
)
def test_only_the_share_is_read(
    name: str, short: int, read_of_it: int, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or whole rows, where they are short."""
    monkeypatch.setattr(sharded_weights, "SHORT_ROW_BYTES", short)
    folder = model_folder("llama-bias-llama3")
    geometry = read_geometry(folder)
    share = RankShare(geometry, 1, 2)
    bytes_read: list[int] = []
    real = os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        count = real(descriptor, buffers, offset)
        bytes_read.append(count)
        return count

    with ShardedWeights(folder, share) as files:
        monkeypatch.setattr(os, "preadv", counted)
        found = read(files, share.own, f"model.layers.0.{name}")
    assert sum(bytes_read) == math.prod(found.shape) * 4 * read_of_it


@pytest.mark.parametrize("part", [Part(1, 6, ((1, 2), (4, 6))), Part(2, 5, ((2, 4),)), Part(1, 6, ((3, 6),))], ids=str)
def test_any_stretch_of_a_part_is_that_of_the_cut_tensor(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any element on, row by row and in pieces of several rows, whose last is not filled."""
    whole = torch.arange(7 * 6 * 5, dtype=torch.bfloat16).view(7, 6, 5)
    expected = torch.cat([whole.narrow(part.axis, a, b - a) for a, b in part.ranges], dim=part.axis).reshape(-1)
    monkeypatch.setattr(sharded_weights, "_PIECE_BYTES", 150)
    for short in (0, 1024):
        monkeypatch.setattr(sharded_weights, "SHORT_ROW_BYTES", short)
        cut = sharded_weights._Slice(_Mapped(whole), "w", part)
        for first in range(len(expected)):
            for count in (1, 7, len(expected) - first):
                found = torch.zeros(min(count, len(expected) - first), dtype=torch.bfloat16)
                cut.fill(found, first)
                assert torch.equal(found, expected[first : first + count]), (short, first, count)


def test_a_tensor_of_another_shape_is_named(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("llama-bias-llama3")
    wrong = dataclasses.replace(read_geometry(folder), intermediate_size=160)
    with pytest.raises(ModelError, match=r"down_proj\.weight has shape \(48, 80\).* 160 along dimension 1"):
        ShardedWeights(folder, RankShare(wrong, 0, 2)).read(
            "model.layers.0.mlp.down_proj.weight", (48, 80), torch.float32, CPU
        )
