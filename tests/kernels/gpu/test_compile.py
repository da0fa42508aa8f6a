"""The kernels as machine code for a GPU that is not here: what the interpreter lets pass, a compiler may refuse."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper_and_spills_next_to_nothing(tmp_path):
    tables = tmp_path / "tables.md"
    command = [sys.executable, "-P", "-m", "cohort.kernels.gpu.compile_offline", "--model", "Llama-3-8B"]
    command += ["--max-rows", "20", "--markdown", str(tables)]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
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
