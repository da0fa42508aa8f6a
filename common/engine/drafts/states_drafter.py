"""Drafts that go on from the model's own last states: by a head for it, or by a module that its checkpoint brings.

    position p of the head   [embedding of token p + 1 ; state of the model at p] ──▶ one layer ─▶ state of p + 1
                             ─▶ the last product ─▶ token p + 2

Known tokens t0 … t(n-1) have states up to n - 2 before their step runs, so the head's position n - 2 drafts token n;
for each further draft its own state takes the model's place. The model's states lie beside its KV, by slot, and so does
the head's KV; the head's own states lie where the model's will, in slots that it has not computed yet. Which of them
are a sequence's is told by its number: what was computed for another sequence (a shared prefix), by another worker, or
lay elsewhere before a swap has none here, and the head attends from the block behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cohort.common.engine.cache.kv_tensors import KvTensors
from cohort.common.engine.drafts.batch_drafts import DraftRow, UnderWay, slots_of
from cohort.common.engine.drafts.slot_drafter import SlotDrafter
from cohort.common.engine.drafts.token_chain import TokenChain
from cohort.common.engine.forward.device_steps import DeviceSteps
from cohort.common.engine.models.step_inputs import StepInputs
from cohort.common.engine.step.batch import Int64Array, StepBatch
from cohort.common.engine.weights.linear import Embedding, Linear
from cohort.common.types import DraftSource

_POSITION_BITS = 32


class StatesHead(Protocol):
    """What goes on from states; one layer of KV."""

    last_product: Linear | None
    """Makes logits of its states; None = the model's."""
    drafted: Tensor | None
    """The tokens that these logits are of, where the product is not over all [outputs]."""

    def forward(self, step: StepInputs, embedded: Tensor, states: Tensor, kv: Tensor) -> Tensor:
        """States [T, hidden] that follow: of the embeddings of the tokens behind, and the states there."""
        ...


class KeepsStates(Protocol):
    """A model whose final states of all positions can be had."""

    @property
    def outer(self) -> tuple[Embedding, Linear]:
        """The embedding, and the product that makes logits of final states."""
        ...

    def keep_states(self, slots: int) -> Tensor:
        """From now on every step leaves its tokens' final states there [slots, hidden], by slot, recorded ones too."""
        ...


class HeadModel:
    """A head as steps see it: a `Model` whose inputs are tokens, and the states in the slots of their positions."""

    def __init__(self, head: StatesHead, target: KeepsStates, slots: int) -> None:
        """`target` keeps its states from now on, of every step; before any is recorded."""
        self._head = head
        self._embedding, last_product = target.outer
        self._last_product, self._drafted = head.last_product or last_product, head.drafted
        self._vocabulary = last_product.out_features
        self.states = target.keep_states(slots)

    sampled_states: Tensor | None = None

    @property
    def vocabulary(self) -> int:
        """Logits that it has: the model's, whatever it drafts from."""
        return self._vocabulary

    def forward(self, step: StepInputs, kv: Tensor) -> Tensor:
        """See `step_inputs.Model`."""
        given = self.states.index_select(0, step.slot_mapping)
        embedded = torch.empty_like(given)
        self._embedding.into(step.token_ids, embedded)
        last = self._head.forward(step, embedded, given, kv).index_select(0, step.sample_index)
        logits = torch.empty((len(last), self._last_product.out_features), dtype=torch.float32, device=last.device)
        self._last_product.into(last, logits)
        self.sampled_states = last
        if self._drafted is None:
            return logits
        of_all = logits.new_full((len(last), self._vocabulary), float("-inf"))
        return of_all.index_copy_(1, self._drafted, logits)


class StatesDrafter(SlotDrafter):
    source: DraftSource = "head"
    _ahead = 1

    def __init__(
        self, head: HeadModel, kv: KvTensors, *, longest: int, steps: DeviceSteps | None = None, graph_bytes: int = 0
    ) -> None:
        """`longest`: positions that the head's rotation has."""
        super().__init__(head, kv, vocabulary=head.vocabulary, steps=steps, graph_bytes=graph_bytes)
        self._head, self._longest = head, longest
        slots = len(kv.blocks) * self._block_size
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

    def _mark(self, each: UnderWay, end: int) -> None:
        """What is computed from the head's own states is none of the model's."""
        tags = 0 if each.drafts else _tags(each.row, each.computed, end)
        self._computed[each.slots[each.computed : end]] = tags

    def _step(self, going: Sequence[UnderWay]) -> None:
        """And where a row goes on, the state that its next draft is made of."""
        super()._step(going)
        on = [index for index, each in enumerate(going) if len(each.drafts) < len(each.row.sampling)]
        if on:
            self._keep_own(np.array([going[index].slots[going[index].computed] for index in on]), np.array(on))

    def _keep_own(self, slots: Int64Array, rows: Int64Array) -> None:
        """The states that these rows of the last step came to, in these slots, which nothing else reads before the
        model computes them. Another step follows on the same stream and is awaited, so the model's comes later."""
        self._known[slots] = 0
        steps = self._steps
        with nullcontext() if steps is None else steps.stream.use():
            states = self._head.sampled_states if steps is None else steps.sampled_states()
            assert states is not None
            there, these = (torch.from_numpy(each).to(states.device) for each in (slots, rows))
            self._head.states.index_copy_(0, there, states.index_select(0, these))


def _tags(row: DraftRow, first: int, end: int) -> Int64Array:
    """What a slot of the sequence holds, of these positions."""
    return (row.number << _POSITION_BITS) | np.arange(first, end, dtype=np.int64)
