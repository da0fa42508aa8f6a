"""Rounding at load: how far a weight may move, what is rounded, and a model of which all matrices are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from cohort.common.engine.weights.matrices import GROUP, RoundedWeights, Rounding, matrix, rounded
from cohort.common.engine.weights.quantized import QuantizedWeight
from cohort.common.engine.weights.weights import RandomWeights
from cohort.common.errors import ConfigError
from cohort.kernels.cpu import native
from tests.common.engine.driver import Driver, make_runner, random_prompts
from tests.common.engine.models.test_families import forward, own_logits
from tests.examples import examples

CPU = torch.device("cpu")
needs_kernels = pytest.mark.skipif(native.operators() is None, reason="no compiled kernels here")


@settings(max_examples=examples(0.7))
@given(
    rounding=st.sampled_from(["int8", "int4"]),
    outputs=st.integers(1, 9),
    half=st.integers(1, 60),
    size=st.sampled_from([0.0, 1e-6, 1.0, 300.0]),
    seed=st.integers(0, 2**16),
)
def test_a_weight_moves_by_at_most_half_a_step(
    rounding: Rounding, outputs: int, half: int, size: float, seed: int
) -> None:
    weight = torch.randn(outputs, 2 * half, generator=torch.Generator().manual_seed(seed)) * size
    codes = rounded(weight, rounding)
    moved = (codes.dequantized() - weight).abs()
    for first in range(0, weight.shape[1], GROUP):
        part = weight[:, first : first + GROUP]
        extent = part.abs().amax(dim=1) / 127
        if rounding == "int4":
            extent = (part.amax(dim=1) - part.amin(dim=1)) / 15
        assert (moved[:, first : first + GROUP].amax(dim=1) <= 0.5001 * extent + 1e-6 * part.abs().amax(dim=1)).all()


def test_four_bits_of_an_odd_number_of_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="come in pairs"):
        rounded(torch.randn(3, 7), "int4")


@needs_kernels
def test_matrices_are_rounded_and_vectors_are_not() -> None:
    files = RoundedWeights(RandomWeights(), "int4", torch.float32)
    (inner,) = matrix(files, ["a.weight"], [40], 64, torch.float32, CPU)
    (outer,) = matrix(files, ["model.embed_tokens.weight"], [40], 64, torch.float32, CPU)
    assert isinstance(inner, QuantizedWeight)
    assert isinstance(outer, QuantizedWeight)
    assert (inner.code, outer.code) == ("uint4", "int8")
    assert len(matrix(files, ["a.weight", "b.weight"], [40, 8], 64, torch.float32, CPU)) == 2
    odd = matrix(files, ["a.weight"], [40], 63, torch.float32, CPU)
    assert isinstance(odd, torch.Tensor)
    assert torch.equal(files.read("norm.weight", (64,), torch.float32, CPU), torch.ones(64))


@needs_kernels
@pytest.mark.parametrize("name", ["llama", "qwen2", "llama-bias-llama3", "phi3"])
@pytest.mark.parametrize(("rounding", "allowed"), [("int8", 0.1), ("int4", 0.1)])
def test_a_rounded_model_follows_the_model_of_its_rounded_weights(
    name: str, rounding: Rounding, allowed: float, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers computes with the dequantised weights and with x as it is; x in 8 bits is the only difference."""
    folder = model_folder(name)
    tensors = load_file(folder / "model.safetensors")
    for tensor, values in tensors.items():
        if values.dim() == 2:
            outer = tensor.endswith(("embed_tokens.weight", "lm_head.weight"))
            tensors[tensor] = rounded(values, "int8" if outer else rounding).dequantized()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    prompts = random_prompts((40, 3, 17), seed=5)
    expected = [logits.log_softmax(-1) for logits in own_logits(tmp_path, prompts)]
    plain = [logits.log_softmax(-1) for logits in own_logits(folder, prompts)]
    runner = make_runner(folder, rounding=rounding)
    driver = Driver(runner, shuffle=7)
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt)
    found = forward(runner, driver, [(str(index), len(prompt)) for index, prompt in enumerate(prompts)])
    for ours, exact, unrounded in zip(found, expected, plain, strict=True):
        error = (ours.log_softmax(-1) - exact).abs().mean()
        assert error < allowed
        assert error < 0.7 * (unrounded - exact).abs().mean() or rounding == "int8"


@needs_kernels
def test_a_rounded_model_answers_the_same_in_every_batch(model_folder: Callable[[str], Path]) -> None:
    runner = make_runner(model_folder("qwen2"), rounding="int4")
    prompts = random_prompts((40, 3, 17, 26), seed=6)

    def answers(together: bool) -> list[list[int]]:
        driver = Driver(runner)
        names = [str(index) for index in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            driver.add(name, prompt)
        for group in [names] if together else [[name] for name in names]:
            driver.step([(name, driver.remaining(name)) for name in group])
            for _ in range(12):
                driver.step([(name, 1) for name in group])
        return [driver.requests[name].tokens for name in names]

    assert answers(together=True) == answers(together=False)


def test_what_cannot_be_rounded_is_refused(
    model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="not served for opt"):
        make_runner(model_folder("opt"), rounding="int8")
    with pytest.raises(ConfigError, match="not served for mixtral"):
        make_runner(model_folder("mixtral"), rounding="int4")
    (tmp_path / "config.json").write_text((model_folder("llama") / "config.json").read_text())
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match="are codes already"):
        make_runner(tmp_path, rounding="int8")
    monkeypatch.setattr(native, "implementation", lambda: "reference")
    with pytest.raises(ConfigError, match="compiled kernels alone"):
        make_runner(model_folder("llama"), rounding="int8")
