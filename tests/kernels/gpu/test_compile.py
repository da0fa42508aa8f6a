"""The kernels as machine code for a GPU that is not here: what the interpreter lets pass, a compiler may refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def compiled(cache: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "cohort.kernels.gpu.compile_offline", *options]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper_and_spills_next_to_nothing(tmp_path):
    tables = tmp_path / "tables.md"
    done = compiled(tmp_path, "--model", "Llama-3-8B", "--max-rows", "20", "--markdown", str(tables))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    names = [line[1] for line in lines]
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
    assert all(int(line[-1]) >= 16 for line in lines if line[1] in ("decode_rows", "prefill_rows"))
    assert all(int(line[-1]) >= 4 for line in lines if line[1] == "sample_rows")
    assert tables.read_text().count("| `decode_rows` |") >= 1


@pytest.mark.slow
def test_what_gives_a_position_its_bits_is_one_variant(tmp_path):
    """For one row and for many, in parts and at once, wherever queries lie: another variant might compute otherwise."""
    done = compiled(
        tmp_path, "--model", "SmolLM2-135M, batch-invariant", "--launch", "every row", "--launch", "960 x 576"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = [line.split(", batch-invariant ")[1].split()[0] for line in done.stdout.splitlines()]
    assert names.count("position_rows") == names.count("join_parts") == 1
    assert names.count("product_rows") == names.count("add_parts") == 2  # into its place, and added to what is there
