"""Inputs of recorded steps: numbers and block tables at fixed addresses on the device, filled from the host.

Owned by `static_decode` and `static_mixed`, one each. Host memory exists twice: while a step is filled in, the device
may still copy from that of the step before; the one before that must be over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cohort.common.engine.device.uploads import host_bytes
from cohort.common.engine.step.batch import Int64Array, StepBatch

Int32s = npt.NDArray[np.int32]
Numbers = Mapping[str, np.ndarray]

Layout = Sequence[tuple[str, type[np.generic], int]]
"""Name, dtype and count of arrays that lie in one stretch of memory, so that a step sends them in one copy."""


def packed_bytes(layout: Layout) -> int:
    return sum(count * np.dtype(dtype).itemsize for _, dtype, count in layout)


def parts_of(packed: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Return the arrays in `packed`, uint8, by name and in the order of `layout`."""
    found, begin = dict[str, Tensor](), 0
    for name, dtype, count in layout:
        end = begin + count * np.dtype(dtype).itemsize
        found[name] = packed[begin:end].view(torch.from_numpy(np.empty(0, dtype)).dtype)
        begin = end
    return found


class _HostSide:
    def __init__(self, layout: Layout, cells: int, device: torch.device) -> None:
        self.packed = host_bytes(packed_bytes(layout), device)
        self.numbers = {name: part.numpy() for name, part in parts_of(self.packed, layout).items()}
        self.tables = host_bytes(4 * cells, device).view(torch.int32)


class StandingInputs:
    """Inputs at fixed addresses: the host's numbers by `layout`, int64 before int32; `tensors` has them on the
    device."""

    def __init__(
        self, layout: Layout, *, rows: int, width: int, spare_block: int, device: torch.device, groups: int = 1
    ) -> None:
        """`layout` as in the class. Tables are [groups, rows, width], at first all of the spare block."""
        self._numbers = torch.zeros(packed_bytes(layout), dtype=torch.uint8, device=device)
        self.tensors: Mapping[str, Tensor] = parts_of(self._numbers, layout)
        self._host, self._other_host = (_HostSide(layout, groups * rows * width, device) for _ in range(2))
        # Tables travel as wide as the step needs, and are spread over the full width on the device.
        self._packed = torch.zeros(groups * rows * width, dtype=torch.int32, device=device)
        self.tables = torch.full((groups, rows, width), spare_block, dtype=torch.int32, device=device)

    def next_numbers(self) -> Numbers:
        """Return the host's numbers of the step that begins here, still those of the step before the last one."""
        self._host, self._other_host = self._other_host, self._host
        return self._host.numbers

    def send_numbers(self) -> None:
        self._numbers.copy_(self._host.packed, non_blocking=True)

    def host_tables(self, rows: int, width: int) -> Int32s:
        """Return this step's tables, [groups, rows, width], to be written."""
        groups = len(self.tables)
        tables: Int32s = self._host.tables[: groups * rows * width].numpy().reshape(groups, rows, width)
        return tables

    def send_tables(self, rows: int, width: int) -> None:
        """Copy `host_tables` into the first columns of the device's."""
        groups = len(self.tables)
        used = groups * rows * width
        self._packed[:used].copy_(self._host.tables[:used], non_blocking=True)
        self.tables[:, :rows, :width].copy_(self._packed[:used].view(groups, rows, width))


# -- Tokens that the step before samples (`StepBatch.token_source`), without the host


def awaited_tokens(token_source: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return, of the tokens that are not known yet, the index among the sampled ones, and the place in the step."""
    places = np.flatnonzero(token_source >= 0)
    return token_source[places], places


def fill_sources(batch: StepBatch, numbers: Numbers, gap: int = 0, gap_at: int = 0) -> int:
    """Write `awaited_tokens`, and return how many. `gap`: tokens between the batch's first `gap_at` and the others."""
    if batch.token_source is None:
        return 0
    sources, places = awaited_tokens(batch.token_source)
    numbers["sources"][: len(sources)] = sources
    numbers["places"][: len(places)] = places + gap * (places >= gap_at)
    return len(sources)


def put_tokens(token_ids: Tensor, sampled: Tensor, sources: Tensor, places: Tensor, count: int) -> None:
    """Copy the first `count` of `sampled[sources]` into `token_ids`, at `places`; in place, on the device."""
    if count == len(token_ids):  # all of them, in order
        torch.index_select(sampled, 0, sources[:count], out=token_ids)
    else:
        token_ids.index_copy_(0, places[:count], sampled.index_select(0, sources[:count]))
