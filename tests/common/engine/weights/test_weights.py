"""Weight files: single, sharded, PyTorch; fused reading; errors that name what is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cohort.common.engine.weights.weight_files import WeightFiles
from cohort.common.errors import ConfigError, ModelError
from tests.common.engine.driver import Driver, make_runner, random_prompts, run_together

CPU = torch.device("cpu")


def answers(folder: Path) -> list[int]:
    driver = Driver(make_runner(folder))
    driver.add("a", random_prompts([12])[0])
    run_together(driver, ["a"], 8)
    return driver.requests["a"].tokens


def copy_config(source: Path, target: Path) -> None:
    (target / "config.json").write_text((source / "config.json").read_text())


def test_every_file_form_gives_the_same_model(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    source = model_folder("qwen2")
    expected = answers(source)
    state = load_file(source / "model.safetensors")

    sharded = tmp_path / "sharded"
    transformers.AutoModelForCausalLM.from_pretrained(source).save_pretrained(sharded, max_shard_size="40KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 1
    assert answers(sharded) == expected

    binary = tmp_path / "binary"
    binary.mkdir()
    copy_config(source, binary)
    torch.save(state, binary / "pytorch_model.bin")
    assert answers(binary) == expected

    bare = tmp_path / "bare"  # saved from the model without its head's prefix
    bare.mkdir()
    copy_config(source, bare)
    save_file({name.removeprefix("model."): tensor for name, tensor in state.items()}, bare / "model.safetensors")
    assert answers(bare) == expected


def test_reads_fused_and_casts(tmp_path: Path) -> None:
    first, second = torch.randn(3, 4), torch.randn(2, 4)
    save_file({"first": first, "second": second}, tmp_path / "model.safetensors")
    fused = WeightFiles(tmp_path).read_rows(["first", "second"], [3, 2], (4,), torch.bfloat16, CPU)
    assert torch.equal(fused, torch.cat([first, second]).bfloat16())


def test_missing_tensors_are_named_together(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    source = model_folder("llama")
    copy_config(source, tmp_path)
    state = load_file(source / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"], state["model.norm.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks 2 tensors.*model\.norm\.weight.*layers\.1\.mlp\.up_proj\.weight"):
        make_runner(tmp_path)


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"weight has shape \(3, 4\).*\(3, 5\)"):
        WeightFiles(tmp_path).read("weight", (3, 5), torch.float32, CPU)


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        WeightFiles(tmp_path)


def test_absent_shard_is_named(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.zeros(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00002\.safetensors"):
        WeightFiles(tmp_path)


def test_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        WeightFiles(tmp_path)


def test_random_weights_are_a_model_that_every_worker_draws_alike(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """From nothing but a configuration; finite, and not one token over and over."""
    for name in ("llama", "qwen3", "opt"):
        folder = tmp_path / name
        folder.mkdir()
        copy_config(model_folder(name), folder)
        prompts = random_prompts([12, 5, 30])
        sampled = []
        for _ in range(2):
            driver = Driver(make_runner(folder, weights="random"))
            for index, prompt in enumerate(prompts):
                driver.add(str(index), prompt)
            run_together(driver, ["0", "1", "2"], 6)
            sampled.append([driver.requests[str(index)].tokens for index in range(3)])
            assert bool(torch.isfinite(driver.runner.kv.blocks).all())
        assert sampled[0] == sampled[1]
        assert len({tuple(tokens[-6:]) for tokens in sampled[0]}) > 1


def test_only_lean_models_can_be_drawn(model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"model\.weights"):
        make_runner(model_folder("gpt2"), weights="random")
