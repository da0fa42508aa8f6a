"""Fixtures that every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cohort.common import paths
from tests.examples import register_profiles

register_profiles()

# Triton decides when it is imported whether kernels are compiled or interpreted. Without a GPU nothing compiled runs.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's folder; `scripts/test` makes it."""
    path = Path(os.environ.get("COHORT_TEST_MODEL") or paths.default_model_dir())
    if not (path / "config.json").is_file():
        pytest.skip(f"no model in {path}; scripts/setup makes it")
    return path
