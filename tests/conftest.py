"""Fixtures that every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cohort.common import paths


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's folder; `scripts/test` makes it."""
    path = Path(os.environ.get("COHORT_TEST_MODEL") or paths.default_model_dir())
    if not (path / "config.json").is_file():
        pytest.skip(f"no model in {path}; scripts/setup makes it")
    return path
