"""Drafts that go on from the model's own last states, by a head for it.

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

import numpy as np
import torch
from torch import Tensor

from cohort.common.engine.cache.kv_tensors import KvTensors
from cohort.common.engine.drafts.batch_drafts import BatchDrafter, DraftRow, UnderWay, slots_of
from cohort.common.engine.drafts.token_chain import TokenChain
from cohort.common.engine.forward.device_steps import DeviceSteps
from cohort.common.engine.models.lean_llama import LeanLlama, read_layer
from cohort.common.engine.models.model_files import Loading, split_heads
from cohort.common.engine.models.rope import rope_tables
from cohort.common.engine.models.step_inputs import StepInputs
from cohort.common.engine.step.batch import Int64Array, StepBatch
from cohort.common.engine.weights.linear import Linear
from cohort.common.errors import ModelError
from cohort.common.json_files import read_json_object
from cohort.common.types import DraftSource
from cohort.kernels.ops.fused import rms_norm, rope_and_write_kv
from cohort.kernels.ops.paged_attention import paged_attention

_POSITION_BITS = 32


class HeadModel:
    """A head as steps see it: a `Model` whose inputs are tokens, and the states in the slots of their positions."""

    def __init__(self, head: EagleHead, target: LeanLlama, slots: int) -> None:
        """`target` keeps its states from now on, of every step; before any is recorded."""
        self._head = head
        self._embedding, last_product = target.outer
        self._last_product, self._drafted = head.last_product or last_product, head.drafted
        self.vocabulary = last_product.out_features
        self.states = target.keep_states(slots)

    sampled_states: Tensor | None = None

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
        of_all = logits.new_full((len(last), self.vocabulary), float("-inf"))
        return of_all.index_copy_(1, self._drafted, logits)


class StatesDrafter(BatchDrafter):
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
        """The sequence and position of each slot's model state and head KV; 0 = of none."""

    def takes(self, chain: TokenChain, drafts: int) -> bool:
        return len(chain) > 1 and len(chain) + drafts <= self._longest

    def ran(self, batch: StepBatch) -> None:
        """Note whose states the model has left in the slots."""
        if batch.numbers is None:
            self._known[batch.slot_mapping] = 0
            return
        numbers = np.repeat(batch.numbers, np.diff(batch.query_start))
        self._known[batch.slot_mapping] = (numbers << _POSITION_BITS) | batch.positions

    def _start(self, row: DraftRow) -> UnderWay:
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
        """Note what is computed; from the head's own states it is none of the model's."""
        tags = 0 if each.drafts else _tags(each.row, each.computed, end)
        self._computed[each.slots[each.computed : end]] = tags

    def _step(self, going: Sequence[UnderWay]) -> None:
        """Store also the state that the next draft of a row is made of."""
        super()._step(going)
        on = [index for index, each in enumerate(going) if len(each.drafts) < len(each.row.sampling)]
        if on:
            self._keep_own(np.array([going[index].slots[going[index].computed] for index in on]), np.array(on))

    def _keep_own(self, slots: Int64Array, rows: Int64Array) -> None:
        """Store the states that these rows of the last step came to in these slots, which nothing else reads before the
        model computes them. Another step follows on the same stream and is awaited, so the model's comes later."""
        self._known[slots] = 0
        steps = self._steps
        with nullcontext() if steps is None else steps.stream.use():
            states = self._head.sampled_states if steps is None else steps.sampled_states()
            assert states is not None
            slot_ids, row_ids = (torch.from_numpy(each).to(states.device) for each in (slots, rows))
            self._head.states.index_copy_(0, slot_ids, states.index_select(0, row_ids))


def _tags(row: DraftRow, first: int, end: int) -> Int64Array:
    """Return the contents of a slot of the sequence, of these positions."""
    return (row.number << _POSITION_BITS) | np.arange(first, end, dtype=np.int64)


class EagleHead:
    """A head for a model of Llama's form (EAGLE, Li et al. 2024): one decoder layer over [embedding ; state], by the
    tensors of published checkpoints. Embedding and last product are the model's, unless the head brings the rows of
    the last product that it drafts from (`draft_vocab_size`, with `d2t` as published EAGLE-3 heads have it): of a small
    model the product over all tokens costs more than the head."""

    last_product: Linear | None = None
    """The product that makes logits of its states; None = the model's."""
    drafted: Tensor | None = None
    """The tokens that these logits are of, where the product is not over all [outputs]."""

    def __init__(self, load: Loading) -> None:
        """Read fc (with or without a bias) and the layer `layers.0`, which needs no first norm. Raises `ModelError`."""
        self._geometry = geometry = load.geometry
        hidden = geometry.hidden_size
        with load.open() as files:
            names = files.weights
            prefix = names.prefix(("", "model."), "layers.0.self_attn.o_proj.weight")
            fc = names.prefix((prefix, ""), "fc.weight") + "fc"
            self._fc = files.linear([fc], [hidden], 2 * hidden, bias=f"{fc}.bias" in names)
            self._normed = f"{prefix}layers.0.input_layernorm.weight" in names
            self._layer = read_layer(files, geometry, f"{prefix}layers.0.", 0, input_norm=self._normed)
            config = read_json_object(load.folder / "config.json")
            if 0 < (count := int(config.get("draft_vocab_size") or 0)) < int(config["vocab_size"]):
                self.last_product = files.linear(["lm_head"], [count], hidden)
                offsets = names.read("d2t", (count,), torch.int64, load.device)
        if self.last_product is not None:
            self.drafted = offsets + torch.arange(len(offsets), device=load.device)
            if not bool(((self.drafted >= 0) & (self.drafted < geometry.vocab_size)).all()):
                raise ModelError(f"{load.folder}: d2t names tokens beyond the model's {geometry.vocab_size}")
        self._cos, self._sin = rope_tables(geometry, load.device)

    def forward(self, step: StepInputs, embedded: Tensor, states: Tensor, kv: Tensor) -> Tensor:
        """Return the states [T, hidden] that follow from the embeddings of the next tokens and the states there; one
        layer of KV."""
        g, layer = self._geometry, self._layer
        residual = self._fc(torch.cat([embedded, states], dim=1))
        normed = torch.empty_like(residual)
        if self._normed:
            rms_norm(residual, layer.input_norm, g.norm_eps, normed)
        qkv = layer.qkv(normed if self._normed else residual)
        query, key, value = split_heads(qkv, g)
        rope_and_write_kv(query, key, value, self._cos, self._sin, step.positions, kv, 0, step.slot_mapping)
        attended = residual.new_empty((len(qkv), g.num_heads, g.head_dim))
        paged_attention(query, kv, 0, step.meta, g.head_dim**-0.5, attended)
        layer.attention_out.add_into(attended.view(len(qkv), -1), residual)
        rms_norm(residual, layer.mlp_norm, g.norm_eps, normed)
        activated = residual.new_empty((len(qkv), g.intermediate_size))
        layer.mlp.add_into(normed, activated, residual)
        return residual
