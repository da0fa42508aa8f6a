from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from cohort.common.config import load_config
from cohort.common.devices.fit import Need, check_fit, gpu_dtype, need, parameters, share_bytes
from cohort.common.engine.device_memory import kv_bytes
from cohort.common.errors import ConfigError
from tests.common.devices.fakes import GIB
from tests.common.engine.test_device_memory import LLAMA_8B


def shard(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """A safetensors file without its data: only headers are read here."""
    header = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, (dtype, shape) in tensors.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def config(**engine: Any) -> Any:
    return load_config(overrides={"engine": {"device": "cuda", **engine}})


def test_weights_are_counted_from_the_files_headers(tmp_path: Path) -> None:
    shard(tmp_path / "model-00001-of-00002.safetensors", {"a": ("F32", [10, 4]), "b": ("BF16", [7])})
    shard(tmp_path / "model-00002-of-00002.safetensors", {"c": ("F16", [2, 2, 2]), "scalar": ("F32", [])})
    shard(tmp_path / "consolidated.safetensors", {"everything once more": ("BF16", [56])})
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = {"weight_map": {"a": names[0], "b": names[0], "c": names[1], "scalar": names[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert parameters(tmp_path, LLAMA_8B) == 40 + 7 + 8 + 1
    assert need(config(), tmp_path, LLAMA_8B).weights == 56 * 2  # 16 bits on a GPU, whatever the file has
    assert gpu_dtype(config()) == "bfloat16"


def test_broken_files_are_the_engines_business(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert parameters(tmp_path, LLAMA_8B) == 0


def test_random_weights_are_counted_from_the_shape(tmp_path: Path) -> None:
    assert parameters(tmp_path, LLAMA_8B, "random") == pytest.approx(8.03e9, rel=0.01)


def test_an_8b_model_fits_24_gib_alone_but_not_two_of_them(tmp_path: Path) -> None:
    settings = load_config(overrides={"model": {"weights": "random"}, "engine": {"device": "cuda"}})
    wanted = need(settings, tmp_path, LLAMA_8B)
    check_fit(settings, "llama", wanted, "L4", 24 * GIB, 1)
    with pytest.raises(ConfigError, match="one worker per GPU instead of 2"):
        check_fit(settings, "llama", wanted, "L4", 24 * GIB, 2)
    check_fit(settings, "llama", wanted, "?", 0, 2)  # nothing known of the GPU


def test_the_refusal_says_by_how_much_and_what_would_fit() -> None:
    large = Need(weights=141 * GIB, steps=2 * GIB, graphs=2 * GIB, cache=0)
    with pytest.raises(ConfigError) as refused:
        check_fit(config(), "llama-70b", large, "NVIDIA H100", 80 * GIB, 1)
    told = str(refused.value)
    for part in (
        "llama-70b does not fit NVIDIA H100",
        "73.0 GiB are missing",
        "a GPU of 162 GiB or more",
        "workers: tensor_parallel: auto",
    ):
        assert part in told
    assert "16 bits" not in told and "per GPU instead" not in told
    wide = load_config(overrides={"engine": {"device": "cuda"}, "model": {"dtype": "float32"}})
    with pytest.raises(ConfigError, match=r"16 bits \(model.dtype=bfloat16\)"):
        check_fit(wide, "m", Need(80 * GIB, GIB, GIB, 0), "H100", 80 * GIB, 1)
    with pytest.raises(ConfigError, match=r"lower engine.max_step_tokens"):
        check_fit(config(), "m", Need(14 * GIB, 2 * GIB, GIB, 0), "T4", 16 * GIB, 1)


def test_one_worker_has_far_more_cache_than_two_that_stand_by_for_each_other() -> None:
    """Why `workers: auto` gives one GPU one worker: the standby's weights, steps and half of the memory are lost."""
    wanted = need(
        load_config(overrides={"model": {"weights": "random"}, "engine": {"device": "cuda"}}), Path(), LLAMA_8B
    )

    def cache(sharers: int) -> int:
        return kv_bytes(
            total=80 * GIB,
            free=80 * GIB - sharers * wanted.weights,
            own=wanted.weights,
            sharers=sharers,
            fraction=0.9,
            reserved=wanted.steps + wanted.graphs,
        )

    assert cache(1) > 2.5 * cache(2) > 0


def test_a_share_is_a_part_of_what_may_be_used() -> None:
    assert share_bytes(config(), 80 * GIB, 2) == int(0.9 * 40 * GIB)
