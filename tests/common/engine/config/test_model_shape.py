"""What a mixture's shape says of its weights is what the engine finds in the files, and what `doctor` counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from cohort.common.devices.fit import parameters, weight_bytes
from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.config.model_shape import model_shape
from cohort.common.policies.cost_model import ModelShape
from tests.engine_models import make_runner
from tests.examples import another_of_its_kind

NAMES = ["mixtral", "qwen3-moe", "qwen2-moe", "gpt-oss", "deepseek2", "deepseek3"]


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=another_of_its_kind()) for name in NAMES[1:])])
def test_a_mixture_weighs_what_its_files_hold(name: str, model_folder: Callable[[str], Path]) -> None:
    """But for norms and biases, and the one output of a shared expert's gate."""
    folder = model_folder(name)
    geometry = read_geometry(folder)
    shape = ModelShape(**model_shape(name, geometry, "float32"))
    sizes: dict[str, tuple[int, ...]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            sizes |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    small = [key for key, size in sizes.items() if len(size) < 2 or "bias" in key or "shared_expert_gate" in key]
    beside = sum(math.prod(sizes[key]) for key in small)
    assert 0 < beside < 0.1 * shape.parameters
    assert shape.parameters + beside == sum(map(math.prod, sizes.values())) == parameters(folder, geometry)
    assert shape.weights_total_bytes + 4 * beside == weight_bytes(folder, geometry, 4, device_type="cpu")
    assert parameters(folder, geometry, "random") == shape.parameters
    runner = make_runner(folder)
    token_bytes = runner.geometry.kv_geometry("float32", 1).token_bytes
    assert shape.kv_geometry(1).token_bytes == token_bytes
