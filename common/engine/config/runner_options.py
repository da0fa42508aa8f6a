"""How one model is to run on one device: what `ModelRunner` is made of, and what a follower is told of its share.

Made by `worker_process` from the configuration. Decides nothing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.config.lora_checkpoint import LoraOptions
from cohort.common.engine.config.quantization_config import Rounding

WeightKind = Literal["files", "random"]


class RunnerOptions(msgspec.Struct, frozen=True, kw_only=True):
    dtype: str
    device: str
    threads: int
    """0: torch's own choice."""
    block_size: int
    num_blocks: int
    """0: as many KV blocks as `share` has memory for once the weights are there; only on a GPU."""
    host_blocks: int
    max_rows: int
    max_step_tokens: int
    max_context: int = 0
    """No request is longer; 0 = the model's."""
    weights: WeightKind = "files"
    device_steps: bool | None = None
    """Whether steps run as on a GPU; None = on one."""
    cache_dtype: str = "auto"
    grouped: bool = False
    """Blocks of groups of layers, where their windows differ (`layer_groups`); steps then have tables for each."""
    batch_invariant: bool = False
    """The option, refused where it cannot be kept."""
    rounding: Rounding | None = None
    """Rounding of plain matrices, at load, on a processor; None = they stay as they are."""
    share: DeviceShare = DeviceShare()
    lora: LoraOptions = LoraOptions({}, 1)
    """Adapters that requests may name; they are checked before the model is loaded."""
