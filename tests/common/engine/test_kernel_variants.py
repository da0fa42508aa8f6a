"""No variant of a GPU kernel is compiled while requests wait: warming up names all that a mixed workload launches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples import another_of_its_kind, nightly

pytest.importorskip("triton")

from cohort.common.engine.config.model_config import ExpertsGeometry
from cohort.common.engine.config.rank_shares import RankShare
from cohort.common.engine.device import compiled_kernels
from cohort.common.paths import cache_dir
from cohort.kernels.gpu import variants
from cohort.kernels.gpu.compile_offline import RANKS
from tests.common.engine.config.test_device_memory import LLAMA_8B
from tests.common.engine.drafts.test_eagle_head import head_folder
from tests.common.engine.kernel_variants import MAX_ROWS

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "bfloat16"),
        pytest.param("mistral-window", "float32", marks=another_of_its_kind()),
        pytest.param("qwen3", "bfloat16", marks=another_of_its_kind()),
        pytest.param("phi3-longrope", "bfloat16", marks=another_of_its_kind()),
        pytest.param("gemma3", "bfloat16", marks=another_of_its_kind()),
        pytest.param("opt", "float32", marks=another_of_its_kind()),
        pytest.param("mixtral", "bfloat16", marks=another_of_its_kind()),
        pytest.param("qwen2-moe", "float32", marks=another_of_its_kind()),
        pytest.param("gpt-oss", "bfloat16", marks=another_of_its_kind()),
        pytest.param("gemma2", "bfloat16", marks=another_of_its_kind()),
        pytest.param("deepseek2", "bfloat16", marks=another_of_its_kind()),
        pytest.param("deepseek3", "bfloat16", marks=another_of_its_kind()),
    ],
)
def test_warming_up_covers_a_mixed_workload(name: str, dtype: str, model_folder: Callable[[str], Path]) -> None:
    found = _found(f"{model_folder(name)},{dtype}")
    layers, launched = 3, found["launched"]
    latents = name.startswith("deepseek")
    decode, prefill = ("decode_latents", "prefill_latents") if latents else ("decode_rows", "prefill_rows")
    assert min(launched[decode], launched[prefill], launched["sample_rows"]) > 30 * layers, launched
    assert launched.get("_store_kv", 0) > 100 * layers, launched
    own_scores = latents or name in (
        "gpt-oss",
        "gemma2",
    )  # whose keys are never gathered: flash attention is given none of them
    assert (launched.get("stage_rows", 0) > 10 * layers) != own_scores, launched
    assert found["served_beyond_warmed"] == []
    assert found["warmed_beyond_named"] == []
    assert found["recorded_rows"] == [1, 2, 4, 8, 16, 24, 32, MAX_ROWS]
    assert found["recorded_mixed"] >= 9  # up to 64 prompt tokens, beside 8, 32 or all rows
    named = Counter(found["named"])
    classes = len(variants.row_classes(MAX_ROWS))
    kinds = 2 if name in ("gemma2", "gemma3", "gpt-oss") else 1  # of layers: with a window and without
    assert classes == 3  # 16, 32, 64
    assert named[decode] == named["merge_parts"] == kinds * classes
    assert named[prefill] == kinds
    assert (named["sample_rows"], named["stage_rows"]) == (1, not latents)
    assert named["_copy_tokens"] == 2
    mixture = latents or name in ("mixtral", "qwen2-moe")
    assert named["gated_expert_rows"] == 2 * mixture  # few rows for their experts, and many
    assert named["expert_rows"] == (2 * mixture if name != "gpt-oss" else 4)  # of gpt-oss both products
    assert named["_clamped_swiglu"] == (name == "gpt-oss")
    assert named["add_weighted_rows"] == (mixture or name == "gpt-oss")
    assert (launched.get("gated_expert_rows", 0) > 100 * layers) == mixture


@another_of_its_kind()
def test_warming_up_covers_a_head_beside_the_model(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    found = _found(f"{model_folder('llama')},bfloat16,{head_folder(tmp_path / 'head')}")
    assert found["launched"]["drafts"] > 100
    assert found["served_beyond_warmed"] == found["warmed_beyond_named"] == []


def _found(model: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.common.engine.kernel_variants", model]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "COHORT_TEST_SEEDS": "2" if nightly() else "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(line)
    return found


def test_experts_are_compiled_as_they_are_divided_over_ranks() -> None:
    """Each number of columns that a rank of gpt-oss has, and both products of them."""
    mixture = ExpertsGeometry(32, 4, 2880, normalised=True, layers=(True,) * LLAMA_8B.num_layers, mxfp4=True)
    geometry = replace(LLAMA_8B, model_type="gpt_oss", family="gpt_oss", experts=mixture)
    for degree in (2, 4, 8):
        widths = {RankShare(geometry, rank, degree).own.experts.inner_size for rank in range(degree)}  # type: ignore[union-attr]
        listed = [served for name, served in RANKS.items() if name.startswith(f"gpt-oss-20b, {degree} ranks")]
        assert {served.experts.inner for served in listed if served.experts is not None} == widths
        assert {p.inputs for served in listed for p in served.products if not p.gathers} == widths
        assert {p.outputs // 2 for served in listed for p in served.products if p.gathers} == widths
        assert {served.query_heads for served in listed} == {64 // degree}


def test_a_cache_of_one_layer_has_its_variants() -> None:
    """Of a head, or of a model that is so small."""
    for layers in (1, 3):
        tensors = variants._Tensors(variants.Served(4, 2, 16, 64, 80, 199, torch.bfloat16, layers=layers), CPU)
        assert tensors.kv[:, tensors.layer].shape == (4, 2, 2, 16, 16)


def test_compilations_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a faked hook: what Triton calls after each compilation; hooks of others go on being called."""
    others: list[str] = []
    monkeypatch.setattr(
        variants.knobs.runtime, "jit_post_compile_hook", lambda **facts: others.append(facts["fn"].name)
    )
    counting = variants._Compilations()
    monkeypatch.setattr(variants, "compilations", counting)
    before = compiled_kernels.compilations()
    counting.watch()
    counting.watch()

    class Kernel:
        name = "decode_rows"

    hook: Any = variants.knobs.runtime.jit_post_compile_hook
    hook(fn=Kernel)
    hook(fn=Kernel)
    assert (before, compiled_kernels.compilations(), others) == (0, 2, ["decode_rows"] * 2)


def test_triton_keeps_its_kernels_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COHORT_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    compiled_kernels.keep_in_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(cache_dir() / "triton") == str(tmp_path / "triton")
    assert variants.knobs.cache.dir == str(tmp_path / "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    compiled_kernels.keep_in_cache()
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
