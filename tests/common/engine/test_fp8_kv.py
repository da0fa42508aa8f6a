"""A KV cache in FP8: models beside transformers with keys and values rounded alike, and blocks that move as bytes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from cohort.common.config import load_config
from cohort.common.devices.fit import host_need, need
from cohort.common.engine.cache.kv_tensors import KvTensors
from cohort.common.engine.config.model_config import FP8, FP8_PLANES, kv_dtype, read_geometry
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.transfer.transfer_memory import CacheMemory, Message, Span
from cohort.common.errors import ConfigError
from cohort.common.types import KvGeometry
from cohort.kernels.cpu import panels
from cohort.kernels.fp8_cache import decoded, encoded, planes
from tests.common.engine.driver import Driver, make_runner, random_prompts
from tests.common.engine.groups import group_runner
from tests.common.engine.models.test_families import forward
from tests.engine_models import BLOCK_SIZE

FAMILIES = ("llama", "qwen3", "phi3", "gemma2", "gemma3", "gpt-oss", "mixtral-window", "opt", "stablelm", "gpt-neox")
PROMPT, DECODED = 30, 8


def reference(
    folder: Path, prompt: Sequence[int], monkeypatch: pytest.MonkeyPatch, *, rounded: bool, dtype: str = "float32"
) -> Tensor:
    """Log-probabilities [tokens, vocabulary] of transformers, with keys and values as FP8 keeps them or as they are."""
    number = getattr(torch, dtype)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=number, attn_implementation="eager")
    code: Any = sys.modules[type(model).__module__]
    plain = code.eager_attention_forward

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        kept = [decoded(encoded(x)).to(x.dtype) if rounded else x for x in (key, value)]
        return plain(module, query, *kept, *rest, **options)

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(code, "eager_attention_forward", attend)
        logits = model.eval()(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


def own(runner: ModelRunner, prompt: Sequence[int], *, reverse: bool = False) -> Tensor:
    """The same: the first tokens as a prompt, the rest as decode rows."""
    driver = Driver(runner, shuffle=2, reverse=reverse)
    driver.add("r", prompt)
    found = [*forward(runner, driver, [("r", PROMPT)])]
    for _ in range(len(prompt) - PROMPT):
        found += forward(runner, driver, [("r", 1)])
    return torch.cat(found).float().log_softmax(-1)


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).square().mean().sqrt())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_form_computes_with_what_the_cache_holds(
    name: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 nothing else differs. A number between two codes may fall to either side in its last bit, which moves
    answers by a part of what rounding does."""
    folder, (prompt,) = model_folder(name), random_prompts((PROMPT + DECODED,), seed=6)
    exact, rounded = (reference(folder, prompt, monkeypatch, rounded=each) for each in (False, True))
    runner = make_runner(folder, cache_dtype="fp8")
    assert runner.kv.blocks.dtype == torch.uint8
    found = own(runner, prompt, reverse=name != "gpt-neox")
    moved = apart(rounded, exact)
    assert apart(found, rounded) < 0.1 * moved
    assert (found - rounded).abs().median() < 1e-4 < moved


@pytest.mark.skipif(not panels.available(torch.bfloat16, 48), reason="this processor does not multiply bfloat16")
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2"])
def test_in_bfloat16_the_errors_of_both_add_in_squares(
    name: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half as much again, since two samples of such an error differ."""
    folder, (prompt,) = model_folder(name), random_prompts((PROMPT + DECODED,), seed=6)
    exact, of_fp8 = (reference(folder, prompt, monkeypatch, rounded=each) for each in (False, True))
    of_bfloat16 = reference(folder, prompt, monkeypatch, rounded=False, dtype="bfloat16")
    found = own(make_runner(folder, dtype="bfloat16", cache_dtype="fp8"), prompt)
    assert apart(found, exact) < 1.5 * (apart(of_fp8, exact) ** 2 + apart(of_bfloat16, exact) ** 2) ** 0.5
    assert apart(of_fp8, exact) < 0.2 * exact.std(dim=1).min()


def test_one_call_of_all_layers_is_the_calls_one_by_one(model_folder: Callable[[str], Path]) -> None:
    runner, (prompt,) = make_runner(model_folder("llama"), cache_dtype="fp8"), random_prompts((PROMPT + 2,))
    together = own(runner, prompt)
    with runner.one_by_one():
        assert torch.equal(own(runner, prompt), together)


def answered(driver: Driver, name: str, steps: int) -> list[int]:
    for _ in range(steps):
        driver.step([(name, driver.remaining(name))])
    return driver.requests[name].tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_worker_goes_on_with_the_bytes(dtype: str, model_folder: Callable[[str], Path]) -> None:
    """At any token; a row holds its scale, so nothing but blocks is sent."""
    folder, (prompt,) = model_folder("qwen3"), random_prompts((29,))
    first, second = (make_runner(folder, dtype=dtype, cache_dtype="fp8") for _ in range(2))
    whole = Driver(first, shuffle=1, reverse=True)
    whole.add("r", prompt)
    expected = answered(whole, "r", 12)
    for split in (1, 4, 11):
        driver = Driver(first, shuffle=3, reverse=True)
        driver.add("r", prompt)
        answered(driver, "r", split)
        sender, receiver = CacheMemory(first.kv), CacheMemory(second.kv)
        for block in driver.requests["r"].blocks:
            message = Message((Span(block, 1),))
            (checksum,) = sender.outgoing([message], summed=True)
            receiver.buffer(message)[:] = sender.buffer(message)  # type: ignore[index]
            assert receiver.sums([message], [checksum]) == [checksum]
        driver.runner = second
        assert answered(driver, "r", 12 - split) == expected


def test_host_memory_holds_blocks_and_slots_as_they_are(model_folder: Callable[[str], Path]) -> None:
    """Swapped out, written over, and brought back to other blocks; checkpointed by slots likewise."""
    runner, (prompt,) = make_runner(model_folder("llama"), cache_dtype="fp8", host_blocks=16), random_prompts((29,))
    whole = Driver(runner, shuffle=1)
    whole.add("r", prompt)
    expected = answered(whole, "r", 12)
    for by_slots in (False, True):
        driver = Driver(runner, shuffle=5)
        driver.add("r", prompt)
        answered(driver, "r", 5)
        request, kv = driver.requests["r"], runner.kv
        gone, host = list(request.blocks), list(range(len(request.blocks)))
        other = [driver._free.pop() for _ in gone]

        def slots(blocks: Sequence[int]) -> list[int]:
            return [block * BLOCK_SIZE + slot for block in blocks for slot in range(BLOCK_SIZE)]

        if by_slots:
            kv.copy_slots_out(slots(gone), slots(host))
            kv.blocks[gone] = 0
            kv.copy_slots_in(slots(other), slots(host))
        else:
            kv.copy_out(list(zip(gone, host, strict=True)))
            kv.blocks[gone] = 0
            kv.copy_in(list(zip(host, other, strict=True)))
        request.blocks = other
        assert answered(driver, "r", 7) == expected


def test_a_prefix_is_shared_by_its_blocks(model_folder: Callable[[str], Path]) -> None:
    runner, (prompt,) = make_runner(model_folder("qwen2"), cache_dtype="fp8"), random_prompts((3 * BLOCK_SIZE + 5,))
    driver = Driver(runner, shuffle=2)
    driver.add("first", prompt)
    expected = answered(driver, "first", 6)
    driver.add("second", prompt)
    driver.requests["second"].blocks = driver.requests["first"].blocks[:3]
    driver.requests["second"].directions = [0, 0, 0]
    driver.requests["second"].computed = 3 * BLOCK_SIZE
    assert answered(driver, "second", 6) == expected


def test_ranks_keep_their_heads_so_too(model_folder: Callable[[str], Path]) -> None:
    folder, (prompt,) = model_folder("llama"), random_prompts((21,))
    answers = []
    for degree in (1, 2):
        with group_runner(folder, degree, cache_dtype="fp8") as runner:
            driver = Driver(runner)
            driver.add("r", prompt)
            answers.append(answered(driver, "r", 8))
            assert runner.block_geometry.head_dim == 17
    assert answers[0] == answers[1]


def test_the_same_memory_holds_almost_twice_the_tokens(model_folder: Callable[[str], Path]) -> None:
    """A head of 128 has 129 bytes a row in place of 256."""
    geometry = dataclasses.replace(read_geometry(model_folder("llama")), head_dim=128)
    blocks = {kept: (1 << 30) // geometry.kv_geometry(kept, 16).block_bytes for kept in (FP8, "bfloat16", "float32")}
    assert blocks[FP8] / blocks["bfloat16"] == pytest.approx(256 / 129, rel=1e-3)
    assert blocks[FP8] / blocks["float32"] == pytest.approx(512 / 129, rel=1e-3)
    assert geometry.kv_token_bytes(FP8) == 2 * 3 * 2 * 129
    settings = {
        name: load_config(overrides={"model": {"weights": "random"}, "kv": {"cache_dtype": name}})
        for name in ("auto", "fp8", "fp8_e4m3")
    }
    plain, fp8, same = (
        host_need(settings[name], Path(), geometry, computes_bfloat16=True) for name in ("auto", "fp8", "fp8_e4m3")
    )
    assert (fp8.cache, fp8.kv_tokens) == (plain.cache * 129 // 256, plain.kv_tokens) and fp8 == same
    assert fp8.weights == plain.weights


def test_a_gpu_keeps_scales_in_planes_of_four_bytes(model_folder: Callable[[str], Path]) -> None:
    """A head of 128 has 132 bytes a row there, and a block of one kind of device never passes for the other's."""
    geometry = dataclasses.replace(read_geometry(model_folder("llama")), head_dim=128)
    assert kv_dtype("fp8", "bfloat16", geometry, "cuda") == FP8_PLANES
    assert geometry.kv_token_bytes(FP8_PLANES) == 2 * 3 * 2 * 132
    settings = [
        load_config(
            overrides={"engine": {"device": "cuda"}, "model": {"weights": "random"}, "kv": {"cache_dtype": name}}
        )
        for name in ("auto", "fp8")
    ]
    plain, fp8 = (need(each, Path(), geometry) for each in settings)
    assert (fp8.cache, fp8.kv_tokens) == (plain.cache * 132 // 256, plain.kv_tokens)


def test_host_memory_of_a_gpu_has_its_planes() -> None:
    """Slots checkpointed token by token lie where whole blocks copied back look for them."""
    geometry, device = KvGeometry(2, 2, 12, 1, 4), torch.device("cpu")
    kv = KvTensors(geometry, num_blocks=3, host_blocks=3, dtype=torch.uint8, device=device, apart=True)
    codes, scales = planes(kv.blocks)
    codes.copy_(torch.randint(0, 255, codes.shape, dtype=torch.uint8))
    scales.copy_(torch.randn(scales.shape))
    before = kv.blocks.clone()
    kv.copy_slots_out(range(12), [*range(4, 12), *range(4)])
    kv.blocks.zero_()
    kv.copy_in([(1, 0), (2, 1), (0, 2)])
    assert torch.equal(kv.blocks, before)
    kv.blocks.zero_()
    kv.copy_slots_in(range(12), [*range(4, 12), *range(4)])
    assert torch.equal(kv.blocks, before)


def test_where_it_is_not_served_it_is_refused_by_name(model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(
        ConfigError, match=r"kv.cache_dtype: fp8 is not served for deepseek_v2, whose cache has latents"
    ):
        make_runner(model_folder("deepseek2"), cache_dtype="fp8")
    geometry = read_geometry(model_folder("llama"))
    assert kv_dtype("auto", "bfloat16", geometry, "cuda") == "bfloat16"
    assert kv_dtype("fp8", "bfloat16", geometry, "cpu") == FP8
    with pytest.raises(ConfigError, match=r"fp8_e5m2"):
        load_config(overrides={"kv": {"cache_dtype": "fp8_e5m2"}})
