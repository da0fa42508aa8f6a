"""Sampler of a whole batch on the device: host rows into the tables of `kernels.sampling`, and back.

Called by `static_decode`, which has the sampler in its recorded steps, over standing tables (`StandingSampler`), and by
`device_steps` for all other steps (`sample_on_device`). Same order, rules and random numbers as `sampler`, grammars
first, so the same tokens, up to the last bits of a logarithm. Results stay on the device until their copy to the host,
which is launched, not awaited.

Penalties: a request's history counts its tokens as they come (`TokenHistory`), so that a step costs a copy of the ids
that differ, eight bytes each, and nothing is counted again. The counts do not stay on the device: there they would be
one number per row and vocabulary entry (67 MB for 256 rows) that must follow a request through preemption and transfer;
the copy, 16 KB for a history of 2,000 ids, runs beside the forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cohort.common.engine.device.uploads import Uploads, host_bytes
from cohort.common.engine.step.batch import GREEDY, SamplingRow, StepOutput, TokenLogprobs
from cohort.common.engine.step.grammar_masks import TokenMasks
from cohort.common.engine.step.standing_inputs import Layout, packed_bytes, parts_of
from cohort.kernels.ops.sampling import sample_rows
from cohort.kernels.types import EDIT_KINDS, SampledRows, SamplingTables

MOST_LOGPROBS = 20
"""Likeliest tokens per row that a recorded step has memory for; a step that needs more runs unrecorded."""

STANDING_EDITS = 1 << 20
"""Number of penalised, biased and banned ids of all rows that a recorded step has memory for, 12 bytes each."""

_NUMBERS: tuple[tuple[str, type[np.generic]], ...] = (
    ("seeds", np.int64),
    ("positions", np.int64),
    ("top_ps", np.float64),
    ("temperatures", np.float32),
    ("min_ps", np.float32),
    ("top_ks", np.int32),
    ("wants", np.int32),
)

Edits = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32]]  # starts, ids, values


@dataclass(slots=True)
class SampledOnDevice:
    """Tokens of a batch, on their way to the host. `wait` what was launched before reading `output`."""

    rows: Sequence[SamplingRow]
    tokens: Tensor  # int64 [S], host
    logprobs: Tensor | None = None  # float32 [S], host; None: no row wants any
    top_ids: Tensor | None = None  # int64 [S, most], host
    top_logprobs: Tensor | None = None  # float32 [S, most], host
    places: npt.NDArray[np.int64] | None = None  # indices of the sampled rows among S; None: they are all, in order
    failures: Mapping[int, str] = field(default_factory=dict)
    late: frozenset[int] = frozenset()
    on_device: Tensor | None = (
        None  # int64 [len(rows)]: the tokens where they were sampled, for the step behind this one
    )

    def output(self) -> StepOutput:
        tokens = self.tokens.numpy()
        places = range(len(self.rows)) if self.places is None else self.places.tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(self.rows)
        if self.logprobs is not None and self.top_ids is not None and self.top_logprobs is not None:
            for index, (place, row) in enumerate(zip(places, self.rows, strict=True)):
                if (top := row.logprobs) >= 0:
                    ids, values = self.top_ids[place, :top].tolist(), self.top_logprobs[place, :top].tolist()
                    logprobs[index] = TokenLogprobs(float(self.logprobs[place]), tuple(ids), tuple(values))
        sampled = tokens.copy() if self.places is None else tokens[self.places]
        return StepOutput(tokens=sampled, logprobs=tuple(logprobs), failures=self.failures, late=self.late)


def sample_on_device(
    logits: Tensor, rows: Sequence[SamplingRow], uploads: Uploads, masks: TokenMasks | None = None
) -> SampledOnDevice:
    """Return one token per row of float32 logits [S, vocabulary], which stay as they were. `masks`: if a row has a
    grammar; log-probabilities are those of all tokens nevertheless."""
    most = max([1, *(row.logprobs for row in rows)])
    out = SampledRows.empty(len(rows), most, logits.device)
    if rows:
        allowed = logits
        if masks is not None:
            (bits,) = uploads.put([masks.bits])
            apply_token_mask(allowed := logits.clone(), bits)
        sample_rows(allowed, eager_tables(rows, logits.shape[1], uploads), out)
        if masks is not None and any(row.logprobs >= 0 for row in rows):
            logprobs = logits.log_softmax(dim=-1)
            out.logprobs.copy_(logprobs.gather(1, out.tokens[:, None])[:, 0])
            likeliest = logprobs.topk(min(most, logits.shape[1]), dim=-1)
            out.top_ids[:, : likeliest.indices.shape[1]] = likeliest.indices
            out.top_logprobs[:, : likeliest.values.shape[1]] = likeliest.values
    sampled = results(rows, out)
    sampled.on_device = out.tokens
    if masks is not None:
        sampled.failures, sampled.late = masks.failures, frozenset(masks.late)
    return sampled


def apply_token_mask(logits: Tensor, bits: Tensor) -> None:
    """Set logits [n, vocabulary], in place, to -inf if the bit of their token is not set in `bits`, int32 [n,
    ceil(vocabulary / 32)], token t at bit t % 32 of word t // 32."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    forbidden = ((bits[:, :, None] >> places) & 1).logical_not().view(len(bits), -1)
    logits.masked_fill_(forbidden[:, : logits.shape[1]], float("-inf"))


def results(
    rows: Sequence[SamplingRow], out: SampledRows, places: npt.NDArray[np.int64] | None = None
) -> SampledOnDevice:
    """Launch the copies to the host of what `rows` need; `places`: their indices among the rows of `out`."""
    sampled = SampledOnDevice(rows, _to_host(out.tokens), places=places)
    if any(row.logprobs >= 0 for row in rows):
        sampled.logprobs = _to_host(out.logprobs)
        sampled.top_ids, sampled.top_logprobs = _to_host(out.top_ids), _to_host(out.top_logprobs)
    return sampled


def eager_tables(rows: Sequence[SamplingRow], vocabulary: int, uploads: Uploads) -> SamplingTables:
    """Return the tables of these rows, in one copy to the device; they hold until the uploads restart."""
    numbers = {name: np.empty(len(rows), dtype=dtype) for name, dtype in _NUMBERS}
    _write_numbers(numbers, rows, vocabulary)
    starts, ids, values = edits_of(rows, vocabulary)
    arrays: list[npt.NDArray[np.generic]] = [*numbers.values(), starts, ids, values, np.empty_like(values)]
    return SamplingTables(*uploads.put(arrays))


def edits_of(rows: Sequence[SamplingRow], vocabulary: int) -> Edits:
    counts = np.zeros(EDIT_KINDS * len(rows) + 1, dtype=np.int32)
    ids: list[npt.NDArray[np.integer]] = []
    values: list[npt.NDArray[np.floating]] = []

    def add(row: int, kind: int, these: npt.NDArray[np.integer], amounts: npt.NDArray[np.floating]) -> None:
        counts[EDIT_KINDS * row + kind + 1] = len(these)
        ids.append(these)
        values.append(amounts)

    for index, row in enumerate(rows):
        if row.penalised and row.history is not None:
            if row.repetition_penalty != 1.0:
                seen = row.history.seen_with(row.ahead)
                add(index, 0, seen, np.full(len(seen), row.repetition_penalty, np.float32))
            if row.presence_penalty != 0.0 or row.frequency_penalty != 0.0:
                tokens, repeats = row.history.output_counts_with(row.ahead)
                add(index, 1, tokens, row.presence_penalty + row.frequency_penalty * repeats)
        if row.logit_bias is not None:
            add(index, 2, *row.logit_bias.within(vocabulary))
        if row.banned and row.grammar is None:  # a grammar's mask has them in it
            banned = np.unique([token for token in row.banned if 0 <= token < vocabulary]).astype(np.int32)
            add(index, 3, banned, np.zeros(len(banned), dtype=np.float32))
    if not ids:
        return counts, np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
    amounts: npt.NDArray[np.float32] = np.concatenate(values).astype(np.float32)
    return np.cumsum(counts, dtype=np.int32), np.concatenate(ids).astype(np.int32), amounts


def _write_numbers(numbers: dict[str, np.ndarray], rows: Sequence[SamplingRow], vocabulary: int) -> None:
    count = len(rows)
    numbers["seeds"][:count] = np.array([row.seed & (1 << 64) - 1 for row in rows], dtype=np.uint64).view(np.int64)
    for name, attribute in (
        ("positions", "position"),
        ("top_ps", "top_p"),
        ("temperatures", "temperature"),
        ("min_ps", "min_p"),
    ):
        numbers[name][:count] = [getattr(row, attribute) for row in rows]
    numbers["top_ks"][:count] = [min(max(row.top_k, 0), vocabulary) for row in rows]
    numbers["wants"][:count] = [min(row.logprobs, vocabulary) for row in rows]


def _to_host(tensor: Tensor) -> Tensor:
    host = host_bytes(tensor.nbytes, tensor.device).view(tensor.dtype).view(tensor.shape)
    return host.copy_(tensor, non_blocking=True)


class _HostTables:
    """Host memory of a step's sampling. There are two: the device may still copy from that of the step before."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.all = host_bytes(packed_bytes(layout), device)
        self.numbers = {name: part.numpy() for name, part in parts_of(self.all, layout).items()}
        self.edits = host_bytes(8 * STANDING_EDITS, device).view(torch.int32).view(2, STANDING_EDITS)


class StandingSampler:
    """Tables and results at fixed addresses, for steps that are recorded once and replayed. While the next step is
    filled in, the one before it may still run; the one before that must be over."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        layout: Layout = [
            *((name, dtype, rows) for name, dtype in _NUMBERS),
            ("starts", np.int32, EDIT_KINDS * rows + 1),
        ]
        self._host, self._other_host = _HostTables(layout, device), _HostTables(layout, device)
        self._device_buffer = torch.zeros(packed_bytes(layout), dtype=torch.uint8, device=device)
        ids = torch.zeros(STANDING_EDITS, dtype=torch.int32, device=device)
        values = torch.zeros(STANDING_EDITS, dtype=torch.float32, device=device)
        numbers = parts_of(self._device_buffer, layout).values()
        self._tables = SamplingTables(*[*numbers, ids, values, torch.empty_like(values)])
        self._out = SampledRows.empty(rows, min(MOST_LOGPROBS, vocabulary), device)
        for host in (self._host, self._other_host):
            _write_numbers(host.numbers, [GREEDY] * rows, vocabulary)
            host.numbers["starts"][:] = 0
        self._device_buffer.copy_(self._host.all)
        self._plain = rows  # number of first rows that are known to be plainly greedy there

    def takes(self, rows: Sequence[SamplingRow]) -> bool:
        """Return whether the tables have memory for what these rows need."""
        edits = 0
        for row in rows:
            if row.logprobs > MOST_LOGPROBS:
                return False
            if row.history is not None:
                edits += len(row.history.seen) + len(row.history.output_counts[0]) + 2 * len(row.ahead)
            if row.logit_bias is not None:
                edits += len(row.logit_bias.ids)
            edits += len(row.banned)
        return edits <= STANDING_EDITS

    def fill(self, sampling: Sequence[SamplingRow], places: npt.NDArray[np.integer], rows: int) -> None:
        """Fill the tables for a step of `rows` rows: those at `places` sample as in `sampling`, others are not read."""
        if self._plain >= rows and all(row.plain_greedy and row.logprobs < 0 for row in sampling):
            return  # the tables hold that already
        every = [GREEDY] * rows
        for place, row in zip(places.tolist(), sampling, strict=True):
            every[place] = row
        self._host, self._other_host = self._other_host, self._host
        host = self._host
        _write_numbers(host.numbers, every, self._vocabulary)
        starts, ids, values = edits_of(every, self._vocabulary)
        host.numbers["starts"][: len(starts)] = starts
        self._device_buffer.copy_(host.all, non_blocking=True)
        if used := len(ids):
            host.edits[0, :used] = torch.from_numpy(ids)
            host.edits[1, :used] = torch.from_numpy(values).view(torch.int32)
            self._tables.edit_ids[:used].copy_(host.edits[0, :used], non_blocking=True)
            self._tables.edit_values[:used].copy_(host.edits[1, :used].view(torch.float32), non_blocking=True)
        self._plain = rows if all(row.plain_greedy and row.logprobs < 0 for row in every) else 0

    def sample(self, logits: Tensor) -> Tensor:
        sample_rows(logits, self._tables, self._out)
        return self._out.tokens[: len(logits)]

    def results(self, sampling: Sequence[SamplingRow], places: npt.NDArray[np.integer], rows: int) -> SampledOnDevice:
        out = self._out
        used = SampledRows(
            out.tokens[:rows], out.logprobs[:rows], out.top_ids[:rows], out.top_logprobs[:rows], out.scratch
        )
        sampled = results(sampling, used, places.astype(np.int64))
        if len(places) == rows:  # no step runs behind one that does not sample all of its rows
            sampled.on_device = used.tokens
        return sampled
