"""GGUF files in the engine: answers beside those of transformers with the file's dequantised weights, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from cohort.common.engine.models.lean_llama import LeanLlama
from cohort.common.engine.weights.gguf_files import GgufFiles, served_name
from cohort.common.engine.weights.linear import linear_form
from cohort.common.engine.weights.quantized import QuantizedWeight
from cohort.common.errors import ModelError
from cohort.services.launcher.models.gguf_folder import make_folder
from tests.common.engine.driver import Driver, make_runner
from tests.common.engine.models.test_families import forward
from tests.gguf_models import CONFIGS, Q4_K_M, VOCABULARY, random_model, write_gguf

CPU = torch.device("cpu")
COMPILED = linear_form(CPU, torch.float32, 64) == "panels"
PROMPTS = [
    [(7 * step * (index + 3)) % (VOCABULARY - 5) + 3 for step in range(length)]
    for index, length in enumerate((40, 3, 17))
]
KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", Q4_K_M, "F16", "F32", "BF16")


def served(tmp_path: Path, arch: str, kind: str) -> tuple[Path, Any]:
    """A folder to serve, made as the launcher makes it, and the model of the same weights."""
    model = random_model(arch)
    file = write_gguf(model, tmp_path / f"tiny.{kind}.gguf", kind)
    (tmp_path / "tokenizer.json").write_text("{}")  # no test here reads text
    make_folder(file, tmp_path / "folder")
    return tmp_path / "folder", model


def logprobs(folder: Path, **options: Any) -> tuple[list[Tensor], Any]:
    runner = make_runner(folder, **options)
    driver = Driver(runner, shuffle=3)
    for index, prompt in enumerate(PROMPTS):
        driver.add(str(index), prompt)
    found = forward(runner, driver, [(str(index), len(prompt)) for index, prompt in enumerate(PROMPTS)])
    return [logits.float().log_softmax(-1) for logits in found], runner


def reference(model: Any) -> list[Tensor]:
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_those_of_the_dequantised_model(kind: str, tmp_path: Path) -> None:
    """Codes: x in 8 bits is the only difference. Plain types: none but the order of sums."""
    folder, model = served(tmp_path, "llama", kind)
    found, runner = logprobs(folder)
    assert isinstance(runner._model, LeanLlama)
    assert (runner._model._stack is not None) == COMPILED
    plain = kind in ("F16", "F32", "BF16")
    for ours, exact in zip(found, reference(model), strict=True):
        assert exact.std(dim=1).min() > 0.5  # answers differ clearly
        error = (ours - exact).abs()
        if plain or not COMPILED:
            assert error.max() < 1e-3
        else:
            assert error.mean() < 0.03
            assert error.max() < 0.3


@pytest.mark.parametrize("arch", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_architecture_and_precision(arch: str, dtype: str, tmp_path: Path) -> None:
    folder, model = served(tmp_path, arch, Q4_K_M)
    found, _ = logprobs(folder, dtype=dtype)
    for ours, exact in zip(found, reference(model), strict=True):
        assert (ours - exact).abs().mean() < 0.05


@pytest.mark.skipif(not COMPILED, reason="no compiled kernels here")
def test_weights_stay_in_their_codes(tmp_path: Path) -> None:
    """4 bits and two float16 of each 32 inputs are 5 bits a weight; 8 bits and one of each 16 are 9."""
    folder, model = served(tmp_path, "llama", Q4_K_M)
    _, runner = logprobs(folder)
    layer, shape = runner._model._layers[0], model.config
    heads = (shape.num_attention_heads + shape.num_key_value_heads) * 64
    values = shape.num_key_value_heads * 64
    weights = heads * 5 / 8 + values * 9 / 8
    assert layer.qkv.form == "quantized"
    assert layer.qkv.panel_data.nbytes == pytest.approx(256 * weights + 4 * (heads + values), rel=0.01)


def test_rows_are_independent_of_their_batch(tmp_path: Path) -> None:
    folder, _ = served(tmp_path, "qwen3", "Q4_1")
    together, runner = logprobs(folder)
    for prompt, expected in zip(PROMPTS, together, strict=True):
        driver = Driver(runner)
        driver.add("alone", prompt)
        (alone,) = forward(runner, driver, [("alone", len(prompt))])
        if COMPILED:
            assert torch.equal(alone.log_softmax(-1), expected)


def test_query_and_key_rows_of_llama_move_back(tmp_path: Path) -> None:
    model = random_model("llama")
    files = GgufFiles(write_gguf(model, tmp_path / "x.gguf", "Q8_0"))
    for module in ("q_proj", "k_proj", "v_proj"):
        expected = getattr(model.model.layers[1].self_attn, module).weight
        name = f"model.layers.1.self_attn.{module}.weight"
        weight = files.read_quantized(name, *expected.shape, CPU)
        assert isinstance(weight, QuantizedWeight)
        assert torch.equal(weight.dequantized(), expected)
        both = files.read_rows([name, name], [len(expected)] * 2, expected.shape[1:], torch.float32, CPU)
        assert torch.equal(both, torch.cat((expected, expected)))


def test_names() -> None:
    assert served_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    assert served_name("blk.3.attn_q.bias") == "model.layers.3.self_attn.q_proj.bias"
    assert served_name("output.weight") == "lm_head.weight"
    assert served_name("blk.0.ffn_gate_inp.weight") is None


def _bare(path: Path, *tensors: tuple[str, Any, str]) -> Path:
    writer = gguf.GGUFWriter(path, "qwen2")
    for name, values, kind in tensors:
        writer.add_tensor(name, values, raw_dtype=None if kind == "F32" else gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_refusals_name_what_is_wrong(tmp_path: Path) -> None:
    norm = np.ones(4, dtype=np.float32)
    with pytest.raises(ModelError, match=r"not served: blk\.0\.ssm_in\.weight"):
        GgufFiles(_bare(tmp_path / "a.gguf", ("blk.0.ssm_in.weight", norm, "F32")))
    with pytest.raises(ModelError, match=r"type Q2_K are not served; served are Q8_0, Q4_0"):
        GgufFiles(_bare(tmp_path / "b.gguf", ("output.weight", np.zeros((2, 84), np.uint8), "Q2_K")))
    files = GgufFiles(_bare(tmp_path / "c.gguf", ("output_norm.weight", norm, "F32")))
    with pytest.raises(ModelError, match=r"lacks 1 tensors .* lm_head\.weight"):
        files.require(["lm_head.weight", "model.norm.weight"])
    with pytest.raises(ModelError, match=r"shape \(4,\), its metadata say \(8,\)"):
        files.read("model.norm.weight", (8,), torch.float32, CPU)
    damaged = tmp_path / "d.gguf"
    damaged.write_bytes((tmp_path / "c.gguf").read_bytes()[:-20])
    with pytest.raises(ModelError, match="not a complete GGUF file"):
        GgufFiles(damaged)
    damaged.write_bytes(json.dumps({}).encode())
    with pytest.raises(ModelError, match="not a complete GGUF file"):
        GgufFiles(damaged)
