"""The engine's measurements: what they count and compare is right, and they leave no trace. How fast is not tested."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.profiler import ProfilerActivity, profile

from cohort.common.config import load_config
from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.runner import model_runner
from cohort.common.engine.step.batch import trial_batch
from cohort.common.engine.step.batch_builder import BatchBuilder
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.kernels.cpu import native
from cohort.services.bench.engine.inside.comparisons import (
    LowerBounds,
    Product,
    Products,
    compared,
    measure_attention,
    model_products,
)
from cohort.services.bench.engine.inside.in_process import StepClock, Target, clocked, engine_targets
from cohort.services.bench.engine.inside.measuring import measure_shares
from cohort.services.bench.engine.report import KERNEL_PARTS
from tests.engine_models import make_runner

ModelFolder = Callable[[str], Path]
PLENTY = 1 << 30
needs_kernels = pytest.mark.skipif(native.implementation() != "native", reason="no compiled kernels here")


@pytest.mark.parametrize("name", ["llama", "qwen3", "opt"])
def test_the_lower_bounds_multiply_every_matrix_of_the_checkpoint(model_folder: ModelFolder, name: str) -> None:
    folder = model_folder(name)
    products = model_products(read_geometry(folder))
    assert products is not None
    with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
        matrices = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    weights = sum(
        tensor.numel() for key, tensor in matrices.items() if tensor.dim() == 2 and "embed_positions" not in key
    )
    assert products.parameters == weights


def test_a_model_that_runs_through_transformers_has_no_lower_bounds(model_folder: ModelFolder) -> None:
    assert model_products(read_geometry(model_folder("gemma"))) is None


def test_layers_share_no_weights_and_memory_bounds_their_number() -> None:
    products = Products((Product(64, 32), Product(64, 32, "gated"), Product(32, 32, "added")), Product(100, 32), 5)
    lower_bounds = LowerBounds(products, torch.float32, PLENTY)
    assert lower_bounds.layers == 5
    pointers = {weight.data_ptr() for layer in lower_bounds._plain for weight in layer}
    assert len(pointers) == 15
    layer_bytes = 3 * (2 * 64 * 32 + 32 * 32) * 4
    vocabulary_bytes = 3 * 100 * 32 * 4
    assert LowerBounds(products, torch.float32, 2 * (vocabulary_bytes + 2 * layer_bytes)).layers == 2
    assert LowerBounds(products, torch.float32, 0).layers == 1


def test_every_form_multiplies_the_same_weights() -> None:
    """Otherwise a ratio compares two different things."""
    products = Products((Product(48, 32),), Product(70, 32), 1)
    lower_bounds = LowerBounds(products, torch.float32, PLENTY)
    x = torch.ones(3, 32)
    expected = x @ lower_bounds._plain[0][0].T
    out = torch.empty(3, 48)
    lower_bounds._ours[0][0].into(x, out)
    assert torch.allclose(out, expected, atol=1e-5)
    forms = lower_bounds.calls(3, 1)
    assert next(iter(forms)) == "linear" and list(forms)[-1] == "ours"
    for layers, vocabulary in forms.values():
        layers()
        vocabulary()


def test_a_comparison_measures_steps_that_fit_model_and_cache(model_folder: ModelFolder) -> None:
    runner = make_runner(model_folder("llama"), num_blocks=64)  # 512 positions; the model knows 256
    products = model_products(runner.geometry)
    assert products is not None
    lower_bounds = LowerBounds(products, torch.float32, PLENTY)
    comparison = compared(runner, lower_bounds, 4, (16, 128, 256), rounds=3, read_bytes=1 << 20)
    assert [(point.rows, point.context) for point in comparison.steps] == [(4, 16), (4, 128)]
    assert (comparison.tokens, comparison.sampled, comparison.lower_bound_layers) == (4, 4, 3)
    assert {"linear", "ours", "memory"} <= set(comparison.lower_bounds)
    for point in comparison.steps:
        assert set(point.ratios) == set(comparison.lower_bounds)
        assert 0 < point.step.min_s <= point.step.median_s <= point.step.max_s
        for form, ratio in point.ratios.items():
            lower_bound = comparison.lower_bounds[form]
            assert point.step.min_s / lower_bound.max_s <= ratio <= point.step.max_s / lower_bound.min_s
    alone = compared(runner, None, 1, (512,), rounds=1, read_bytes=1 << 20)
    assert alone.lower_bounds == {} and alone.steps == []
    prefill = compared(runner, lower_bounds, 1, (32,), rounds=2, read_bytes=1 << 20, tokens_per_row=32)
    assert (prefill.kind, prefill.tokens, prefill.sampled) == ("prefill", 32, 1)


def test_layers_that_were_not_timed_are_taken_to_cost_as_much(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(model_folder("llama"))
    products = model_products(runner.geometry)
    assert products is not None
    lower_bounds = LowerBounds(products, torch.float32, 0)
    assert lower_bounds.layers == 1
    seconds = [[2.0], [0.5], [3.0], [0.5]]  # two forms, layers and vocabulary
    monkeypatch.setattr(LowerBounds, "calls", lambda self, tokens, sampled: {"linear": (id, id), "ours": (id, id)})
    monkeypatch.setattr(
        "cohort.services.bench.engine.inside.comparisons.each_s", lambda calls, rounds: [*seconds, [1.0], [0.5], [13.0]]
    )
    comparison = compared(runner, lower_bounds, 1, (16,), rounds=1, read_bytes=1 << 20)
    assert comparison.lower_bounds["linear"].median_s == 3 * 2.0 + 0.5
    assert comparison.lower_bounds["ours"].median_s == 3 * 3.0 + 0.5
    assert comparison.steps[0].ratios["linear"] == 2.0
    assert comparison.bandwidth == (1 << 20) / 0.5
    assert comparison.lower_bounds["memory"].median_s == pytest.approx(products.parameters * 4 / ((1 << 20) / 0.5))


def test_time_inside_another_clocked_function_counts_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("cohort.services.bench.engine.inside.in_process.time.perf_counter", lambda: float(next(ticks)))
    clock = StepClock()
    inner = clock.wrap("products", lambda: None)
    middle = clock.wrap("dispatch", lambda: (inner(), inner()))
    outer = clock.wrap("glue", lambda: (middle(), inner()))
    outer()
    # Every reading of the clock advances it by 1: inner 1 each, middle 5 with two inside, outer 9 with middle and one.
    assert dict(clock.seconds) == {"products": 3.0, "dispatch": 3.0, "glue": 3.0}


def test_clocks_leave_no_trace_even_after_an_error() -> None:
    targets = [*engine_targets(), Target(WorkerMachine, "_plan", "plan"), Target(BatchBuilder, "build", "build")]
    before = [getattr(target.owner, target.name) for target in targets]
    with pytest.raises(RuntimeError), clocked(StepClock(), targets):
        assert all(
            getattr(target.owner, target.name) is not function for target, function in zip(targets, before, strict=True)
        )
        raise RuntimeError
    assert all(getattr(target.owner, target.name) is function for target, function in zip(targets, before, strict=True))


@needs_kernels
def test_a_step_is_the_sum_of_its_parts(model_folder: ModelFolder) -> None:
    runner = make_runner(model_folder("llama"), num_blocks=256)
    execute = model_runner.ModelRunner.execute
    shares = measure_shares(load_config(), runner, rows=3, context=20, steps=4)
    assert shares is not None and model_runner.ModelRunner.execute is execute
    assert set(KERNEL_PARTS) <= set(shares.parts_s)
    assert all(seconds > 0 for seconds in shares.parts_s.values())
    assert 0 < shares.outside_execute < shares.outside_kernels < 1
    assert measure_shares(load_config(), runner, rows=300, context=20, steps=4) is None
    assert measure_shares(load_config(), runner, rows=1, context=256, steps=4) is None


@needs_kernels
@pytest.mark.skipif(not torch.profiler.kineto_available(), reason="torch without its profiler")
def test_a_decode_step_allocates_nothing_but_the_sampled_tokens(model_folder: ModelFolder, tmp_path: Path) -> None:
    """By torch's allocator, inside operators too; each allocation counts for the innermost operator around it."""
    runner = make_runner(model_folder("llama"))
    batch = trial_batch(5, 1, 16, block_size=runner.block_size, num_blocks=len(runner.kv.blocks))
    assert batch is not None
    runner.execute(batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        runner.execute(batch)
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    operators = [event for event in events if event.get("ph") == "X" and event.get("cat") == "cpu_op"]
    taken = [event for event in events if event.get("name") == "[memory]" and event["args"]["Bytes"] > 0]
    for each in taken:
        around = [o for o in operators if o["tid"] == each["tid"] and 0 <= each["ts"] - o["ts"] <= o["dur"]]
        assert min(around, key=lambda operator: operator["dur"])["name"] == "aten::argmax"
    assert sum(each["args"]["Bytes"] for each in taken) <= 5 * 8


@pytest.mark.parametrize(("cache_dtype", "row_bytes"), [("auto", 16 * 4), ("fp8", 16 + 1)])
def test_attention_of_the_models_own_heads(model_folder: ModelFolder, cache_dtype: str, row_bytes: int) -> None:
    runner = make_runner(model_folder("llama"), cache_dtype=cache_dtype)
    assert runner.compute_dtype == torch.float32
    point = measure_attention(runner, rows=2, context=32, rounds=2, cache_bytes=1 << 20)
    # 2 rows x 32 positions x K and V x 2 heads in every layer
    assert point.read_bytes == point.layers * 2 * 32 * 2 * 2 * row_bytes
    assert point.rate > 0 and point.bandwidth > 0 and point.share > 0
    assert point.reversed_ratio > 0
