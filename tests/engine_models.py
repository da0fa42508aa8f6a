"""Models the tests of the engine and of its measurements share: tiny random ones, and the real default model.

A folder's conftest imports the fixtures it wants.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cohort.common.engine.config.runner_options import RunnerOptions
from cohort.common.engine.device import compiled_kernels
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.paths import default_model_dir

compiled_kernels.keep_in_cache()  # some tests ask for the implementation while they are collected

VOCAB = 199
BLOCK_SIZE = 8

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
}
_LLAMA: dict[str, Any] = {**_SMALL, "intermediate_size": 80, "num_key_value_heads": 2}
_MIXTURE: dict[str, Any] = {**_LLAMA, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_OSS_ROPE = {**_YARN_ROPE, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
_PHI3: dict[str, Any] = {**_LLAMA, "pad_token_id": 0, "eos_token_id": 2}
_LONGROPE = {  # three of the four frequencies: the part that is rotated
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.1, 1.3, 1.7],
    "long_factor": [2.0, 5.0, 9.0],
}
_LOCAL_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention"]

_DEEPSEEK: dict[str, Any] = {
    **_SMALL,
    "intermediate_size": 80,
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_LLAMA, head_dim=16, tie_word_embeddings=True),
    "llama-bias-llama3": lambda: transformers.LlamaConfig(
        **_LLAMA, attention_bias=True, mlp_bias=True, rope_parameters=_LLAMA3_ROPE
    ),
    "llama-yarn": lambda: transformers.LlamaConfig(**_LLAMA, rope_parameters=_YARN_ROPE),
    "llama-linear": lambda: transformers.LlamaConfig(**_LLAMA, rope_parameters=_LINEAR_ROPE),
    "llama-dynamic": lambda: transformers.LlamaConfig(**_LLAMA, rope_parameters=_DYNAMIC_ROPE),
    "phi3": lambda: transformers.Phi3Config(**_PHI3, sliding_window=11),
    "phi3-longrope": lambda: transformers.Phi3Config(
        **{**_PHI3, "max_position_embeddings": 1024},
        original_max_position_embeddings=128,
        rope_parameters=_LONGROPE,
        tie_word_embeddings=True,
    ),
    "mistral-window": lambda: transformers.MistralConfig(**_LLAMA, sliding_window=11),
    "qwen2": lambda: transformers.Qwen2Config(**_LLAMA),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **_LLAMA, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**_LLAMA, head_dim=16, tie_word_embeddings=True),
    "mixtral": lambda: transformers.MixtralConfig(**_LLAMA, num_local_experts=5),
    "mixtral-window": lambda: transformers.MixtralConfig(
        **_LLAMA, head_dim=16, num_local_experts=4, num_experts_per_tok=1, sliding_window=11, tie_word_embeddings=True
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **_MIXTURE, head_dim=16, num_experts=8, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "qwen3-moe-sparse": lambda: transformers.Qwen3MoeConfig(
        **_MIXTURE, num_experts=6, decoder_sparse_step=2, attention_bias=True
    ),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(**_MIXTURE, num_experts=6, shared_expert_intermediate_size=56),
    "qwen2-moe-window": lambda: transformers.Qwen2MoeConfig(
        **_MIXTURE,
        num_experts=4,
        shared_expert_intermediate_size=24,
        norm_topk_prob=True,
        qkv_bias=False,
        use_sliding_window=True,
        sliding_window=9,
    ),
    "opt": lambda: transformers.OPTConfig(**_SMALL, ffn_dim=80),
    "opt-350m-like": lambda: transformers.OPTConfig(
        **_SMALL, ffn_dim=80, word_embed_proj_dim=32, do_layer_norm_before=False
    ),
    "opt-plain": lambda: transformers.OPTConfig(
        **_SMALL, ffn_dim=80, enable_bias=False, layer_norm_elementwise_affine=False, tie_word_embeddings=False
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**_SMALL, intermediate_size=80),
    "stablelm": lambda: transformers.StableLmConfig(**_LLAMA),
    "gemma": lambda: transformers.GemmaConfig(**_LLAMA, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(
        **_LLAMA,
        head_dim=16,
        sliding_window=7,
        query_pre_attn_scalar=12,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma2-uncapped": lambda: transformers.Gemma2Config(
        **_LLAMA,
        head_dim=16,
        sliding_window=9,
        attention_bias=True,
        tie_word_embeddings=False,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_LLAMA, head_dim=16, sliding_window=7, query_pre_attn_scalar=12, layer_types=_LOCAL_GLOBAL
    ),
    "gemma3-linear": lambda: transformers.Gemma3TextConfig(
        **_LLAMA,
        head_dim=16,
        sliding_window=9,
        query_pre_attn_scalar=16,
        layer_types=_LOCAL_GLOBAL,
        final_logit_softcapping=5.0,
        attn_logit_softcapping=2.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gemma3-images": lambda: transformers.Gemma3Config(
        text_config={
            **_LLAMA,
            "head_dim": 16,
            "sliding_window": 7,
            "query_pre_attn_scalar": 12,
            "layer_types": _LOCAL_GLOBAL,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        boi_token_index=VOCAB - 3,
        eoi_token_index=VOCAB - 2,
        image_token_index=VOCAB - 1,
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **_LLAMA, head_dim=16, num_local_experts=6, num_experts_per_tok=3, sliding_window=7, rope_parameters=_OSS_ROPE
    ),
    "gpt-oss-plain": lambda: transformers.GptOssConfig(
        **_LLAMA,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=1,
        attention_bias=False,
        tie_word_embeddings=True,
        layer_types=["full_attention"] * 3,
        swiglu_limit=0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "deepseek2": lambda: transformers.DeepseekV2Config(
        **_DEEPSEEK, q_lora_rank=None, num_experts_per_tok=3, n_routed_experts=6, moe_intermediate_size=40
    ),
    "deepseek2-groups": lambda: transformers.DeepseekV2Config(
        **_DEEPSEEK,
        q_lora_rank=20,
        num_experts_per_tok=3,
        n_routed_experts=8,
        moe_intermediate_size=24,
        n_shared_experts=1,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.0,
        attention_bias=True,
        rope_parameters={**_YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.7},
    ),
    "deepseek3": lambda: transformers.DeepseekV3Config(
        **_DEEPSEEK,
        q_lora_rank=20,
        num_experts_per_tok=3,
        n_routed_experts=8,
        moe_intermediate_size=24,
        n_group=4,
        topk_group=2,
        rope_parameters={**_YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek3-apart": lambda: transformers.DeepseekV3Config(
        **{**_DEEPSEEK, "first_k_dense_replace": 3}, q_lora_rank=None, rope_interleave=False, tie_word_embeddings=True
    ),
    "phi": lambda: transformers.PhiConfig(**_SMALL, intermediate_size=80),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=6, n_positions=256, bos_token_id=0, eos_token_id=0
    ),
}


def save_random_model(config: Any, folder: Path, *, seed: int = 0) -> Path:
    """A model of this configuration with weights large enough that its logits differ clearly."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                offset = 1.0 if ("norm" in name or "ln_" in name) and name.endswith("weight") else 0.0
                parameter.normal_(0.0, 0.2).add_(offset)
            else:  # learned positions weigh as much as the rest of a layer, or answers repeat one token
                scale = 6.0 if "embed_positions" in name else 1.5
                parameter.normal_(0.0, scale / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # of DeepSeek's router: it chooses and does not weigh
                buffer.normal_(0.0, 0.2)
    model.tie_weights()
    model.save_pretrained(folder)
    return folder


def as_mxfp4(folder: Path) -> Path:
    """gpt-oss as it is published: the experts of this folder become blocks and scales, at random."""
    tensors, random = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        groups = inputs // 32
        codes = torch.randint(0, 256, (experts, outputs, groups, 16), dtype=torch.uint8, generator=random)
        scales = torch.randint(121, 126, (experts, outputs, groups), dtype=torch.uint8, generator=random)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    return folder


def runner_options(**overrides: Any) -> RunnerOptions:
    options: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "block_size": BLOCK_SIZE,
        "num_blocks": 96,
        "host_blocks": 8,
        "max_rows": 16,
        "max_step_tokens": 256,
    }
    return RunnerOptions(**{**options, **overrides})


def make_runner(folder: Path, **overrides: Any) -> ModelRunner:
    return ModelRunner(folder, runner_options(**overrides))


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny random model of the named configuration; made once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save_random_model(CONFIGS[name](), tmp_path_factory.mktemp(name))
        return made[name]

    return folder


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The real default model, or a skip."""
    folder = Path(os.environ.get("COHORT_TEST_MODEL") or default_model_dir())
    if not (folder / "config.json").is_file():
        pytest.skip(f"no model in {folder}: run the set-up, or name a folder in COHORT_TEST_MODEL")
    return folder
