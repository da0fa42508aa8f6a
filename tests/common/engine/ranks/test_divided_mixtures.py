"""Mixtures of experts over several ranks: each holds of every expert a part of its columns, and together they compute
transformers' tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.config.rank_shares import RankShare, check_degree, degrees, reduced_bytes
from cohort.common.engine.models import lean_gpt_oss
from cohort.common.engine.models.experts import DeviceExperts, MixtureReader
from cohort.common.engine.models.lean_gpt_oss import _Reader
from cohort.common.engine.models.model_files import ModelFiles
from cohort.common.engine.ranks.sharded_weights import open_sharded
from cohort.common.engine.weights.weights import WeightKind, open_weights
from cohort.common.errors import ConfigError
from cohort.kernels import reference
from cohort.kernels.types import ExpertCodes
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
from tests.common.engine.joint_ranks import joint_runner
from tests.common.engine.ranks.test_divided_codes import told
from tests.engine_models import VOCAB, as_mxfp4, save_random_model
from tests.examples import another_of_its_kind
from tests.quantised_models import Written, write

CPU = torch.device("cpu")

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 2,
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
        mlp_only_layers=[0],
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
        pytest.param("qwen2_moe", 2, marks=another_of_its_kind()),
        pytest.param("gpt_oss", 2, marks=another_of_its_kind()),
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
    expected = reference_generate(folder, random_prompts((1, 5, 33)), 8)
    with group_runner(folder, degree) as runner:
        assert check_schedule(runner, expected, run_chunked(7), shuffle=3, reverse=True) <= 1
        assert check_schedule(runner, expected, run_together) <= 1
        ranks, geometry = runner.ranks, read_geometry(folder)
        assert ranks is not None
        before, driver = ranks.allreduce_bytes, Driver(runner)
        driver.add("0", random_prompts([13])[0])
        driver.step([("0", 13)])
        assert ranks.allreduce_bytes - before == geometry.num_layers * reduced_bytes(geometry, 4, 13)


@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss"])
def test_greedy_equals_transformers_within_one_process(name: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(name)
    expected = reference_generate(folder, random_prompts((1, 5, 33)), 8)
    runner, joint = joint_runner(folder, 2)
    assert check_schedule(runner, expected, run_chunked(7), shuffle=3, reverse=True) <= 1
    assert check_schedule(runner, expected, run_together) <= 1
    before, driver = [rank.allreduce_bytes for rank in joint.ranks], Driver(runner)
    driver.add("0", random_prompts([13])[0])
    driver.step([("0", 13)])
    summed = runner.geometry.num_layers * reduced_bytes(runner.geometry, 4, 13)
    assert [rank.allreduce_bytes for rank in joint.ranks] == [each + summed for each in before]


def parts_of(folder: Path, degree: int, dtype: torch.dtype, kind: WeightKind = "files") -> list[Any]:
    """The last layer's experts, whole and of each rank, as a GPU has them."""
    geometry = read_geometry(folder)
    layer = f"model.layers.{geometry.num_layers - 1}."
    found = []
    for rank in range(-1, degree):
        share = None if rank < 0 else RankShare(geometry, rank, degree)
        own = geometry if share is None else share.own
        assert own.experts is not None
        opened = (
            open_weights(folder, kind, geometry.quantization) if share is None else open_sharded(folder, kind, share)
        )
        with opened as weights:
            files = ModelFiles(weights, dtype, CPU)
            if own.family == "gpt_oss":
                found.append(_Reader(files, own, 1).layer(layer, 0)().experts)
            else:
                found.append(MixtureReader(files, layer, own, own.experts).on_device())
    return found


def check_sum(whole: DeviceExperts, parts: list[DeviceExperts], hidden: int) -> None:
    """What the parts add to nothing is together what the whole adds."""
    x = torch.randn(9, hidden, generator=torch.Generator().manual_seed(2))
    sums = []
    for each in (whole, *parts):
        sums.append(torch.zeros_like(x))
        each.add_into(x, sums[-1], sums[-1])
    torch.testing.assert_close(torch.stack(sums[1:]).sum(0), sums[0], rtol=1e-4, atol=1e-5)
    assert sums[0].std() > 1e-3 and (sums[1] - sums[0]).abs().max() > 1e-3


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_parts_of_a_gpu_add_up(name: str, fused: bool, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Of experts in tensors of their own, and of all experts in one tensor of each kind."""
    folder = folder_of(name)
    if fused:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.save_pretrained(tmp_path, save_original_format=False)
        folder = tmp_path
    whole, *parts = parts_of(folder, 4, torch.float32)
    check_sum(whole, parts, SHAPE["hidden_size"])
    assert {part.down.shape[2] * 4 for part in parts} == {whole.down.shape[2]}


@pytest.mark.parametrize("kind", ["files", "random"])
def test_parts_of_gpt_oss_add_up(
    kind: WeightKind, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gates beside their ups, biases, of which that of the sum is added once."""
    monkeypatch.setattr(lean_gpt_oss, "groups_on_host", lambda device: False)
    whole, *parts = parts_of(folder_of("gpt_oss"), 4, torch.float32, kind)
    check_sum(whole, parts, SHAPE["hidden_size"])


@pytest.fixture(scope="module")
def mxfp4_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As it is published: 160 columns of an expert are five groups, which do not divide evenly."""
    shape = SHAPE | {"hidden_size": 64, "num_hidden_layers": 2}
    config = transformers.GptOssConfig(**shape, intermediate_size=160, num_local_experts=4, num_experts_per_tok=2)
    return as_mxfp4(save_random_model(config, tmp_path_factory.mktemp("mxfp4")))


@pytest.mark.parametrize(("degree", "groups"), [(2, [3, 2]), (4, [2, 1, 1, 1])])
def test_mxfp4_is_cut_between_groups(
    degree: int, groups: list[int], mxfp4_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its codes are the whole's, and stay codes; a group is never cut."""
    monkeypatch.setattr(lean_gpt_oss, "groups_on_host", lambda device: False)
    whole, *parts = parts_of(mxfp4_folder, degree, torch.bfloat16)
    assert [part.down.codes.shape[2] // 16 for part in parts] == groups
    numbers = [[reference.expert_numbers(each) for each in (one.gate_up, one.down)] for one in (whole, *parts)]
    assert torch.equal(torch.cat([part[0] for part in numbers[1:]], dim=1), numbers[0][0])
    assert torch.equal(torch.cat([part[1] for part in numbers[1:]], dim=2), numbers[0][1])
    geometry = read_geometry(mxfp4_folder)
    assert degrees(geometry, 8) == [1, 2, 4]
    with pytest.raises(ConfigError, match=r"160 columns has 5 groups of 32 that share scales, for 8 ranks"):
        check_degree(geometry, 8, "here")


def test_mxfp4_over_four_ranks(mxfp4_folder: Path) -> None:
    """Of which the first computes two of five groups of an expert's columns."""
    expected = reference_generate(mxfp4_folder, random_prompts((5, 33)), 12)
    runner, joint = joint_runner(mxfp4_folder, 4)
    assert check_schedule(runner, expected, run_chunked(7), shuffle=3, reverse=True) <= 1
    assert [rank.share.own.experts.inner_size for rank in joint.ranks] == [64, 32, 32, 32]  # type: ignore[union-attr]


@pytest.mark.parametrize("degree", [2, 4])
@another_of_its_kind()
def test_mxfp4_over_ranks(degree: int, mxfp4_folder: Path) -> None:
    expected = reference_generate(mxfp4_folder, random_prompts((5, 33)), 12)
    with group_runner(mxfp4_folder, degree) as runner:
        assert check_schedule(runner, expected, run_chunked(7), shuffle=3, reverse=True) <= 1


def coded(folder: Path, name: str) -> Written:
    shape = SHAPE | {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    more = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 128, "num_experts": 3}
    config = transformers.Qwen2MoeConfig(**shape, **more, num_experts_per_tok=2)
    return write(save_random_model(config, folder / "plain"), folder, name)


@pytest.mark.parametrize("name", ["fp8-blocks", pytest.param("awq-32", marks=another_of_its_kind())])
def test_codes_of_experts_are_cut(name: str, tmp_path: Path) -> None:
    """A rank's codes are the whole's between groups of 32 columns; where one would be cut, the degree is refused."""
    written = coded(tmp_path, name)
    whole, *parts = parts_of(written.folder, 2, torch.bfloat16)
    assert all(isinstance(part.down, ExpertCodes) for part in parts)
    downs = [reference.expert_numbers(each.down) for each in (whole, *parts)]
    assert torch.equal(torch.cat(downs[1:], dim=2), downs[0])
    ups = [reference.expert_numbers(each.gate_up).chunk(2, dim=1) for each in (whole, *parts)]
    for index in range(2):
        assert torch.equal(torch.cat([up[index] for up in ups[1:]], dim=1), ups[0][index])
    whole, *parts = parts_of(written.folder, 2, torch.float32)
    check_sum(whole, parts, 64)
    with pytest.raises(ConfigError, match=r"an expert of 64 columns has 2 groups of 32 that share scales, for 4"):
        check_degree(read_geometry(written.folder), 4, "here")


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=another_of_its_kind())])
@another_of_its_kind()
def test_ranks_compute_over_codes_what_one_computes(dtype: str, tmp_path: Path) -> None:
    """In float32 weights are dequantised, in bfloat16 codes are kept: what ranks move is less than rounding does."""
    written, (prompt,) = coded(tmp_path, "fp8-blocks"), random_prompts((36,), seed=5)
    alone = told(make_runner(written.folder, dtype=dtype), prompt)
    with group_runner(written.folder, 2, dtype=dtype) as runner:
        found = told(runner, prompt)
    if dtype == "float32":
        assert (found - alone).abs().max() < 1e-3
    else:
        exact = told(make_runner(written.dequantised), prompt)
        assert (found - alone).square().mean() < 2.25 * (alone - exact).square().mean()
