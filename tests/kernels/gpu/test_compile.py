"""The kernels as machine code for a GPU that is not here: what the interpreter lets pass, a compiler may refuse."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.examples import another_of_its_kind


def compiled(request, model, *more):
    """What is said of each variant. Once per checkout: Triton finds again what it made of the same source."""
    command = [sys.executable, "-P", "-m", "cohort.kernels.gpu.compile_offline", "--max-rows", "20", "--model", model]
    kept = str(request.config.cache.mkdir("triton"))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": kept}
    done = subprocess.run([*command, *more], env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line.strip() for line in done.stdout.splitlines()]
    return [line[len(model) :].split() for line in said if line.startswith(f"{model} ")]


@another_of_its_kind()
@pytest.mark.slow
def test_every_kernel_compiles_for_hopper_and_spills_next_to_nothing(request):
    lines = compiled(request, "Llama-3-8B")
    names = [line[0] for line in lines]
    assert set(names) == {
        "decode_rows",
        "merge_parts",
        "prefill_rows",
        "stage_rows",
        "sample_rows",
        "_copy_tokens",
        "_store_kv",
        "_rope",
        "_rms_norm",
        "_silu_mul",
    }
    assert names.count("decode_rows") == names.count("merge_parts") == 2  # 16 and 32 rows
    assert names.count("sample_rows") == 1
    # without 16-byte loads of keys and values decode is far from what the memory gives
    assert all(int(line[-1]) >= 16 for line in lines if line[0] in ("decode_rows", "prefill_rows"))
    assert all(int(line[-1]) >= 4 for line in lines if line[0] == "sample_rows")


@pytest.mark.slow
def test_what_gives_a_position_its_bits_is_one_variant(request):
    """For one row and for many, in parts and at once, wherever queries lie: another variant might compute otherwise."""
    asked = ("--launch", "every row", "--launch", "960 x 576")
    names = [line[0] for line in compiled(request, "SmolLM2-135M, batch-invariant", *asked)]
    assert names.count("position_rows") == names.count("join_parts") == 1
    assert names.count("product_rows") == names.count("add_parts") == 2  # into its place, and added to what is there
