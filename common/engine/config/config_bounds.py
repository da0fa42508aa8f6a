"""Bounds of what a model's configuration may say: a stranger's number is judged before anything is made of that size.

Called by `model_config`, `quantization_config`, `lora_checkpoint`, and by the launcher for the metadata of GGUF files.
Each bound leaves the largest model known a factor of four or more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from cohort.common.errors import ModelError

MOST_LAYERS = 1024  # Llama 3.1 405B has 126
MOST_HEADS = 4096  # the same has 128
MOST_WIDTH = 1 << 17  # of a hidden state and a head; Llama 3.1 405B has 16,384, MT-NLG 530B 20,480
MOST_INNER = 1 << 20  # of an MLP; PaLM and Llama 3.1 405B have 53,248 to 73,728
MOST_TOKENS = 1 << 22  # of a vocabulary; Gemma 3 has 262,208
MOST_POSITIONS = 1 << 26  # Llama 4 Scout has 10,485,760
MOST_EXPERTS = 1 << 14  # Kimi K2 has 384, the widest published mixtures 2,048
MOST_REPEATS = 4
"""Repeats in a pattern for names of modules. Python's matcher tries every division of a name: of 40 characters four
repeats have 135,000, five 1.2 million. Patterns of published checkpoints have up to three, and repeat no group."""

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
_LEFT_OUT = ("num_key_value_heads", "num_kv_heads", "first_k_dense_replace", "max_window_layers", "n_group")
_PARTS = ("head_dim", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "shared_expert_intermediate_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "n_shared_experts")
_BOUNDS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(_LAYERS, (1, MOST_LAYERS)),
    **dict.fromkeys(_HEADS, (1, MOST_HEADS)),
    **dict.fromkeys(_WIDTHS, (1, MOST_WIDTH)),
    **dict.fromkeys(_POSITIONS, (1, MOST_POSITIONS)),
    "vocab_size": (1, MOST_TOKENS),
    "draft_vocab_size": (0, MOST_TOKENS),
    **dict.fromkeys(_LEFT_OUT, (0, MOST_HEADS)),
    **dict.fromkeys((*_PARTS, "word_embed_proj_dim"), (0, MOST_WIDTH)),
    **dict.fromkeys(_INNER, (0, MOST_INNER)),
    **dict.fromkeys(_EXPERTS, (0, MOST_EXPERTS)),
    **dict.fromkeys(("decoder_sparse_step", "sliding_window_pattern"), (1, MOST_LAYERS)),
    "sliding_window": (0, MOST_POSITIONS),
}


def check_sizes(config: Mapping[str, Any], where: str) -> None:
    """Raise `ModelError` naming a size that is no whole number or beyond its bound, with the figure. `where`: the file.

    A list has one for each layer; null is what is absent."""
    for name, (least, most) in _BOUNDS.items():
        value = config.get(name)
        for each in value if isinstance(value, list) else (value,):
            if each is not None and (type(each) is not int or not least <= each <= most):
                raise ModelError(f"{where}: {name} is {shown(each)}; served are whole numbers from {least} to {most}")


def check_finite(value: Any, where: str, name: str = "") -> None:
    """Raise `ModelError` for a number that is not finite anywhere in a frozen configuration."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ModelError(f"{where}: {name} is {value}, not a finite number")
    elif is_dataclass(value):
        for field in fields(value):
            check_finite(getattr(value, field.name), where, field.name)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            check_finite(each, where, str(key))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            check_finite(each, where, name)


def check_pattern(expression: str) -> None:
    """Raise ValueError for a regular expression that is none, or that could take for ever to match a module's name."""
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{shown(expression)} is no pattern: {error}") from None
    plain = re.sub(r"\\.", "", expression)
    if len(re.findall(r"[*+?{]", plain.replace("(?:", "("))) > MOST_REPEATS or re.search(r"\)[*+{]", plain):
        raise ValueError(
            f"{shown(expression)} could take for ever to match; served are patterns of at most {MOST_REPEATS} repeats, "
            "and none of a group"
        )


def shown(value: Any) -> str:
    """Return a stranger's value as an error's text may have it: short."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
