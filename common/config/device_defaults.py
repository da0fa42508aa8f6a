"""Defaults that follow from the machine: a GPU's are a layer between the built-in defaults and the preset.

Called by `load_config` alone; asks no device anything. On a CPU the built-in defaults stay. The values follow from the
memory of the smallest GPU, which goes with its speed closely enough for a start:

- `engine.max_step_tokens`: a whole 8k prompt in one iteration on an 80 GB card, as in vLLM's server. It costs memory
  for the widest intermediate (`step_bytes`: 1.1 GB for an 8B model at 8192 tokens).
- `engine.prefill_chunk`: the prompt tokens that decode rows have to wait for. 2,048 of an 8B model are 33 TFLOP: 0.06 s
  on an H100, well within the default TPOT of 0.2 s; a card a third as fast gets half.
- `engine.max_rows`: a decode step is bound by reading weights and KV until several hundred rows. 60 GB of KV of an 8B
  model are 450 tokens for each of 1,024 rows. Every row costs the reserve its logits (0.8 MB with 128k tokens) and
  start-up the graph classes up to it.
- `engine.cuda_graph_memory_bytes`: small cards have none to spare; larger graph classes are recorded first.
- `kv.host_memory_bytes`: a quarter of the RAM, 64 GiB at most, for each GPU's worker, and half of the RAM for all of
  them together: the pool is page-locked, so what it has nothing else gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30

LARGEST_HOST_POOL_BYTES = 64 * GIB
HOST_POOL_SHARE = 0.25  # of the RAM, for one GPU
HOST_POOLS_SHARE = 0.5  # of the RAM, for all GPUs together


@dataclass(frozen=True, slots=True)
class Machine:
    """Host that a configuration is read for. `gpu_memory_bytes`: of the smallest GPU, 0 = not known."""

    gpus: int = 0
    gpu_memory_bytes: int = 0
    host_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class GpuClass:
    """GPUs of this much memory or more; see the module's docstring for the reasons."""

    memory_bytes: int
    max_step_tokens: int
    prefill_chunk: int
    max_rows: int
    graph_bytes: int


# A card's nominal gigabytes are a little more than what the driver reports: an "80 GB" one has 79.2 GiB, or 74.5.
GPU_CLASSES = (
    GpuClass(120 * GIB, 8192, 2048, 1024, 4 * GIB),  # H200, B200, MI300-sized
    GpuClass(60 * GIB, 8192, 2048, 512, 2 * GIB),  # A100-80, H100
    GpuClass(20 * GIB, 4096, 1024, 256, 2 * GIB),  # A10, L4, L40S, A100-40, RTX 4090
    GpuClass(0, 2048, 512, 256, 1 * GIB),
)


def gpu_class(memory_bytes: int) -> GpuClass:
    """Return the class of a GPU; unknown memory (0) counts as little."""
    return next(each for each in GPU_CLASSES if memory_bytes >= each.memory_bytes)


def on_gpu(device: str, machine: Machine) -> bool:
    """Return whether `engine.device` means a GPU on this machine."""
    return device.startswith("cuda") or (device == "auto" and machine.gpus > 0)


def device_layer(machine: Machine) -> dict[str, dict[str, int]]:
    """Return a GPU machine's defaults, as a layer of the configuration."""
    found = gpu_class(machine.gpu_memory_bytes)
    layer = {
        "engine": {
            "max_step_tokens": found.max_step_tokens,
            "prefill_chunk": found.prefill_chunk,
            "max_rows": found.max_rows,
            "cuda_graph_memory_bytes": found.graph_bytes,
        }
    }
    if machine.host_memory_bytes:
        layer["kv"] = {"host_memory_bytes": host_pool_bytes(machine)}
    return layer


DEVICE_KEYS = (
    ("engine", ("max_step_tokens", "prefill_chunk", "max_rows", "cuda_graph_memory_bytes")),
    ("kv", ("host_memory_bytes",)),
)
"""Options that `device_layer` decides."""


def settled(layers: Mapping[str, Any]) -> bool:
    """Return whether these settings name every option that depends on the device."""
    return all(key in (layers.get(section) or {}) for section, keys in DEVICE_KEYS for key in keys)


def host_pool_bytes(machine: Machine) -> int:
    """Return the host pool of one worker. Two on a box's only GPU take a quarter each."""
    share = min(HOST_POOL_SHARE, HOST_POOLS_SHARE / max(1, machine.gpus))
    return min(LARGEST_HOST_POOL_BYTES, int(share * machine.host_memory_bytes))
