"""Models that are measured."""

from __future__ import annotations

from tests.engine_models import few_threads, model_folder, real_model

__all__ = ["model_folder", "few_threads", "real_model"]
