"""Families of the lean path against transformers in float32: logits, and KV that requests share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.models.lean_deepseek import LeanDeepseek
from cohort.common.engine.models.lean_gemma import LeanGemma
from cohort.common.engine.models.lean_gpt_oss import LeanGptOss
from cohort.common.engine.models.lean_llama import LeanLlama
from cohort.common.engine.models.step_inputs import step_inputs
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.errors import ModelError
from tests.common.engine.driver import (
    Driver,
    check_schedule,
    count_near_ties,
    make_runner,
    random_prompts,
    reference_generate,
    run_chunked,
    run_together,
    save_random_model,
)
from tests.engine_models import BLOCK_SIZE, CONFIGS

LEAN_FORMS = {
    "llama-dynamic": LeanLlama,
    "phi3": LeanLlama,
    "phi3-longrope": LeanLlama,
    "gemma2": LeanGemma,
    "gemma2-uncapped": LeanGemma,
    "gemma3": LeanGemma,
    "gemma3-linear": LeanGemma,
    "gemma3-images": LeanGemma,
    "gpt-oss": LeanGptOss,
    "gpt-oss-plain": LeanGptOss,
    "deepseek2": LeanDeepseek,
    "deepseek2-groups": LeanDeepseek,
    "deepseek3": LeanDeepseek,
    "deepseek3-apart": LeanDeepseek,
}
FAMILIES = pytest.mark.parametrize("name", LEAN_FORMS)
LENGTHS = (40, 3, 17, 26)  # beyond every window, within it, and between


def forward(runner: ModelRunner, driver: Driver, plan: Sequence[tuple[str, int]]) -> list[Tensor]:
    """One step of whole chunks: logits [tokens of the row, vocabulary] of each row, in the batch's order."""
    plan = sorted(plan, key=lambda entry: entry[1] == 1)
    inputs = step_inputs(driver.batch(plan), runner.block_size, runner.device)
    inputs.sample_index = torch.arange(len(inputs.token_ids))
    with torch.inference_mode():
        logits = runner._model.forward(inputs, runner.kv.blocks).clone()
    for name, count in plan:
        driver.requests[name].computed += count
    return list(logits.split([count for _, count in plan]))


def own_logits(folder: Path, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0] for prompt in prompts]


@FAMILIES
def test_logits_equal_those_of_transformers(name: str, model_folder: Callable[[str], Path]) -> None:
    """Every token's, for rows of unlike lengths in one step, and then for the same prompts in chunks."""
    folder = model_folder(name)
    runner = make_runner(folder)
    assert type(runner._model) is LEAN_FORMS[name]
    prompts = random_prompts(LENGTHS, seed=5)
    expected = own_logits(folder, prompts)
    for chunk in (max(LENGTHS), 6):
        driver = Driver(runner, shuffle=7, reverse=True)
        for index, prompt in enumerate(prompts):
            driver.add(str(index), prompt)
        found: dict[str, list[Tensor]] = {str(index): [] for index in range(len(prompts))}
        while plan := [(each, min(chunk, driver.remaining(each))) for each in found if driver.remaining(each)]:
            rows = forward(runner, driver, plan)
            for (each, _), logits in zip(sorted(plan, key=lambda entry: entry[1] == 1), rows, strict=True):
                found[each].append(logits)
        for index, logits in enumerate(expected):
            torch.testing.assert_close(torch.cat(found[str(index)]), logits, rtol=1e-4, atol=1e-4)


@FAMILIES
def test_a_shared_prefix_answers_as_its_own(name: str, model_folder: Callable[[str], Path]) -> None:
    """What a prefix cache does: a request begins behind full blocks that another one filled."""
    folder = model_folder(name)
    shared, *ends = random_prompts((3 * BLOCK_SIZE, 5, 21), seed=8)
    expected = reference_generate(folder, [shared + end for end in ends], 10)
    driver = Driver(make_runner(folder), shuffle=2)
    driver.add("first", expected[0].prompt)
    driver.step([("first", driver.remaining("first"))])
    driver.add("second", expected[1].prompt)
    second = driver.requests["second"]
    second.blocks, second.directions = driver.requests["first"].blocks[:3], [0] * 3
    second.computed = len(shared)
    driver.step([("first", 1), ("second", driver.remaining("second"))])
    for _ in range(8):
        driver.step([("first", 1), ("second", 1)])
    driver.step([("second", 1)])
    for each, one in zip(("first", "second"), expected, strict=True):
        assert count_near_ties(one, driver.requests[each].tokens[len(one.prompt) :]) == 0


@FAMILIES
def test_recorded_steps_of_a_family(name: str, model_folder: Callable[[str], Path]) -> None:
    """The steps of a GPU, by plain repetition over standing buffers."""
    folder = model_folder(name)
    expected = reference_generate(folder, random_prompts((5, 33, 9)), 8)
    runner = make_runner(folder, device_steps=True, share=DeviceShare(graphs=1 << 40))
    runner.warm_up()
    steps: Any = runner._device_steps
    assert steps.decode.classes
    for schedule in (run_together, run_chunked(7)):
        assert check_schedule(runner, expected, schedule, shuffle=4, reverse=True) <= 1


@pytest.mark.parametrize("name", ["phi3", "gemma2", "gemma3", "gpt-oss", "deepseek2", "deepseek3"])
def test_bfloat16_follows_transformers(name: str, model_folder: Callable[[str], Path]) -> None:
    """As near to transformers' float32 as transformers itself is in bfloat16, within half as much again."""
    folder = model_folder(name)
    prompt = random_prompts((40,), seed=5)[0]
    (exact,) = own_logits(folder, [prompt])
    runner = make_runner(folder, dtype="bfloat16")
    driver = Driver(runner)
    driver.add("r", prompt)
    (ours,) = forward(runner, driver, [("r", len(prompt))])
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        theirs = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float()
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()


@pytest.mark.parametrize(("name", "form"), [("gemma2", "gemma"), ("gpt-oss", "gpt_oss"), ("qwen3", "llama")])
def test_a_form_is_the_same_on_a_gpu(name: str, form: str, model_folder: Callable[[str], Path]) -> None:
    geometry = read_geometry(model_folder(name))
    assert geometry.family == form


@pytest.mark.parametrize(
    "edit",
    [
        {"hidden_activation": "gelu"},
        {"use_bidirectional_attention": True},
        {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 10000.0}},
    ],
)
def test_values_that_the_gemma_form_does_not_compute(
    model_folder: Callable[[str], Path], tmp_path: Path, edit: dict[str, Any]
) -> None:
    config = json.loads((model_folder("gemma2") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **edit}))
    assert read_geometry(tmp_path).family == "generic"


def test_longrope_factors_must_fit_the_rotated_part(tmp_path: Path) -> None:
    folder = save_random_model(CONFIGS["phi3-longrope"](), tmp_path / "m")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["partial_rotary_factor"] = 1.0
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match="longrope: 3 factors in short_factor, 4 frequencies"):
        make_runner(folder)


def test_the_earlier_names_of_tensors_beside_those_of_images(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = model_folder("gemma3-images")
    tensors = {
        name.replace("model.language_model.", "language_model.model."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    assert "language_model.model.norm.weight" in tensors
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    expected = reference_generate(folder, random_prompts((17,)), 6)
    assert check_schedule(make_runner(tmp_path), expected, run_together) == 0
