"""The number of devices that each worker's model is divided over (`workers: tensor_parallel`). Pure.

Called by the launcher before anything is started, and by every worker, which may have been started on its own.

| tensor_parallel | on a CPU | on GPUs |
|---|---|---|
| a number | that many processes | that many GPUs, each rank on one of its own |
| auto | 1 | the fewest whose shares hold the weights, a step, and KV for `LEAST_KV_TOKENS` tokens |
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from cohort.common.config import Config, WorkerGroup
from cohort.common.devices.division import used_gpus
from cohort.common.devices.fit import gpu_dtype, need, share_bytes
from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.config.quantization_config import rounding_of
from cohort.common.engine.config.rank_shares import RankShare, check_degree, degrees
from cohort.common.errors import ConfigError
from cohort.common.paths import GGUF_FILE

LEAST_KV_TOKENS = 8192
"""Least KV of a worker, unless the context is shorter: with less it recomputes long prompts again and again."""


def settle_degrees(config: Config, model: Path, geometry: ModelGeometry, memories: Sequence[int]) -> Config:
    """Return the configuration with a number for every degree. `memories`: bytes of each usable GPU, empty on a CPU;
    0 = not known. Raises `ConfigError` where the model's heads do not divide, or there are fewer GPUs."""
    groups = tuple(
        msgspec.structs.replace(group, tensor_parallel=degree_of(config, group, model, geometry, memories))
        for group in config.workers
    )
    return msgspec.structs.replace(config, workers=groups)


def degree_of(config: Config, group: WorkerGroup, model: Path, geometry: ModelGeometry, memories: Sequence[int]) -> int:
    """Return one group's degree; see `settle_degrees`."""
    on_gpu = bool(memories)
    gpus = used_gpus(config, len(memories)) if on_gpu else 0
    if group.tensor_parallel == "auto":
        return _fewest(config, model, geometry, sorted(memories, reverse=True)[:gpus]) if on_gpu else 1
    check_divided(config, model, geometry, group.degree)
    if on_gpu and group.local_degree > gpus:
        raise ConfigError(
            f"workers: tensor_parallel: {group.degree}: every rank of a worker has a GPU of its own, "
            + (f"{group.local_degree} on each of {group.hosts} hosts, " if group.hosts > 1 else "")
            + f"and {gpus} can be used here"
        )
    return group.degree


def check_divided(config: Config, model: Path, geometry: ModelGeometry, degree: int) -> None:
    """Raise `ConfigError` where the model's heads do not divide by this degree, or another option excludes any."""
    if degree > 1 and (reason := _undivided(config, model)):
        raise ConfigError(f"workers: tensor_parallel: {degree}: {reason} is not divided over ranks yet")
    check_degree(geometry, degree, config.model.served_name or model.name)


def _undivided(config: Config, model: Path) -> str:
    if config.model.lora:
        return "a model with adapters (model.lora)"
    if rounding_of(config.model.quantization) is not None:
        return f"a model that is rounded at load (model.quantization: {config.model.quantization})"
    return "a GGUF file" if (model / GGUF_FILE).exists() else ""


def _fewest(config: Config, model: Path, geometry: ModelGeometry, memories: Sequence[int]) -> int:
    """Return the least degree that fits; 1 if none does, whose refusal then names the bytes that lack."""
    tokens = min(LEAST_KV_TOKENS, config.model.max_model_len or geometry.max_positions)
    for degree in degrees(geometry, 1 if _undivided(config, model) else len(memories)):
        own = RankShare(geometry, 0, degree).own
        least = need(config, model, geometry, degree).total + tokens * own.kv_token_bytes(gpu_dtype(config))
        smallest = memories[degree - 1]
        if not smallest or least <= share_bytes(config, smallest, max(1, config.engine.workers_per_gpu)):
            return degree
    return 1
