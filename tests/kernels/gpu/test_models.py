"""Whole models with every kernel of a GPU, in Triton's interpreter: the tokens of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.forward.device_steps import DeviceSteps
from cohort.common.engine.models import lean_deepseek, lean_gpt_oss, lean_llama
from cohort.common.engine.runner import draft_loading
from cohort.common.engine.weights import linear
from cohort.kernels.cpu import native
from cohort.kernels.gpu import available, operators
from tests.common.engine.drafts.test_eagle_head import Reference, Served, head_folder
from tests.common.engine.driver import check_schedule, make_runner, random_prompts, reference_generate, run_chunked
from tests.common.engine.groups import group_runner
from tests.common.engine.joint_ranks import joint_runner
from tests.common.engine.models.test_gpt_oss import mxfp4_folder as mxfp4_folder
from tests.engine_models import model_folder as model_folder
from tests.examples import another_of_its_kind
from tests.kernels.gpu.conftest import DEVICE


@pytest.fixture
def every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cuda":
        return
    monkeypatch.setattr(native, "ops_for", lambda tensor: None)
    monkeypatch.setattr(linear, "linear_form", lambda *shape: "plain")
    monkeypatch.setattr(available, "ops_for", lambda tensor: operators)
    for form in (lean_llama, lean_gpt_oss, lean_deepseek):
        monkeypatch.setattr(form, "groups_on_host", lambda device: False)


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        pytest.param("gemma2", "auto", marks=another_of_its_kind()),  # soft caps, windows, norms around everything
        pytest.param("gpt-oss", "auto", marks=another_of_its_kind()),  # sinks, windows, clamped experts
        pytest.param("qwen3-moe", "auto", marks=another_of_its_kind()),
        pytest.param("deepseek2", "auto", marks=another_of_its_kind()),  # latents; the shared expert
        pytest.param("deepseek3", "auto", marks=another_of_its_kind()),  # experts by groups, queries by a latent too
    ],
)
def test_tokens_are_those_of_transformers(name, cache, model_folder, every_kernel):
    check_tokens(model_folder(name), cache)


@another_of_its_kind()
@pytest.mark.skipif(DEVICE.type == "cuda", reason="the ranks of a group have a GPU each")
@pytest.mark.parametrize("name", ["qwen3", "qwen2-moe"])
def test_a_rank_records_its_part(name, model_folder, every_kernel, monkeypatch):
    """Rank 0 with a GPU's kernels over its heads and columns, beside one that computes as a processor does."""
    monkeypatch.setattr(DeviceSteps, "compile", lambda steps, threads: None)
    folder, options = model_folder(name), {"max_rows": 2, "max_step_tokens": 32, "num_blocks": 24}
    expected = reference_generate(folder, random_prompts((5, 19)), 4)
    with group_runner(folder, 2, graphs=(1 << 40, 1 << 40), **options) as runner:
        runner.warm_up()
        assert runner.captured_batch_sizes == (1, 2)
        assert check_schedule(runner, expected, run_chunked(7), shuffle=4, reverse=True) <= 1


@another_of_its_kind()
def test_experts_in_mxfp4(mxfp4_folder, every_kernel, monkeypatch):
    """In float32, whose codes are widened otherwise, so that tokens can be compared."""
    monkeypatch.setattr(lean_gpt_oss, "keeps_codes", lambda *layout: True)
    check_tokens(mxfp4_folder, "auto")


@pytest.mark.parametrize(("name", "degree"), [("deepseek3", 2), ("deepseek2-groups", 3)])
@another_of_its_kind()
def test_latents_over_ranks(name, degree, model_folder, every_kernel):
    """Each with a part of the heads and of every expert's columns; its cache is the others', to the bit."""
    folder = model_folder(name)
    expected = reference_generate(folder, random_prompts((5, 19)), 4)
    runner, joint = joint_runner(folder, degree, max_rows=2, max_step_tokens=32, num_blocks=24)
    assert check_schedule(runner, expected, run_chunked(7), shuffle=4) <= 1
    assert joint.caches[0].abs().sum() > 0
    assert all(torch.equal(cache, joint.caches[0]) for cache in joint.caches)


@another_of_its_kind()
def test_a_head_drafts_what_its_formula_says(model_folder, tmp_path, every_kernel, monkeypatch):
    """From the states that the model's recorded steps leave on the device, by recorded steps of its own."""
    monkeypatch.setattr(draft_loading, "FILLED_AT_ONCE", 32)
    monkeypatch.setattr(draft_loading, "_MOST_ROWS", 8)
    if DEVICE.type != "cuda":  # the interpreter would run what is only to be compiled, over memory without meaning
        monkeypatch.setattr(DeviceSteps, "compile", lambda steps, threads: None)
    model, head = model_folder("llama"), head_folder(tmp_path / "head")
    options = {"device": DEVICE.type, "max_rows": 2, "max_step_tokens": 32, "num_blocks": 24}
    served, reference = Served(model, head, device_steps=True, **options), Reference(model, head)
    for name, prompt in zip("ab", random_prompts((13, 5)), strict=True):
        served.driver.add(name, prompt)
        served.driver.step([(name, len(prompt))])
    for counts in ({"a": 2, "b": 3}, {"b": 1, "a": 2}):
        expected = [reference.drafts(served.driver.requests[name].tokens, count) for name, count in counts.items()]
        assert served.together(counts) == expected
        served.driver.step([("a", 1), ("b", 1)])


def check_tokens(folder: Path, cache: str) -> None:
    expected = reference_generate(folder, random_prompts((5, 19)), 4)
    runner = make_runner(
        folder,
        device=DEVICE.type,
        device_steps=True,
        max_rows=2,
        max_step_tokens=32,
        num_blocks=24,
        cache_dtype=cache,
        share=DeviceShare(graphs=1 << 40),
    )
    assert check_schedule(runner, expected, run_chunked(7), shuffle=4, reverse=True) <= 1
