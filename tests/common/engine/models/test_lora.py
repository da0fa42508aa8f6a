"""Adapters in a step: tokens as transformers' with the adapter merged, and bits that no other row changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cohort.common.engine.config import lora_checkpoint
from cohort.common.engine.config.lora_checkpoint import LoraOptions
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import SamplingRow, TokenLogprobs
from cohort.common.engine.weights.linear import GatedLinear
from cohort.common.engine.worker.engine_threads import LoraLoader
from cohort.common.errors import InvariantViolated, ModelError
from cohort.common.machines.effects import LoadAdapter
from cohort.common.machines.events import AdapterFailed, AdapterLoaded
from cohort.kernels.cpu.llama import LayerStack
from cohort.kernels.ops.fused import silu_mul
from tests.common.engine.driver import (
    Driver,
    Expected,
    Schedule,
    count_near_ties,
    make_runner,
    random_prompts,
    reference_generate,
    run_chunked,
    run_one_by_one,
    run_together,
)
from tests.examples import another_of_its_kind
from tests.lora_adapters import ALL, save_adapter, save_merged

OUTPUTS = 10
ADAPTERS: dict[str, dict[str, Any]] = {
    "every projection": {"seed": 1, "rank": 4, "alpha": 8},
    "attention, odd rank": {"seed": 2, "targets": ALL[:4], "rank": 3, "alpha": 3},
    "q and v of one layer": {"seed": 3, "targets": ["q_proj", "v_proj"], "layers": [1], "strength": 2.0},
    "mlp, rslora": {"seed": 4, "targets": ALL[4:], "rank": 5, "alpha": 4, "use_rslora": True},
    "patterns": {"seed": 5, "ranks": {"q_proj": 2, "down_proj": 7}, "alphas": {"q_proj": 6.0, "up_proj": 1.0}},
    "gate alone": {"seed": 6, "targets": ["gate_proj"], "strength": 3.0},
}
FUSED: dict[str, dict[str, Any]] = {
    "every projection": {"seed": 1, "targets": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
    "qkv": {"seed": 2, "targets": ["qkv_proj"], "rank": 3},
}
MIXTURE: dict[str, dict[str, Any]] = {"attention": {"seed": 1, "targets": ALL[:4], "strength": 2.0}}

Case = tuple[ModelRunner, dict[str, list[Expected]]]


def _case(base: Path, folder: Path, adapters: dict[str, dict[str, Any]], **options: Any) -> Case:
    prompts = random_prompts((1, 9, 33))
    expected = {"": reference_generate(base, prompts, OUTPUTS)}
    paths = {}
    for index, (name, made) in enumerate(adapters.items()):
        paths[name] = str(save_adapter(base, folder / f"adapter-{index}", **made))
        merged = save_merged(base, Path(paths[name]), folder / f"merged-{index}")
        expected[name] = reference_generate(merged, prompts, OUTPUTS)
    runner = make_runner(base, lora=LoraOptions(paths, len(paths)), num_blocks=200, max_rows=32, **options)
    for name in paths:
        runner.lora.hold(runner.lora.load(name))
    return runner, expected


@pytest.fixture(
    scope="module",
    params=[pytest.param("llama", marks=another_of_its_kind()), "llama-bias-llama3", "qwen3", "phi3", "mixtral"],
)
def case(request: pytest.FixtureRequest, model_folder: Callable[[str], Path], tmp_path_factory: Any) -> Case:
    adapters = {"phi3": FUSED, "mixtral": MIXTURE}.get(request.param, ADAPTERS)
    return _case(model_folder(request.param), tmp_path_factory.mktemp(request.param), adapters)


def _check(case: Case, schedule: Schedule, names: list[str], **options: Any) -> None:
    """All prompts under each of these adapters ("" = the base), as one schedule."""
    runner, expected = case
    driver = Driver(runner, **options)
    wanted = {f"{name}/{index}": one for name in names for index, one in enumerate(expected[name])}
    for request, one in wanted.items():
        driver.add(request, one.prompt, adapter=request.rpartition("/")[0])
    schedule(driver, list(wanted), OUTPUTS)
    ties = sum(
        count_near_ties(one, driver.requests[request].tokens[len(one.prompt) :]) for request, one in wanted.items()
    )
    assert ties <= 1


def test_an_adapter_answers_otherwise_than_the_base(case: Case) -> None:
    """Or equality would prove nothing."""
    _, expected = case
    base = [one.tokens for one in expected[""]]
    for name in filter(None, expected):
        assert [one.tokens for one in expected[name]] != base


def test_each_adapter_alone_equals_transformers(case: Case) -> None:
    for name in case[1]:
        _check(case, run_one_by_one, [name])


@pytest.mark.parametrize("schedule", [run_together, run_chunked(7), run_chunked(1)])
def test_adapters_and_base_rows_in_one_step_equal_transformers(case: Case, schedule: Schedule) -> None:
    _check(case, schedule, list(case[1]), shuffle=3)


def _run(runner: ModelRunner, adapter: str, companions: list[str]) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Tokens and log-probabilities of a request beside others of these adapters."""
    driver = Driver(runner, shuffle=len(companions))
    prompts = random_prompts([21, 4, 37, 9, 30, 17])
    driver.add("it", prompts[0], adapter=adapter)
    for index, other in enumerate(companions):
        driver.add(str(index), prompts[1 + index], adapter=other)
    logprobs = []
    for step in range(OUTPUTS):
        position = len(driver.requests["it"].tokens)
        driver.requests["it"].sampling = SamplingRow(seed=7, position=position, temperature=0.9, top_p=0.95, logprobs=4)
        beside = [str(index) for index in range(len(companions)) if (step + index) % 3]
        plan = [(name, driver.remaining(name)) for name in ["it", *beside]]
        output = driver.step(plan)
        order = [name for name, _ in sorted(plan, key=lambda entry: entry[1] == 1)]
        logprobs.append(output.logprobs[order.index("it")])
    return driver.requests["it"].tokens, logprobs


def test_companions_change_no_bit_of_a_row(case: Case) -> None:
    runner, expected = case
    names = list(expected)
    for adapter in names:
        alone = _run(runner, adapter, [])
        same = _run(runner, adapter, [adapter] * 3)
        others = _run(runner, adapter, [names[-1], "", adapter, names[1], ""])
        assert same == alone
        assert others == alone


@pytest.mark.parametrize("inner", [80, 76])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_product_taken_apart_has_the_same_bits(dtype: torch.dtype, inner: int) -> None:
    """Or a row without an adapter would differ beside one with."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn((2 * inner, 48), generator=generator).to(dtype)
    x = (3 * torch.randn((9, 48), generator=generator)).to(dtype)
    gated, whole, apart = (
        GatedLinear(weight),
        torch.empty((9, inner), dtype=dtype),
        torch.empty((9, inner), dtype=dtype),
    )
    gated.into(x, whole)
    silu_mul(gated.unactivated(x), apart)
    assert torch.equal(whole, apart)


def test_steps_without_an_adapter_stay_one_call(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, expected = case
    calls: list[object] = []
    run = LayerStack.run
    monkeypatch.setattr(LayerStack, "run", lambda self, *rest: (calls.append(self), run(self, *rest)))
    driver = Driver(runner)
    driver.add("base", expected[""][1].prompt)
    driver.step([("base", 9)])
    if not calls:
        pytest.skip("this model's layers do not run as one call here")
    driver.add("other", expected[""][1].prompt, adapter=list(expected)[1])
    driver.step([("base", 1), ("other", 9)])
    assert len(calls) == 1


def test_steps_as_on_a_gpu_equal_transformers(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Decode steps are recorded there; those with adapters are launched beside them."""
    adapters = {name: ADAPTERS[name] for name in ("every projection", "attention, odd rank")}
    case = _case(model_folder("llama"), tmp_path, adapters, device_steps=True)
    case[0].warm_up()
    _check(case, run_together, ["", *adapters])
    _check(case, run_chunked(5), ["", *adapters])
    _check(case, run_together, [""])


def test_sixteen_bits_stay_near_the_merged_model(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    base = model_folder("llama")
    adapter = save_adapter(base, tmp_path / "adapter", seed=1)
    merged = make_runner(save_merged(base, adapter, tmp_path / "merged"), dtype="bfloat16")
    beside = make_runner(base, dtype="bfloat16", lora=LoraOptions({"it": str(adapter)}, 1))
    beside.lora.hold(beside.lora.load("it"))
    prompt = random_prompts([25])[0]
    best = []
    for runner, name in ((merged, ""), (beside, "it")):
        driver = Driver(runner)
        driver.add("r", prompt, SamplingRow(seed=0, position=25, temperature=0.0, logprobs=20), adapter=name)
        best.append(driver.step([("r", 25)]).logprobs[0])
    assert best[0] is not None and best[1] is not None
    assert len(set(best[0].top_ids) & set(best[1].top_ids)) >= 15
    assert abs(best[0].logprob - best[1].logprob) < 0.3


# -- what is held --------------------------------------------------------------------------------------------------


def test_an_adapter_that_is_not_held_is_an_error_not_the_base(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = save_adapter(model_folder("llama"), tmp_path, seed=1)
    runner = make_runner(model_folder("llama"), lora=LoraOptions({"it": str(adapter)}, 1))
    driver = Driver(runner)
    driver.add("r", [5, 6, 7], adapter="it")
    with pytest.raises(InvariantViolated, match="'it'"):
        driver.step([("r", 3)])
    runner.lora.hold(runner.lora.load("it"))
    driver.step([("r", 3)])
    runner.lora.drop("it")
    assert runner.lora.held == []
    with pytest.raises(InvariantViolated, match="'it'"):
        driver.step([("r", 1)])


def test_a_file_that_changed_is_not_loaded_under_the_old_name(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    base = model_folder("llama")
    adapter = save_adapter(base, tmp_path / "a", seed=1)
    runner = make_runner(base, lora=LoraOptions({"it": str(adapter)}, 1))
    save_adapter(base, tmp_path / "a", seed=2)
    (adapter / "adapter_model.safetensors").touch()
    with pytest.raises(ModelError, match="has changed since the start"):
        runner.lora.load("it")
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        runner.lora.load("it")


async def test_the_loader_reads_on_a_thread_and_answers_each_load(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    base, prompt = model_folder("llama"), [5, 6, 7]
    adapters = {name: str(save_adapter(base, tmp_path / name, seed=1)) for name in ("one", "two")}
    runner = make_runner(base, lora=LoraOptions(adapters, 1))
    told: asyncio.Queue[AdapterLoaded | AdapterFailed] = asyncio.Queue()
    loader = LoraLoader(runner.lora, told.put_nowait)
    loader.load(LoadAdapter("one"))
    assert runner.lora.held == [] and told.empty(), "the event loop went on"
    assert await told.get() == AdapterLoaded("one")
    driver = Driver(runner)
    driver.add("r", prompt, adapter="one")
    driver.step([("r", 3)])
    loader.load(LoadAdapter("two", instead_of="one"))
    assert runner.lora.held == []
    assert await told.get() == AdapterLoaded("two")
    assert runner.lora.held == ["two"]
    (tmp_path / "one" / "adapter_model.safetensors").write_bytes(b"damaged")
    loader.load(LoadAdapter("one", instead_of="two"))
    answer = await told.get()
    assert isinstance(answer, AdapterFailed) and "has changed since the start" in answer.reason
    loader.close()


# -- what is refused at start --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "use_dora .DoRA. is not served"),
        ({"bias": "all"}, "bias 'all' .trained biases."),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": "much"}, "lora_alpha is 'much'"),
        ({"r": 5}, "down_proj.lora_A.weight has shape .4, 80.; with rank 5"),
        ({"rank_pattern": {"k_proj": 2}}, "k_proj.lora_A.weight has shape .4, 48.; with rank 2"),
        ({"rank_pattern": {"(": 2}}, "no module"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the base weights"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "'embed_tokens' .embeddings."),
        ({"layers_to_transform": None, "target_modules": ["q_proj"]}, None),
    ],
)
def test_settings_are_refused_by_name(
    model_folder: Callable[[str], Path], tmp_path: Path, settings: dict[str, Any], words: str | None
) -> None:
    adapter = save_adapter(model_folder("llama"), tmp_path / "a", seed=1)
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    options = LoraOptions({"it": str(adapter)}, 1)
    if words is None:
        make_runner(model_folder("llama"), lora=options)
        return
    with pytest.raises(ModelError, match=words) as refused:
        make_runner(model_folder("llama"), lora=options)
    assert str(adapter) in str(refused.value)


def _renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def _without(part: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_renamed("layers.2.", "layers.3."), "is of layer 3; the base model has layers 0 to 2"),
        (_renamed("self_attn.q_proj", "self_attn.query"), "changes self_attn.query"),
        (_renamed("layers.0.mlp.up_proj.lora_A", "embed_tokens.lora_embedding_A"), "lora_embedding_A.weight is not"),
        (_without("layers.1.mlp.up_proj.lora_B"), "lacks tensor .*layers.1.mlp.up_proj.lora_B.weight"),
        (_without("layers.2."), "lacks tensors of layers.2.self_attn.o_proj"),
        (_without(""), "holds no LoRA tensors"),
    ],
)
def test_tensors_are_refused_by_name(
    model_folder: Callable[[str], Path], tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], words: str
) -> None:
    adapter = save_adapter(model_folder("llama"), tmp_path / "a", seed=1)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(ModelError, match=words) as refused:
        make_runner(model_folder("llama"), lora=LoraOptions({"it": str(adapter)}, 1))
    assert str(file) in str(refused.value)


def test_other_faults_at_start(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    base = model_folder("llama")
    adapter = save_adapter(base, tmp_path / "a", seed=1, rank=8)
    other = save_adapter(model_folder("qwen2"), tmp_path / "b", seed=1)

    def start(adapters: dict[str, str], model: str = "llama") -> None:
        make_runner(model_folder(model), lora=LoraOptions(adapters, 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora_checkpoint, "MAX_RANK", 4)
        with pytest.raises(ModelError, match=r"lora_A.weight has rank 8; at most 4 "):
            start({"it": str(adapter)})
    with pytest.raises(ModelError, match=r"k_proj.lora_B.weight has shape \(16, 4\).*needs \(32, 4\)"):
        start({"it": str(other)})
    with pytest.raises(ModelError, match="no folder"):
        start({"it": str(tmp_path / "none")})
    with pytest.raises(ModelError, match="no name for an adapter"):
        start({" it": str(adapter)})
    with pytest.raises(ModelError, match="no adapters for opt models"):
        start({"it": str(adapter)}, model="opt")
    (adapter / "adapter_model.safetensors").write_bytes(b"\\x10\\x00\\x00\\x00\\x00\\x00\\x00\\x00{}")
    with pytest.raises(ModelError, match="cannot be read"):
        start({"it": str(adapter)})
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match="safe_serialization"):
        start({"it": str(adapter)})
