"""Drafts of all rows of a step at once: what a drafter of that kind is asked, the rows it has under way, their course.

    known tokens, computed up to some position ─▶ what is lacking, as chunks ─▶ first draft
                                                  a step of all rows for each further one ─┘

Called by `drafting` through `BatchDrafter`; what a model of its own (`draft_model`) and a head on the model's states
(`states_drafter`) have in common is `slot_drafter`'s. Decides nothing about requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from cohort.common.engine.drafts.token_chain import TokenChain
from cohort.common.engine.step.batch import Int64Array, SamplingRow, StepBatch
from cohort.common.types import DraftSource

FILLED_AT_ONCE = 512
"""Positions that a drafter computes for what it lacks before one step; a row that lacks more waits for the next."""
SHORT = 16
"""Positions that a row may lack to be computed together with those of the other rows."""


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A sequence whose next tokens are wanted. `blocks` hold its known tokens and all drafts but the last."""

    chain: TokenChain
    blocks: Sequence[int]
    directions: Sequence[int] | None
    sampling: tuple[SamplingRow, ...]
    """Of each draft, as its position will be sampled; penalties count the drafts before it besides."""
    number: int = 0
    """Of the sequence, as in `StepBatch.numbers`."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """`seconds`: what they took, without what was computed before because it lacked; `filled`: positions of that."""

    tokens: list[list[int]]
    seconds: float
    filled: int


class BatchDrafter(Protocol):
    """What proposes for all rows of a step at once, between two steps of the model, on the engine's thread."""

    source: DraftSource

    def takes(self, chain: TokenChain, drafts: int) -> bool:
        """Whether it can say anything of a sequence. On the event loop's thread."""
        ...

    def propose_all(self, rows: Sequence[DraftRow]) -> Drafts:
        """As many tokens for each row as it has `sampling`, or none."""
        ...

    def ran(self, batch: StepBatch) -> None:
        """The model has computed a step."""
        ...

    def warm_up(self) -> None:
        """Before anything is served: on a device, kernels are compiled and steps recorded."""
        ...


@dataclass(slots=True)
class UnderWay:
    """A row under way: of the drafter's positions that known tokens give, `known`, [begins, computed) are in its slots.
    The last of them makes the first draft."""

    row: DraftRow
    slots: Int64Array
    known: int
    computed: int
    begins: int = 0
    """Nothing before it is attended to; at the beginning of a block."""
    drafts: list[int] = field(default_factory=list)

    @property
    def lacks(self) -> int:
        """Positions until the first draft; none where nothing is known to begin with."""
        return self.known - self.computed


def drafted(
    under: Sequence[UnderWay], fill: Callable[[UnderWay, int], None], step: Callable[[Sequence[UnderWay]], None]
) -> Drafts:
    """As many drafts of each row as it has `sampling`; none where more than can be filled at once is lacking. `fill`
    computes so many positions of a row; `step` one draft more of each of these, rows that lack most first."""
    before = sum(each.lacks for each in under)
    left = FILLED_AT_ONCE
    for each in under:
        count = min(left, each.lacks - 1)  # `step` computes the end
        if each.lacks > SHORT and count > 0:
            fill(each, count)
            left -= count
    filled = before - sum(each.lacks for each in under)
    began_s = time.perf_counter()
    going = [each for each in under if 0 < each.lacks <= SHORT and each.row.sampling]
    while going:
        step(sorted(going, key=lambda each: -each.lacks))  # prefill rows first
        going = [each for each in going if len(each.drafts) < len(each.row.sampling)]
    return Drafts([each.drafts for each in under], time.perf_counter() - began_s, filled)


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of a row that are computed next, from position `first` on. `begins`: as of `UnderWay`."""

    row: DraftRow
    tokens: Int64Array
    first: int
    slots: Int64Array
    begins: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.tokens)


def slots_of(row: DraftRow, positions: int, block_size: int) -> Int64Array:
    """Of the row's first positions."""
    places = np.arange(positions)
    indices, offsets = places // block_size, places % block_size
    if row.directions is not None:  # R13
        offsets = np.where(np.asarray(row.directions)[indices] == 1, block_size - 1 - offsets, offsets)
    slots: Int64Array = np.asarray(row.blocks, dtype=np.int64)[indices] * block_size + offsets
    return slots


def batch_of(parts: Sequence[Part], block_size: int, sampling: Sequence[SamplingRow] = ()) -> StepBatch:
    """A step of a drafter: behind each part's last token one is sampled so, or behind none."""
    widths = [-(-part.end // block_size) - part.begins // block_size for part in parts]
    tables = np.zeros((len(parts), max(widths)), dtype=np.int32)
    directions = None
    for index, part in enumerate(parts):
        begins = part.begins // block_size
        within = slice(begins, begins + widths[index])
        tables[index, : widths[index]] = part.row.blocks[within]
        if part.row.directions is not None:
            if directions is None:
                directions = np.zeros(tables.shape, dtype=np.uint8)
            directions[index, : widths[index]] = part.row.directions[within]
    return StepBatch(
        token_ids=np.concatenate([part.tokens for part in parts]),
        positions=np.concatenate([np.arange(part.first, part.end, dtype=np.int64) for part in parts]),
        query_start=np.cumsum([0, *[len(part.tokens) for part in parts]], dtype=np.int32),
        context_lens=np.array([part.end - part.begins for part in parts], dtype=np.int32),
        block_tables=tables,
        directions=directions,
        slot_mapping=np.concatenate([part.slots[part.first : part.end] for part in parts]),
        sample_rows=np.arange(len(sampling), dtype=np.int32),
        sampling=tuple(sampling),
    )
