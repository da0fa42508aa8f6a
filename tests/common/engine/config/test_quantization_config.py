"""config.json's quantization_config → which modules are stored how, or a refusal that names what is served."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cohort.common.engine.config.quantization_config import (
    CodeLayout,
    Quantization,
    WeightScheme,
    check_wanted,
    keeps_codes,
    read_quantization,
)
from cohort.common.errors import ModelError

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
INT4_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}


def compressed(weights: dict[str, Any], form: str = "float-quantized", **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, **more.pop("group", {})}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, **more}


def read(found: Any) -> Quantization:
    quantization = read_quantization({"quantization_config": found}, "config.json")
    assert quantization is not None
    return quantization


def test_plain_checkpoints_have_none() -> None:
    assert read_quantization({"model_type": "llama"}, "config.json") is None
    assert read_quantization({"quantization_config": None}, "config.json") is None


def test_deepseeks_and_qwens_fp8() -> None:
    """As Qwen3-8B-FP8 says it."""
    found = read(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
        }
    )
    scheme = WeightScheme("scaled", 8, floating=True, block=(128, 128))
    assert found == Quantization("fp8", (scheme,), ("lm_head", "model.layers.0.input_layernorm"), "dynamic")
    assert found.scheme_of("model.layers.0.mlp.up_proj") == scheme and found.scheme_of("lm_head") is None


def test_autofp8() -> None:
    found = read({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["re:.*lm_head"]})
    assert found == Quantization("fp8", (WeightScheme("scaled", 8, floating=True),), ("re:.*lm_head",), "static")
    assert found.scheme_of("lm_head") is None


def test_compressed_tensors_excludes_by_whole_names_and_patterns() -> None:
    group = {"input_activations": {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}}
    found = read(compressed(FP8_WEIGHTS, ignore=["lm_head", r"re:.*\.gate$"], group=group))
    assert found.activations == "dynamic"
    assert [
        found.scheme_of(module) is None for module in ("lm_head", "x.lm_head", "a.mlp.gate", "a.mlp.gate_proj")
    ] == [True, False, True, False]


def test_the_older_name_of_the_section() -> None:
    section = compressed(INT4_WEIGHTS, "pack-quantized")
    del section["quant_method"]
    found = read_quantization({"compression_config": section}, "config.json")
    assert found == Quantization("compressed-tensors", (WeightScheme("packed", 4, group=128),), ())
    nested = read_quantization({"text_config": {"quantization_config": section}}, "config.json")
    assert nested == found


def test_groups_of_modules_with_schemes_of_their_own() -> None:
    """A target by name or pattern goes before the class."""
    section = compressed(INT4_WEIGHTS, "mixed-precision", group={"format": "pack-quantized"})
    section["config_groups"]["group_1"] = {
        "targets": [r"re:.*down_proj"],
        "weights": FP8_WEIGHTS,
        "format": "float-quantized",
    }
    found = read(section)
    packed, floating = found.scheme_of("model.layers.0.mlp.up_proj"), found.scheme_of("model.layers.0.mlp.down_proj")
    assert packed is not None and packed.layout == "packed"
    assert floating is not None and floating.layout == "scaled" and floating.floating


def test_awq_and_gptq() -> None:
    awq = read({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "GEMM", "zero_point": True})
    assert awq.schemes == (WeightScheme("awq", 4, group=128, symmetric=False),)
    excluding = read({"quant_method": "awq", "bits": 4, "group_size": -1, "modules_to_not_convert": ["mlp.gate"]})
    assert excluding.schemes[0].group == 0
    assert excluding.scheme_of("model.layers.3.mlp.gate") is None
    assert excluding.scheme_of("model.layers.3.mlp.gate_proj") is not None
    assert read(GPTQ).schemes == (WeightScheme("gptq", 4, group=128, zero_is_one_less=True),)
    later = read({**GPTQ, "checkpoint_format": "gptq_v2", "bits": 8, "sym": False, "dynamic": {"-:lm_head": {}}})
    assert later.schemes == (WeightScheme("gptq", 8, group=128, symmetric=False),)


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "the method bitsandbytes"),
        ({"quant_method": "hqq"}, "the method hqq"),
        ({"quant_method": "mxfp4"}, "the method mxfp4"),
        ({**GPTQ, "bits": 3}, "gptq weights of 3 bits"),
        ({**GPTQ, "bits": 2}, "gptq weights of 2 bits"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "gptq weights in the format marlin"),
        ({**GPTQ, "is_marlin_format": True}, "gptq weights in the format marlin"),
        ({**GPTQ, "dynamic": {r"+:.*down.*": {"bits": 8}}}, r"bits or groups of their own for some modules \(\+:"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq weights in the layout gemv"),
        ({"quant_method": "awq", "bits": 8}, "awq weights of 8 bits"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 weights in e5m2"),
        (compressed(FP8_WEIGHTS, "nvfp4-pack-quantized"), "in the format nvfp4-pack-quantized"),
        (compressed({**INT4_WEIGHTS, "num_bits": 3}, "pack-quantized"), r"pack-quantized weights of 3 bits \(int\)"),
        (compressed(INT4_WEIGHTS, "int-quantized"), r"int-quantized weights of 4 bits"),
        (compressed(FP8_WEIGHTS, sparsity_config={"format": "sparse-24-bitmask"}), r"sparsity \(sparse-24-bitmask\)"),
        (compressed(FP8_WEIGHTS, transform_config={"config_groups": {"u": {}}}), "transforms of their inputs"),
        (compressed(FP8_WEIGHTS, group={"targets": ["Embedding"]}), "weights of Embedding modules"),
    ],
)
def test_what_is_not_served_is_refused_with_what_is(found: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: .*{named}.* are not served; served are fp8 \(E4M3.*awq \(4"):
        read(found)


@pytest.mark.parametrize("found", [{"quant_method": "gptq"}, [4], compressed(FP8_WEIGHTS, group={"targets": ["re:("]})])
def test_a_section_that_makes_no_sense_is_named(found: Any) -> None:
    with pytest.raises(ModelError, match=r"config\.json: quantization_config"):
        read(found)


def test_the_wanted_quantisation_agrees_with_the_checkpoint_or_is_refused() -> None:
    gptq = read(GPTQ)
    for wanted in ("auto", "gptq", "gptq_marlin"):
        check_wanted(wanted, gptq, "m")
    for wanted in ("auto", "none", "int8", "int4"):
        check_wanted(wanted, None, "m")
    with pytest.raises(ModelError, match=r"int4, but config\.json of m says that it is quantised by gptq"):
        check_wanted("int4", gptq, "m")
    with pytest.raises(ModelError, match=r"awq, but config\.json of m says that it is quantised by gptq"):
        check_wanted("awq", gptq, "m")
    with pytest.raises(ModelError, match=r"none, but config\.json of m says"):
        check_wanted("none", gptq, "m")
    with pytest.raises(
        ModelError, match=r"fp8, but .* its weights are plain; at load, plain weights are rounded to int8 or int4"
    ):
        check_wanted("fp8", None, "m")
    with pytest.raises(ModelError, match=r"'bitsandbytes' is not served; write one of auto, none, fp8"):
        check_wanted("bitsandbytes", gptq, "m")


@pytest.mark.parametrize(
    ("more", "reordered"),
    [
        ({}, False),
        ({"desc_act": True}, True),
        ({"desc_act": True, "group_size": -1}, False),  # one group has every order
        ({"desc_act": True, "static_groups": True}, False),  # made of neighbours, then quantised in another order
    ],
)
def test_act_order_is_known_before_the_files_are_read(more: dict[str, Any], reordered: bool) -> None:
    (scheme,) = read({**GPTQ, **more}).schemes
    assert scheme.reordered == reordered
    assert keeps_codes("cpu", "bfloat16", scheme.codes(4096)) != reordered


@pytest.mark.parametrize(("order", "reordered"), [(None, False), ("weight", False), ("group", True), (True, True)])
def test_compressed_tensors_says_its_order(order: Any, reordered: bool) -> None:
    (scheme,) = read(compressed({**INT4_WEIGHTS, "actorder": order}, "pack-quantized")).schemes
    assert scheme.reordered == reordered


def test_what_stays_in_codes() -> None:
    integers = CodeLayout(4, False, 128, 4096, offsets=True)
    floats = CodeLayout(8, True, 128, 4096, offsets=False)
    for codes in (integers, floats, None):
        assert keeps_codes("cpu", "bfloat16", codes) and keeps_codes("cpu", "float16", codes)
        assert keeps_codes("cuda", "bfloat16", codes) and keeps_codes("cuda", "float16", codes)
        assert not keeps_codes("cuda", "float32", codes) and not keeps_codes("cuda", "float32", codes, checkpoint=False)
        assert not keeps_codes("cpu", "float32", codes)  # computes exactly what its codes mean
        assert keeps_codes("cpu", "float32", codes, checkpoint=False)  # rounded for these products
    assert not keeps_codes("cpu", "bfloat16", replace(integers, group=24))
    for codes in (integers, floats):
        assert not keeps_codes("cuda", "bfloat16", replace(codes, group=48))
        assert not keeps_codes("cuda", "bfloat16", replace(codes, reordered=True))
    assert not keeps_codes("cuda", "bfloat16", replace(integers, inputs=4095, group=4095))
    assert keeps_codes("cpu", "bfloat16", replace(floats, group=24))
    assert not keeps_codes("cpu", "bfloat16", replace(floats, offsets=True))
    assert not keeps_codes("cpu", "bfloat16", replace(integers, inputs=4095, group=4095))
