"""Quantised checkpoints: each format's weights one by one, and models of them against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.models.experts import MixtureReader
from cohort.common.engine.models.model_files import ModelFiles
from cohort.common.engine.weights.quantized import QuantizedWeight
from cohort.common.engine.weights.quantized_files import QuantizedFiles
from cohort.common.engine.weights.quantized_formats import ReorderedWeight
from cohort.common.engine.weights.weight_files import WeightFiles
from cohort.common.engine.weights.weights import open_weights
from cohort.common.errors import ModelError
from cohort.kernels import reference
from cohort.kernels.types import ExpertCodes, products_made
from tests.common.engine.driver import (
    Driver,
    check_schedule,
    make_runner,
    random_prompts,
    reference_generate,
    run_chunked,
    run_together,
)
from tests.common.engine.models.test_families import forward, own_logits
from tests.engine_models import save_random_model
from tests.examples import another_of_its_kind
from tests.quantised_models import FORMATS, Written, write

CPU = torch.device("cpu")
CODES = {"fp8": "e4m3", "ct-fp8": "e4m3", "ct-int8": "int8", "ct-packed-8": "int8", "gptq-8": "int8"}
MODULE = "model.layers.1.mlp.down_proj"


def opened(folder: Path) -> QuantizedFiles:
    quantization = read_geometry(folder).quantization
    assert quantization is not None
    files = open_weights(folder, "files", quantization)
    assert isinstance(files, QuantizedFiles)
    return files


def changed(written: Written, target: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """The checkpoint with other tensors."""
    tensors = load_file(written.folder / "model.safetensors")
    change(tensors)
    target.mkdir()
    (target / "config.json").write_text((written.folder / "config.json").read_text())
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_what_the_checkpoint_says(name: str, model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Own writers scale in float16, whose products with codes are exact in float32; compressed-tensors' library takes
    zeros away before it multiplies, which float32 rounds elsewhere."""
    written = write(model_folder("qwen3"), tmp_path, name)
    files, exact = opened(written.folder), not name.startswith("ct-")
    for full_name, expected in written.weights.items():
        if full_name.endswith("norm.weight"):
            continue
        outputs, inputs = expected.shape
        dense = files.read_rows([full_name], [outputs], (inputs,), torch.float32, CPU)
        stored = files.read_quantized(full_name, outputs, inputs, CPU)
        if not full_name.endswith("_proj.weight"):
            assert stored is None and torch.equal(dense, expected)
            continue
        assert stored is not None and torch.equal(stored.dequantized(), dense)  # to the bit, however it is computed
        torch.testing.assert_close(dense, expected, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)
        if "act-order" in name:
            assert isinstance(stored, ReorderedWeight)
            continue
        assert isinstance(stored, QuantizedWeight)
        code = max((start for start in CODES if name.startswith(start)), key=len, default="")
        assert stored.code == CODES.get(code, "uint4")


@pytest.mark.parametrize("name", ["ct-packed-4-asymmetric", "ct-packed-8"])
def test_packed_inputs_may_name_their_groups(name: str, model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """compressed-tensors' act-order, which its library writes no more: `weight_g_idx`, all -1 where it is unused."""
    written = write(model_folder("qwen3"), tmp_path, name)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(3))
    groups = {"mixed": (torch.arange(80) // 16)[order].int(), "unused": torch.full((80,), -1, dtype=torch.int32)}
    plain = opened(written.folder).read_quantized(f"{MODULE}.weight", 48, 80, CPU)
    assert isinstance(plain, QuantizedWeight)
    found = {}
    for kind, named in groups.items():
        folder = changed(
            written, tmp_path / kind, lambda parts, named=named: parts.update({f"{MODULE}.weight_g_idx": named})
        )
        found[kind] = opened(folder).read_quantized(f"{MODULE}.weight", 48, 80, CPU)
    assert isinstance(found["unused"], QuantizedWeight)
    assert torch.equal(found["unused"].dequantized(), plain.dequantized())
    assert isinstance(found["mixed"], ReorderedWeight)
    steps = (plain.dequantized() - (0 if plain.offsets is None else plain.offsets.repeat_interleave(16, dim=1))) / (
        plain.scales.repeat_interleave(16, dim=1)
    )
    expected = steps.round() * plain.scales[:, groups["mixed"].long()]
    if plain.offsets is not None:
        expected += plain.offsets[:, groups["mixed"].long()]
    torch.testing.assert_close(found["mixed"].dequantized(), expected)


@pytest.mark.parametrize("name", ["fp8-blocks", "ct-int8-channel", "awq", "gptq-4", "gptq-4-act-order"])
def test_models_answer_as_transformers_with_the_dequantised_weights(
    name: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Tokens and every position's logits, in float32; projections that one product computes together among them."""
    written = write(model_folder("qwen3"), tmp_path, name)
    expected = reference_generate(written.dequantised, random_prompts((1, 9, 30)), 8)
    runner = make_runner(written.folder)
    for schedule in (run_together, run_chunked(7)):
        assert check_schedule(runner, expected, schedule, shuffle=4, reverse=True) == 0
    prompt = random_prompts((25,), seed=5)[0]
    driver = Driver(runner)
    driver.add("r", prompt)
    (logits,) = forward(runner, driver, [("r", len(prompt))])
    (reference,) = own_logits(written.dequantised, [prompt])
    torch.testing.assert_close(logits.log_softmax(-1), reference.log_softmax(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["phi3", "gemma3", "opt", "mixtral", "qwen3-moe"])
def test_every_lean_form_reads_quantised_weights(
    family: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    source = model_folder(family)
    plain = frozenset({"lm_head", "model.decoder.project_in", "model.decoder.project_out"})
    written = write(source, tmp_path, "ct-int8-channel", plain=plain)
    answers = []
    for folder in (written.folder, written.dequantised):
        driver = Driver(make_runner(folder))
        driver.add("r", random_prompts((20,))[0])
        run_together(driver, ["r"], 8)
        answers.append(driver.requests["r"].tokens)
    assert answers[0] == answers[1]
    stored = load_file(written.folder / "model.safetensors")
    assert any(tensor.dtype == torch.int8 for tensor in stored.values())


def test_transformers_reads_the_block_scales_alike(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Without a GPU it dequantises FP8 checkpoints at load, in bfloat16; blocks must divide a weight there."""
    written = write(model_folder("qwen3"), tmp_path, "fp8-even-blocks")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(written.folder, dtype=torch.bfloat16)
    theirs = model.state_dict()
    files, compared = opened(written.folder), 0
    for name, expected in written.weights.items():
        if name.endswith("_proj.weight"):
            ours = files.read_rows([name], [len(expected)], expected.shape[1:], torch.float32, CPU)
            torch.testing.assert_close(theirs[name].float(), ours, rtol=2**-7, atol=1e-5)
            compared += 1
    assert compared == 3 * 7


def test_excluded_modules_stay_plain_whether_named_or_matched(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    source = model_folder("qwen3")
    plain = frozenset({"lm_head", "model.layers.0.self_attn.o_proj", MODULE})
    written = write(source, tmp_path, "ct-packed-4", plain=plain)
    config = json.loads((written.folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head", "model.layers.0.self_attn.o_proj", r"re:.*1\.mlp\.down.*"]
    (written.folder / "config.json").write_text(json.dumps(config))
    expected = reference_generate(written.dequantised, random_prompts((9, 30)), 8)
    assert check_schedule(make_runner(written.folder), expected, run_together) == 0
    files = opened(written.folder)
    for module in plain - {"lm_head"}:
        assert files.read_quantized(f"{module}.weight", 48, 80 if module == MODULE else 96, CPU) is None


def test_one_of_three_fused_projections_may_be_plain(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    plain = frozenset({"lm_head", *(f"model.layers.{layer}.self_attn.v_proj" for layer in range(3))})
    written = write(model_folder("qwen3"), tmp_path, "gptq-4", plain=plain)
    expected = reference_generate(written.dequantised, random_prompts((9, 30)), 8)
    assert check_schedule(make_runner(written.folder), expected, run_together) == 0


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("fp8-tensor", ["weight_scale"]),
        ("fp8-blocks", ["weight_scale_inv"]),
        ("ct-packed-4-asymmetric", ["weight_scale", "weight_zero_point"]),
        ("ct-packed-4", ["weight_packed"]),
        ("awq", ["qzeros", "scales"]),
        ("gptq-4", ["qweight"]),
    ],
)
def test_missing_parts_are_named(
    name: str, parts: list[str], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    written = write(model_folder("qwen3"), tmp_path, name)

    def without(tensors: dict[str, Tensor]) -> None:
        for part in parts:
            del tensors[f"{MODULE}.{part}"]

    folder = changed(written, tmp_path / "broken", without)
    told = ".*".join(f"{MODULE}.{part}" for part in parts).replace(".", r"\.").replace(r"\.*", ".*")
    with pytest.raises(ModelError, match=f"lacks {len(parts)} tensors.*{told}"):
        make_runner(folder)


@pytest.mark.parametrize(
    ("name", "part", "value", "message"),
    [
        ("awq", "scales", torch.ones(2, 48).half(), r"down_proj\.scales has shape \(2, 48\).*\(5, 48\)"),
        ("awq", "qweight", torch.ones(80, 6), r"down_proj\.qweight has torch\.float32.*needs torch\.int32"),
        ("gptq-4", "qweight", torch.ones(9, 48, dtype=torch.int32), r"qweight has shape \(9, 48\).*\(10, 48\)"),
        ("gptq-4", "g_idx", torch.full((80,), 7, dtype=torch.int32), r"down_proj: inputs of groups 7 to 7, of 5"),
        (
            "fp8-blocks",
            "weight_scale_inv",
            torch.ones(3, 3),
            r"down_proj: scales of shape \(3, 3\).*blocks of \(32, 32\)",
        ),
        ("ct-int8-channel", "weight_scale", torch.ones(47, 1), r"down_proj: scales of shape \(47, 1\).*channels"),
        ("fp8-tensor", "weight", torch.ones(48, 80).to(torch.float8_e5m2), r"down_proj\.weight has torch\.float8_e5m2"),
    ],
)
def test_wrong_parts_are_named(
    name: str, part: str, value: Tensor, message: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    written = write(model_folder("qwen3"), tmp_path, name)
    folder = changed(written, tmp_path / "broken", lambda tensors: tensors.update({f"{MODULE}.{part}": value}))
    with pytest.raises(ModelError, match=message):
        make_runner(folder)


def test_codes_that_the_configuration_excludes_are_no_weights(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    written = write(model_folder("qwen3"), tmp_path, "fp8-tensor")
    config = json.loads((written.folder / "config.json").read_text())
    config["quantization_config"]["ignored_layers"].append("mlp.down_proj")
    (written.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"down_proj\.weight has torch\.float8_e4m3fn.*excludes"):
        make_runner(written.folder)


def test_plain_checkpoints_are_opened_plain(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("qwen3")
    assert isinstance(open_weights(folder, "files", read_geometry(folder).quantization), WeightFiles)


@pytest.mark.parametrize("name", ["fp8-blocks", pytest.param("awq-32", marks=another_of_its_kind())])
def test_a_mixture_on_a_gpu_keeps_its_experts_codes(name: str, tmp_path: Path) -> None:
    """In bfloat16: what all experts' codes stand for is what the writer says; in float32 they are numbers."""
    shape = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 16}
    more = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99, "intermediate_size": 64}
    config = transformers.Qwen3MoeConfig(**shape, **more, num_hidden_layers=1, tie_word_embeddings=True)
    written = write(save_random_model(config, tmp_path / "plain"), tmp_path, name)
    geometry = read_geometry(written.folder)
    assert geometry.experts is not None
    with open_weights(written.folder, "files", geometry.quantization) as files:
        coded, plain = (
            MixtureReader(ModelFiles(files, dtype, CPU), "model.layers.0.", geometry, geometry.experts).on_device()
            for dtype in (torch.bfloat16, torch.float32)
        )
    assert isinstance(coded.gate_up, ExpertCodes) and isinstance(coded.down, ExpertCodes)
    assert isinstance(plain.gate_up, torch.Tensor) and isinstance(plain.down, torch.Tensor)
    assert torch.equal(reference.expert_numbers(coded.gate_up), plain.gate_up)
    assert torch.equal(reference.expert_numbers(coded.down), plain.down)
    made = {(each.outputs, each.inputs, each.gathers) for each in products_made() if each.experts == 3}
    assert made >= {(64, 64, True), (64, 32, False)}
    x, residual = torch.randn(5, 64), torch.zeros(5, 64, dtype=torch.bfloat16)
    coded.add_into(x.bfloat16(), residual, residual)
    exact = torch.zeros(5, 64)
    plain.add_into(x.bfloat16().float(), exact, exact)
    assert (residual.float() - exact).abs().max() < 0.03 * exact.abs().max()
