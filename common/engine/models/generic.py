"""Any other decoder: transformers' own layers with their attention replaced by ours over the paged cache.

Called by the model runner for architectures without a lean form. A model that the replacement cannot serve is refused
at load (`generic_probe`), so one that loads computes what transformers computes.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.models.generic_probe import check_answers, check_structure
from cohort.common.engine.models.generic_recording import hindrances
from cohort.common.engine.models.paged_interface import ATTENTION_NAME, RunningStep, attending, attention
from cohort.common.engine.models.step_inputs import StepInputs
from cohort.common.errors import ModelError


class GenericModel:
    """A transformers model over the paged cache."""

    def __init__(self, model_dir: Path, geometry: ModelGeometry, *, dtype: torch.dtype, device: torch.device) -> None:
        # Slow to import, and lean models never need it.
        from transformers import AttentionInterface, AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        AttentionInterface.register(ATTENTION_NAME, attention)
        try:
            # Loaded with the attention every architecture has; whether ours can take its place is the next question.
            model: Any = AutoModelForCausalLM.from_pretrained(
                model_dir,
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                trust_remote_code=False,  # left out, transformers asks on a terminal whether to run the folder's code
            )
        except (ValueError, OSError, KeyError, ImportError) as error:
            raise ModelError(f"{model_dir}: transformers cannot load {geometry.model_type}: {error}") from error
        self._model = model.to(device).eval()
        parameters = inspect.signature(model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        expected = check_structure(self._model, geometry, model_dir, device)
        check_answers(self, expected, geometry, model_dir, dtype, device)
        self.hindrances = hindrances(self, geometry, dtype, device)
        """Operations of its decode steps that keep them from being recorded; none: they are, as a lean model's are."""

    sampled_states: Tensor | None = None  # transformers' forward hands out logits only

    def forward(self, step: StepInputs, kv: Tensor) -> Tensor:
        """See `step_inputs.Model`."""
        extra = {"logits_to_keep": step.sample_index} if self._keeps_logits else {}
        with attending(RunningStep(step, kv)):
            output = self._model(
                input_ids=step.token_ids.unsqueeze(0),
                position_ids=step.positions.unsqueeze(0),
                use_cache=False,
                **extra,
            )
        logits: Tensor = output.logits[0]
        return (logits if self._keeps_logits else logits[step.sample_index]).float()
