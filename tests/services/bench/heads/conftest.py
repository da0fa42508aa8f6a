"""Models that heads are trained for."""

from __future__ import annotations

from tests.engine_models import few_threads, model_folder

__all__ = ["model_folder", "few_threads"]
