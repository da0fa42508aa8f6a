"""From the metadata of a GGUF file to config.json and generation_config.json of a Hugging Face folder.

Called by `gguf_folder`. Pure: a mapping in, mappings out. Serves the architectures whose tensors the engine knows
(`common/engine/weights/gguf_files.py`); whatever else a file asks for is refused by name, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cohort.common.errors import ModelError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def model_config(
    fields: Mapping[str, Any], tensors: Mapping[str, Sequence[int]], rope_factors: Sequence[float] = ()
) -> dict[str, Any]:
    """config.json of the model.

    `fields`: metadata by their names; `tensors`: the shape of every tensor, outputs first; `rope_factors`: the tensor
    `rope_freqs.weight`, where there is one. Raises `ModelError` naming what is missing or not served.
    """
    arch = str(fields.get("general.architecture", ""))
    if arch not in ARCHITECTURES:
        raise ModelError(f"GGUF files of architecture {arch!r} are not served; served are {', '.join(ARCHITECTURES)}")

    def of(key: str, default: Any = None) -> Any:
        value = fields.get(f"{arch}.{key}", default)
        if value is None:
            raise ModelError(f"the GGUF file lacks {arch}.{key}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(f"{arch}.{key} differs from layer to layer, which is not served")
            value = value[0]
        return value

    if of("expert_count", 0):
        raise ModelError(f"GGUF files of mixtures of experts are not served ({arch}.expert_count)")
    heads, hidden = int(of("attention.head_count")), int(of("embedding_length"))
    head_dim = int(of("attention.key_length", hidden // heads))
    if int(of("attention.value_length", head_dim)) != head_dim or int(of("rope.dimension_count", head_dim)) != head_dim:
        raise ModelError("heads whose keys, values and rotated parts differ in size are not served")
    context = int(of("context_length"))
    config = {
        "architectures": [_CLASSES[arch]],
        "model_type": arch,
        "hidden_size": hidden,
        "num_hidden_layers": int(of("block_count")),
        "intermediate_size": int(of("feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(of("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "rms_norm_eps": float(of("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": context,
        "vocab_size": _shape(tensors, "token_embd.weight")[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "rope_theta": float(of("rope.freq_base", 10000.0)),
        "attention_bias": _bias(arch, tensors),
        "mlp_bias": False,
        "dtype": "bfloat16",
    }
    if scaling := _rope_scaling(fields, arch, context, rope_factors):
        config["rope_scaling"] = scaling
    for name, key in (("bos_token_id", "bos_token_id"), ("eos_token_id", "eos_token_id")):
        if f"tokenizer.ggml.{key}" in fields:
            config[name] = int(fields[f"tokenizer.ggml.{key}"])
    return config


def generation_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens that end a generation: end of text and, where the file names it, end of turn."""
    ends = [fields.get(f"tokenizer.ggml.{key}") for key in ("eos_token_id", "eot_token_id")]
    found = list(dict.fromkeys(int(end) for end in ends if end is not None))
    return {"eos_token_id": found} if found else {}


def _shape(tensors: Mapping[str, Sequence[int]], name: str) -> Sequence[int]:
    if name not in tensors:
        raise ModelError(f"the GGUF file lacks tensor {name}")
    return tensors[name]


def _bias(arch: str, tensors: Mapping[str, Sequence[int]]) -> bool:
    """Whether `llama` and `qwen3` have biases; `qwen2` has those of q, k and v always."""
    queries, output = "blk.0.attn_q.bias" in tensors, "blk.0.attn_output.bias" in tensors
    if arch == "qwen2":
        if not queries or output:
            raise ModelError("qwen2 is served with biases of q, k and v, and of these alone")
        return True
    if queries != output:
        raise ModelError(f"{arch} is served with biases of q, k, v and the output, or of none")
    return queries


def _rope_scaling(
    fields: Mapping[str, Any], arch: str, context: int, factors: Sequence[float]
) -> dict[str, Any] | None:
    """A factor for every frequency (Llama 3.1) is LongRoPE's form with a range that ends at the context."""
    kind = str(fields.get(f"{arch}.rope.scaling.type", "none"))
    if factors:
        return {
            "rope_type": "longrope",
            "short_factor": [float(factor) for factor in factors],
            "long_factor": [float(factor) for factor in factors],
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }
    factor = fields.get(f"{arch}.rope.scaling.factor", fields.get(f"{arch}.rope.scale_linear"))
    if kind == "none" or (kind == "linear" and factor is None):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn" and factor is not None:
        original = fields.get(f"{arch}.rope.scaling.original_context_length")
        scaling = {"rope_type": "yarn", "factor": float(factor)}
        return scaling if original is None else {**scaling, "original_max_position_embeddings": int(original)}
    raise ModelError(f"{arch}.rope.scaling.type {kind!r} is not served; served are none, linear and yarn")
