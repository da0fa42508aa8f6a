"""The inputs of a section: the device, its rates, the guard of its items, and models of known shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.services.bench.gpu_check.frame import rates
from cohort.services.bench.gpu_check.frame.bounds import Ceilings
from cohort.services.bench.gpu_check.frame.guard import Guard
from cohort.services.bench.gpu_check.frame.report import Findings
from cohort.services.bench.gpu_check.frame.shapes import LLAMA_3_8B, QWEN25_14B, TINY, shape_folder


@dataclass(slots=True)
class Check:
    """`real`: a GPU is measured; else tiny shapes show that everything runs. `folder`: for models and run files;
    `logs`: for what is to be kept."""

    device: torch.device
    real: bool
    folder: Path
    found: Findings
    guard: Guard
    logs: Path
    _ceilings: Ceilings | None = field(default=None, init=False)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.real else torch.float32

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def ceilings(self) -> Ceilings:
        """This device's rates, measured by this process when they are first asked for."""
        if self._ceilings is None:
            self._ceilings = rates.ceilings(self.device, self.dtype, real=self.real)
            print(f"ceilings: {self._ceilings}", flush=True)
        return self._ceilings

    def shape(self, name: str) -> Mapping[str, Any]:
        """A model shape to measure; on the processor there is one for all."""
        return {"Llama-3-8B": LLAMA_3_8B, "Qwen2.5-14B": QWEN25_14B}[name] if self.real else TINY

    def runner(self, name: str, config: Mapping[str, Any], **overrides: Any) -> ModelRunner:
        return random_model(self.folder / name, config, self.device, real=self.real, **overrides)

    def keep_profile(self, name: str, note: str, kernels: list[dict[str, Any]]) -> None:
        """A profile's table, for the report."""
        folder = self.folder / "profiles"
        folder.mkdir(parents=True, exist_ok=True)
        content = {"name": name, "note": note, "kernels": kernels}
        file = folder / f"{self.found.section}-{len(list(folder.iterdir())):02}.json"
        file.write_text(json.dumps(content), encoding="utf-8")


def random_model(
    folder: Path, config: Mapping[str, Any], device: torch.device, *, real: bool, **overrides: Any
) -> ModelRunner:
    """A model of this shape with random weights, as a worker would load it; where not `real`, with a small cache."""
    options: dict[str, Any] = {
        "dtype": "bfloat16" if real else "float32",
        "device": str(device),
        "threads": 0,
        "block_size": 16,
        "num_blocks": 0 if real else 64,
        "host_blocks": 0,
        "max_rows": 256 if real else 8,
        "max_step_tokens": 8192 if real else 128,
        "weights": "random",
        "device_steps": True,
        "share": DeviceShare(graphs=2 << 30),
    }
    return ModelRunner(shape_folder(folder, config), **{**options, **overrides})
