"""Quantised checkpoints over several ranks: each rank's codes are a part of the whole, and together they compute it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.config.quantization_config import keeps_codes
from cohort.common.engine.config.rank_shares import RankShare, check_degree, why_not_divisible
from cohort.common.engine.ranks.sharded_weights import open_sharded
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import ScoringRow, StepBatch
from cohort.common.engine.weights.quantized_files import QuantizedFiles
from cohort.common.engine.weights.quantized_formats import ReorderedWeight
from cohort.common.engine.weights.weights import open_weights
from cohort.common.errors import ConfigError, ModelError
from cohort.kernels.cpu import native
from tests.common.engine.driver import Driver, make_runner, random_prompts
from tests.common.engine.groups import group_runner
from tests.common.engine.joint_ranks import joint_runner
from tests.engine_models import VOCAB, save_random_model
from tests.examples import another_of_its_kind
from tests.quantised_models import FORMATS, WIDE_GROUPS, write

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
STRADDLING = {"awq-64", "gptq-4-64-asymmetric", "ct-packed-4-64-asymmetric", "ct-packed-8-64"}  # of a quarter of 128


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(transformers.Qwen3Config(**SHAPE), tmp_path_factory.mktemp("qwen3"))


def shapes(share: RankShare) -> dict[str, tuple[int, int]]:
    g = share.own
    query, kv = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
    return {
        "self_attn.q_proj": (query, 64),
        "self_attn.k_proj": (kv, 64),
        "self_attn.o_proj": (64, query),
        "mlp.up_proj": (g.intermediate_size, 64),
        "mlp.down_proj": (64, g.intermediate_size),
    }


@pytest.mark.parametrize("name", [*FORMATS, *WIDE_GROUPS])
def test_a_rank_holds_its_part_of_the_codes(name: str, source: Path, tmp_path: Path) -> None:
    """To the bit, what it stands for is the whole's part; and what the whole keeps in codes, a part keeps."""
    folder = write(source, tmp_path, name).folder
    geometry, degree = read_geometry(folder), 4
    if name in STRADDLING:
        assert "share scales in groups of 64, and each rank's 32 would cut" in why_not_divisible(geometry, degree)
        degree = 2
    assert why_not_divisible(geometry, degree) == ""
    with open_weights(folder, "files", geometry.quantization) as whole:
        assert isinstance(whole, QuantizedFiles)
        for rank in (0, degree - 1):
            share = RankShare(geometry, rank, degree)
            with open_sharded(folder, "files", share) as files:
                assert isinstance(files, QuantizedFiles)
                for module, (outputs, inputs) in shapes(share).items():
                    weight = f"model.layers.1.{module}.weight"
                    part = share.part(weight)
                    assert part is not None
                    extents = (part.of, inputs) if part.axis == 0 else (outputs, part.of)
                    every = whole.read_quantized(weight, *extents, CPU)
                    own = files.read_quantized(weight, outputs, inputs, CPU)
                    assert every is not None and own is not None and own.shape == (outputs, inputs)
                    ((first, end),) = part.ranges
                    assert torch.equal(own.dequantized(), every.dequantized().narrow(part.axis, first, end - first))
                    read = files.read(weight, (outputs, inputs), torch.bfloat16, CPU)
                    assert torch.equal(read, own.dequantized().bfloat16())
                    if not isinstance(own, ReorderedWeight):
                        for device in ("cpu", "cuda"):
                            kept = keeps_codes(device, "bfloat16", every.layout)
                            assert keeps_codes(device, "bfloat16", own.layout) == kept


def told(runner: ModelRunner, prompt: Sequence[int]) -> Tensor:
    """Log-probabilities of a prompt's tokens, each after those before it."""
    driver = Driver(runner, shuffle=2)
    driver.add("r", prompt)
    batch = driver.batch([("r", len(prompt))])
    kept = {name: getattr(batch, name) for name in batch.__slots__ if name != "scoring"}
    output = runner.execute(StepBatch(**kept, scoring=(ScoringRow(0, 0, tuple(prompt[1:]), 0),)))
    return torch.tensor([score.logprob for score in output.scores[0]])


@pytest.mark.parametrize(
    ("name", "degree", "processes"),
    [
        ("fp8-blocks", 2, False),
        pytest.param("fp8-blocks", 2, True, marks=another_of_its_kind()),
        pytest.param("awq-32", 4, True, marks=another_of_its_kind()),
        pytest.param("gptq-4-act-order", 2, True, marks=another_of_its_kind()),
        pytest.param("ct-int8-channel", 4, True, marks=another_of_its_kind()),
        pytest.param("fp8-tensor", 4, True, marks=another_of_its_kind()),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_compute_what_one_computes(
    name: str, degree: int, processes: bool, dtype: str, source: Path, tmp_path: Path
) -> None:
    """In float32 weights are dequantised, in bfloat16 codes are kept; either way sums have another order alone. What
    that moves in bfloat16 is less than what rounding to it does."""
    if dtype == "bfloat16" and native.operators() is None:
        pytest.skip("no compiled kernels here")
    written, (prompt,) = write(source, tmp_path, name), random_prompts((36,), seed=5)
    alone = told(make_runner(written.folder, dtype=dtype), prompt)
    if processes:
        with group_runner(written.folder, degree, dtype=dtype) as runner:
            found = told(runner, prompt)
    else:
        found = told(joint_runner(written.folder, degree, dtype=dtype)[0], prompt)
    if dtype == "float32":
        assert (found - alone).abs().max() < 1e-3
    else:
        exact = told(make_runner(written.dequantised), prompt)
        assert (found - alone).square().mean() < 2.25 * (alone - exact).square().mean()
    plain = told(make_runner(source), prompt)
    assert (alone - plain).abs().max() > 0.01  # the codes are no whole weights


@pytest.mark.parametrize(
    "name", ["awq-32", "fp8-blocks", "gptq-4-32-act-order", "gptq-8-32-asymmetric", "ct-packed-4-32"]
)
@another_of_its_kind()
def test_columns_of_five_groups_over_four_ranks(name: str, tmp_path: Path) -> None:
    """Whole groups of 32 on each, two of them on the first."""
    config = transformers.Qwen3Config(**{**SHAPE, "intermediate_size": 160})
    written = write(save_random_model(config, tmp_path / "plain"), tmp_path, name)
    (prompt,), geometry = random_prompts((36,), seed=5), read_geometry(written.folder)
    assert [RankShare(geometry, rank, 4).own.intermediate_size for rank in range(4)] == [64, 32, 32, 32]
    found, alone = told(joint_runner(written.folder, 4)[0], prompt), told(make_runner(written.folder), prompt)
    assert (found - alone).abs().max() < 1e-3


def test_what_cannot_be_cut_is_named(source: Path, tmp_path: Path) -> None:
    folder = write(source, tmp_path, "awq-64").folder
    geometry = read_geometry(folder)
    with pytest.raises(
        ConfigError, match=r"tensor_parallel: 4: awq-64: the 128 inputs of self_attn.o_proj share scales"
    ):
        check_degree(geometry, 4, folder.name)
    with pytest.raises(ConfigError, match=r"degrees for this model: 1, 2$"):
        check_degree(geometry, 4, folder.name)
    share = RankShare(geometry, 1, 4)
    with open_sharded(folder, "files", share) as files:
        assert isinstance(files, QuantizedFiles)
        with pytest.raises(ModelError, match=r"o_proj.weight, rank 1 of 4: inputs 32 to 64 of 128 would cut through"):
            files.read_quantized("model.layers.0.self_attn.o_proj.weight", 64, 32, CPU)
    quantization = geometry.quantization
    assert quantization is not None
    plain = dataclasses.replace(quantization, excluded=("o_proj", "down_proj"))
    assert why_not_divisible(dataclasses.replace(geometry, quantization=plain), 4) == ""
