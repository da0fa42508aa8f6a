from __future__ import annotations

import json
import math
import os
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cohort.common.config import load_config
from cohort.common.devices.fit import (
    Need,
    check_fit,
    check_host_fit,
    gpu_dtype,
    host_need,
    need,
    parameters,
    share_bytes,
    weight_bytes,
)
from cohort.common.engine.config.device_memory import kv_bytes
from cohort.common.engine.config.model_config import ExpertsGeometry, ModelGeometry, read_geometry
from cohort.common.engine.config.quantization_config import Quantization, WeightScheme
from cohort.common.engine.config.rank_shares import RankShare
from cohort.common.errors import ConfigError
from tests.common.devices.fakes import GIB
from tests.common.engine.config.test_device_memory import LLAMA_8B

V2_LITE: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "vocab_size": 102400,
}


def shard(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """A safetensors file with a hole for its data: only headers are read here."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * int(re.sub(r"^[A-Z]+|_.*", "", dtype)) // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)


def config(**engine: Any) -> Any:
    return load_config(overrides={"engine": {"device": "cuda", **engine}})


def test_weights_are_counted_from_the_files_headers(tmp_path: Path) -> None:
    shard(tmp_path / "model-00001-of-00002.safetensors", {"a": ("F32", [10, 4]), "b": ("BF16", [7])})
    shard(tmp_path / "model-00002-of-00002.safetensors", {"c": ("F16", [2, 2, 2]), "scalar": ("F32", [])})
    shard(tmp_path / "consolidated.safetensors", {"everything once more": ("BF16", [56])})
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = {"weight_map": {"a": names[0], "b": names[0], "c": names[1], "scalar": names[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert parameters(tmp_path, LLAMA_8B) == 40 + 7 + 8 + 1
    assert need(config(), tmp_path, LLAMA_8B).weights == 56 * 2  # 16 bits on a GPU, whatever the file has
    assert gpu_dtype(config()) == "bfloat16"


def test_broken_files_are_the_engines_business(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert parameters(tmp_path, LLAMA_8B) == 0


def test_random_weights_are_counted_from_the_shape(tmp_path: Path) -> None:
    assert parameters(tmp_path, LLAMA_8B, "random") == pytest.approx(8.03e9, rel=0.01)


def test_an_8b_model_fits_24_gib_alone_but_not_two_of_them(tmp_path: Path) -> None:
    settings = load_config(overrides={"model": {"weights": "random"}, "engine": {"device": "cuda"}})
    wanted = need(settings, tmp_path, LLAMA_8B)
    check_fit(settings, "llama", wanted, "L4", 24 * GIB, 1)
    with pytest.raises(ConfigError, match="one worker per GPU instead of 2"):
        check_fit(settings, "llama", wanted, "L4", 24 * GIB, 2)
    check_fit(settings, "llama", wanted, "?", 0, 2)  # nothing known of the GPU


def test_several_gpus_are_proposed_for_what_divides_alone(tmp_path: Path) -> None:
    settings = load_config(overrides={"model": {"weights": "random"}, "engine": {"device": "cuda"}})
    dense, whole = (need(settings, tmp_path, replace(LLAMA_8B, family=family)) for family in ("llama", "gemma"))
    assert (dense.degrees, whole.degrees) == ((2, 4, 8, 16), ())
    with pytest.raises(ConfigError, match="tensor_parallel 2"):
        check_fit(settings, "llama", dense, "T4", 16 * GIB, 1)
    with pytest.raises(ConfigError, match=r"too much; ") as refused:
        check_fit(settings, "gemma", whole, "T4", 16 * GIB, 1)
    assert "tensor_parallel" not in str(refused.value)


def test_a_mixture_is_proposed_in_groups_that_its_experts_divide_by(tmp_path: Path) -> None:
    """And a rank is counted with its columns of every expert, in its weights and in what a step takes."""
    settings = load_config(overrides={"model": {"weights": "random"}, "engine": {"device": "cuda"}})
    of_experts = ExpertsGeometry(8, 2, 14336, normalised=True, layers=(True,) * LLAMA_8B.num_layers)
    mixtral = replace(LLAMA_8B, family="moe", model_type="mixtral", vocab_size=32000, experts=of_experts)
    wanted, half = need(settings, tmp_path, mixtral), need(settings, tmp_path, mixtral, 2)
    assert wanted.degrees == (2, 4, 8, 16)
    assert wanted.weights == pytest.approx(93.4e9, rel=0.01) and half.weights == wanted.weights // 2
    assert half.steps < wanted.steps and half.cache == wanted.cache // 2
    assert half.graphs == wanted.graphs == settings.engine.cuda_graph_memory_bytes
    with pytest.raises(ConfigError, match=r"tensor_parallel 2 \("):
        check_fit(settings, "mixtral", wanted, "H100", 80 * GIB, 1)
    check_fit(settings, "mixtral", half, "H100", 80 * GIB, 1)
    in_codes = replace(mixtral, experts=replace(of_experts, inner_size=2880, mxfp4=True), family="gpt_oss")
    assert need(settings, tmp_path, in_codes).degrees == (2, 4, 8, 16)  # 90 groups of columns


def test_a_cache_of_latents_is_on_every_gpu(tmp_path: Path) -> None:
    """DeepSeek-V2-Lite with latents that are large beside its weights: more GPUs hold no more tokens."""
    settings = load_config(overrides={"model": {"weights": "random"}, "engine": {"device": "cuda"}})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v2", **V2_LITE}))
    geometry = read_geometry(tmp_path)
    wanted, half = need(settings, tmp_path, geometry), need(settings, tmp_path, geometry, 2)
    assert wanted.weights == pytest.approx(31.4e9, rel=0.01) and half.weights == wanted.weights // 2
    assert half.cache == wanted.cache > 0 and half.steps < wanted.steps
    assert half.whole_cache and wanted.degrees == (2, 4, 8, 16)
    for cache, gib, degree in ((wanted.cache, 32, 2), (12 * GIB, 24, 8)):
        with pytest.raises(ConfigError, match=rf"tensor_parallel {degree} \("):
            check_fit(settings, "V2-Lite", replace(wanted, cache=cache), "GPU", gib * GIB, 1)
    with pytest.raises(ConfigError) as refused:
        check_fit(settings, "V2-Lite", replace(wanted, cache=20 * GIB), "GPU", 20 * GIB, 1)
    assert "tensor_parallel" not in str(refused.value)


@pytest.mark.parametrize("degree", [2, 4])
def test_a_ranks_weights_are_what_its_files_have_for_it(degree: int, tmp_path: Path) -> None:
    """By tensor: queries' first product, latents and router are whole on every rank, experts' groups are uneven."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v2", **V2_LITE}))
    geometry = replace(
        read_geometry(tmp_path),
        quantization=Quantization("fp8", (WeightScheme("scaled", 8, True, block=(128, 128)),), ()),
    )
    layer = "model.layers.1."
    shapes = {
        "self_attn.q_proj": (3072, 2048),
        "self_attn.kv_a_proj_with_mqa": (576, 2048),
        "self_attn.o_proj": (2048, 2048),
        "mlp.experts.5.up_proj": (1408, 2048),
        "mlp.experts.5.down_proj": (2048, 1408),
    }
    tensors = {f"{layer}{name}.weight": ("F8_E4M3", list(shape)) for name, shape in shapes.items()}
    tensors |= {f"{layer}{name}.weight_scale_inv": ("F32", [-(-n // 128) for n in shapes[name]]) for name in shapes}
    tensors[f"{layer}mlp.gate.weight"] = ("BF16", [64, 2048])
    shard(tmp_path / "model.safetensors", tensors)
    groups = {2: [6, 5], 4: [3, 3, 3, 2]}[degree]
    for rank, own in enumerate(groups):
        widened = 3072 * 2048 // degree + 576 * 2048 + 2048 * 2048 // degree  # attention, when it is read
        codes, router = 2 * own * 128 * 2048, 64 * 2048
        found = weight_bytes(tmp_path, geometry, 2, share=RankShare(geometry, rank, degree))
        assert found - 2 * (widened + router) - codes == 4 * codes // 128 // 128  # scales of blocks
    assert need(config(), tmp_path, geometry, degree).weights == weight_bytes(
        tmp_path, geometry, 2, share=RankShare(geometry, 0, degree)
    )


def test_the_refusal_says_by_how_much_and_what_would_fit() -> None:
    large = Need(weights=141 * GIB, steps=2 * GIB, graphs=2 * GIB, cache=0)
    with pytest.raises(ConfigError) as refused:
        check_fit(config(), "llama-70b", large, "NVIDIA H100", 80 * GIB, 1)
    told = str(refused.value)
    for part in (
        "llama-70b does not fit NVIDIA H100",
        "needs 141.0 GiB for weights, 2.0 GiB for steps and 2.0 GiB for graphs, its share is 72.0 GiB of 80.0 GiB",
        "73.0 GiB too much",
        "tensor_parallel 4 (workers: [{role, tensor_parallel}]), or a GPU of 162 GiB or more would fit",
    ):
        assert part in told
    assert "16 bits" not in told and "per GPU instead" not in told
    wide = load_config(overrides={"engine": {"device": "cuda"}, "model": {"dtype": "float32"}})
    with pytest.raises(ConfigError, match=r"16 bits \(model.dtype=bfloat16\)"):
        check_fit(wide, "m", Need(80 * GIB, GIB, GIB, 0), "H100", 80 * GIB, 1)
    with pytest.raises(ConfigError, match=r"lower engine.max_step_tokens"):
        check_fit(config(), "m", Need(14 * GIB, 2 * GIB, GIB, 0), "T4", 16 * GIB, 1)


def test_the_refusal_proposes_fp8_kv_and_fewer_bits_with_what_they_take(tmp_path: Path) -> None:
    """The least change that fits; what it would take is what `need` then says."""
    random = {"weights": "random", "max_model_len": 65536}
    plain = need(load_config(overrides={"model": random, "engine": {"device": "cuda"}}), tmp_path, LLAMA_8B)
    fp8 = need(
        load_config(overrides={"model": random, "engine": {"device": "cuda"}, "kv": {"cache_dtype": "fp8"}}),
        tmp_path,
        LLAMA_8B,
    )
    assert plain.fp8_cache == fp8.cache and fp8.fp8_cache == 0
    long = replace(plain, cache=8 * plain.cache, fp8_cache=8 * plain.fp8_cache)
    in_fp8 = long.total - long.cache + long.fp8_cache
    with pytest.raises(ConfigError) as refused:
        check_fit(config(), "m", long, "L4", int(in_fp8 / 0.9) + GIB // 4, 1)
    assert f"too much; --kv-cache-dtype fp8 ({in_fp8 / GIB:.1f} GiB a worker), or " in str(refused.value)
    names, sizes = zip(*plain.codes, strict=True)
    assert names == ("FP8 or INT8", "4 bits (AWQ, GPTQ)")
    tables = 2 * 2 * LLAMA_8B.vocab_size * LLAMA_8B.hidden_size
    assert [(size - tables) / (plain.weights - tables) for size in sizes] == pytest.approx([8.25 / 16, 4.75 / 16])
    for has, told in (
        (0.95 * sizes[0] + plain.total - plain.weights, "a checkpoint in 4 bits (AWQ, GPTQ) ("),
        (1.01 * sizes[0] + plain.total - plain.weights, "a checkpoint in FP8 or INT8 ("),
    ):
        with pytest.raises(ConfigError) as refused:
            check_fit(config(), "m", plain, "T4", int(has / 0.9), 1)
        assert told in str(refused.value)
    assert need(config(), tmp_path, scaled(floating=True)).codes == ()


def test_one_worker_has_far_more_cache_than_two_that_stand_by_for_each_other() -> None:
    """Why `workers: auto` gives one GPU one worker: the standby's weights, steps and half of the memory are lost."""
    wanted = need(
        load_config(overrides={"model": {"weights": "random"}, "engine": {"device": "cuda"}}), Path(), LLAMA_8B
    )

    def cache(sharers: int) -> int:
        return kv_bytes(
            total=80 * GIB,
            free=80 * GIB - sharers * wanted.weights,
            own=wanted.weights,
            sharers=sharers,
            fraction=0.9,
            reserved=wanted.steps + wanted.graphs,
        )

    assert cache(1) > 2.5 * cache(2) > 0


def test_a_share_is_a_part_of_what_may_be_used() -> None:
    assert share_bytes(config(), 80 * GIB, 2) == int(0.9 * 40 * GIB)


AWQ = replace(LLAMA_8B, quantization=Quantization("awq", (WeightScheme("awq", 4, group=128, symmetric=False),), ()))
CPU_7B = {"model": {"weights": "random", "max_model_len": 4096}, "kv": {"memory_bytes": 8 * GIB}}


def awq_shard(folder: Path) -> None:
    """One projection of 4096 by 4096 in groups of 128, and a norm."""
    shard(
        folder / "model.safetensors",
        {
            "m.qweight": ("I32", [4096, 512]),
            "m.qzeros": ("I32", [32, 512]),
            "m.scales": ("F16", [32, 4096]),
            "m.input_scale": ("F32", [1]),
            "norm.weight": ("BF16", [4096]),
        },
    )


def test_codes_are_counted_as_the_weights_they_stand_for(tmp_path: Path) -> None:
    """Where they are dequantised at load, that is what they take: in float32."""
    awq_shard(tmp_path)
    assert parameters(tmp_path, AWQ) == 4096 * 4096 + 4096
    assert weight_bytes(tmp_path, AWQ, 4, "files", "cuda", "float32") == 4 * (4096 * 4096 + 4096)
    assert weight_bytes(tmp_path, AWQ, 2) == 4 * 512 * 4096 + 4 * 32 * (512 + 4096) + 2 * 4096
    shard(tmp_path / "model.safetensors", {"mlp.experts.0.up.weight": ("F8_E4M3", [8, 8])})
    assert weight_bytes(tmp_path, AWQ, 2) == 2 * 64
    shard(tmp_path / "model.safetensors", {"m.weight": ("F8_E4M3", [8, 8]), "m.weight_scale": ("F32", [8, 1])})
    assert parameters(tmp_path, AWQ) == 64


def test_experts_in_mxfp4_take_their_bytes_on_a_gpu(tmp_path: Path) -> None:
    """gpt-oss: 2 experts of 64 outputs and 96 inputs, with biases; widened in float32 and on a processor."""
    tensors = {
        "e.gate_up_proj_blocks": ("U8", [2, 64, 3, 16]),
        "e.gate_up_proj_scales": ("U8", [2, 64, 3]),
        "e.gate_up_proj_bias": ("BF16", [2, 64]),
        "norm.weight": ("BF16", [96]),
    }
    shard(tmp_path / "model.safetensors", tensors)
    oss = replace(LLAMA_8B, family="gpt_oss")
    plain = 2 * 64 + 96
    assert parameters(tmp_path, oss) == 2 * 64 * 96 + plain
    assert weight_bytes(tmp_path, oss, 2) == 2 * 64 * 96 * 4.25 / 8 + 2 * plain
    assert weight_bytes(tmp_path, oss, 4, "files", "cuda", "float32") == 4 * parameters(tmp_path, oss)
    assert weight_bytes(tmp_path, oss, 2, "files", "cpu") == 2 * parameters(tmp_path, oss)
    wanted = need(config(), tmp_path, oss)
    assert wanted.weights == weight_bytes(tmp_path, oss, 2) and wanted.graphs > 0
    halved = need(load_config(overrides={"model": {"dtype": "float32"}}), tmp_path, oss)
    assert halved.weights == 4 * parameters(tmp_path, oss)


def scaled(**scheme: Any) -> ModelGeometry:
    quantization = Quantization("compressed-tensors", (WeightScheme("scaled", 8, **scheme),), ())
    return replace(LLAMA_8B, quantization=quantization)


def test_where_codes_are_kept_they_take_what_they_are(tmp_path: Path) -> None:
    """By the rule that the engine reads weights by: not in float32, not with act-order, not in groups of 8."""
    awq_shard(tmp_path)
    wide = 2 * (4096 * 4096 + 4096)
    for device in ("cpu", "cuda"):
        assert weight_bytes(tmp_path, AWQ, 2, "files", device) == 4 * 512 * 4096 + 4 * 32 * (512 + 4096) + 2 * 4096
    assert weight_bytes(tmp_path, AWQ, 4, "files", "cpu", "float16") < wide / 3  # widened are the plain ones alone
    assert weight_bytes(tmp_path, AWQ, 4, "files", "cpu", "float32") == 2 * wide
    for reordered, group in ((True, 128), (False, 8)):
        scheme = WeightScheme("gptq", 4, group=group, reordered=reordered)
        gptq = replace(AWQ, quantization=Quantization("gptq", (scheme,), ()))
        assert weight_bytes(tmp_path, gptq, 2, "files", "cpu") == weight_bytes(tmp_path, gptq, 2) == wide
    codes = {"m.weight": ("F8_E4M3", [8, 8]), "m.weight_scale": ("F32", [8, 1]), "n.weight": ("BF16", [8, 8])}
    shard(tmp_path / "model.safetensors", codes)
    assert weight_bytes(tmp_path, scaled(floating=True), 2, "files", "cpu") == 64 + 8 * 4 + 2 * 64
    assert weight_bytes(tmp_path, scaled(floating=True, symmetric=False), 2, "files", "cpu") == 4 * 64
    shard(tmp_path / "model.safetensors", {"m.weight": ("I8", [8, 8]), "m.weight_scale": ("F32", [8, 1])})
    assert weight_bytes(tmp_path, scaled(), 2, "files", "cpu") == 64 + 8 * 4
    assert weight_bytes(tmp_path, scaled(group=4), 2) == 2 * 64, "no whole tile of a GPU's kernel"
    for has, name in ((20, "int8"), (10, "int4")):
        with pytest.raises(ConfigError, match=f"too much; --quantization {name}, or 29 GiB of memory"):
            check_host_fit(config(), "m", Need(28 * GIB, 0, 0, GIB, 4096, rounds=True), has * GIB, 1)


def test_a_host_is_told_what_lacks_before_anything_is_read() -> None:
    settings = load_config(overrides=CPU_7B)
    wanted = host_need(settings, Path(), LLAMA_8B, computes_bfloat16=True)
    assert wanted.weights == 2 * parameters(Path(), LLAMA_8B, "random")
    assert (wanted.kv_tokens, wanted.cache) == (4096, 4096 * LLAMA_8B.kv_token_bytes("bfloat16"))
    check_host_fit(settings, "llama", wanted, wanted.total, 1)
    check_host_fit(settings, "llama", wanted, 0, 9)  # nothing known of the host
    with pytest.raises(ConfigError) as refused:
        check_host_fit(settings, "llama", wanted, wanted.total + GIB, 2)
    told = str(refused.value)
    for part in (
        "each of its 2 workers needs 15.0 GiB for weights, 0.5 GiB for 4,096 tokens of KV and 0.2 GiB for steps",
        f"{wanted.total / GIB - 1:.1f} GiB too much; 1 of the 2 workers (--preset unified has one), or ",
        "GiB of memory that are free would fit",
    ):
        assert part in told
    assert "--quantization int8, or " in told
    assert "tensor_parallel" not in told  # it makes nothing less of one host's memory


def test_weights_that_are_rounded_at_load_are_counted_so() -> None:
    plain, eight, four = (
        host_need(
            load_config(overrides={**CPU_7B, "model": {**CPU_7B["model"], "weights": "files", "quantization": name}}),
            Path("nowhere"),
            LLAMA_8B,
            computes_bfloat16=True,
        )
        for name in ("auto", "int8", "int4")
    )
    assert (plain.rounds, eight.rounds) == (True, False)
    assert 0.5 < eight.weights / plain.weights < 0.6 and 0.3 < four.weights / plain.weights < 0.4


def test_a_processor_without_bfloat16_widens_all_but_the_embedding() -> None:
    settings = load_config(overrides={**CPU_7B, "model": {**CPU_7B["model"], "dtype": "bfloat16"}})
    count, table = parameters(Path(), LLAMA_8B, "random"), LLAMA_8B.vocab_size * LLAMA_8B.hidden_size
    wanted = host_need(settings, Path(), LLAMA_8B, computes_bfloat16=False)
    assert wanted.weights == 4 * count - 2 * table


def test_the_least_cache_is_no_more_than_what_is_configured() -> None:
    settings = load_config(overrides={"model": {"weights": "random"}, "kv": {"memory_bytes": 64 << 20}})
    wanted = host_need(settings, Path(), LLAMA_8B, computes_bfloat16=True)
    assert wanted.cache <= 64 << 20 and wanted.kv_tokens == wanted.cache // LLAMA_8B.kv_token_bytes("bfloat16")
