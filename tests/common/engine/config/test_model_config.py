"""config.json → geometry, checked against what transformers makes of the same file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from cohort.common.engine.config.model_config import read_geometry
from cohort.common.errors import ModelError


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize(
    "model_type",
    ["llama", "mistral", "phi3", "gemma2", "gemma3_text", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "opt"],
)
def test_absent_keys_take_the_defaults_of_transformers(tmp_path: Path, model_type: str) -> None:
    """A config.json with only its model_type and sizes."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 30, "num_attention_heads": 32, "intermediate_size": 96}
    if model_type == "opt":
        sizes = {}
    geometry = read_geometry(write(tmp_path, {"model_type": model_type, **sizes}))
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    assert geometry.vocab_size == config.vocab_size
    assert geometry.max_positions == config.max_position_embeddings
    assert geometry.num_kv_heads == getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    assert geometry.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    assert geometry.tie_embeddings == config.tie_word_embeddings
    assert geometry.eos_token_ids == (() if config.eos_token_id is None else (config.eos_token_id,))
    expected_window = (
        (config.sliding_window or 0) if model_type in ("mistral", "mixtral", "gemma2", "gemma3_text") else 0
    )
    kinds = (
        config.layer_types
        if model_type in ("gemma2", "gemma3_text")
        else ["sliding_attention"] * len(geometry.sliding_windows)
    )
    assert geometry.sliding_windows == tuple(expected_window if "sliding" in kind else 0 for kind in kinds)
    if model_type in ("gemma2", "gemma3_text"):
        assert geometry.family == "gemma"
        assert geometry.attention_scale == config.query_pre_attn_scalar**-0.5
        assert geometry.logit_softcap == (config.final_logit_softcapping or 0.0)
        assert geometry.attention_softcap == (config.attn_logit_softcapping or 0.0)
    if model_type != "opt":
        assert geometry.norm_eps == config.rms_norm_eps
        assert geometry.rope is not None
        ropes = config.rope_parameters
        assert geometry.rope.theta == ropes.get("full_attention", ropes)["rope_theta"]
        local = None if geometry.local_rope is None else geometry.local_rope.theta
        assert local == ropes.get("sliding_attention", {}).get("rope_theta")


def test_qwen_windows_begin_at_a_layer(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 96}
    window = {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 3}
    geometry = read_geometry(write(tmp_path, {"model_type": "qwen2", **sizes, **window}))
    assert geometry.sliding_windows == (0, 0, 0, 128)
    assert geometry.qkv_bias
    assert not geometry.output_bias


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "linear", "factor": 2.0}},
    ],
)
def test_both_spellings_of_rope(tmp_path: Path, spelling: dict[str, Any]) -> None:
    rope = read_geometry(write(tmp_path, LLAMA | spelling)).rope
    assert rope is not None
    assert (rope.theta, rope.rope_type, dict(rope.scaling)) == (500000.0, "linear", {"factor": 2.0})


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 5e5, "rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
            }
        },
    ],
)
def test_both_spellings_of_two_ropes(tmp_path: Path, spelling: dict[str, Any]) -> None:
    config = {**LLAMA, "model_type": "gemma3_text", **spelling}
    geometry = read_geometry(write(tmp_path, config))
    assert geometry.family == "gemma"
    ropes = [geometry.rope, geometry.local_rope]
    found = [(rope.theta, rope.rope_type, dict(rope.scaling)) for rope in ropes if rope is not None]
    assert found == [(5e5, "linear", {"factor": 8.0}), (2e4, "default", {})]


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_windows_follow_the_pattern_of_layers(tmp_path: Path, model_type: str) -> None:
    config = {**LLAMA, "model_type": model_type, "num_hidden_layers": 7, "sliding_window": 64}
    geometry = read_geometry(write(tmp_path, config))
    full = (5,) if model_type == "gemma3_text" else (1, 3, 5)
    assert geometry.sliding_windows == tuple(0 if index in full else 64 for index in range(7))


@pytest.mark.parametrize(
    ("edit", "family"),
    [
        ({}, "llama"),
        ({"hidden_act": "gelu"}, "generic"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "llama"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "generic"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "generic"),
        ({"model_type": "phi3", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "llama"),
        ({"model_type": "phi3", "hidden_act": "gelu"}, "generic"),
        ({"model_type": "granite"}, "generic"),
    ],
)
def test_family(tmp_path: Path, edit: dict[str, Any], family: str) -> None:
    assert read_geometry(write(tmp_path, LLAMA | edit)).family == family


def test_end_tokens(tmp_path: Path) -> None:
    """generation_config.json rules over config.json."""
    assert read_geometry(write(tmp_path, LLAMA | {"eos_token_id": 7})).eos_token_ids == (7,)
    assert read_geometry(write(tmp_path, LLAMA | {"eos_token_id": 7}, {"eos_token_id": [7, 9]})).eos_token_ids == (7, 9)


def test_longrope_is_served_in_its_first_range(tmp_path: Path) -> None:
    config: dict[str, Any] = LLAMA | {
        "model_type": "phi3",
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    }
    for rope_type in ("longrope", "su", "yarn"):  # the names it has had in Phi-3's configurations
        config["rope_scaling"]["type"] = rope_type
        geometry = read_geometry(write(tmp_path, config))
        assert (geometry.max_positions, geometry.family) == (4096, "llama")
        assert geometry.rope is not None
        assert (geometry.rope.rope_type, geometry.rope.scaling["factor"]) == ("longrope", 32.0)


def test_kv_weight(tmp_path: Path) -> None:
    """B1 · 2·L·H·D·B: 2 · 2 layers · 2 KV heads · 16 · 2 bytes."""
    geometry = read_geometry(write(tmp_path, LLAMA | {"num_key_value_heads": 2}))
    assert geometry.kv_token_bytes("bfloat16") == 256
    assert geometry.kv_geometry("float32", 16).block_bytes == 8192


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "no config.json"),
        ("{", "not valid JSON"),
        ({"hidden_size": 3}, "no model_type"),
        ({"model_type": "llama", "hidden_size": 64}, "lacks 'num_attention_heads'"),
        (LLAMA | {"quantization_config": {"quant_method": "hqq"}}, "by the method hqq are not served; served are fp8"),
        (
            LLAMA | {"model_type": "stablelm", "quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"\(gptq\) of stablelm are not served",
        ),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_errors_name_the_cause(tmp_path: Path, config: dict[str, Any] | str | None, message: str) -> None:
    if isinstance(config, str):
        (tmp_path / "config.json").write_text(config)
    elif config is not None:
        write(tmp_path, config)
    with pytest.raises(ModelError, match=message):
        read_geometry(tmp_path)


def test_every_tiny_model_is_read_as_saved(model_folder: Callable[[str], Path]) -> None:
    for name in ("llama", "gpt-neox", "gemma", "phi", "gpt2"):
        geometry = read_geometry(model_folder(name))
        assert (geometry.num_layers, geometry.num_heads, geometry.max_positions) == (3, 6, 256)


def test_needs_no_torch() -> None:
    """The gateway reads model facts; it must start without torch."""
    code = "import sys, cohort.common.engine.config.model_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
