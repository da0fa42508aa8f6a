"""A mixture of experts: what it computes, that no row depends on the others, and how checkpoints name it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.config.model_config import ExpertsGeometry, read_geometry
from cohort.common.engine.models import lean_llama
from cohort.common.engine.models.experts import DenseMlp, DeviceExperts, ExpertBuffers, Experts, Router, SharedExpert
from cohort.common.engine.models.step_inputs import StepInputs
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.weights.linear import GatedLinear, Linear, linear_form
from cohort.common.errors import ModelError
from cohort.kernels.attention_meta import AttentionMeta
from cohort.kernels.cpu import native
from tests.common.engine.driver import (
    BLOCK_SIZE,
    VOCAB,
    Driver,
    check_schedule,
    make_runner,
    random_prompts,
    reference_generate,
    run_chunked,
    run_together,
)

HIDDEN, INNER, SHARED, COUNT, PER_TOKEN = 48, 40, 24, 7, 3
MODELS = ["mixtral", "qwen3-moe", "qwen2-moe"]
DTYPES = [torch.float32, torch.bfloat16]


class Layer:
    """A random mixture, and the same sum written plainly."""

    def __init__(self, dtype: torch.dtype, *, normalised: bool = True, shared: bool = True) -> None:
        generator = torch.Generator().manual_seed(3)

        def weight(rows: int, width: int) -> Tensor:
            return (torch.randn((rows, width), generator=generator) * width**-0.5).to(dtype)

        self.router = weight(COUNT, HIDDEN) * 4
        self.gate_up = [weight(2 * INNER, HIDDEN) for _ in range(COUNT)]
        self.down = [weight(HIDDEN, INNER) for _ in range(COUNT)]
        self.shared = (weight(2 * SHARED, HIDDEN), weight(HIDDEN, SHARED), weight(1, HIDDEN)) if shared else None
        self.normalised = normalised
        self.lean = Experts(
            Router(Linear(self.router), PER_TOKEN, normalised, rounded=False),
            [DenseMlp(GatedLinear(up), Linear(down)) for up, down in zip(self.gate_up, self.down, strict=True)],
            None
            if self.shared is None
            else SharedExpert(DenseMlp(GatedLinear(self.shared[0]), Linear(self.shared[1])), Linear(self.shared[2])),
            ExpertBuffers(8 * PER_TOKEN, HIDDEN, INNER, dtype),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden]: the mixture alone."""
        residual = torch.zeros_like(x)
        self.lean.add_into(x, x.new_empty((len(x), INNER)), residual)
        return residual

    def plainly(self, x: Tensor) -> Tensor:
        """In float64, token by token and expert by expert."""
        out = torch.zeros(x.shape, dtype=torch.float64)
        for token, row in enumerate(x.double()):
            weights, chosen = torch.softmax(self.router.double() @ row, 0).topk(PER_TOKEN)
            weights = weights / weights.sum() if self.normalised else weights
            for weight, expert in zip(weights, chosen.tolist(), strict=True):
                out[token] += weight * self._mlp(row, self.gate_up[expert], self.down[expert])
            if self.shared is not None:
                up, down, gate = self.shared
                out[token] += torch.sigmoid(gate.double() @ row) * self._mlp(row, up, down)
        return out

    @staticmethod
    def _mlp(row: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = (gate_up.double() @ row).chunk(2)
        return down.double() @ (torch.nn.functional.silu(gate) * up)


def _rows(count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(11)).to(dtype)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 9, 67])
def test_is_the_weighted_sum(rows: int, normalised: bool, shared: bool) -> None:
    layer, x = Layer(torch.float32, normalised=normalised, shared=shared), _rows(rows, torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x).double(), layer.plainly(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_computes_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    """Alone, among others, and at every place of a batch whose length is no multiple of a vector."""
    if linear_form(torch.device("cpu"), dtype, HIDDEN) == "plain":
        pytest.skip("plain products promise no such thing")
    layer, x = Layer(dtype), _rows(131, dtype)
    with torch.inference_mode():
        together = layer(x)
        assert len(set(torch.bincount(layer.lean.router.route(x)[0].view(-1), minlength=COUNT).tolist())) > 1
        alone = torch.cat([layer(x[row : row + 1]) for row in range(len(x))])
        assert torch.equal(alone, together)
        for count in (2, 3, 17, 64, 130):
            assert torch.equal(layer(x[:count]), together[:count])
            assert torch.equal(layer(x[-count:].contiguous()), together[-count:])
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5))
        assert torch.equal(layer(x[order]), together[order])


def test_equal_scores_are_routed_alike_in_every_batch() -> None:
    """Ties are common where scores are rounded: all experts tie for a row of zeros."""
    layer, x = Layer(torch.float32, shared=False), _rows(20, torch.float32)
    x[7] = 0
    with torch.inference_mode():
        experts, weights = layer.lean.router.route(x)
        alone, weights_alone = layer.lean.router.route(x[7:8])
    assert torch.equal(experts[7:8], alone)
    assert torch.equal(weights[7:8], weights_alone)


def _logits(runner: ModelRunner, prompt: list[int]) -> Tensor:
    tokens = len(prompt)
    positions = torch.arange(tokens)
    step = StepInputs(
        token_ids=torch.tensor(prompt),
        positions=positions,
        slot_mapping=positions.clone(),
        sample_index=positions.clone(),
        meta=AttentionMeta(
            query_start=torch.tensor([0, tokens], dtype=torch.int32),
            context_lens=torch.tensor([tokens], dtype=torch.int32),
            block_tables=torch.arange(-(-tokens // BLOCK_SIZE), dtype=torch.int32).unsqueeze(0),
            directions=None,
            block_size=BLOCK_SIZE,
            max_query_len=tokens,
            num_prefill_rows=1,
        ),
    )
    with torch.inference_mode():
        return runner._model.forward(step, runner.kv.blocks).clone()


def _reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, model_folder: Callable[[str], Path]) -> None:
    folder = model_folder(name)
    (prompt,) = random_prompts([61])
    with torch.inference_mode():
        expected = _reference(folder)(torch.tensor([prompt])).logits[0]
    logits = _logits(make_runner(folder), prompt)
    assert logits.shape == (61, VOCAB)
    assert float((logits - expected).abs().max()) < 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_as_close_to_transformers_as_rounding_lets_it(
    name: str, model_folder: Callable[[str], Path]
) -> None:
    """The median over positions: rounded scores may route single tokens differently, and rightly."""
    folder = model_folder(name)
    (prompt,) = random_prompts([61])
    model = _reference(folder).to(torch.bfloat16)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].float()
    error = _logits(make_runner(folder, dtype="bfloat16"), prompt) - expected
    assert float((error.norm(dim=1) / expected.norm(dim=1)).median()) < 0.05


@pytest.mark.parametrize("name", MODELS)
def test_a_cached_prefix_changes_nothing(name: str, model_folder: Callable[[str], Path]) -> None:
    """A second request over the first one's blocks computes its last tokens only, and the same answer to the bit."""
    runner = make_runner(model_folder(name))
    (prompt,) = random_prompts([4 * BLOCK_SIZE + 5])
    driver = Driver(runner, shuffle=2)
    driver.add("first", prompt)
    driver.add("second", prompt)
    driver.step([("first", len(prompt))])
    first, second = driver.requests["first"], driver.requests["second"]
    second.blocks, second.directions, second.computed = first.blocks[:4], first.directions[:4], 4 * BLOCK_SIZE
    for _ in range(10):
        driver.step([(request, driver.remaining(request)) for request in ("first", "second")])
    assert second.tokens == first.tokens[: len(second.tokens)]
    assert len(second.tokens) == len(prompt) + 10


@pytest.mark.parametrize("name", MODELS)
def test_experts_in_one_tensor_are_read_too(name: str, model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """transformers 5 keeps a layer's experts in one tensor, and saves them so when asked to."""
    folder = model_folder(name)
    _reference(folder).save_pretrained(tmp_path, save_original_format=False)
    (prompt,) = random_prompts([19])
    assert torch.equal(_logits(make_runner(tmp_path), prompt), _logits(make_runner(folder), prompt))


def test_a_missing_expert_is_named(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = model_folder("qwen3-moe")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 9}))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"mlp\.experts\.8\.gate_proj\.weight"):
        make_runner(tmp_path)


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe"])
def test_without_compiled_kernels(
    name: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts in plain products, as where there is no compiler."""
    monkeypatch.setattr(native, "ops_for", lambda tensor: None)
    monkeypatch.setattr(native, "operators", lambda: None)
    folder = model_folder(name)
    expected = reference_generate(folder, random_prompts((5, 33)), 12)
    assert check_schedule(make_runner(folder), expected, run_chunked(7)) <= 1


def test_random_weights(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model_folder("qwen2-moe") / "config.json").read_text())
    logits = _logits(make_runner(tmp_path, weights="random"), random_prompts([9])[0])
    assert bool(torch.isfinite(logits).all())


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "qwen3-moe-sparse"])
def test_as_on_a_gpu(name: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """All experts in two tensors, which the reference multiplies here; the steps that a GPU records are repeated."""
    monkeypatch.setattr(lean_llama, "groups_on_host", lambda device: False)
    folder = model_folder(name)
    runner = make_runner(folder, device_steps=True, share=DeviceShare(graphs=1 << 40))
    layers = [layer.mlp for layer in runner._model._layers if not isinstance(layer.mlp, DenseMlp)]
    assert layers
    assert all(isinstance(mlp, DeviceExperts) for mlp in layers)
    expected = reference_generate(folder, random_prompts((5, 33, 9)), 10)
    for schedule in (run_together, run_chunked(7)):
        assert check_schedule(runner, expected, schedule, shuffle=4, reverse=True) <= 1
    runner = make_runner(folder)
    runner.device = torch.device("cuda", 0)
    assert runner.geometry.family == "moe"


def test_experts_in_one_tensor_are_read_for_a_gpu(
    model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lean_llama, "groups_on_host", lambda device: False)
    folder = model_folder("mixtral")
    _reference(folder).save_pretrained(tmp_path, save_original_format=False)
    (prompt,) = random_prompts([19])
    assert torch.equal(_logits(make_runner(tmp_path), prompt), _logits(make_runner(folder), prompt))


def _geometry(tmp_path: Path, config: dict[str, Any]) -> ExpertsGeometry | None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(sizes | config))
    geometry = read_geometry(tmp_path)
    assert geometry.family == ("llama" if geometry.experts is None else "moe")
    return geometry.experts


def test_which_layers_have_experts(tmp_path: Path) -> None:
    def layers(**config: Any) -> tuple[bool, ...] | None:
        experts = _geometry(tmp_path, {"model_type": "qwen3_moe", **config})
        return None if experts is None else experts.layers

    assert layers() == (True,) * 4
    assert layers(mlp_only_layers=[0, 2]) == (False, True, False, True)
    assert layers(decoder_sparse_step=2) == (False, True, False, True)
    assert layers(decoder_sparse_step=2, mlp_only_layers=[3]) == (False, True, False, False)
    assert layers(num_experts=0) is None
    assert layers(mlp_only_layers=[0, 1, 2, 3]) is None


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_absent_keys_take_the_defaults_of_transformers(tmp_path: Path, model_type: str) -> None:
    experts = _geometry(tmp_path, {"model_type": model_type})
    config = transformers.AutoConfig.for_model(model_type)
    assert experts is not None
    assert experts.count == config.num_experts
    assert experts.per_token == config.num_experts_per_tok
    assert experts.inner_size == getattr(config, "moe_intermediate_size", config.intermediate_size)
    assert experts.shared_inner_size == getattr(config, "shared_expert_intermediate_size", 0)
    assert experts.normalised == getattr(config, "norm_topk_prob", True)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_both_names_of_their_number(tmp_path: Path, name: str) -> None:
    experts = _geometry(tmp_path, {"model_type": "qwen3_moe", name: 16})
    assert experts is not None
    assert experts.count == 16
