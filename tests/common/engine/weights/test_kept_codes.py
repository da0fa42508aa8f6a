"""Quantised checkpoints in bfloat16 on a processor, where codes stay codes: beside the dequantised model.

Three things differ from transformers' float32 over the dequantised weights, and each is measured by itself:

    bfloat16   transformers in bfloat16 over the same weights: it rounds weights, every product's inputs and its outputs
    x8         transformers in float32 whose quantised products take inputs in 8 bits: |x|max of a unit is 127 steps
    packed     this engine: exact codes, inputs in bfloat16 and in 8 bits, outputs in bfloat16

Errors of independent roundings add in squares, so packed is at most sqrt(bfloat16² + x8²); what the weights' rounding
takes of bfloat16 is headroom. Two samples of such an error differ: `SPREAD`. Beside bfloat16 alone: of a product, each
of its three roundings moves the result by 2^-7 / sqrt(12) · 0.735 = 0.17 % (0.735: the mean over mantissas), 8 bits of
a normal input by 2.3 / (127 · sqrt(12)) = 0.52 %, and by 0.91 % of one whose largest of 32 lies four deviations out.
That is (0.57 % to 0.94 %) to 0.29 %: `RATIO`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.config.quantization_config import keeps_codes
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.weights import matrices
from cohort.common.engine.weights.quantized import QuantizedWeight
from cohort.common.engine.weights.quantized_files import QuantizedFiles
from cohort.common.engine.weights.weights import open_weights
from cohort.kernels.code_units import unit_of
from cohort.kernels.cpu import native, panels
from tests.common.engine.driver import Driver, make_runner, random_prompts
from tests.common.engine.models.test_families import forward
from tests.engine_models import VOCAB, save_random_model
from tests.examples import another_of_its_kind
from tests.quantised_models import FORMATS, WIDE_GROUPS, Written, write

pytestmark = pytest.mark.skipif(native.operators() is None, reason="no compiled kernels here")

CPU = torch.device("cpu")
SPREAD = 1.5
RATIO = 3.3
PROMPT, DECODED = 30, 10
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
WIDENED = {"gptq-4-act-order", "gptq-8-act-order", "gptq-4-32-act-order", "ct-packed-4-8"}
NAMES = [*FORMATS, *WIDE_GROUPS]
LIKE_OTHERS = {  # in what they compute with
    *("gptq-8-act-order", "gptq-4-32-act-order", "awq-64", "gptq-4-64-asymmetric", "ct-packed-4-64-asymmetric")
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(transformers.Qwen3Config(**SHAPE), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def written_as(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    return cache(lambda name: write(source, tmp_path_factory.mktemp("codes"), name))


def inputs_in_8_bits(unit: int) -> Any:
    """A hook that rounds a product's inputs as the packed products do."""

    def rounded(_: Any, arguments: tuple[Tensor]) -> tuple[Tensor]:
        (x,) = arguments
        width = x.shape[-1]
        units = torch.nn.functional.pad(x, (0, -width % unit)).unflatten(-1, (-1, unit))
        step = units.abs().amax(dim=-1, keepdim=True) / 127
        return (((units / step.clamp(min=1e-30)).round() * step).flatten(-2)[..., :width],)

    return rounded


def reference(folder: Path, prompt: Sequence[int], dtype: torch.dtype, unit: int = 0) -> Tensor:
    """Log-probabilities [tokens, vocabulary]; `unit`: inputs of quantised products in 8 bits, units of so many."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    for name, module in model.eval().named_modules():
        if unit and name.endswith("_proj"):
            module.register_forward_pre_hook(inputs_in_8_bits(unit))
    with torch.inference_mode():
        return model(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0].float().log_softmax(-1)


def own(runner: ModelRunner, prompt: Sequence[int]) -> Tensor:
    """The same: the first tokens as a prompt, the rest as decode rows."""
    driver = Driver(runner, shuffle=2)
    driver.add("r", prompt)
    found = [*forward(runner, driver, [("r", PROMPT)])]
    for _ in range(len(prompt) - PROMPT):
        found += forward(runner, driver, [("r", 1)])
    return torch.cat(found).float().log_softmax(-1)


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).square().mean().sqrt())


def forms(runner: ModelRunner) -> set[str]:
    layers: Any = runner._model._layers  # type: ignore[attr-defined]
    parts = [part for layer in layers for part in (layer.qkv, layer.attention_out, layer.mlp.down)]
    gated = {layer.mlp.gate_up._packed.data.dtype == torch.uint8 for layer in layers}
    return {part.form for part in parts} | {"quantized" if codes else "panels" for codes in gated}


@pytest.mark.skipif(not panels.available(torch.bfloat16, 64), reason="this processor does not multiply bfloat16")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=another_of_its_kind()) if name in LIKE_OTHERS else name for name in NAMES]
)
def test_log_probabilities_keep_to_the_meaning_of_the_codes(name: str, written_as: Callable[[str], Written]) -> None:
    written = written_as(name)
    (prompt,) = random_prompts((PROMPT + DECODED,), seed=4)
    scheme = read_geometry(written.folder).quantization
    assert scheme is not None
    codes = scheme.schemes[0].codes(SHAPE["hidden_size"])
    integers = not codes.floating and name not in WIDENED
    exact = reference(written.dequantised, prompt, torch.float32)
    in_bfloat16 = reference(written.dequantised, prompt, torch.bfloat16)
    of_bfloat16 = apart(in_bfloat16, exact)
    unit = unit_of(codes.group, codes.inputs) or 0
    of_inputs = apart(reference(written.dequantised, prompt, torch.float32, unit), exact) if integers else 0.0
    runner = make_runner(written.folder, dtype="bfloat16")
    found = own(runner, prompt)
    assert forms(runner) == {"panels" if name in WIDENED else "quantized"}
    allowed = (of_bfloat16**2 + of_inputs**2) ** 0.5
    assert apart(found, exact) <= SPREAD * allowed
    assert apart(found, in_bfloat16) <= SPREAD * (allowed**2 + of_bfloat16**2) ** 0.5
    assert apart(found, exact) <= (RATIO if integers else SPREAD) * of_bfloat16
    assert RATIO * of_bfloat16 < 0.2 * exact.std(dim=1).min()  # codes read wrongly are far beyond


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_one_rule_says_what_is_kept(name: str, dtype: torch.dtype, written_as: Callable[[str], Written]) -> None:
    """By the configuration alone, as the sums of memory ask, and by the weight that is read."""
    written = written_as(name)
    quantization = read_geometry(written.folder).quantization
    assert quantization is not None
    files, module = open_weights(written.folder, "files", quantization), "model.layers.1.mlp.down_proj"
    scheme = quantization.scheme_of(module)
    assert scheme is not None
    inner, hidden = SHAPE["intermediate_size"], SHAPE["hidden_size"]
    told = keeps_codes("cpu", str(dtype).removeprefix("torch."), scheme.codes(inner))
    found = matrices.matrix(files, [f"{module}.weight"], [hidden], inner, dtype, CPU)
    assert told == (dtype != torch.float32 and name not in WIDENED)
    assert isinstance(found, Tensor) != told
    codes = scheme.codes(inner)
    in_tiles = codes.group >= inner or codes.group % 32 == 0
    assert keeps_codes("cuda", "bfloat16", codes) == (in_tiles and not codes.reordered)


class Counting:
    """Tensors of a checkpoint by how often they are read."""

    def __init__(self, files: QuantizedFiles, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: dict[str, int] = {}
        stored = files._files.read_stored

        def counted(name: str, device: torch.device) -> Tensor:
            self.read[name] = self.read.get(name, 0) + 1
            return stored(name, device)

        monkeypatch.setattr(files._files, "read_stored", counted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["awq", "gptq-4-act-order", "ct-packed-4-8", "fp8-blocks", "ct-int8-channel"])
def test_nothing_is_read_twice(
    name: str, dtype: torch.dtype, written_as: Callable[[str], Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = written_as(name)
    files = open_weights(written.folder, "files", read_geometry(written.folder).quantization)
    assert isinstance(files, QuantizedFiles)
    counting = Counting(files, monkeypatch)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    found = matrices.matrix(files, names, [64, 32, 32], 64, dtype, CPU)
    assert counting.read and set(counting.read.values()) == {1}
    whole = found if isinstance(found, Tensor) else torch.cat([part.dequantized() for part in found])
    expected = torch.cat([written.weights[part] for part in names])
    torch.testing.assert_close(whole.float(), expected, rtol=2**-7 if isinstance(found, Tensor) else 1e-5, atol=1e-5)


def test_a_product_of_plain_and_coded_parts_is_numbers(source: Path, tmp_path: Path) -> None:
    plain = frozenset({"lm_head", "model.layers.0.self_attn.v_proj"})
    written = write(source, tmp_path, "gptq-4", plain=plain)
    files = open_weights(written.folder, "files", read_geometry(written.folder).quantization)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    found = matrices.matrix(files, names, [64, 32, 32], 64, torch.bfloat16, CPU)
    assert isinstance(found, Tensor)
    assert torch.equal(found, torch.cat([written.weights[part] for part in names]).bfloat16())
    coded = matrices.matrix(files, names[:2], [64, 32], 64, torch.bfloat16, CPU)
    assert not isinstance(coded, Tensor) and all(isinstance(part, QuantizedWeight) for part in coded)


def test_e4m3_takes_half_the_bytes(source: Path, tmp_path: Path) -> None:
    """And a scale of float32 for each output and 32 inputs: 9 bits a weight, and a header for each of q, k and v."""
    written = write(source, tmp_path, "fp8-blocks")
    layer: Any = make_runner(written.folder, dtype="bfloat16")._model._layers[0]  # type: ignore[attr-defined]
    assert layer.qkv.panel_data.nbytes == 128 * 64 * 9 // 8 + 3 * 64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["deepseek2", "deepseek3"])
def test_deepseeks_published_form_is_read_with_its_scales(
    family: str, dtype: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """In float32 the dequantised model's tokens; in bfloat16 experts stay in E4M3, and answers beside it."""
    source = model_folder(family)
    written = write(source, tmp_path, "fp8-blocks")
    (prompt,) = random_prompts((PROMPT + DECODED,), seed=4)
    exact, found = (own(make_runner(folder), prompt) for folder in (written.dequantised, written.folder))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)
    if dtype == "bfloat16":
        widened = own(make_runner(written.dequantised, dtype=dtype), prompt)
        kept = own(make_runner(written.folder, dtype=dtype), prompt)
        assert (kept - exact).abs().median() <= SPREAD * (widened - exact).abs().median()
