"""The inputs of a section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cohort.common.engine.device_memory import DeviceShare
from cohort.common.engine.model_runner import ModelRunner
from cohort.services.bench.gpu_check.report import Findings
from cohort.services.bench.gpu_check.shapes import LLAMA_3_8B, QWEN25_14B, TINY, shape_folder


@dataclass(frozen=True, slots=True)
class Check:
    """`real`: a GPU is measured; else tiny shapes show on the processor that everything runs. `folder`: for models, run
    files, logs."""

    device: torch.device
    real: bool
    folder: Path
    found: Findings

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.real else torch.float32

    def shapes(self) -> Mapping[str, Mapping[str, Any]]:
        """The model shapes to measure."""
        return {"Llama-3-8B": LLAMA_3_8B, "Qwen2.5-14B": QWEN25_14B} if self.real else {"tiny": TINY}

    def runner(self, name: str, config: Mapping[str, Any], **overrides: Any) -> ModelRunner:
        """A model of this shape with random weights, as a worker would load it; on the processor with a small cache."""
        options: dict[str, Any] = {
            "dtype": "bfloat16" if self.real else "float32",
            "device": str(self.device),
            "threads": 0,
            "block_size": 16,
            "num_blocks": 0 if self.real else 64,
            "host_blocks": 0,
            "max_rows": 256 if self.real else 8,
            "max_step_tokens": 2048 if self.real else 128,
            "weights": "random",
            "device_steps": True,
            "share": DeviceShare(graphs=2 << 30),
        }
        return ModelRunner(shape_folder(self.folder / name, config), **{**options, **overrides})
