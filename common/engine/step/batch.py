"""The rows that one iteration of the engine computes, and their results: plain NumPy, no torch.

Built by the worker loop from the iteration scheduler's decision, consumed by `ModelRunner.execute`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from cohort.common.errors import InvariantViolated
from cohort.common.sampling_inputs import GrammarInputs, LogitBias, TokenHistory
from cohort.common.types import Attempt

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
Uint8Array = npt.NDArray[np.uint8]


@dataclass(slots=True, unsafe_hash=True)
class SamplingRow:
    """Sampling of one row's next token; `position` is that token's. Never changed; not frozen, because a step makes one
    per row and a frozen one takes twice as long. `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and the
    neutral penalties switch themselves off. `banned` ids must not come yet (the end tokens until min_tokens).
    `logprobs`: -1 none, k ≥ 0 the sampled token's log-probability and the k likeliest ones."""

    seed: int
    position: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    history: TokenHistory | None = None
    logit_bias: LogitBias | None = None
    banned: tuple[int, ...] = ()
    logprobs: int = -1
    grammar: GrammarInputs | None = None
    awaits: int = 0
    """Output tokens before this one that `history` and `grammar` must have, if the last of them is sampled by the step
    that runs (`StepBatch.apply_last_tokens`); 0 = they have all."""
    ahead: tuple[int, ...] = ()
    """Drafts between what `history` and `grammar` have and this token, for which they count too: the token stands only
    if all of these are right. Empty if the row has neither."""

    def apply_last_token(self, token: int) -> None:
        """Apply the token before this one, just sampled, to penalties and grammar; once, however often called. If that
        row was late, there is none, and this row has no token either."""
        if self.awaits and not (self.grammar is not None and self.grammar.late):
            if self.history is not None and self.history.output_tokens < self.awaits:
                self.history.extend([token])
            if self.grammar is not None and len(self.grammar.output) < self.awaits:
                self.grammar.output.append(token)

    @property
    def penalised(self) -> bool:
        return self.history is not None and (
            self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        )

    @property
    def plain_greedy(self) -> bool:
        """Whether the token is simply the largest logit."""
        return self.temperature == 0.0 and not (
            self.penalised or self.logit_bias is not None or self.banned or self.grammar is not None
        )


@dataclass(frozen=True, slots=True)
class ScoringRow:
    """Request for log-probabilities: of `targets[i]` after the step's token `first + i`, and of the `top` likeliest."""

    row: int
    first: int
    targets: tuple[int, ...]
    top: int


@dataclass(frozen=True, slots=True)
class PoolingRow:
    """Request for the sum of final hidden states over `count` tokens of the step, from token `first` on."""

    attempt: Attempt
    row: int
    first: int
    count: int


GREEDY = SamplingRow(seed=0, position=0, temperature=0.0)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Rows of one forward: prefill rows first, then decode rows, concatenated (R14). T tokens in R rows, S of which are
    sampled. A row's tokens are the last ones of its context. On the padded path the last `padding[r]` tokens of a row
    are padding: computed, written behind its context, attended to by no row."""

    token_ids: Int64Array  # [T]
    positions: Int64Array  # [T] absolute positions
    query_start: Int32Array  # [R+1] prefix sums of tokens per row
    context_lens: Int32Array  # [R] KV length after this step
    block_tables: Int32Array  # [R, M]; entries beyond a row's context mean nothing
    directions: Uint8Array | None  # [R, M], 1 = block filled right to left: offset j lies in slot block_size-1-j
    slot_mapping: Int64Array  # [T] block · block_size + slot where each token's KV goes
    sample_rows: Int32Array  # [S] rows whose last token's logits are sampled
    sampling: tuple[SamplingRow, ...]  # one per sample row; one for every token of a sample row with drafts
    padding: Int32Array | None = None  # [R] tokens at a row's end that only fill it up; None = none anywhere
    scoring: tuple[ScoringRow, ...] = ()  # rows whose prompt tokens are scored
    pooling: tuple[PoolingRow, ...] = ()  # rows whose final hidden states are wanted
    grammars: tuple[GrammarInputs, ...] = ()  # of all rows, those of prompts that are not yet at their end too
    token_source: Int64Array | None = None
    """[T] for a step queued after another one: index of a token among the other's sampled ones; -1 for known tokens."""
    adapters: tuple[str, ...] = ()
    """[R] LoRA adapter of each row, "" = none; empty if no row has one."""
    more_tables: Int32Array | None = None
    """[G - 1, R, M] for a model whose layers are in G groups: the tables of those after the first, as wide as its."""
    more_slots: Int64Array | None = None
    """[G - 1, T] slots of each token's KV in these groups."""
    numbers: Int64Array | None = None
    """[R] each row's sequence number, above 0, for a drafter that uses it; None = nobody does."""
    drafts: Int32Array | None = None
    """[R] drafts at the end of each row: the row is sampled at every position from the one before them on. Such a row
    is a sample row with one other token. None = no row has any."""

    @property
    def num_rows(self) -> int:
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def beyond_sampling(self) -> bool:
        """Whether more is wanted of the forward than logits of sampled tokens: no recorded step computes that."""
        return bool(self.scoring or self.pooling)

    @property
    def num_sampled(self) -> int:
        drafted = 0 if self.drafts is None else int(self.drafts[self.sample_rows].sum())
        return len(self.sample_rows) + drafted

    def check(self) -> None:
        """Raise `InvariantViolated` unless the arrays fit together. Cheap enough for tests and debug runs."""
        lengths = np.diff(self.query_start)
        if self.query_start[0] != 0 or self.query_start[-1] != self.num_tokens or (lengths <= 0).any():
            raise InvariantViolated(f"step batch: query_start {self.query_start} does not cut {self.num_tokens} tokens")
        slots = self.slot_mapping if self.more_slots is None else np.vstack([self.slot_mapping, self.more_slots])
        facts = {
            "a row's context covers its tokens": bool((self.context_lens >= lengths).all()),
            "a row's last position is its context's last": bool(
                (self.positions[self.query_start[1:] - 1] == self.context_lens - 1).all()
            ),
            "slots are distinct": len(np.unique(slots)) == slots.size,
            "every group has tables and slots": (self.more_tables is None) == (self.more_slots is None)
            and (self.more_tables is None or self.more_tables.shape == (slots.shape[0] - 1, *self.block_tables.shape)),
            "one position and slot per token": len(self.positions) == len(self.slot_mapping) == self.num_tokens,
            "one table per row": self.block_tables.shape[0] == self.num_rows,
            "every row has an adapter or none": len(self.adapters) in (0, self.num_rows),
            "directions match the tables": self.directions is None or self.directions.shape == self.block_tables.shape,
            "one sampling row per sampled token": self.num_sampled == len(self.sampling),
            "drafts stand behind one known token": self.drafts is None
            or (
                bool((self.drafts >= 0).all())
                and bool((lengths[self.drafts > 0] == self.drafts[self.drafts > 0] + 1).all())
                and set(np.flatnonzero(self.drafts).tolist()) <= set(self.sample_rows.tolist())
            ),
            "a sampled token is one row's": self.token_source is None
            or (
                len(self.token_source) == self.num_tokens
                and not (np.repeat(lengths, lengths)[self.token_source >= 0] > 1).any()
            ),
            "a row is more than its padding": self.padding is None
            or (len(self.padding) == self.num_rows and bool(((self.padding >= 0) & (self.padding < lengths)).all())),
        }
        if broken := [name for name, holds in facts.items() if not holds]:
            raise InvariantViolated(f"step batch: not true that {'; '.join(broken)}")

    def after(self, tokens: Int64Array) -> StepBatch:
        """Return the batch with its tokens, once those that the step before it sampled are known."""
        source = self.token_source
        if source is None:
            return self
        self.apply_last_tokens(tokens)
        return replace(self, token_ids=np.where(source >= 0, tokens[source], self.token_ids), token_source=None)

    @property
    def needs_last_tokens(self) -> bool:
        """Whether sampling, not the forward, needs the tokens of the step before on the host."""
        return self.token_source is not None and any([row.awaits for row in self.sampling])

    def apply_last_tokens(self, tokens: Int64Array) -> None:
        """Apply what the step before sampled to penalties and grammars; once, however often this is called."""
        if self.token_source is None or not self.needs_last_tokens:
            return
        for index, row in zip(self.sample_rows.tolist(), self.sampling, strict=True):
            if row.awaits:
                row.apply_last_token(int(tokens[self.token_source[self.query_start[index]]]))

    def split(self) -> tuple[StepBatch, StepBatch]:
        """Return two batches that together compute the same, for a device that refuses memory for the whole. Tokens
        must be known (`after`). Rows never read another row's KV of the same step, so a cut between rows changes no
        result."""
        if self.num_rows < 2:
            raise InvariantViolated("a batch of one row cannot be split")
        middle = self.num_rows // 2
        return self._rows(0, middle), self._rows(middle, self.num_rows)

    def _rows(self, first: int, end: int) -> StepBatch:
        token_first, token_end = int(self.query_start[first]), int(self.query_start[end])
        tokens = slice(token_first, token_end)
        sampled = [i for i, row in enumerate(self.sample_rows.tolist()) if first <= row < end]
        sampling = self.sampling
        if self.drafts is not None:
            each = 1 + self.drafts[self.sample_rows]
            inside = np.repeat((self.sample_rows >= first) & (self.sample_rows < end), each)
            sampling = tuple(row for row, is_inside in zip(sampling, inside.tolist(), strict=True) if is_inside)
        else:
            sampling = tuple(sampling[i] for i in sampled)
        return StepBatch(
            token_ids=self.token_ids[tokens],
            positions=self.positions[tokens],
            query_start=self.query_start[first : end + 1] - self.query_start[first],
            context_lens=self.context_lens[first:end],
            block_tables=self.block_tables[first:end],
            directions=None if self.directions is None else self.directions[first:end],
            slot_mapping=self.slot_mapping[tokens],
            more_tables=None if self.more_tables is None else self.more_tables[:, first:end],
            more_slots=None if self.more_slots is None else self.more_slots[:, tokens],
            sample_rows=self.sample_rows[sampled] - np.int32(first),
            sampling=sampling,
            padding=None if self.padding is None else self.padding[first:end],
            scoring=tuple(
                ScoringRow(item.row - first, item.first - token_first, item.targets, item.top)
                for item in self.scoring
                if first <= item.row < end
            ),
            pooling=tuple(
                PoolingRow(item.attempt, item.row - first, item.first - token_first, item.count)
                for item in self.pooling
                if first <= item.row < end
            ),
            grammars=self.grammars,
            adapters=self.adapters[first:end],
            numbers=None if self.numbers is None else self.numbers[first:end],
            drafts=None if self.drafts is None else self.drafts[first:end],
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities from the raw logits, before temperature and penalties."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Sampled tokens, in the order of `StepBatch.sample_rows`; prompt scores, in the order of `StepBatch.scoring`. Of
    rows with drafts the correct ones, and the token after them. `pooled`: sums in the order of `StepBatch.pooling`,
    each [hidden] as float32 in little-endian bytes."""

    tokens: Int64Array  # [S], or as many as `counts` says
    logprobs: tuple[TokenLogprobs | None, ...]  # one for each of them
    scores: tuple[tuple[TokenLogprobs, ...], ...] = ()
    pooled: tuple[bytes, ...] = ()
    failures: Mapping[int, str] = field(default_factory=dict)
    """Reasons why a request can have no further token, by the index of the missing one."""
    counts: tuple[int, ...] | None = None
    """[S] number of tokens of each sample row; None = one each. 0: its mask was not ready, so it sat the step out."""
    late: frozenset[int] = frozenset()
    """Indices of tokens that are none, because their rows sat the step out; without `counts`."""


def trial_batch(
    rows: int, tokens_per_row: int, context: int, *, block_size: int, num_blocks: int, groups: int = 1
) -> StepBatch | None:
    """Return a greedy batch over the first blocks, for warming up and measuring; None if the cache cannot hold it."""
    blocks_per_row = -(-context // block_size)
    if groups * rows * blocks_per_row > num_blocks or context < tokens_per_row:
        return None
    every = np.arange(groups * rows * blocks_per_row, dtype=np.int32).reshape(groups, rows, blocks_per_row)
    row_positions = np.arange(context - tokens_per_row, context, dtype=np.int64)
    slots = every[..., row_positions // block_size].astype(np.int64) * block_size + row_positions % block_size
    return StepBatch(
        token_ids=np.ones(rows * tokens_per_row, dtype=np.int64),
        positions=np.tile(row_positions, rows),
        query_start=np.arange(rows + 1, dtype=np.int32) * np.int32(tokens_per_row),
        context_lens=np.full(rows, context, dtype=np.int32),
        block_tables=every[0],
        directions=None,
        slot_mapping=slots[0].reshape(-1),
        sample_rows=np.arange(rows, dtype=np.int32),
        sampling=(GREEDY,) * rows,
        more_tables=every[1:] if groups > 1 else None,
        more_slots=slots[1:].reshape(groups - 1, -1) if groups > 1 else None,
    )
