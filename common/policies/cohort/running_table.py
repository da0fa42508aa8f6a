"""What the sequences that hold KV here were promised, as arrays: what a decision asks of all of them at once.

    a row per sequence, by key    ── filled when it comes, and again when its first token or a new prediction does
    positions known and computed  ── read at the start of every decision
    ─▶ who gives way last (`ranked`), the bound of an iteration (`strictest_s`, `spare_s`, `stretched_s`), the pace
       that all need together (`tokens_per_s`), the room that they leave in the cache (`fits`)

`CohortBatching` owns it. The values are those of `promise.py`, evaluated for a thousand sequences in some microseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cohort.common.policies.baselines.arrival_queues import leaves_next_blocks
from cohort.common.policies.cohort.promise import began_s, is_promised, tpot_s, ttft_s
from cohort.common.policies.dynaserve import kv_forecast
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Sequence
from cohort.common.types import Attempt

Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]

_MADE_UP = 0.5
"""Share of a TPOT that a sequence wins with a token."""
_STRETCH = 0.1
"""Share of a TPOT by which an iteration may be longer for what its requests have won."""


class _Of:
    """Columns: plain numbers, as an enumeration's members take longer to read than a column."""

    KNOWN = 0
    COMPUTED = 1
    ARRIVED = 2  # time
    PRIORITY = 3
    EFFORT = 4  # 1 = best-effort
    CHOICES = 5
    PROMPT = 6  # tokens
    START = 7  # tokens known when the promise began
    PREDICTED = 8  # output tokens
    LAST = 9  # position behind the last that is predicted to be computed here
    END = 10  # position behind the last that may be computed here
    TPOT = 11  # seconds; 0 = none promised
    FIRST_DUE = 12  # time; infinite = nothing was promised
    DUE = 13  # time from which its tokens' due times count
    ANCHOR = 14  # time of its first token here; infinite = its mean TPOT does not count from there
    EARNS = 15  # 1 = its first token was this worker's
    NAMED = 16  # 1 = the TPOT is the client's own, not a guess from a deadline
    BY_DEADLINE = 17  # 1 = a deadline stands for the TTFT
    DEADLINE = 18  # 1 = it has a deadline
    LOST = 19  # 1 = its first token missed its TTFT
    COUNT = 20


class RunningTable:
    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        """Sequences by key: which is before which where a decision has no other reason."""
        self._cells: Numbers = np.zeros((_Of.COUNT, 64))
        self._rows: Numbers = self._cells[:, :0]
        """Cells of the sequences here, without the room for more."""
        self._due_s = self._to_come = np.zeros(0)
        """Due time of each one's next token, as `promise.due_s`; and output tokens to come. As of `read`, as below."""
        self._missed = np.zeros(0, np.bool_)
        """Flags: its first token missed its TTFT; with a deadline, it would need twice the planned pace."""
        self._unread: set[Sequence] = set()
        """Sequences of which something may have changed since their row was filled."""
        self._starting: set[Sequence] = set()
        """Sequences without a first token when their row was filled."""
        self._deadlines = self._efforts = 0
        """Sequences with a deadline; and best-effort ones."""
        self._demands: dict[tuple[int, bool], _Demand] = {}
        """Sums that `fits` has asked for since `read`, by block size and whether of real-time sequences alone."""

    def __len__(self) -> int:
        return len(self.sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return self._at(sequence) is not None

    def _at(self, sequence: Sequence) -> int | None:
        at = bisect_left(self.sequences, sequence.key, key=_key)
        return at if at < len(self.sequences) and self.sequences[at] is sequence else None

    def add(self, sequence: Sequence) -> None:
        at, count = bisect_left(self.sequences, sequence.key, key=_key), len(self.sequences)
        if count == self._cells.shape[1]:
            self._cells = np.concatenate([self._cells, np.zeros_like(self._cells)], axis=1)
        if at < count:
            self._cells[:, at + 1 : count + 1] = self._cells[:, at:count].copy()
        self.sequences.insert(at, sequence)
        self._rows = self._cells[:, : count + 1]
        self._fill(at, sequence)
        self._efforts += sequence.request.traffic_class != "rt"
        self._deadlines += bool(sequence.request.slo.deadline_s)
        if sequence.prefill_done_s is None:
            self._starting.add(sequence)
        for (size, real_time), demand in self._demands.items():
            if not real_time or sequence.request.traffic_class == "rt":
                self._demands[size, real_time] = demand.with_one(sequence, size)

    def remove(self, sequence: Sequence) -> bool:
        """Return whether it was here."""
        at, count = self._at(sequence), len(self.sequences)
        if at is None:
            return False
        self._cells[:, at : count - 1] = self._cells[:, at + 1 : count].copy()
        del self.sequences[at]
        self._rows = self._cells[:, : count - 1]
        self._efforts -= sequence.request.traffic_class != "rt"
        self._deadlines -= bool(sequence.request.slo.deadline_s)
        self._unread.discard(sequence)
        self._starting.discard(sequence)
        self._demands.clear()
        return True

    def changed(self, sequence: Sequence) -> None:
        """Note a new prediction, if it is here."""
        if sequence in self:
            self._unread.add(sequence)

    def read(self, now_s: float) -> None:
        """Take over the progress of all."""
        begun = {sequence for sequence in self._starting if sequence.prefill_done_s is not None}
        for sequence in self._unread | begun:
            at = self._at(sequence)
            assert at is not None, f"{sequence.key} is to be read and not here"
            self._fill(at, sequence)
        self._starting -= begun
        self._unread.clear()
        self._demands.clear()
        rows = self._rows
        rows[_Of.KNOWN] = [len(sequence.tokens) for sequence in self.sequences]
        rows[_Of.COMPUTED] = [sequence.computed for sequence in self.sequences]
        known, tpots = rows[_Of.KNOWN], rows[_Of.TPOT]
        outputs = known - rows[_Of.PROMPT]
        self._due_s = rows[_Of.DUE] + (known - rows[_Of.START]) * tpots
        self._to_come = rows[_Of.PREDICTED] - outputs
        later: Flags = rows[_Of.LOST] > 0.0
        if self._deadlines:
            pace_lost = now_s > self._due_s + 0.5 * np.maximum(0.0, self._to_come) * tpots
            later = np.where(rows[_Of.BY_DEADLINE] > 0.0, pace_lost, later)
        self._missed = np.where(outputs > 0.0, later, now_s > rows[_Of.FIRST_DUE])

    def _fill(self, at: int, sequence: Sequence) -> None:
        request, slo, first_s = sequence.request, sequence.request.slo, sequence.prefill_done_s
        promised, end = is_promised(sequence), sequence.end
        first_due_s = began_s(sequence) + ttft_s(sequence) if promised else inf
        last = request.prompt_tokens + min(round(sequence.predicted), request.sampling.max_tokens) - 1
        cells = self._cells
        cells[:, at] = (
            sequence.known,
            sequence.computed,
            sequence.arrived_s,
            request.priority,
            request.traffic_class != "rt",
            request.choices,
            request.prompt_tokens,
            request.prompt_tokens + request.output_known,
            sequence.predicted,
            last if end is None else min(last, end),
            inf if end is None else end,
            tpot_s(sequence) if promised else 0.0,
            first_due_s,
            first_s if promised and first_s is not None and not slo.ttft_s else first_due_s,
            first_s if promised and first_s is not None and slo.ttft_s else inf,
            first_s is not None,
            bool(slo.tpot_s),
            not slo.ttft_s,
            bool(slo.deadline_s),
            promised and bool(slo.ttft_s) and first_s is not None and first_s > first_due_s,
        )

    @property
    def most_choices(self) -> int:
        """Largest number of choices of a request."""
        return int(self._rows[_Of.CHOICES].max(initial=0))

    @property
    def real_time(self) -> int:
        """Number of real-time sequences."""
        return len(self.sequences) - self._efforts

    @property
    def targets(self) -> Numbers:
        """Positions of each to compute with the tokens known now."""
        targets: Numbers = np.minimum(self._rows[_Of.KNOWN], self._rows[_Of.END])
        return targets

    @property
    def known(self) -> int:
        """Known tokens of all, as of the last decision."""
        return int(self._rows[_Of.KNOWN].sum())

    def context(self, chosen: Indices) -> int:
        """Return the positions that decode rows of these attend to."""
        return int(self._rows[_Of.COMPUTED][chosen].sum()) + len(chosen)

    def at(self, places: Indices) -> list[Sequence]:
        """Return the sequences of these rows."""
        sequences = self.sequences
        return [sequences[place] for place in places.tolist()]

    def places(self, chosen: list[Sequence]) -> Indices:
        """Return the rows of these, in their order."""
        return np.array([bisect_left(self.sequences, sequence.key, key=_key) for sequence in chosen], np.intp)

    # Order

    def ranked(self, *, by_slack: bool = True) -> Indices:
        """Return all in the order in which they keep a place in the cache, safest first: real-time before best-effort,
        a promise that can be kept before a broken one, least slack before most. Slack is what a sequence has won and
        will still win: one near its end could not make up for a pause, but frees its blocks soon anyway. Without
        `by_slack`: the youngest gives way."""
        came = (self._rows[_Of.ARRIVED], self._rows[_Of.PRIORITY])
        effort = (self._rows[_Of.EFFORT],) if self._efforts else ()
        if not by_slack:
            return np.lexsort((*came, *effort))
        slack_s = self._due_s + _MADE_UP * np.maximum(0.0, self._to_come) * self._rows[_Of.TPOT]
        return np.lexsort((*came, slack_s, self._missed, *effort))

    def decoding(self, order: Indices) -> Indices:
        """Return those in `order` that have one position to compute."""
        single: Flags = self.targets - self._rows[_Of.COMPUTED] == 1.0
        return order[single[order]]

    def due_first(self, now_s: float, decoding: Indices, step_s: float) -> Indices:
        """Sort by when the next token is due: now, if this worker sampled none yet. `step_s`: time of an iteration."""
        by_key = np.sort(decoding)
        last_s = np.array([self.sequences[at].last_token_s for at in by_key.tolist()], np.float64)
        # A time that is None has become not a number.
        next_s = np.where(np.isnan(last_s), now_s, last_s + self._paces_s(step_s)[by_key])
        first: Indices = by_key[np.argsort(next_s, kind="stable")]
        return first

    # Promises

    def _flags(self, chosen: Indices) -> Flags:
        flags = np.zeros(len(self.sequences), np.bool_)
        flags[chosen] = True
        return flags

    def _attainable(self, now_s: float, chosen: Indices, decodes_s: float) -> tuple[Flags, Numbers]:
        """Return which of the chosen can still keep their mean TPOT, and the time that each of all has won: how early
        the last token came, by the mean TPOT since this worker's first, else by its due times."""
        tpots, anchors = self._rows[_Of.TPOT], self._rows[_Of.ANCHOR]
        since = np.maximum(0.0, self._rows[_Of.KNOWN] - self._rows[_Of.START] - 1.0)
        won_s = np.where(anchors < inf, anchors + since * tpots, self._due_s - tpots) - now_s
        can = won_s + np.maximum(1.0, self._to_come) * (tpots - decodes_s) >= 0.0
        return self._flags(chosen) & can & (tpots > 0.0) & ~self._missed, won_s

    def _strictest(self, kept: Flags, targets_s: Numbers, late: bool) -> float:
        """Return the least target of those `kept` in seconds; infinite if there is none. Targets from a deadline rest
        on a predicted length, and the least of many guesses is nearly always wrong: a quarter of these may fall behind,
        unless prompts are `late`."""
        named = kept & (self._rows[_Of.NAMED] > 0.0) if self._deadlines else kept
        least_s = float(np.minimum.reduce(targets_s, where=named, initial=inf))
        guesses = np.sort(targets_s[kept & ~named]) if self._deadlines else ()
        return min(least_s, float(guesses[0 if late else (len(guesses) - 1) // 4])) if len(guesses) else least_s

    def has_deadlines(self, chosen: Indices) -> bool:
        return self._deadlines > 0 and bool(self._rows[_Of.DEADLINE][chosen].any())

    def strictest_s(self, chosen: Indices, *, late: bool) -> float:
        """Return the strictest TPOT promised to these; infinite if there is none."""
        tpots = self._rows[_Of.TPOT]
        return self._strictest(self._flags(chosen) & (tpots > 0.0), tpots, late)

    def spare_s(self, now_s: float, chosen: Indices, decodes_s: float, *, headroom: float) -> float:
        """Return the longest iteration after which all have kept their mean TPOT so far: a TPOT, and what their tokens
        came early. Requests whose promises are lost do not count; infinite if none is left. `decodes_s`: an iteration
        of decodes alone, in which time is won. `headroom`: share of a TPOT left free."""
        kept, won_s = self._attainable(now_s, chosen, decodes_s)
        spare_s = won_s + self._rows[_Of.TPOT] * (1.0 - headroom)
        return float(np.minimum.reduce(spare_s, where=kept, initial=inf))

    def stretched_s(
        self, now_s: float, chosen: Indices, decodes_s: float, *, headroom: float, late: bool = True
    ) -> float:
        """Return `spare_s` where every iteration may take prompts: a request spends max `_STRETCH` of a TPOT of what it
        has won at once, so that gaps stay even, and regains what it lacks in halves of one. `headroom` is kept once,
        not per iteration. If the first token is another worker's, nothing is won. `late`: as in `_strictest`."""
        kept, won_s = self._attainable(now_s, chosen, decodes_s)
        tpots = self._rows[_Of.TPOT]
        won_s = np.where(self._rows[_Of.EARNS] > 0.0, won_s, np.minimum(won_s, 0.0))
        stretched = np.minimum(won_s + tpots * (1.0 - headroom), tpots * (1.0 + _STRETCH))
        return self._strictest(kept, np.maximum(stretched, 0.5 * tpots), late)

    # Rows

    def _paces_s(self, step_s: float) -> Numbers:
        """Return the seconds between two tokens of each, at least an iteration."""
        paces_s: Numbers = np.maximum(step_s, self._rows[_Of.TPOT])
        return paces_s

    def tokens_per_s(self, step_s: float) -> float:
        """Return the token rate that all need together."""
        return float((1.0 / np.maximum(1e-6, self._paces_s(step_s))).sum())

    def lengths(self) -> tuple[int, float]:
        """Return the prompt tokens and the predicted output tokens of all, one each at least."""
        return int(self._rows[_Of.PROMPT].sum()), float(np.maximum(1.0, self._rows[_Of.PREDICTED]).sum())

    # Blocks

    def fits(self, kv: KvAllocator, newcomer: Sequence, *, real_time: bool = False, freed_blocks: int = 0) -> bool:
        """Return whether there are blocks for it and for the predicted peak of all sequences, or of all `real_time`
        ones: `kv_forecast.fits` of them (D5). `freed_blocks`: of sequences that give theirs up for it."""
        geometry = kv.geometry
        if geometry.frees_behind_window:
            lasting = [s for s in self.sequences if not real_time or s.request.traffic_class == "rt"]
            return kv_forecast.fits(kv, lasting, newcomer, freed_blocks=freed_blocks)
        demand = self._demand(geometry.block_size, real_time and self._efforts > 0)
        if not demand.sequences or not leaves_next_blocks(kv, demand.sequences, newcomer, freed_blocks=freed_blocks):
            return not demand.sequences
        # In positions; the rest of every last block is included.
        blocks = kv.free_blocks + kv.cached_blocks + freed_blocks + demand.blocks * geometry.num_groups
        held, coming = kv_forecast.holding(newcomer)
        free = geometry.positions(blocks) - demand.held - held
        if demand.coming + coming <= free:
            return True
        positions, last = self.targets, self._rows[_Of.LAST]
        if real_time:
            of = self._rows[_Of.EFFORT] == 0.0
            positions, last = positions[of], last[of]
        to_come = np.maximum(0.0, last - positions)
        holders = zip([*positions.tolist(), held], [*to_come.tolist(), coming], strict=True)
        return kv_forecast.peak_growth(holders) <= free

    def _demand(self, block_size: int, real_time: bool) -> _Demand:
        """Return what all need, or all `real_time` ones: added up once after `read`, then newcomers are added."""
        known = self._demands.get((block_size, real_time))
        if known is not None:
            return known
        held, computed, last = self.targets, self._rows[_Of.COMPUTED], self._rows[_Of.LAST]
        if real_time:
            of = self._rows[_Of.EFFORT] == 0.0
            held, computed, last = held[of], computed[of], last[of]
        blocks = np.ceil((held - (held - computed == 1.0)) / block_size)
        coming = np.maximum(0.0, last - held)
        made = _Demand(len(held), int(held.sum()), int(coming.sum()), int(blocks.sum()))
        self._demands[block_size, real_time] = made
        return made


class _Demand(NamedTuple):
    """Sequences, positions that they hold with the tokens known now, positions to come, and blocks of a group."""

    sequences: int
    held: int
    coming: int
    blocks: int

    def with_one(self, sequence: Sequence, block_size: int) -> _Demand:
        held, coming = kv_forecast.holding(sequence)
        blocks = -(-(held - (held - sequence.computed == 1)) // block_size)
        return _Demand(self.sequences + 1, self.held + held, self.coming + coming, self.blocks + blocks)


def _key(sequence: Sequence) -> Attempt:
    return sequence.key
