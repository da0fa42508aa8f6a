"""What the generic model refuses at load, with the reason; and which of its steps are recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.models import generic
from cohort.common.engine.models.generic import unrecordable_operations
from cohort.common.engine.models.step_inputs import StepInputs
from cohort.common.errors import ModelError
from tests.common.engine.driver import (
    check_schedule,
    make_runner,
    random_prompts,
    reference_generate,
    run_chunked,
    run_together,
    save_random_model,
)

SMALL: dict[str, Any] = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MAMBA = transformers.MambaConfig(
    vocab_size=99, hidden_size=32, num_hidden_layers=2, state_size=4, num_heads=4, max_position_embeddings=64
)
BLOOM = transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4, max_position_embeddings=64)
NARROW_VALUES = transformers.DeepseekV3Config(
    **SMALL,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_key_value_heads=4,
    kv_lora_rank=8,
    q_lora_rank=8,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=12,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=2,
    first_k_dense_replace=2,
    max_position_embeddings=64,
)

CHUNKED = transformers.Llama4TextConfig(
    **SMALL,
    intermediate_size=48,
    intermediate_size_mlp=48,
    num_key_value_heads=2,
    head_dim=8,
    num_local_experts=2,
    attention_chunk_size=8,
    pad_token_id=0,
    max_position_embeddings=64,
)
OLD_ATTENTION = transformers.GPTJConfig(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4)


@pytest.mark.parametrize(
    ("config", "edit", "reason"),
    [
        (MAMBA, {"num_attention_heads": 4}, "recurrent state"),
        (BLOOM, {}, "attention interface|position ids"),
        (CHUNKED, {}, "chunked_attention"),
        (OLD_ATTENTION, {}, "attention interface"),
        (NARROW_VALUES, {"moe_layer_freq": 2}, "KV heads, key width"),
    ],
)
def test_refused(tmp_path: Path, config: Any, edit: dict[str, Any], reason: str) -> None:
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    _edit_config(tmp_path, edit)
    with pytest.raises(ModelError, match=reason):
        make_runner(tmp_path)


def test_refused_when_its_answers_differ(model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an architecture hides from the probe of its structure: here, a window that is not announced."""
    real = generic.paged_attention

    def narrowed(*args: Any, **kwargs: Any) -> None:
        real(*args, **{**kwargs, "sliding_window": 12})

    monkeypatch.setattr(generic, "paged_attention", narrowed)
    with pytest.raises(ModelError, match="its logits differ from its own"):
        make_runner(model_folder("gpt-neox"))


@pytest.mark.parametrize("name", ["gpt-neox", "gemma"])
def test_bfloat16_loads(model_folder: Callable[[str], Path], name: str) -> None:
    make_runner(model_folder(name), dtype="bfloat16").warm_up()


def test_attention_outside_a_step_is_an_error(model_folder: Callable[[str], Path]) -> None:
    runner = make_runner(model_folder("gpt-neox"))
    with pytest.raises(ModelError, match="outside a step"):
        runner._model._model(input_ids=torch.zeros((1, 3), dtype=torch.int64))  # type: ignore[attr-defined]


def _edit_config(folder: Path, edit: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **edit}))


@pytest.mark.parametrize("name", ["gpt-neox", "stablelm", "gemma", "phi", "gpt2"])
def test_recorded_steps_answer_what_transformers_does(name: str, model_folder: Callable[[str], Path]) -> None:
    """Decode steps and steps with prompts, by plain repetition over standing buffers."""
    folder = model_folder(name)
    expected = reference_generate(folder, random_prompts((5, 33, 9)), 10)
    runner = make_runner(folder, device_steps=True, share=DeviceShare(graphs=1 << 40))
    runner.warm_up()
    steps: Any = runner._device_steps
    assert steps.decode.classes == (1, 2, 4, 8, 16) and len(steps.mixed.classes) >= 6
    runner.kv.with_spare.copy_(torch.randn_like(runner.kv.with_spare))  # whatever was there before
    for schedule in (run_together, run_chunked(7)):
        assert check_schedule(runner, expected, schedule, shuffle=4, reverse=True) <= 1


def test_a_model_that_asks_the_device_is_not_recorded(tmp_path: Path) -> None:
    """A dynamic rotary embedding compares the largest position with a number, in Python."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    config = transformers.GemmaConfig(
        **SMALL,
        intermediate_size=48,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rope_parameters=rope,
    )
    folder = save_random_model(config, tmp_path / "m")
    runner = make_runner(folder, device_steps=True, share=DeviceShare(graphs=1 << 40))
    model: Any = runner._model
    assert model.unrecordable == ("aten::_local_scalar_dense",)
    runner.warm_up()
    steps: Any = runner._device_steps
    assert steps.decode.classes == () and steps.mixed.classes == ()
    expected = reference_generate(folder, random_prompts((5, 12), vocab=99), 6)
    assert check_schedule(runner, expected, run_together) <= 1


class _Asking:
    """A model that does what a recorded step cannot, one thing a time."""

    sampled_states = None

    def __init__(self, asks: Callable[[torch.Tensor], object]) -> None:
        self._asks = asks

    def forward(self, step: StepInputs, kv: torch.Tensor) -> torch.Tensor:
        self._asks(step.positions)
        return step.positions.float()[:, None]


@pytest.mark.parametrize(
    ("asks", "found"),
    [
        (lambda x: x + 1, ()),
        (lambda x: x[torch.zeros_like(x)], ()),
        (lambda x: int(x.max()), ("aten::_local_scalar_dense",)),
        (lambda x: x.max() > 3 or 1, ("aten::_local_scalar_dense",)),
        (lambda x: x.nonzero(), ("aten::nonzero",)),
        (lambda x: torch.where(x > 3), ("aten::nonzero",)),
        (lambda x: x[x > 3], ("aten::index by a mask",)),
        (lambda x: x.unique(), ("aten::_unique2",)),
        (lambda x: x.repeat_interleave(x), ("aten::repeat_interleave",)),
        (lambda x: torch.zeros(3, device="meta").copy_(x), ("aten::copy_ between host and device",)),
    ],
)
def test_what_cannot_be_recorded_is_seen(
    asks: Callable[[torch.Tensor], object], found: tuple[str, ...], model_folder: Callable[[str], Path]
) -> None:
    geometry = read_geometry(model_folder("gpt-neox"))
    assert unrecordable_operations(_Asking(asks), geometry, torch.float32, torch.device("cpu")) == found
