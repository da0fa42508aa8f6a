"""A bfloat16 GGUF file of a Llama in Hugging Face format, as llama.cpp's own converter writes it.

    python -m tests.benchmarks.make_gguf MODEL_FOLDER FILE

Byte-pair tokenizers of SmolLM's kind and tied embeddings alone: what `scripts/opponents` measures with.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import quants
from safetensors import safe_open

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
BF16 = gguf.GGMLQuantizationType.BF16


def write(model: Path, file: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "llama" or not config["tie_word_embeddings"]:
        raise SystemExit(f"{model}: only a Llama with tied embeddings can be written")
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    _add_tokenizer(writer, model, config)
    with safe_open(model / "model.safetensors", framework="numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118 -- no mapping
            values = tensors.get_tensor(name).astype(np.float32)
            module, _, leaf = name.rpartition(".")
            for query_or_key, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
                if module.endswith(query_or_key):
                    values = _as_pairs(values, config[heads])
            if values.ndim == 1:
                writer.add_tensor(f"{_written_name(module)}.{leaf}", values)
            else:
                writer.add_tensor(f"{_written_name(module)}.{leaf}", quants.quantize(values, BF16), raw_dtype=BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _as_pairs(values: Any, heads: int) -> Any:
    """Return rows in llama.cpp's order, whose rotation turns neighbours instead of halves."""
    return values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def _written_name(module: str) -> str:
    if module in _OUTER:
        return _OUTER[module]
    _, _, index, rest = module.split(".", 3)
    return f"blk.{index}.{_LAYER[rest]}"


def _add_tokenizer(writer: Any, model: Path, config: dict[str, Any]) -> None:
    described = json.loads((model / "tokenizer.json").read_text())
    special = {token["id"] for token in described["added_tokens"] if token["special"]}
    ids = {**described["model"]["vocab"], **{token["content"]: token["id"] for token in described["added_tokens"]}}
    names = {token_id: name for name, token_id in ids.items()}
    tokens = [names.get(index, f"[PAD{index}]") for index in range(config["vocab_size"])]
    kinds = [gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in range(len(tokens))]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in described["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template((model / "chat_template.jinja").read_text())


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
