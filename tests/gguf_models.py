"""GGUF files of tiny random models, each beside the same model in transformers with the weights that the file says.

The file is written as llama.cpp's converter writes it: its names, its order of query and key rows for the architecture
`llama`. Types that the gguf package quantises are made from the model's weights; of the K types the blocks are random,
and the model takes what they say.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import quants
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

VOCABULARY = 320
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_SHAPE, tie_word_embeddings=False),
    "qwen2": lambda: transformers.Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**_SHAPE, head_dim=64, tie_word_embeddings=False),
}
Q4_K_M = "Q4_K_M"
"""Not one type: as llama.cpp mixes them, 6 bits for values, the way down and the last product, 4 for the others."""
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def random_model(arch: str, *, seed: int = 0) -> Any:
    """With weights large enough that its answers differ clearly."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[arch](), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.0, 0.2).add_(1.0 if name.endswith("norm.weight") else 0.0)
            else:
                parameter.normal_(0.0, 1.2 / parameter.shape[-1] ** 0.5)
    return model


def write_gguf(model: Any, file: Path, kind: str, *, extra: Callable[[Any], None] | None = None) -> Path:
    """`kind`: a ggml type, or `Q4_K_M`. Afterwards the model has the weights that the file says."""
    config = model.config
    arch = config.model_type
    writer = gguf.GGUFWriter(file, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_value_length(model.model.layers[0].self_attn.head_dim)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_bos_token_id(config.bos_token_id)
    if extra is not None:
        extra(writer)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module, _, leaf = name.rpartition(".")
            rows = 0
            if arch == "llama" and module.endswith(("q_proj", "k_proj")):
                rows = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
            values = _as_pairs(parameter.data, rows)
            typed = _type_of(module, kind) if parameter.dim() == 2 else "F32"
            written, read = _encoded(values.numpy(), typed)
            _add(writer, f"{_written_name(module)}.{leaf}", written, typed)
            parameter.copy_(_as_halves(torch.from_numpy(read).view(parameter.shape), rows))
    model.tie_weights()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add_tokenizer(writer: Any) -> None:
    """Byte pairs as GPT-2's: three special tokens, every byte, and a few pairs."""
    alphabet = sorted(ByteLevel.alphabet())
    pairs = [f"{first} {second}" for first in "thesanirdu" for second in "heanrt"][: VOCABULARY - len(alphabet) - 3]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, *(pair.replace(" ", "") for pair in pairs)]
    tokens += [f"<|unused{index}|>" for index in range(VOCABULARY - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(pairs)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")


def _written_name(module: str) -> str:
    if module in _OUTER:
        return _OUTER[module]
    _, _, index, rest = module.split(".", 3)
    return f"blk.{index}.{_LAYER[rest]}"


def _type_of(module: str, kind: str) -> str:
    if kind != Q4_K_M:
        return kind
    return "Q6_K" if module.endswith(("v_proj", "down_proj", "lm_head", "embed_tokens")) else "Q4_K"


def _add(writer: Any, name: str, values: Any, kind: str) -> None:
    if kind in ("F32", "F16"):
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType[kind])


def _encoded(values: Any, kind: str) -> tuple[Any, Any]:
    """What is written, and the numbers that it says."""
    if kind == "F32":
        return values, values
    if kind == "F16":
        return values.astype(np.float16), values.astype(np.float16).astype(np.float32)
    typed = gguf.GGMLQuantizationType[kind]
    written = _random_blocks(values.shape, kind) if kind in ("Q4_K", "Q6_K") else quants.quantize(values, typed)
    return written, quants.dequantize(written, typed).astype(np.float32)


def _random_blocks(shape: tuple[int, ...], kind: str) -> Any:
    """Weights of mean 0 and of about 1.2 / sqrt(256)."""
    random = np.random.default_rng(shape[0] + shape[1])
    stored = {"Q4_K": 144, "Q6_K": 210}[kind]
    blocks = random.integers(0, 256, (shape[0], shape[1] // 256, stored), dtype=np.uint8)
    places = {0: 3.2e-4, 2: 2.4e-3} if kind == "Q4_K" else {208: 6e-5}
    for place, size in places.items():
        scales = (size * random.uniform(0.9, 1.1, blocks.shape[:2])).astype(np.float16)
        blocks[:, :, place : place + 2] = scales[:, :, None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def _as_pairs(rows: Tensor, heads: int) -> Tensor:
    """Rows of a head in llama.cpp's order, in which neighbours are rotated together."""
    if not heads:
        return rows.contiguous()
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _as_halves(rows: Tensor, heads: int) -> Tensor:
    if not heads:
        return rows
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
