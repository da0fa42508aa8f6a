"""Reads a model folder's config.json into the frozen facts the engine and the gateway need.

Called by the model runner, by planners of KV memory and by code of the gateway: hence no torch and no transformers
here. Never reads weights. Which of the engine's forms of a model runs (lean Llama shape, the same with experts, lean
Gemma shape, gpt-oss, DeepSeek, OPT, generic through transformers) is decided here, because it follows from the
configuration alone. Both spellings of transformers are read: of version 5, and of those before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cohort.common.engine.config.config_bounds import check_finite, check_sizes, shown
from cohort.common.engine.config.model_defaults import DEFAULTS
from cohort.common.engine.config.quantization_config import Quantization, check_wanted, read_quantization
from cohort.common.errors import ConfigError, ModelError
from cohort.common.json_files import read_json_object
from cohort.common.types import FP8_SCALE_BYTES, KvGeometry

Family = Literal["llama", "moe", "gemma", "gpt_oss", "deepseek", "opt", "generic"]
Dtype = Literal["float32", "bfloat16", "float16"]

FP8 = "fp8"
FP8_PLANES = "fp8 in planes"
"""A cache in FP8 has rows of codes in E4M3, each with a scale of its own, which a GPU keeps apart from the codes
(`kernels/fp8_cache.py`); its blocks are copied and sent as any others."""
SCALE_BYTES: Mapping[str, int] = {FP8: FP8_SCALE_BYTES["cpu"], FP8_PLANES: FP8_SCALE_BYTES["cuda"]}
"""Bytes of a row's scale, by what `kv_dtype` returns; other dtypes have none."""
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 1, FP8_PLANES: 1}
LLAMA_SHAPED = frozenset({"llama", "mistral", "phi3", "qwen2", "qwen3"})
MIXTURES = frozenset({"mixtral", "qwen2_moe", "qwen3_moe"})  # Llama-shaped but for the MLP
_WINDOWED_OR_NOT = frozenset({"sliding_attention", "full_attention"})
GEMMA_SHAPED = frozenset({"gemma2", "gemma3_text"})
_WHOLE = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_positions")
LEAN_ROPE_TYPES = frozenset({"default", "linear", "dynamic", "llama3", "yarn", "longrope"})


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base and scaling. `scaling` holds the numbers of its type as config.json names them."""

    theta: float
    rope_type: str
    scaling: Mapping[str, Any]
    partial: float = 1.0  # of each head's elements, the first ones are rotated


@dataclass(frozen=True, slots=True)
class ExpertsGeometry:
    """A mixture of experts in place of a layer's MLP."""

    count: int
    per_token: int
    inner_size: int  # of each expert
    normalised: bool  # the weights of a token's experts sum to one
    layers: tuple[bool, ...]  # which layers have it; the others have an MLP of `intermediate_size`
    shared_inner_size: int = 0  # Qwen2-MoE: of the expert that every token takes; 0 = there is none
    swiglu_alpha: float = 0.0  # gpt-oss: of its activation; 0 = SiLU
    swiglu_limit: float = 0.0  # gpt-oss: gates and ups are clamped to it
    routing: RoutingGroups | None = None  # DeepSeek
    mxfp4: bool = False  # gpt-oss: the files hold its experts in these codes


@dataclass(frozen=True, slots=True)
class LatentGeometry:
    """Multi-head latent attention (DeepSeek-V2): of a token the cache has one vector for all heads and for keys and
    values, of which the first part makes both and the rest is a rotated key that all heads share."""

    rank: int  # of the first part
    rotated: int  # width of the rest
    plain: int  # of each head's query, what meets keys that are not rotated
    value: int  # width of each head's values
    query_rank: int  # queries come by way of so many numbers; 0 = directly
    interleaved: bool  # a rotated pair stands side by side, not half a head apart

    @property
    def width(self) -> int:
        """Numbers that the cache has of a token and layer."""
        return self.rank + self.rotated


@dataclass(frozen=True, slots=True)
class RoutingGroups:
    """DeepSeek: experts are chosen from the best groups of them."""

    scoring: Literal["softmax", "sigmoid"]  # the latter with a correction that chooses and does not weigh
    groups: int  # 1 = experts are chosen from all
    chosen: int
    scale: float  # of the weights


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """A model's geometry and layers."""

    model_type: str
    family: Family
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int  # the longest context served, prompt and output together
    norm_eps: float
    tie_embeddings: bool
    activation: str
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str  # what the weights were saved in, "" when the configuration does not say
    rope: RopeConfig | None = None
    local_rope: RopeConfig | None = None  # of layers with a sliding window, where it is another one
    sliding_windows: tuple[int, ...] = ()  # per layer, positions seen back with the own one; 0 = all
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen3: RMSNorm over each head of q and k
    attention_scale: float = 0.0  # of the scores; 0 = head_dim ** -0.5
    attention_softcap: float = 0.0  # bound of the scores, cap * tanh(score / cap); 0 = none
    logit_softcap: float = 0.0  # the same of the logits
    attention_sinks: bool = False  # gpt-oss: of every head a score that takes weight and gives no value
    fused_weights: bool = False  # Phi-3: q, k and v are one tensor in the files, gate and up another
    experts: ExpertsGeometry | None = None
    latent: LatentGeometry | None = None  # `head_dim` is then the width of a latent, of which there is one a token
    word_embedding_size: int = 0  # OPT: width of the embedding before project_in
    norm_before: bool = True  # OPT: normalise before attention and MLP, not after
    final_norm: bool = True  # OPT
    norm_affine: bool = True  # OPT
    quantization: Quantization | None = None  # None: plain weights

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated; 0 without a rotary embedding."""
        if self.latent is not None:
            return self.latent.rotated
        return 0 if self.rope is None else int(self.head_dim * self.rope.partial)

    @property
    def kv_window(self) -> int:
        """Positions after which no layer sees a token; 0: some layer sees all of them."""
        windows = self.sliding_windows
        return max(windows) if windows and all(windows) else 0

    def kv_geometry(self, dtype: str, block_size: int) -> KvGeometry:
        """Return the geometry of this model's KV cache, in what `kv_dtype` returns: in FP8 a row has its scale too."""
        # A latent is key and value in one, so it weighs what a key and a value of half its width do.
        width = self.head_dim // (1 if self.latent is None else 2) + SCALE_BYTES.get(dtype, 0)
        return KvGeometry(self.num_layers, self.num_kv_heads, width, DTYPE_BYTES[dtype], block_size, self.kv_window)

    def kv_token_bytes(self, dtype: str) -> int:
        """B1 · Return the bytes of one token's KV over all layers."""
        return self.kv_geometry(dtype, 1).token_bytes


def kv_dtype(cache_dtype: str, dtype: str, geometry: ModelGeometry, device_type: str) -> str:
    """Return what keys and values are stored in, as `kv_geometry` takes it: by `kv.cache_dtype`, in a model of `dtype`.

    FP8 is stored in rows on a processor, in planes on a GPU. Raises `ConfigError` where it is not served.
    """
    if cache_dtype == "auto":
        return dtype
    if geometry.latent is not None:
        raise ConfigError(
            f"kv.cache_dtype: {cache_dtype} is not served for {geometry.model_type}, whose cache has latents, which "
            "are key and value in one; leave it at auto"
        )
    return FP8 if device_type == "cpu" else FP8_PLANES


def read_geometry(model_dir: Path, quantization: str = "auto") -> ModelGeometry:
    """Read the geometry of the model in `model_dir`. Raises `ModelError` where the folder holds none that can be
    served, or one whose weights are not what `quantization` (as `model.quantization`) says."""
    config_file = model_dir / "config.json"
    try:
        config = read_json_object(config_file)
    except FileNotFoundError:
        raise ModelError(f"{model_dir} holds no config.json: a model folder in Hugging Face format is needed") from None
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{config_file} names no model_type")
    for level in (config, config.get("text_config")):
        if isinstance(level, dict):
            check_sizes(level, str(config_file))
    stored = config.get("quantization_config")
    method = stored.get("quant_method") if isinstance(stored, dict) else None
    of_its_own = (config["model_type"], method) == ("gpt_oss", "mxfp4")  # its form reads them itself
    quantised = None if of_its_own else read_quantization(config, str(config_file))
    check_wanted(quantization, quantised, model_dir.name)
    if config.get("is_encoder_decoder"):
        raise ModelError(f"{config_file}: {config['model_type']} is an encoder-decoder; only decoders can be served")
    generation_file = model_dir / "generation_config.json"
    generation = read_json_object(generation_file) if generation_file.is_file() else {}
    try:
        geometry = _geometry(config, eos_ids(config, generation))
    except KeyError as error:
        raise ModelError(f"{config_file} lacks {error}, which {config['model_type']} needs") from None
    except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise ModelError(f"{config_file} is no configuration of {config['model_type']}: {error}") from None
    check_finite(geometry, str(config_file))
    for name in _WHOLE:
        if type(size := getattr(geometry, name)) is not int or size < 1:
            raise ModelError(f"{config_file}: {name} is {shown(size)}, not a whole number above 0")
    if quantised is None:
        return geometry
    if geometry.family == "generic":
        raise ModelError(
            f"{config_file}: quantised weights ({quantised.method}) of {geometry.model_type} are not served: it "
            "runs through transformers, and only the project's own forms read them; convert them to bfloat16"
        )
    return replace(geometry, quantization=quantised)


def _geometry(config: dict[str, Any], eos: tuple[int, ...]) -> ModelGeometry:
    if config["model_type"] in LLAMA_SHAPED | MIXTURES:
        return _llama_shaped(config, eos)
    if config["model_type"] in GEMMA_SHAPED:
        return _gemma_shaped(config, eos)
    if (text := text_decoder(config)) and (found := _gemma_shaped(text, eos)).family == "gemma":
        return found
    if config["model_type"] == "gpt_oss":
        return _gpt_oss(config, eos)
    if config["model_type"] in ("deepseek_v2", "deepseek_v3"):
        return _deepseek(config, eos)
    if config["model_type"] == "opt":
        return _opt(config, eos)
    return _generic(config, eos)


def _decoder(config: Mapping[str, Any], eos: tuple[int, ...], rope: RopeConfig) -> ModelGeometry:
    """Return what the lean forms with a rotary embedding read alike; each replaces what it reads otherwise."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    bias = bool(config.get("attention_bias", False))
    return ModelGeometry(
        model_type=config["model_type"],
        family="llama",
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_positions=max_positions(config, rope),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        activation="silu",
        eos_token_ids=eos,
        checkpoint_dtype=checkpoint_dtype(config),
        rope=rope,
        sliding_windows=sliding_windows(config),
        qkv_bias=bias,
        output_bias=bias,
    )


def _llama_shaped(config: dict[str, Any], eos: tuple[int, ...]) -> ModelGeometry:
    model_type = config["model_type"]
    config = {**DEFAULTS[model_type], **config}
    rope = rope_of(config)
    lean = (
        config.get("hidden_act", "silu") in ("silu", "swish")
        and rope.rope_type in LEAN_ROPE_TYPES
        and (rope.partial == 1.0 or model_type == "phi3")  # the other types' models take no notice of a part, or break
    )
    experts = _experts(config) if model_type in MIXTURES else None
    geometry = replace(
        _decoder(config, eos, rope),
        family="generic" if not lean else "llama" if experts is None else "moe",
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        fused_weights=model_type == "phi3",
        experts=experts,
    )
    if model_type in ("qwen2", "qwen2_moe"):
        return replace(geometry, qkv_bias=bool(config.get("qkv_bias", True)), output_bias=False)
    return geometry


def _gemma_shaped(config: dict[str, Any], eos: tuple[int, ...]) -> ModelGeometry:
    """Return a `generic` geometry where a value asks for what the lean form does not compute."""
    model_type = config["model_type"]
    config = {**DEFAULTS[model_type], **config}
    pattern, layers = config["sliding_window_pattern"], config["num_hidden_layers"]
    config["layer_types"] = config.get("layer_types") or [
        "sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(layers)
    ]
    by_layer = model_type == "gemma3_text"
    rope, local_rope = ropes_by_layer_type(config) if by_layer else (rope_of(config), None)
    lean = (
        config["hidden_activation"] == "gelu_pytorch_tanh"
        and not config.get("use_bidirectional_attention")
        and set(config["layer_types"]) <= _WINDOWED_OR_NOT
        and (not by_layer or set(config.get("rope_parameters") or {}) <= _WINDOWED_OR_NOT)
        and all(each.rope_type in LEAN_ROPE_TYPES and each.partial == 1.0 for each in (rope, local_rope or rope))
    )
    if not lean:
        return _generic(config, eos)
    return replace(
        _decoder(config, eos, rope),
        family="gemma",
        max_positions=min(max_positions(config, each) for each in (rope, local_rope or rope)),
        activation="gelu_pytorch_tanh",
        local_rope=local_rope,
        attention_scale=float(config["query_pre_attn_scalar"]) ** -0.5,
        # transformers' Gemma 3 reads the cap of its scores and never applies it
        attention_softcap=0.0 if by_layer else float(config.get("attn_logit_softcapping") or 0.0),
        logit_softcap=float(config.get("final_logit_softcapping") or 0.0),
        qk_norm=by_layer,
    )


def _experts(config: Mapping[str, Any]) -> ExpertsGeometry | None:
    """Return the mixture; None where every layer is dense. Qwen's first layers, or all but every n-th, may be."""
    layers: int = config["num_hidden_layers"]
    # Both names are in use for one number, and a file may hold either.
    count = int(config["num_local_experts"] if "num_local_experts" in config else config["num_experts"])
    mixtral = config["model_type"] == "mixtral"
    step, dense = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers") or ()
    with_experts = tuple(mixtral or (i not in dense and count > 0 and (i + 1) % step == 0) for i in range(layers))
    if not any(with_experts):
        return None
    return ExpertsGeometry(
        count=count,
        per_token=config["num_experts_per_tok"],
        inner_size=config["intermediate_size" if mixtral else "moe_intermediate_size"],
        normalised=mixtral or bool(config.get("norm_topk_prob", False)),
        layers=with_experts,
        shared_inner_size=int(config.get("shared_expert_intermediate_size", 0)) if not mixtral else 0,
    )


def _gpt_oss(config: dict[str, Any], eos: tuple[int, ...]) -> ModelGeometry:
    """Return a `generic` geometry where a value asks for what the lean form does not compute."""
    rope_given = config.get("rope_parameters") or config.get("rope_scaling")
    config = {**DEFAULTS["gpt_oss"], **config}
    config["rope_parameters"] = rope_given or DEFAULTS["gpt_oss"]["rope_parameters"]
    layers = config["num_hidden_layers"]
    in_turn = [("sliding_attention", "full_attention")[index % 2] for index in range(layers)]
    config["layer_types"] = config.get("layer_types") or in_turn
    rope = rope_of(config)
    lean = (
        config["hidden_act"] in ("silu", "swish")  # the name alone: the experts' activation is another one
        and set(config["layer_types"]) <= _WINDOWED_OR_NOT
        and rope.rope_type in LEAN_ROPE_TYPES
        and rope.partial == 1.0
    )
    if not lean:
        return _generic(config, eos)
    return replace(
        _decoder(config, eos, rope),
        family="gpt_oss",
        activation="clamped_swiglu",
        mlp_bias=True,
        attention_sinks=True,
        experts=ExpertsGeometry(
            count=config["num_experts"] if "num_experts" in config else config["num_local_experts"],
            per_token=config["num_experts_per_tok"],
            inner_size=config["intermediate_size"],
            normalised=True,
            layers=(True,) * layers,
            swiglu_alpha=float(config["swiglu_alpha"]),
            swiglu_limit=float(config["swiglu_limit"]),
            mxfp4=(config.get("quantization_config") or {}).get("quant_method") == "mxfp4",
        ),
    )


def _deepseek(config: dict[str, Any], eos: tuple[int, ...]) -> ModelGeometry:
    """Return a `generic` geometry, which is refused, where a value asks for what the lean form does not compute."""
    third = config["model_type"] == "deepseek_v3"
    config = {**DEFAULTS[config["model_type"]], **config}
    rope, layers = rope_of(config), config["num_hidden_layers"]
    latent = LatentGeometry(
        rank=config["kv_lora_rank"],
        rotated=config["qk_rope_head_dim"],
        plain=config["qk_nope_head_dim"],
        value=config["v_head_dim"],
        query_rank=config["q_lora_rank"] or 0,
        interleaved=not third or bool(config["rope_interleave"]),
    )
    method = "noaux_tc" if third else config["topk_method"]
    grouped = method != "greedy"
    count = int(config["num_local_experts"] if "num_local_experts" in config else config["n_routed_experts"])
    groups = int(config["n_group"] or 1) if grouped else 1
    lean = (
        config["hidden_act"] in ("silu", "swish")
        and rope.rope_type in LEAN_ROPE_TYPES
        and rope.partial == 1.0
        and method in ("greedy", "group_limited_greedy", "noaux_tc")
        and latent.width % 2 == 0
        and count % groups == 0
        and config.get("moe_layer_freq", 1) == 1
        and not config.get("mlp_bias", False)
    )
    if not lean:
        return _generic(config, eos)
    scale: float = (latent.plain + latent.rotated) ** -0.5
    if rope.rope_type != "default" and (weight := rope.scaling.get("mscale_all_dim")):
        scale *= yarn_mscale(rope.scaling["factor"], weight) ** 2
    dense = int(config["first_k_dense_replace"] or 0)
    with_experts = tuple(index >= dense for index in range(layers))
    routing = RoutingGroups(
        scoring="sigmoid" if third else "softmax",
        groups=groups,
        chosen=int(config["topk_group"] or 1),
        scale=float(config["routed_scaling_factor"]),
    )
    return replace(
        _decoder(config, eos, rope),
        family="deepseek",
        num_kv_heads=1,
        head_dim=latent.width,
        attention_scale=scale,
        latent=latent,
        experts=ExpertsGeometry(
            count=count,
            per_token=config["num_experts_per_tok"],
            inner_size=config["moe_intermediate_size"],
            normalised=third and bool(config["norm_topk_prob"]),
            layers=with_experts,
            shared_inner_size=config["moe_intermediate_size"] * int(config["n_shared_experts"] or 0),
            routing=routing,
        )
        if any(with_experts)
        else None,
    )


def _opt(config: dict[str, Any], eos: tuple[int, ...]) -> ModelGeometry:
    config = {**DEFAULTS["opt"], **config}
    heads, hidden, layers = config["num_attention_heads"], config["hidden_size"], config["num_hidden_layers"]
    bias = bool(config.get("enable_bias", True))
    before = bool(config.get("do_layer_norm_before", True))
    return ModelGeometry(
        model_type="opt",
        family="opt",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=config["ffn_dim"],
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        norm_eps=1e-5,
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        activation=config.get("activation_function", "relu"),
        eos_token_ids=eos,
        checkpoint_dtype=checkpoint_dtype(config),
        sliding_windows=(0,) * layers,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        word_embedding_size=config.get("word_embed_proj_dim") or hidden,
        norm_before=before,
        final_norm=before and not config.get("_remove_final_layer_norm", False),
        norm_affine=bool(config.get("layer_norm_elementwise_affine", True)),
    )


def _generic(config: dict[str, Any], eos: tuple[int, ...]) -> ModelGeometry:
    """Read any other decoder, under the names most configurations share; the loader proves the KV shape by a probe."""
    config = {**config, **config.get("text_config", {})}
    hidden = first_of(config, "hidden_size", "n_embd", "d_model")
    heads = first_of(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
    layers = first_of(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    kv_heads = config.get("num_key_value_heads") or config.get("num_kv_heads") or heads
    if config.get("multi_query"):
        kv_heads = 1
    rope = rope_of(config) if has_rope(config) else None
    return ModelGeometry(
        model_type=config["model_type"],
        family="generic",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=config.get("head_dim") or hidden // heads,
        intermediate_size=config.get("intermediate_size") or config.get("n_inner") or 4 * hidden,
        vocab_size=config["vocab_size"],
        max_positions=max_positions(config, rope),
        norm_eps=float(config.get("rms_norm_eps") or config.get("layer_norm_eps") or 1e-5),
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        activation=str(config.get("hidden_act") or config.get("activation_function") or ""),
        eos_token_ids=eos,
        checkpoint_dtype=checkpoint_dtype(config),
        rope=rope,
    )


def first_of(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise KeyError(names[0])


def has_rope(config: Mapping[str, Any]) -> bool:
    parameters = config.get("rope_parameters") or {}
    per_layer_type = any(isinstance(value, dict) for value in parameters.values())
    return not per_layer_type and bool(parameters or config.get("rope_theta") or config.get("rope_scaling"))


def rope_of(config: Mapping[str, Any]) -> RopeConfig:
    """Read both spellings: `rope_parameters` (transformers 5) and `rope_theta` beside `rope_scaling` (before)."""
    parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = parameters.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    legacy_type = parameters.pop("type", None)
    partial = parameters.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    rope_type = parameters.pop("rope_type", None) or legacy_type or "default"
    if config["model_type"] == "phi3" and rope_type in ("su", "yarn"):  # earlier names of the same
        rope_type = "longrope"
    if "original_max_position_embeddings" in config:  # Phi-3 keeps it outside, and it rules there
        parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    if rope_type == "longrope" and parameters.get("factor") is None:
        longest = config["max_position_embeddings"]
        parameters["factor"] = longest / parameters.setdefault("original_max_position_embeddings", longest)
    return RopeConfig(theta=float(theta), rope_type=rope_type, scaling=parameters, partial=float(partial))


def ropes_by_layer_type(config: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotation of layers with full attention and of those with a sliding window: `rope_parameters` has one
    for each; in earlier files `rope_theta` and `rope_scaling` of the full layers, `rope_local_base_freq` of the
    others."""
    parameters = config.get("rope_parameters") or {}
    others = {key: value for key, value in config.items() if not key.startswith("rope_")}
    full = {"rope_theta": config.get("rope_theta", 1e6), **(parameters.get("full_attention") or {})}
    local = {"rope_theta": config.get("rope_local_base_freq", 1e4), **(parameters.get("sliding_attention") or {})}
    full |= config.get("rope_scaling") or {}
    return rope_of({**others, "rope_parameters": full}), rope_of({**others, "rope_parameters": local})


def max_positions(config: Mapping[str, Any], rope: RopeConfig | None) -> int:
    """Return the context served, beyond which requests are refused: the model's, of LongRoPE only its first range.

    LongRoPE switches all of a request's frequencies at a length, which would change KV already cached (and, in one
    forward, other requests' too); inside the original range the short frequencies hold.
    """
    longest = first_of(config, "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
    if rope is not None and rope.rope_type == "longrope":
        return min(longest, int(rope.scaling.get("original_max_position_embeddings", longest)))
    return longest


def sliding_windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    layers, model_type = range(config["num_hidden_layers"]), config["model_type"]
    window, types = int(config.get("sliding_window") or 0), config.get("layer_types")
    if model_type.startswith("qwen") and not config.get("use_sliding_window", False):
        return (0,) * len(layers)
    match model_type:
        case "mistral" | "mixtral" | "phi3" | "qwen3_moe":
            return (window,) * len(layers)
        case "gemma2" | "gemma3_text" | "gpt_oss" | "qwen2" | "qwen3" | "qwen2_moe" if types:
            slides = [kind == "sliding_attention" for kind in types]
        case "qwen2" | "qwen3":
            slides = [index >= config.get("max_window_layers", 28) for index in layers]
        case "qwen2_moe":
            slides = [index % 2 == 0 and index < config.get("max_window_layers", 28) for index in layers]
        case _:
            return (0,) * len(layers)
    return tuple(window if each else 0 for each in slides)


def checkpoint_dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """Return what YaRN (Peng et al. 2023) scales attention by, for contexts longer by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def text_decoder(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the decoder alone of a Gemma 3 checkpoint that also takes images; else none."""
    text = config.get("text_config")
    if config["model_type"] != "gemma3" or not isinstance(text, dict):
        return {}
    outer = {key: config[key] for key in ("tie_word_embeddings", "dtype", "torch_dtype") if key in config}
    return {**text, **outer, "model_type": "gemma3_text"}


def eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the end tokens: generation_config.json rules where it names them, as in transformers."""
    default = DEFAULTS.get(config["model_type"], {}).get("eos_token_id")
    eos = generation.get("eos_token_id", config.get("eos_token_id", default))
    if eos is None:
        return ()
    return tuple(int(each) for each in eos) if isinstance(eos, list) else (int(eos),)
