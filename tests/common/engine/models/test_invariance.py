"""Where a position's bits cannot be promised, the option is refused by name, with what to do."""

from __future__ import annotations

import dataclasses
from typing import cast

import pytest
import torch

from cohort.common.engine.config.model_config import ModelGeometry, read_geometry
from cohort.common.engine.models import model_forms
from cohort.common.engine.models.experts import DeviceExperts, Router
from cohort.common.engine.models.model_forms import check_invariant
from cohort.common.engine.weights.linear import linear_form
from cohort.common.errors import ConfigError
from cohort.kernels import reference
from cohort.kernels.batch_invariance import batch_invariant
from cohort.kernels.cpu import native
from cohort.kernels.cpu.quantized_panels import Codes
from cohort.kernels.gpu import available
from cohort.kernels.ops.coded import CodedMatrix
from tests.common.engine.driver import make_runner

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def llama(model_folder) -> ModelGeometry:
    return read_geometry(model_folder("llama"))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a GPU: what is asked of a device is answered without one."""
    monkeypatch.setattr(available, "ops_for", lambda tensor: object())
    monkeypatch.setattr(model_forms.torch, "empty", lambda *shape, device: None)


def refusal(
    geometry: ModelGeometry, device: torch.device, dtype: str = "bfloat16", ranks: int = 1, threads: int = 2
) -> str:
    with pytest.raises(ConfigError, match=r"^engine\.batch_invariant: it cannot be promised for here on") as raised:
        check_invariant(geometry, device, dtype, ranks=ranks, threads=threads, model="here")
    return str(raised.value)


def test_on_a_gpu(llama, kernels):
    llama = dataclasses.replace(llama, head_dim=64)
    check_invariant(llama, GPU, "bfloat16", ranks=1, threads=2, model="here")
    check_invariant(dataclasses.replace(llama, family="gpt_oss"), GPU, "bfloat16", ranks=1, threads=2, model="here")
    assert "tensor_parallel to 1" in refusal(llama, GPU, ranks=2)
    assert "transformers" in refusal(dataclasses.replace(llama, family="generic"), GPU)
    for family in ("opt", "deepseek"):
        assert "engine.device cpu" in refusal(dataclasses.replace(llama, family=family), GPU)
    assert "heads of 72 elements" in refusal(dataclasses.replace(llama, head_dim=72), GPU)


def test_without_kernels_on_a_gpu(llama, kernels, monkeypatch):
    monkeypatch.setattr(available, "ops_for", lambda tensor: None)
    assert "COHORT_KERNELS" in refusal(llama, GPU)


def test_on_a_processor(llama, monkeypatch):
    monkeypatch.setattr(native, "implementation", lambda: "native")
    check_invariant(llama, CPU, "float32", ranks=4, threads=2, model="here")
    gemma = dataclasses.replace(llama, family="gemma")
    assert "engine.threads 1" in refusal(gemma, CPU, "float32")
    check_invariant(gemma, CPU, "float32", ranks=1, threads=1, model="here")
    opt = dataclasses.replace(llama, family="opt", activation="gelu")
    assert "engine.threads 1" in refusal(opt, CPU, "float32")
    check_invariant(dataclasses.replace(opt, activation="relu"), CPU, "float32", ranks=1, threads=2, model="here")
    assert "transformers" in refusal(dataclasses.replace(llama, family="generic"), CPU, "float32")

    class Narrow:
        @staticmethod
        def panels_multiply_bf16() -> bool:
            return False

    monkeypatch.setattr(native, "operators", lambda: Narrow)
    assert "model.dtype float32" in refusal(llama, CPU, "bfloat16")
    monkeypatch.setattr(native, "implementation", lambda: "reference")
    assert "compiled kernels" in refusal(llama, CPU, "float32")


def test_a_model_is_refused_before_it_is_loaded(model_folder, monkeypatch):
    monkeypatch.setattr(native, "implementation", lambda: "reference")
    with pytest.raises(ConfigError, match="batch_invariant"):
        make_runner(model_folder("llama"), batch_invariant=True, weights="nothing of this kind")


def test_layers_keep_what_was_in_force_when_they_were_made(monkeypatch):
    """Those of a model that drafts, loaded in the same process, are made as ever."""
    router, weight = cast(Router, None), torch.empty(1, 1, 1)
    asked: list[bool] = []
    monkeypatch.setattr(reference, "coded_product", lambda *operands, fixed, **options: asked.append(fixed))
    codes = Codes(torch.zeros(16, 32, dtype=torch.int8), torch.ones(16, 1), None, 32)
    with batch_invariant(True):
        assert linear_form(GPU, torch.bfloat16, 64) == "fixed"
        inside = DeviceExperts(router, weight, weight), CodedMatrix([codes])
    assert linear_form(GPU, torch.bfloat16, 64) == "plain"
    outside = DeviceExperts(router, weight, weight), CodedMatrix([codes])
    assert (inside[0].fixed, outside[0].fixed) == (True, False)
    for _, matrix in (inside, outside):
        matrix.product(torch.zeros(1, 32), None, torch.zeros(1, 16))
    assert asked == [True, False]
