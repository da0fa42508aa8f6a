"""Tensors on a GPU reach the Triton kernels through the same functions that the engine calls on a CPU."""

from __future__ import annotations

import pytest
import torch

from cohort.common.engine.weights.linear import Linear
from cohort.kernels.cpu import native
from cohort.kernels.cpu.quantized_panels import Codes
from cohort.kernels.gpu import available, operators
from cohort.kernels.ops import experts, fused, sampling, slots
from cohort.kernels.ops.coded import CodedMatrix
from cohort.kernels.ops.paged_attention import latent_attention, paged_attention, write_kv


class Called(Exception):
    """Raised in place of a kernel."""


@pytest.fixture
def every_tensor_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for tensors on a GPU: no C++ kernel, Triton for all."""
    monkeypatch.setattr(native, "ops_for", lambda tensor: None)
    monkeypatch.setattr(available, "ops_for", lambda tensor: operators)


@pytest.mark.parametrize("name", operators.__all__)
def test_every_kernel_is_reached(every_tensor_served, make_step, monkeypatch, name):
    def kernel(*args, **options):
        raise Called

    monkeypatch.setattr(operators, name, kernel)
    step = make_step([(20, 3)])
    query, kv, table = step.query, step.kv, torch.rand(9, 32)
    key, slot = query[:, :2], torch.tensor([1, 2, 3])
    tokens = torch.empty(3, 2, 2, 2, 64)
    codes = Codes(torch.zeros(32, 32, dtype=torch.int8), torch.ones(32, 1), None, 32)
    calls = {
        "paged_attention": lambda: paged_attention(query, kv, 1, step.meta, 1.0, query),
        "write_kv": lambda: write_kv(key, key, kv, 1, slot),
        "rope_and_write_kv": lambda: fused.rope_and_write_kv(query, key, key, table, table, slot, kv, 1, slot),
        "rope_inplace": lambda: fused.rope_inplace(query, key, table, table, slot),
        "rms_norm": lambda: fused.rms_norm(query, query[0, 0], 1e-5, query),
        "silu_mul": lambda: fused.silu_mul(torch.rand(2, 8), torch.rand(2, 4)),
        "coded_product": lambda: CodedMatrix([codes]).product(table, None, table),
        "gelu_mul": lambda: fused.gelu_mul(torch.rand(2, 8), torch.rand(2, 4)),
        "soft_cap": lambda: fused.soft_cap(table, 30.0),
        "latent_attention": lambda: latent_attention(query, kv, 1, step.meta, 1.0, query, 32),
        "fixed_product": lambda: Linear(torch.rand(16, 32), form="fixed")(table),
        "clamped_swiglu": lambda: fused.clamped_swiglu(torch.rand(2, 8), 1.7, 7.0, torch.rand(2, 4)),
        "expert_outputs": lambda: experts.expert_outputs(table, torch.zeros(9, 1, dtype=torch.long), table, table),
        "add_weighted": lambda: experts.add_weighted(table, table, None, table),
        "gather_slots": lambda: slots.gather_slots(kv, slot, tokens),
        "scatter_slots": lambda: slots.scatter_slots(tokens, kv, slot),
        "sample_rows": lambda: sampling.sample_rows(table, None, None),  # type: ignore[arg-type]
    }
    assert calls.keys() == set(operators.__all__)
    with pytest.raises(Called):
        calls[name]()


def test_a_step_through_the_public_functions(every_tensor_served, make_gpu_step, assert_close):
    step = make_gpu_step([(20, 3), (30, 1)], directions="mixed")
    out = torch.empty_like(step.query)
    paged_attention(step.query, step.kv, step.layer, step.meta, step.scale, out)
    assert_close(out.cpu(), step.expected())


def test_tensors_elsewhere_are_not_served():
    assert available.ops_for(torch.zeros(1)) is None


@pytest.mark.parametrize("mode", ["auto", "reference"])
def test_the_reference_can_be_asked_for(monkeypatch, mode):
    monkeypatch.setenv("COHORT_KERNELS", mode)
    monkeypatch.setattr(available, "_decided", False)
    monkeypatch.setattr(available, "_operators", None)
    available._decide()
    assert available._operators is (operators if mode == "auto" else None)
