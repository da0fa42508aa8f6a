"""What a box with GPUs changes about a configuration: the device is settled, the workers are divided over the GPUs, and
a model that fits none of them is refused before anything starts.

Called by `main` before `plan.resolve`. Knows GPUs from the driver only; each worker looks again, with torch, at the one
it claims. On a machine without a GPU the configuration stays as it is, but for `workers: auto`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from cohort.common.config import Config
from cohort.common.devices import host_memory
from cohort.common.devices.degrees import settle_degrees
from cohort.common.devices.division import auto_counts, resolve_division
from cohort.common.devices.fit import check_fit, check_host_fit, check_host_kv, host_need, need
from cohort.common.devices.inventory import Gpu
from cohort.common.engine.config.model_config import read_geometry
from cohort.common.errors import ConfigError
from cohort.common.types import InstanceId


def on_box(config: Config, gpus: Sequence[Gpu], *, workers_given: bool, model: Path) -> Config:
    """Settle the configuration for these GPUs. Without `workers_given` (by a file or the command line) a GPU box has as
    many workers as it wants (`auto`), since a preset's count is the smallest arrangement that works. Raises
    `ConfigError`, `ModelError`."""
    if config.engine.device == "auto" and gpus:
        config = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, device="cuda"))
    grouped = any(group.tensor_parallel != 1 for group in config.workers)
    if grouped and (model / "config.json").is_file():  # else not made yet, or no model: checked elsewhere
        memories = [gpu.memory_bytes for gpu in gpus] if config.on_gpu else []
        config = settle_degrees(config, model, read_geometry(model), memories)
    if not config.on_gpu:
        return resolve_division(config, 0)
    if not workers_given:
        config = auto_counts(config)
    return resolve_division(config, len(_fitting(config, gpus, model)) if gpus else 0)


def check_host(config: Config, model: Path) -> None:
    """Check that weights and KV of all workers fit this host's memory; without a GPU each has its own. Raises
    `ConfigError`, `ModelError`."""
    if config.on_gpu:
        return
    geometry = read_geometry(model, config.model.quantization)
    wanted = host_need(config, model, geometry, computes_bfloat16=host_memory.computes_bfloat16())
    workers = sum(group.count for group in config.workers)
    available = host_memory.available_bytes()
    check_host_fit(config, config.model.served_name or model.name, wanted, available, workers)
    check_host_kv(config, wanted.weights, available, workers)


def check_added_worker(config: Config, instance: InstanceId) -> None:
    """Check that one worker more fits the memory that the others on this machine have left."""
    alone = msgspec.structs.replace(config.worker_group(instance), count=1)
    check_host(msgspec.structs.replace(config, workers=(alone,)), Path(config.model.path))


def summary(config: Config, gpus: Sequence[Gpu]) -> str:
    """Return a line for the console; "" without a GPU."""
    if not config.on_gpu or not gpus:
        return ""
    names = sorted({gpu.name for gpu in gpus})
    workers = ", ".join(
        f"{group.count} x {group.role.value}" + (f" of {group.degree} GPUs" if group.degree > 1 else "")
        for group in config.workers
    )
    return f"{len(gpus)} GPU(s), {' and '.join(names)}: workers {workers}, {config.engine.workers_per_gpu} per GPU"


def _fitting(config: Config, gpus: Sequence[Gpu], model: Path) -> list[Gpu]:
    """Return the GPUs that a worker's part of the model fits undivided: a box whose GPUs differ uses those."""
    if not (model / "config.json").is_file():
        return list(gpus)  # not made yet, or no model: checked elsewhere
    geometry = read_geometry(model, config.model.quantization)
    each = [need(config, model, geometry, degree) for degree in sorted({group.degree for group in config.workers})]
    wanted = max(each, key=lambda of_one: of_one.total)
    fitting: list[Gpu] = []
    refusal: ConfigError | None = None
    for gpu in sorted(gpus, key=lambda gpu: gpu.memory_bytes):
        try:
            check_fit(config, config.model.served_name or model.name, wanted, gpu.name, gpu.memory_bytes, 1)
        except ConfigError as error:
            refusal = error
        else:
            fitting.append(gpu)
    if refusal is not None and not fitting:
        raise refusal
    sharers = resolve_division(config, len(fitting)).engine.workers_per_gpu
    smallest = fitting[0]
    check_fit(config, config.model.served_name or model.name, wanted, smallest.name, smallest.memory_bytes, sharers)
    return fitting
