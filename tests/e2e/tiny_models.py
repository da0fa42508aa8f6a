"""Small models with random weights, of architectures other than the default model's."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.services.gateway.tiny_model import byte_level


def llama() -> PreTrainedModel:
    """Four KV heads: divided by 2 and by 4."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=400,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=8,
            max_position_embeddings=512,
        )
    )


def save_stand_in(default_model: Path, folder: Path) -> None:
    """The default model's tokens, in a part of its time: what is scheduled, cached and sent is the same."""
    tokens = len(json.loads((default_model / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])
    torch.manual_seed(7)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "max_position_embeddings": 2048}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    save(LlamaForCausalLM(LlamaConfig(vocab_size=tokens, tie_word_embeddings=True, **shape, **heads)), folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", ".complete"):
        (folder / name).symlink_to(default_model / name)


def save_deep_llama(folder: Path, first: Path) -> None:
    """Twelve layers of which all but the first add nothing; and the first alone, which says the same in a part of the
    time, as a draft model should."""
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    model.save_pretrained(first)


def qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=400,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
        )
    )


def qwen2_windows() -> PreTrainedModel:
    """The first of three layers sees everything, the others the last 40 tokens."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=400,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            use_sliding_window=True,
            sliding_window=40,
            max_window_layers=1,
        )
    )


def gemma3() -> PreTrainedModel:
    """One layer of three sees everything, two the last 40 tokens."""
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=400,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            sliding_window=40,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    )


def qwen3_moe() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=400,
            hidden_size=64,
            intermediate_size=128,
            moe_intermediate_size=48,
            num_experts=6,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            mlp_only_layers=[0],
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
        )
    )


def gpt_oss() -> PreTrainedModel:
    """Every second layer sees everything, the others the last 40 tokens."""
    return GptOssForCausalLM(
        GptOssConfig(
            vocab_size=400,
            hidden_size=64,
            intermediate_size=64,
            num_local_experts=6,
            num_experts_per_tok=2,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            sliding_window=40,
        )
    )


def deepseek() -> PreTrainedModel:
    """Eight heads over one latent: divided by 2 and by 4; the first layer without experts."""
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=400,
            hidden_size=64,
            intermediate_size=128,
            moe_intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=8,
            q_lora_rank=24,
            kv_lora_rank=24,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            max_position_embeddings=512,
        )
    )


def opt() -> PreTrainedModel:
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=400,
            hidden_size=64,
            ffn_dim=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=512,
            word_embed_proj_dim=64,
        )
    )


def save(model: PreTrainedModel, folder: Path) -> None:
    """With weights drawn anew: by default they are so small that all logits nearly tie."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)


def save_of_bytes(model: PreTrainedModel, folder: Path) -> Path:
    """With a tokenizer of 400 tokens, as many as the models here have."""
    save(model, folder)
    byte_level(400).save(str(folder / "tokenizer.json"))
    return folder
