"""GPUs that are not there, for the workers of a container: COHORT_FAKE_GPUS of them are claimed, a processor computes.

Mounted into the container and named by its PYTHONPATH (`test_compose.py`): Python imports it before anything else.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

DEVICES = "cohort.common.engine.worker.devices"


class AfterImport(importlib.abc.MetaPathFinder):
    """Changes the workers' module for devices as soon as it is imported: others take its functions by name."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != DEVICES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def and_change(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = and_change  # type: ignore[method-assign]
        return spec


def change(devices: Any) -> None:
    import torch

    cards = [
        devices.TorchGpu(number, f"GPU-{number:08x}-0000", "a GPU that is not there", 80 << 30)
        for number in range(int(os.environ["COHORT_FAKE_GPUS"]))
    ]
    claim, cpu = devices.claim_device, torch.device("cpu")

    async def claim_and_compute_here(*given: Any) -> Any:
        found = await claim(*given)
        others = () if found is None else tuple((cpu, held) for _, held in found.others)
        return found and dataclasses.replace(found, device=cpu, others=others)

    devices.checked_device = lambda config: torch.device("cuda")
    devices.torch_gpus = lambda: cards
    devices.claim_device = claim_and_compute_here


sys.meta_path.insert(0, AfterImport())
