"""Launches of a step on a GPU are counted over the engine's own steps, kernel by kernel and recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

COUNTED = """
import re, runpy
from triton.backends.nvidia.compiler import CUDABackend

NEEDS = {each: 0 for each in ("shared", "tmem_size", "global_scratch_size", "profile_scratch_size")}
ALIGNED = {"global_scratch_align": 1, "profile_scratch_align": 1}

def empty(source, metadata):
    metadata.update(NEEDS, **ALIGNED, name=re.search(r"public @(\\w+)", str(source))[1])
    return b""

def add_stages(backend, stages, options, language):
    stages["ttir"] = lambda source, metadata: backend.make_ttir(source, metadata, options, 90)
    stages["cubin"] = empty

CUDABackend.add_stages = add_stages
runpy.run_module("cohort.services.bench.gpu_check.engine.launching", run_name="__main__")
"""
"""The command with kernels that are read and not compiled, which would take most of the time: launched are none."""


@pytest.mark.slow
def test_a_recorded_step_is_a_few_launches(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COUNTED, "--steps", "1", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = {each["step"]: each for each in json.loads(done.stdout[done.stdout.index("[\n") :])}
    mixed = "64 decode rows beside 16 prompt tokens"
    a_layer = {name: each["launches"] // 32 for name, each in found.items() if "kernel by kernel" in name}
    assert a_layer == {
        "64 decode rows, kernel by kernel": 10,
        "a prompt of 16 tokens, kernel by kernel": 11,
        f"{mixed}, kernel by kernel": 13,
    }
    assert all(each["launches"] < 10 for name, each in found.items() if "recorded" in name)
    assert all(each["host_us"] > 0 for each in found.values())
