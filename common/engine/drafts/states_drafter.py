"""Drafts that go on from the model's own last states: by a head for it, or by a module that its checkpoint brings.

    position p of the head   [embedding of token p + 1 ; state of the model at p] ──▶ one layer ─▶ state of p + 1
                             ─▶ the last product ─▶ token p + 2

Known tokens t0 … t(n-1) have states up to n - 2 before their step runs, so the head's position n - 2 drafts token n;
for each further draft its own state takes the model's place. The model's states lie beside its KV, by slot, and so does
the head's KV. Which of them are a sequence's own is told by its number: what was computed for another sequence (a
shared prefix), by another worker, or lay elsewhere before a swap has none here, and the head attends from the block
behind it. Called on the engine's thread. Never changes a response: the model verifies every draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cohort.common.engine.batch import Int64Array, SamplingRow, StepBatch
from cohort.common.engine.drafts.batch_drafts import DraftRow, Drafts, Part, UnderWay, batch_of, drafted, slots_of
from cohort.common.engine.drafts.token_chain import TokenChain
from cohort.common.engine.kv_tensors import KvTensors
from cohort.common.engine.linear import Embedding, Linear
from cohort.common.engine.sampler import sample
from cohort.common.types import DraftSource

_POSITION_BITS = 32


class StatesHead(Protocol):
    """What goes on from states; one layer of KV."""

    last_product: Linear | None
    """Makes logits of its states; None = the model's."""

    def forward(self, batch: StepBatch, embedded: Tensor, states: Tensor, kv: Tensor) -> Tensor:
        """States [T, hidden] that follow: of the embeddings of the tokens behind, and the states there."""
        ...


class KeepsStates(Protocol):
    """A model whose final states of all positions can be had."""

    @property
    def outer(self) -> tuple[Embedding, Linear]:
        """The embedding, and the product that makes logits of final states."""
        ...

    def keep_states(self, slots: int) -> Tensor:
        """From now on every step leaves its tokens' final states there [slots, hidden], by slot."""
        ...


class StatesDrafter:
    source: DraftSource = "head"

    def __init__(self, head: StatesHead, target: KeepsStates, kv: KvTensors, *, longest: int) -> None:
        """`target` keeps its states from now on, of every step. `longest`: positions that the head's rotation has."""
        self._head, self._kv, self._longest = head, kv, longest
        self._embedding, last_product = target.outer
        self._last_product = head.last_product or last_product
        self._block_size = kv.geometry.block_size
        slots = len(kv.blocks) * self._block_size
        self._states = target.keep_states(slots)
        self._known, self._computed = (np.zeros(slots, dtype=np.int64) for _ in range(2))
        """By slot, of which sequence and position the model's state and the head's KV are; 0 = of none."""

    def takes(self, chain: TokenChain, drafts: int) -> bool:
        """See `BatchDrafter`."""
        return len(chain) > 1 and len(chain) + drafts <= self._longest

    def ran(self, batch: StepBatch) -> None:
        """Its states were kept."""
        if batch.numbers is None:
            self._known[batch.slot_mapping] = 0
            return
        numbers = np.repeat(batch.numbers, np.diff(batch.query_start))
        self._known[batch.slot_mapping] = (numbers << _POSITION_BITS) | batch.positions

    def warm_up(self) -> None:
        """Nothing is recorded on a processor, where all heads are."""

    def propose_all(self, rows: Sequence[DraftRow]) -> Drafts:
        """See `BatchDrafter`."""
        with torch.inference_mode():
            return drafted([self._begun(row) for row in rows], self._fill, self._step)

    def _begun(self, row: DraftRow) -> UnderWay:
        known = len(row.chain) - 1
        slots, tags = slots_of(row, known + len(row.sampling), self._block_size), _tags(row, 0, known)
        strange = np.flatnonzero(self._known[slots[:known]] != tags)
        begins = 0 if not len(strange) else -(-(int(strange[-1]) + 1) // self._block_size) * self._block_size
        if begins >= known:
            return UnderWay(row, slots, known, known, begins)
        other = self._computed[slots[begins:known]] != tags[begins:]
        computed = begins + int(other.argmax()) if other.any() else known
        # The last one's state makes the first draft.
        return UnderWay(row, slots, known, min(computed, known - 1), begins)

    def _fill(self, each: UnderWay, count: int) -> None:
        self._forward([self._known_part(each, each.computed + count)])

    def _step(self, going: Sequence[UnderWay]) -> None:
        parts, sampling = list[tuple[UnderWay, Part, Tensor]](), list[SamplingRow]()
        for each in going:
            if each.state is None:
                parts.append(self._known_part(each, each.known))
            else:
                token = np.array(each.drafts[-1:], dtype=np.int64)
                parts.append((each, Part(each.row, token, each.computed, each.slots, each.begins), each.state))
            sampling.append(each.row.sampling[len(each.drafts)])
        states = self._forward(parts)
        logits = torch.empty((len(going), self._last_product.out_features))
        self._last_product.into(states, logits)
        tokens = sample(logits, sampling).tokens.tolist()
        for index, (each, token) in enumerate(zip(going, tokens, strict=True)):
            each.state = states[index : index + 1]
            each.drafts.append(token)

    def _known_part(self, each: UnderWay, end: int) -> tuple[UnderWay, Part, Tensor]:
        """Head positions up to `end`, with the model's own states."""
        tokens = each.row.chain.tokens[each.computed + 1 : end + 1]
        states = self._states[torch.from_numpy(each.slots[each.computed : end])]
        return each, Part(each.row, tokens, each.computed, each.slots, each.begins), states

    def _forward(self, parts: Sequence[tuple[UnderWay, Part, Tensor]]) -> Tensor:
        """Compute them; the states [rows, hidden] behind the last position of each."""
        batch = batch_of([part for _, part, _ in parts], self._block_size)
        states = torch.cat([given for _, _, given in parts])
        embedded = torch.empty_like(states)
        self._embedding.into(torch.from_numpy(batch.token_ids), embedded)
        after = self._head.forward(batch, embedded, states, self._kv.blocks)
        for each, part, _ in parts:
            # What is computed from its own states is none of the model's.
            own = each.state is not None
            self._computed[each.slots[part.first : part.end]] = 0 if own else _tags(each.row, part.first, part.end)
            each.computed = part.end
        return after[torch.from_numpy(batch.query_start[1:].astype(np.int64)) - 1]


def _tags(row: DraftRow, first: int, end: int) -> Int64Array:
    """What a slot of the sequence holds, of these positions."""
    return (row.number << _POSITION_BITS) | np.arange(first, end, dtype=np.int64)
