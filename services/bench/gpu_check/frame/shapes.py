"""Model shapes that are measured with random weights, and the bytes and operations that bound them.

A shape's folder holds a configuration and a tokenizer of one token per word, and no weights: `model.weights: random`
draws them. Called by the sections. Arithmetic and small files only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cohort.common.engine.config.model_config import ModelGeometry

LLAMA_3_8B: Mapping[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
QWEN25_14B: Mapping[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 13824,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
TINY: Mapping[str, Any] = {
    **LLAMA_3_8B,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def shape_folder(folder: Path, config: Mapping[str, Any]) -> Path:
    """`folder` with this configuration, and a tokenizer whose words are `t0 t1 …`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    vocabulary = {f"t{index}": index for index in range(config["vocab_size"])}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    return folder


def matrix_elements(geometry: ModelGeometry) -> int:
    """Weights of all layers' matrix products; without embedding and vocabulary."""
    heads = (geometry.num_heads + 2 * geometry.num_kv_heads) * geometry.head_dim
    attention = geometry.hidden_size * (heads + geometry.num_heads * geometry.head_dim)
    return geometry.num_layers * (attention + 3 * geometry.hidden_size * geometry.intermediate_size)


def prefill_operations(geometry: ModelGeometry, tokens: int) -> int:
    """Multiplications and additions of one prompt: the layers' products, and causal attention's half of the square."""
    attention = 2 * 2 * geometry.num_heads * geometry.head_dim * tokens * (tokens + 1) // 2 * geometry.num_layers
    return 2 * matrix_elements(geometry) * tokens + attention
