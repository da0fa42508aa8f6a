"""Whether a transformers model's decode step can be recorded: what it would ask of the device, seen in a trial.

Called once per load by `generic`, after `generic_probe`. A recorded step repeats kernels, not Python: an operation
whose result the host reads (the largest position of a dynamic rotary embedding, say), or one that copies between host
and device, cannot be in it. Every operation of a forward passes torch's dispatcher, so a trial forward on any device
shows them all; the same code runs for every step of that shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.models.step_inputs import Model, StepInputs
from cohort.kernels.ops.paged_attention import AttentionMeta

_ROWS = 3
_BLOCK_SIZE = 16

_KNOWN = frozenset({"aten", "prims", "cohort"})
"""Libraries of operations; what those of others do is not seen."""

_READ_BY_THE_HOST = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::bincount",
        "aten::equal",
        "aten::masked_select",
        "aten::nonzero",
        "aten::unique_consecutive",
        "aten::unique_dim",
        "aten::_unique2",
    }
)
"""Operations with a result, or a result's size, that the host waits for."""


def hindrances(model: Model, geometry: ModelGeometry, dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
    """The operations of a decode step that cannot be recorded; none: it can."""
    shape = (_ROWS, geometry.num_layers, 2, geometry.num_kv_heads, _BLOCK_SIZE, geometry.head_dim)
    rows = torch.arange(_ROWS, dtype=torch.int32, device=device)
    counts = torch.arange(_ROWS + 1, dtype=torch.int32, device=device)
    last = min(_BLOCK_SIZE, geometry.max_positions) - 1
    step = StepInputs(
        token_ids=torch.arange(_ROWS, device=device) % geometry.vocab_size,
        positions=torch.full((_ROWS,), last, device=device),
        slot_mapping=rows.long() * _BLOCK_SIZE + last,
        sample_index=rows.long(),
        meta=AttentionMeta(
            query_start=counts,
            context_lens=torch.full_like(rows, last + 1),
            block_tables=rows[:, None],
            directions=None,
            block_size=_BLOCK_SIZE,
            max_query_len=1,
            num_prefill_rows=0,
        ),
    )
    kv = torch.zeros(shape, dtype=dtype, device=device)
    watch = _Watch()
    with torch.inference_mode():
        model.forward(step, kv)  # what is made at the first call only is none of the step's
        with watch:
            model.forward(step, kv)
    return tuple(sorted(watch.found))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # in inference mode an operation that is made of others comes whole
            result = func.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in _READ_BY_THE_HOST:
            self.found.add(name)
        elif name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
            if any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]):
                self.found.add(f"{name} by a mask")
        elif name.partition("::")[0] not in _KNOWN:
            self.found.add(f"{name}, which is not torch's own")
        elif name == "aten::repeat_interleave" and not (kwargs or {}).get("output_size"):
            self.found.add(name)
        # A number that Python made lies on the host and is part of a kernel's arguments.
        devices = {each.device.type for each in _tensors((args, kwargs, result)) if each.dim()}
        if len(devices) > 1:
            self.found.add(f"{name} between host and device")
        return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from _tensors(each)
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _tensors(each)
