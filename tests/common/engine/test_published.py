"""Published checkpoints as they are described: their configurations, and the names, types and shapes of their tensors.

None of them is here. Each test states the facts of one, makes a file of these tensors without their content (a hole of
that size), and lets the form that reads the model find everything it asks for, in the shape that it asks for.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from cohort.common.engine.config.model_config import ModelGeometry, read_geometry
from cohort.common.engine.config.quantization_config import keeps_codes
from cohort.common.engine.config.rank_shares import degrees, why_not_divisible
from cohort.common.engine.models import lean_deepseek, lean_gemma, lean_gpt_oss, lean_llama
from cohort.common.engine.weights.quantized_files import QuantizedFiles
from cohort.common.engine.weights.quantized_formats import ReorderedWeight
from cohort.common.engine.weights.weights import open_weights
from cohort.common.errors import ModelError

Shapes = dict[str, tuple[str, tuple[int, ...]]]
_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "F8_E4M3": 1, "U8": 1, "I8": 1}
CPU = torch.device("cpu")


def checkpoint(folder: Path, config: dict[str, Any], tensors: Shapes) -> Path:
    """`config.json`, and `model.safetensors` whose data are a hole, but for GPTQ's order of groups."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
        for name, entry in header.items():
            if name.endswith(".g_idx"):  # groups in order
                file.seek(8 + len(text) + entry["data_offsets"][0])
                file.write((torch.arange(entry["shape"][0], dtype=torch.int32) // 128).numpy().tobytes())
    return folder


@dataclass(frozen=True)
class Weights:
    """How a checkpoint stores a matrix [out, in]: its parts."""

    kind: str = "plain"
    plain: str = "BF16"
    group: int = 128
    static: bool = False
    found: Shapes = field(default_factory=dict)

    def matrix(self, module: str, out: int, into: int, *, bias: bool = False, plain: bool = False) -> None:
        parts: Shapes
        match "plain" if plain else self.kind:
            case "fp8-blocks":
                blocks = (-(-out // 128), -(-into // 128))
                parts = {"weight": ("F8_E4M3", (out, into)), "weight_scale_inv": ("F32", blocks)}
                if self.plain == "BF16-scales":
                    parts["weight_scale_inv"] = ("BF16", blocks)
            case "fp8-tensor":
                scale = ("BF16", ())
                parts = {"weight": ("F8_E4M3", (out, into)), "weight_scale": scale, "input_scale": scale}
            case "awq":
                groups = into // self.group
                parts = {
                    "qweight": ("I32", (into, out // 8)),
                    "qzeros": ("I32", (groups, out // 8)),
                    "scales": ("F16", (groups, out)),
                }
            case "gptq":
                groups = into // self.group
                parts = {
                    "qweight": ("I32", (into // 8, out)),
                    "qzeros": ("I32", (groups, out // 8)),
                    "scales": ("F16", (groups, out)),
                    "g_idx": ("I32", (into,)),
                }
            case _:
                parts = {"weight": (self.plain[:4].rstrip("-"), (out, into))}
        if bias:
            parts["bias"] = (self.plain[:4].rstrip("-"), (out,))
        self.found.update({f"{module}.{part}": each for part, each in parts.items()})

    def vector(self, name: str, size: int, dtype: str = "") -> None:
        self.found[name] = (dtype or self.plain[:4].rstrip("-"), (size,))

    def attention(self, layer: str, hidden: int, heads: int, kv: int, dim: int, *, bias: bool = False) -> None:
        for part, out in (("q", heads), ("k", kv), ("v", kv)):
            self.matrix(f"{layer}.self_attn.{part}_proj", out * dim, hidden, bias=bias)
        self.matrix(f"{layer}.self_attn.o_proj", hidden, heads * dim)

    def mlp(
        self, module: str, hidden: int, inner: int, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    ) -> None:
        gate, up, down = names
        for part in (gate, up):
            self.matrix(f"{module}.{part}", inner, hidden)
        self.matrix(f"{module}.{down}", hidden, inner)

    def norms(self, layer: str, hidden: int, *names: str) -> None:
        for name in names or ("input_layernorm", "post_attention_layernorm"):
            self.vector(f"{layer}.{name}.weight", hidden)

    def outer(self, prefix: str, vocabulary: int, hidden: int, *, head: bool = True) -> None:
        self.matrix(f"{prefix}embed_tokens", vocabulary, hidden, plain=True)
        self.vector(f"{prefix}norm.weight", hidden)
        if head:
            self.matrix("lm_head", vocabulary, hidden, plain=True)


def found(folder: Path, geometry: ModelGeometry) -> list[str]:
    """Asks for every tensor that the model's form needs."""
    with open_weights(folder, "files", geometry.quantization) as files:
        match geometry.family:
            case "gemma":
                prefix = files.prefix(lean_gemma._PREFIXES, "embed_tokens.weight")
                names = lean_gemma._tensor_names(geometry, prefix)
            case "deepseek":
                prefix = files.prefix(("model.", ""), "embed_tokens.weight")
                names = lean_deepseek._tensor_names(files, geometry, prefix)
            case "gpt_oss":
                prefix = files.prefix(("model.", ""), "embed_tokens.weight")
                names = lean_gpt_oss._tensor_names(files, geometry, prefix)
            case _:
                prefix = files.prefix(("model.", ""), "embed_tokens.weight")
                names = lean_llama._tensor_names(files, geometry, prefix)
        files.require(names)
        return names


LAYERS = 2  # of each checkpoint's many, which are alike


def qwen3_32b_fp8() -> tuple[dict[str, Any], Weights]:
    config = {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "initializer_range": 0.02, "intermediate_size": 25600, "max_position_embeddings": 40960,
        "max_window_layers": 64, "model_type": "qwen3", "num_attention_heads": 64, "num_hidden_layers": 64,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "use_sliding_window": False, "vocab_size": 151936,
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
            "modules_to_not_convert": [
                "lm_head",
                *(f"model.layers.{i}.{n}" for i in range(64) for n in ("input_layernorm", "post_attention_layernorm")),
            ],
        },
    }  # fmt: skip
    weights = Weights("fp8-blocks", "BF16-scales")
    weights.outer("model.", 151936, 5120)
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        weights.attention(layer, 5120, 64, 8, 128)
        for part in "qk":
            weights.vector(f"{layer}.self_attn.{part}_norm.weight", 128)
        weights.mlp(f"{layer}.mlp", 5120, 25600)
        weights.norms(layer, 5120)
    return config, weights


def llama(hidden: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": 128009, "hidden_act": "silu", "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": inner, "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": heads, "num_hidden_layers": layers, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "torch_dtype": "float16", "vocab_size": 128256, **more,
    }  # fmt: skip


def llama_31_8b_fp8() -> tuple[dict[str, Any], Weights]:
    weights8 = {
        "num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False, "group_size": None,
        "block_structure": None, "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    config = llama(
        4096, 14336, 32, 32,
        max_position_embeddings=131072, eos_token_id=[128001, 128008, 128009], torch_dtype="bfloat16",
        rope_scaling={
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        quantization_config={
            "config_groups": {
                "group_0": {
                    "input_activations": weights8, "output_activations": None, "targets": ["Linear"],
                    "weights": weights8,
                }
            },
            "format": "float-quantized", "global_compression_ratio": 1.46, "ignore": ["lm_head"],
            "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "frozen",
        },
    )  # fmt: skip
    weights = Weights("fp8-tensor")
    weights.outer("model.", 128256, 4096)
    for index in range(LAYERS):
        weights.attention(f"model.layers.{index}", 4096, 32, 8, 128)
        weights.mlp(f"model.layers.{index}.mlp", 4096, 14336)
        weights.norms(f"model.layers.{index}", 4096)
    return config, weights


def llama_3_70b_awq() -> tuple[dict[str, Any], Weights]:
    config = llama(
        8192, 28672, 80, 64,
        quantization_config={
            "bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
            "zero_point": True,
        },
    )  # fmt: skip
    weights = Weights("awq", "F16")
    weights.outer("model.", 128256, 8192)
    for index in range(LAYERS):
        weights.attention(f"model.layers.{index}", 8192, 64, 8, 128)
        weights.mlp(f"model.layers.{index}.mlp", 8192, 28672)
        weights.norms(f"model.layers.{index}", 8192)
    return config, weights


def qwen25_7b_gptq() -> tuple[dict[str, Any], Weights]:
    config = {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
        "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True,
        "use_sliding_window": False, "vocab_size": 152064,
        "quantization_config": {
            "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True,
            "damp_percent": 0.01, "dataset": None, "desc_act": False, "exllama_config": {"version": 1},
            "group_size": 128, "max_input_length": None, "model_seqlen": None,
            "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None,
            "pad_token_id": None, "quant_method": "gptq", "sym": True,
            "tokenizer": None, "true_sequential": True, "use_cuda_fp16": False, "use_exllama": True,
        },
    }  # fmt: skip
    weights = Weights("gptq", "F16")
    weights.outer("model.", 152064, 3584)
    for index in range(LAYERS):
        weights.attention(f"model.layers.{index}", 3584, 28, 4, 128, bias=True)
        weights.matrix(f"model.layers.{index}.self_attn.o_proj", 3584, 3584, bias=True)  # zeros, which nothing reads
        weights.mlp(f"model.layers.{index}.mlp", 3584, 18944)
        weights.norms(f"model.layers.{index}", 3584)
    return config, weights


def gpt_oss_20b() -> tuple[dict[str, Any], Weights]:
    config = {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
        "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
        "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
            "quant_method": "mxfp4",
        },
    }  # fmt: skip
    weights = Weights()
    weights.outer("model.", 201088, 2880)
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        weights.attention(layer, 2880, 64, 8, 64, bias=True)
        weights.vector(f"{layer}.self_attn.o_proj.bias", 2880)
        weights.vector(f"{layer}.self_attn.sinks", 64)
        weights.matrix(f"{layer}.mlp.router", 32, 2880, bias=True)
        for part, out in (("gate_up_proj", 5760), ("down_proj", 2880)):
            expert = f"{layer}.mlp.experts.{part}"
            weights.found[f"{expert}_blocks"] = ("U8", (32, out, 90, 16))
            weights.found[f"{expert}_scales"] = ("U8", (32, out, 90))
            weights.found[f"{expert}_bias"] = ("BF16", (32, out))
        weights.norms(layer, 2880)
    return config, weights


def deepseek_v3() -> tuple[dict[str, Any], Weights]:
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 0, "eos_token_id": 1,
        "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
        "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        },
    }  # fmt: skip
    weights = Weights("fp8-blocks")
    weights.outer("model.", 129280, 7168)
    for index in (0, 1, 2, 3):
        layer = f"model.layers.{index}"
        weights.matrix(f"{layer}.self_attn.q_a_proj", 1536, 7168)
        weights.vector(f"{layer}.self_attn.q_a_layernorm.weight", 1536)
        weights.matrix(f"{layer}.self_attn.q_b_proj", 24576, 1536)
        weights.matrix(f"{layer}.self_attn.kv_a_proj_with_mqa", 576, 7168)
        weights.vector(f"{layer}.self_attn.kv_a_layernorm.weight", 512)
        weights.matrix(f"{layer}.self_attn.kv_b_proj", 32768, 512)
        weights.matrix(f"{layer}.self_attn.o_proj", 7168, 16384)
        weights.norms(layer, 7168)
        if index < 3:
            weights.mlp(f"{layer}.mlp", 7168, 18432)
            continue
        weights.matrix(f"{layer}.mlp.gate", 256, 7168, plain=True)
        weights.vector(f"{layer}.mlp.gate.e_score_correction_bias", 256, "F32")
        weights.mlp(f"{layer}.mlp.shared_experts", 7168, 2048)
        for expert in range(256):
            weights.mlp(f"{layer}.mlp.experts.{expert}", 7168, 2048)
    return config, weights


def gemma_3_4b() -> tuple[dict[str, Any], Weights]:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "torch_dtype": "bfloat16",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "vision_config": {
            "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
        },
    }  # fmt: skip
    weights = Weights()
    weights.outer("language_model.model.", 262208, 2560, head=False)
    for index in range(LAYERS):
        layer = f"language_model.model.layers.{index}"
        weights.attention(layer, 2560, 8, 4, 256)
        for part in "qk":
            weights.vector(f"{layer}.self_attn.{part}_norm.weight", 256)
        weights.mlp(f"{layer}.mlp", 2560, 10240)
        weights.norms(
            layer, 2560,
            "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
        )  # fmt: skip
    weights.found["multi_modal_projector.mm_input_projection_weight"] = ("BF16", (1152, 2560))
    weights.matrix("vision_tower.vision_model.encoder.layers.0.self_attn.q_proj", 1152, 1152, bias=True)
    return config, weights


def mixtral_8x7b() -> tuple[dict[str, Any], Weights]:
    config = {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "vocab_size": 32000,
    }  # fmt: skip
    weights = Weights()
    weights.outer("model.", 32000, 4096)
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        weights.attention(layer, 4096, 32, 8, 128)
        weights.matrix(f"{layer}.block_sparse_moe.gate", 8, 4096)
        for expert in range(8):
            weights.mlp(f"{layer}.block_sparse_moe.experts.{expert}", 4096, 14336, ("w1", "w3", "w2"))
        weights.norms(layer, 4096)
    return config, weights


PUBLISHED = {
    "Qwen3-32B-FP8": (qwen3_32b_fp8, "llama", 32.8e9),
    "Meta-Llama-3.1-8B-Instruct-FP8": (llama_31_8b_fp8, "llama", 8.0e9),
    "Meta-Llama-3-70B-Instruct-AWQ": (llama_3_70b_awq, "llama", 70.6e9),
    "Qwen2.5-7B-Instruct-GPTQ-Int4": (qwen25_7b_gptq, "llama", 7.6e9),
    "gpt-oss-20b": (gpt_oss_20b, "gpt_oss", 0),
    "DeepSeek-V3": (deepseek_v3, "deepseek", 0),
    "gemma-3-4b-it": (gemma_3_4b, "gemma", 0),
    "Mixtral-8x7B-v0.1": (mixtral_8x7b, "moe", 0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_its_configuration_is_read_and_every_tensor_found(name: str, tmp_path: Path) -> None:
    make, family, _ = PUBLISHED[name]
    config, weights = make()
    geometry = read_geometry(checkpoint(tmp_path / "whole", config, {"none": ("F32", (1,))}))
    assert geometry.family == family
    text = config.get("text_config", config)
    layers = 4 if name == "DeepSeek-V3" else LAYERS
    fewer = {**text, "num_hidden_layers": layers}
    if "layer_types" in text:
        fewer["layer_types"] = text["layer_types"][:layers]
    small = {**config, "text_config": fewer} if "text_config" in config else fewer
    folder = checkpoint(tmp_path / "layers", small, weights.found)
    asked = found(folder, read_geometry(folder))
    beside = ("vision_tower", "multi_modal", "input_scale", "o_proj.bias")
    stored = {tensor.rpartition(".")[0] for tensor in weights.found if not any(part in tensor for part in beside)}
    assert stored <= {tensor.rpartition(".")[0] for tensor in asked} | {"lm_head"}  # nothing of it is passed over


@pytest.mark.parametrize("name", [name for name, (_, _, size) in PUBLISHED.items() if size])
def test_a_module_of_it_is_read_in_its_codes_and_divided(name: str, tmp_path: Path) -> None:
    make, _, _ = PUBLISHED[name]
    config, weights = make()
    folder = checkpoint(tmp_path / "m", config, weights.found)
    geometry = read_geometry(folder)
    assert geometry.quantization is not None
    with open_weights(folder, "files", geometry.quantization) as files:
        assert isinstance(files, QuantizedFiles)
        kv = geometry.num_kv_heads * geometry.head_dim
        weight = files.read_quantized("model.layers.1.self_attn.k_proj.weight", kv, geometry.hidden_size, CPU)
        assert weight is not None and not isinstance(weight, ReorderedWeight)
        assert weight.shape == (kv, geometry.hidden_size)
        assert keeps_codes("cuda", "bfloat16", weight.layout) and keeps_codes("cpu", "bfloat16", weight.layout)
        assert files.read_quantized("lm_head.weight", geometry.vocab_size, geometry.hidden_size, CPU) is None
    if name != "Qwen2.5-7B-Instruct-GPTQ-Int4":
        assert [why_not_divisible(geometry, degree) for degree in (2, 4)] == ["", ""]
    else:  # 28 heads in groups of 128, 18,944 columns: 74 and 37 groups
        assert why_not_divisible(geometry, 2) == why_not_divisible(geometry, 4) == ""


@pytest.mark.parametrize("name", ["DeepSeek-V3", "gpt-oss-20b", "Mixtral-8x7B-v0.1"])
def test_mixtures_divide_as_they_are_published(name: str, tmp_path: Path) -> None:
    """128 heads and 16 groups of an expert's columns; 64 heads and 90 groups; plain."""
    config, _ = PUBLISHED[name][0]()
    assert degrees(read_geometry(checkpoint(tmp_path / "m", config, {"none": ("F32", (1,))})), 16) == [1, 2, 4, 8, 16]


def test_what_a_vision_model_has_besides_its_text_is_left_in_its_files(tmp_path: Path) -> None:
    config, _ = gemma_3_4b()
    geometry = read_geometry(checkpoint(tmp_path / "m", config, {"none": ("F32", (1,))}))
    assert (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, geometry.vocab_size) == (8, 4, 256, 262208)
    assert geometry.rope is not None and geometry.local_rope is not None
    assert geometry.sliding_windows[:6] == (1024, 1024, 1024, 1024, 1024, 0) and geometry.tie_embeddings
    assert set(geometry.eos_token_ids) == {1, 106}


def refused() -> Iterator[tuple[dict[str, Any], str]]:
    config, _ = llama_3_70b_awq()
    for changed, told in (
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "by the method bitsandbytes"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "by the method modelopt"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "layout gemv"),
    ):
        yield {**config, "quantization_config": changed}, told


@pytest.mark.parametrize(("config", "told"), [*refused()])
def test_what_is_not_served_is_refused_by_name(config: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=told):
        read_geometry(checkpoint(tmp_path / "m", config, {"none": ("F32", (1,))}))
