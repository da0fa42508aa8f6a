"""gpt-oss: its configuration, experts in MXFP4, and the activation; equality of its answers is in `test_families`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.models import lean_gpt_oss
from cohort.common.engine.models.experts import DeviceExperts
from cohort.common.engine.models.generic import GenericModel
from cohort.common.engine.models.lean_gpt_oss import LeanGptOss, dequantized
from cohort.common.engine.runner import model_runner
from cohort.common.errors import ModelError
from cohort.kernels import reference
from cohort.kernels.ops.fused import clamped_swiglu
from cohort.kernels.types import ExpertCodes
from tests.common.engine.driver import (
    Driver,
    check_schedule,
    make_runner,
    random_prompts,
    reference_generate,
    run_chunked,
    run_together,
    sampled_states,
    save_random_model,
)
from tests.common.engine.models.test_families import forward
from tests.engine_models import CONFIGS, as_mxfp4
from tests.examples import another_of_its_kind

EXPERTS, HIDDEN, INNER = 4, 64, 32


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts as a GPU has them."""
    monkeypatch.setattr(lean_gpt_oss, "groups_on_host", lambda device: False)


@pytest.fixture(scope="module")
def mxfp4_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as it is published: experts in blocks and scales, which transformers dequantises on a processor."""
    folder = tmp_path_factory.mktemp("mxfp4")
    config = CONFIGS["gpt-oss"]().to_dict()
    config |= {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_local_experts": EXPERTS}
    return as_mxfp4(save_random_model(transformers.GptOssConfig(**config), folder))


def test_experts_in_mxfp4(mxfp4_folder: Path) -> None:
    runner = make_runner(mxfp4_folder)
    assert isinstance(runner._model, LeanGptOss)
    expected = reference_generate(mxfp4_folder, random_prompts((5, 33)), 12)
    assert check_schedule(runner, expected, run_chunked(7), shuffle=3, reverse=True) <= 1


def test_other_models_in_mxfp4_are_refused(mxfp4_folder: Path, tmp_path: Path) -> None:
    config = json.loads((mxfp4_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(ModelError, match="mxfp4"):
        read_geometry(tmp_path)


def test_a_missing_scale_is_named(mxfp4_folder: Path, tmp_path: Path) -> None:
    tensors = load_file(mxfp4_folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((mxfp4_folder / "config.json").read_text())
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts\.down_proj_scales"):
        make_runner(tmp_path)


def test_every_code_and_the_order_of_nibbles() -> None:
    """All sixteen codes, low nibble first; scales of 1, 2 and 1/4."""
    codes = torch.tensor([[low | high << 4 for low, high in zip(range(0, 16, 2), range(1, 16, 2), strict=True)] * 2])
    blocks = codes.to(torch.uint8).view(1, 1, 16).repeat(1, 3, 1)
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    row = torch.tensor((positive + [-value for value in positive]) * 2)
    found = dequantized(blocks, torch.tensor([[127, 128, 125]], dtype=torch.uint8), torch.float32)
    assert torch.equal(found, torch.cat([row, 2 * row, row / 4]).view(1, 96))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 40, 64])
def test_the_activation(dtype: torch.dtype, width: int) -> None:
    """Within and beyond the clamps; a row computes the same bits wherever it stands."""
    both = (torch.randn((9, 2 * width), generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    found, expected = torch.empty((9, width), dtype=dtype), torch.empty((9, width), dtype=dtype)
    clamped_swiglu(both, 1.702, 2.0, found)
    reference.clamped_swiglu(both, 1.702, 2.0, expected)
    limits: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found, expected, **limits)
    alone = torch.empty((1, width), dtype=dtype)
    for row in range(9):
        clamped_swiglu(both[row : row + 1], 1.702, 2.0, alone)
        assert torch.equal(alone[0], found[row])


def _geometry(tmp_path: Path, **config: Any) -> Any:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", **config}))
    return read_geometry(tmp_path)


def test_absent_keys_take_the_defaults_of_transformers(tmp_path: Path) -> None:
    geometry, config = _geometry(tmp_path), transformers.GptOssConfig()
    assert geometry.family == "gpt_oss"
    assert geometry.experts is not None
    assert (geometry.experts.count, geometry.experts.per_token) == (config.num_local_experts, 4)
    assert geometry.experts.inner_size == geometry.intermediate_size == config.intermediate_size
    assert (geometry.experts.swiglu_alpha, geometry.experts.swiglu_limit) == (1.702, 7.0)
    assert (geometry.hidden_size, geometry.head_dim, geometry.vocab_size) == (2880, 64, config.vocab_size)
    assert geometry.sliding_windows == (128, 0) * 18
    assert geometry.rope is not None
    assert geometry.rope.theta == config.rope_parameters["rope_theta"] == 150000.0
    expected = {key: value for key, value in config.rope_parameters.items() if key not in ("rope_type", "rope_theta")}
    assert (geometry.rope.rope_type, dict(geometry.rope.scaling)) == ("yarn", expected)


def test_the_published_spelling_of_its_rope(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "truncate": False}
    geometry = _geometry(tmp_path, rope_scaling=scaling, rope_theta=150000, initial_context_length=4096)
    assert geometry.rope is not None
    assert (geometry.rope.theta, geometry.rope.scaling["factor"]) == (150000.0, 8.0)


@pytest.mark.parametrize("edit", [{"hidden_act": "gelu"}, {"layer_types": ["chunked_attention"] * 36}])
def test_values_that_the_lean_form_does_not_compute(tmp_path: Path, edit: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(transformers.GptOssConfig().to_dict() | {"model_type": "gpt_oss"} | edit)
    )
    assert read_geometry(tmp_path).family == "generic"


def test_random_weights(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model_folder("gpt-oss") / "config.json").read_text())
    runner = make_runner(tmp_path, weights="random")
    driver = Driver(runner)
    driver.add("r", random_prompts([9])[0])
    driver.step([("r", 9)])
    assert runner.geometry.family == "gpt_oss"
    assert sampled_states(runner).isfinite().all()


@pytest.mark.parametrize("name", ["gpt-oss", pytest.param("gpt-oss-plain", marks=another_of_its_kind())])
def test_as_on_a_gpu(name: str, model_folder: Callable[[str], Path], on_device: None) -> None:
    """All experts in two tensors, which the reference multiplies here; the steps that a GPU records are repeated."""
    folder = model_folder(name)
    runner = make_runner(folder, device_steps=True, share=DeviceShare(graphs=1 << 40))
    runner.warm_up()
    assert isinstance(runner._model, LeanGptOss)
    assert all(isinstance(layer.experts, DeviceExperts) for layer in runner._model._layers)
    expected = reference_generate(folder, random_prompts((5, 33, 9)), 10)
    for schedule in (run_together, run_chunked(7)):
        assert check_schedule(runner, expected, schedule, shuffle=4, reverse=True) <= 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_mxfp4_as_on_a_gpu(dtype: str, mxfp4_folder: Path, monkeypatch: pytest.MonkeyPatch, on_device: None) -> None:
    """In 16 bits the blocks stay as they are, and answer to the bit as dequantised ones do; in float32 they do not."""
    (prompt,) = random_prompts([33])

    def logits(*, kept: bool) -> torch.Tensor:
        runner = make_runner(mxfp4_folder, dtype=dtype)
        assert isinstance(runner._model, LeanGptOss)
        (mixture, *_) = (layer.experts for layer in runner._model._layers)
        assert isinstance(mixture, DeviceExperts)
        for weight in (mixture.gate_up, mixture.down):
            assert isinstance(weight, ExpertCodes) == kept
        if isinstance(mixture.gate_up, ExpertCodes):  # 4 bits, and 8 for 32 of them
            held = mixture.gate_up.codes.nbytes + mixture.gate_up.scales.nbytes
            assert held * 8 == EXPERTS * 2 * INNER * HIDDEN * 4.25
        driver = Driver(runner)
        driver.add("r", prompt)
        return forward(runner, driver, [("r", len(prompt))])[0]

    as_served = logits(kept=dtype == "bfloat16")
    monkeypatch.setattr(lean_gpt_oss, "keeps_codes", lambda *layout: False)
    assert torch.equal(as_served, logits(kept=False))
    assert as_served.std() > 0.1


@pytest.mark.parametrize("name", ["gpt-oss", pytest.param("gpt-oss-plain", marks=another_of_its_kind())])
def test_through_transformers(name: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a value has no lean form: its sinks then come through transformers' attention interface."""
    monkeypatch.setattr(
        model_runner, "read_geometry", lambda folder: dataclasses.replace(read_geometry(folder), family="generic")
    )
    folder = model_folder(name)
    runner = make_runner(folder)
    assert isinstance(runner._model, GenericModel)
    expected = reference_generate(folder, random_prompts((5, 33)), 10)
    assert check_schedule(runner, expected, run_chunked(7)) <= 1


def test_a_row_computes_the_same_bits_in_every_batch(model_folder: Callable[[str], Path]) -> None:
    runner = make_runner(model_folder("gpt-oss"))
    prompts = random_prompts((40, 3, 17, 26))
    rows = []
    for together in (prompts, *([prompt] for prompt in prompts)):
        driver = Driver(runner)
        for index, prompt in enumerate(together):
            driver.add(str(index), prompt)
        rows.append(forward(runner, driver, [(str(index), len(prompt)) for index, prompt in enumerate(together)]))
    assert all(torch.equal(row, alone) for row, (alone,) in zip(rows[0], rows[1:], strict=True))
