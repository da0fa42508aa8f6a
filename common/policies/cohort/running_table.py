"""What the sequences that hold KV here were promised, as arrays: what a decision asks of all of them at once.

    a row per sequence, by key    ── filled when it comes, and again when its first token or a new prediction does
    positions known and computed  ── read at the start of every decision
    ─▶ who gives way last (`ranked`), the bound of an iteration (`strictest_s`, `spare_s`, `stretched_s`), the pace
       that all need together (`tokens_per_s`), the room that they leave in the cache (`fits`)

`CohortBatching` owns it. The values are those of `promise.py`, evaluated for a thousand sequences in some microseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import IntEnum, auto
from math import inf

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


class _Of(IntEnum):
    """Columns."""

    KNOWN = 0
    COMPUTED = auto()
    ARRIVED = auto()  # time
    PRIORITY = auto()
    EFFORT = auto()  # 1 = best-effort
    CHOICES = auto()
    PROMPT = auto()  # tokens
    START = auto()  # tokens known when the promise began
    PREDICTED = auto()  # output tokens
    LAST = auto()  # position behind the last that is predicted to be computed here
    END = auto()  # position behind the last that may be computed here
    TPOT = auto()  # seconds; 0 = none promised
    FIRST_DUE = auto()  # time; infinite = nothing was promised
    DUE = auto()  # time from which its tokens' due times count
    ANCHOR = auto()  # time of its first token here; infinite = its mean TPOT does not count from there
    EARNS = auto()  # 1 = its first token was this worker's
    NAMED = auto()  # 1 = the TPOT is the client's own, not a guess from a deadline
    BY_DEADLINE = auto()  # 1 = a deadline stands for the TTFT
    DEADLINE = auto()  # 1 = it has a deadline
    LOST = auto()  # 1 = its first token missed its TTFT


class RunningTable:
    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        """Sequences by key: which is before which where a decision has no other reason."""
        self._cells: Numbers = np.zeros((len(_Of), 64))
        self._due_s = self._to_come = np.zeros(0)
        """Due time of each one's next token, as `promise.due_s`; and output tokens to come. As of `read`, as below."""
        self._missed = np.zeros(0, np.bool_)
        """Flags: its first token missed its TTFT; with a deadline, it would need twice the planned pace."""
        self._unread: set[Sequence] = set()
        """Sequences of which something may have changed since their row was filled."""

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
        self._cells[:, at + 1 : count + 1] = self._cells[:, at:count].copy()
        self.sequences.insert(at, sequence)
        self._unread.add(sequence)
        self._fill(at, sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Return whether it was here."""
        at, count = self._at(sequence), len(self.sequences)
        if at is None:
            return False
        self._cells[:, at : count - 1] = self._cells[:, at + 1 : count].copy()
        del self.sequences[at]
        self._unread.discard(sequence)
        return True

    def changed(self, sequence: Sequence) -> None:
        """Note a new prediction, if it is here."""
        if sequence in self:
            self._unread.add(sequence)

    def read(self, now_s: float) -> None:
        """Take over the progress of all."""
        for sequence in list(self._unread):
            at = self._at(sequence)
            assert at is not None, f"{sequence.key} is to be read and not here"
            self._fill(at, sequence)
            if sequence.prefill_done_s is not None:
                self._unread.remove(sequence)
        count = len(self.sequences)
        self._cells[_Of.KNOWN, :count] = [len(sequence.tokens) for sequence in self.sequences]
        self._cells[_Of.COMPUTED, :count] = [sequence.computed for sequence in self.sequences]
        known, tpots, outputs = self._get(_Of.KNOWN), self._get(_Of.TPOT), self._get(_Of.KNOWN) - self._get(_Of.PROMPT)
        self._due_s = self._get(_Of.DUE) + (known - self._get(_Of.START)) * tpots
        self._to_come = self._get(_Of.PREDICTED) - outputs
        pace_lost = now_s > self._due_s + 0.5 * np.maximum(0.0, self._to_come) * tpots
        later = np.where(self._get(_Of.BY_DEADLINE) > 0.0, pace_lost, self._get(_Of.LOST) > 0.0)
        self._missed = np.where(outputs > 0.0, later, now_s > self._get(_Of.FIRST_DUE))

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

    def _get(self, column: _Of) -> Numbers:
        return self._cells[column, : len(self.sequences)]

    @property
    def most_choices(self) -> int:
        """Largest number of choices of a request."""
        return int(self._get(_Of.CHOICES).max(initial=0))

    @property
    def real_time(self) -> int:
        """Number of real-time sequences."""
        return len(self.sequences) - int(self._get(_Of.EFFORT).sum())

    @property
    def targets(self) -> Numbers:
        """Positions of each to compute with the tokens known now."""
        return np.minimum(self._get(_Of.KNOWN), self._get(_Of.END))

    @property
    def known(self) -> int:
        """Known tokens of all, as of the last decision."""
        return int(self._get(_Of.KNOWN).sum())

    def context(self, chosen: Indices) -> int:
        """Return the positions that decode rows of these attend to."""
        return int(self._get(_Of.COMPUTED)[chosen].sum()) + len(chosen)

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
        effort, came = self._get(_Of.EFFORT), (self._get(_Of.ARRIVED), self._get(_Of.PRIORITY))
        if not by_slack:
            return np.lexsort((*came, effort))
        slack_s = self._due_s + _MADE_UP * np.maximum(0.0, self._to_come) * self._get(_Of.TPOT)
        return np.lexsort((*came, slack_s, self._missed, effort))

    def decoding(self, order: Indices) -> Indices:
        """Return those in `order` that have one position to compute."""
        single: Flags = self.targets - self._get(_Of.COMPUTED) == 1.0
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

    def _attainable(self, now_s: float, chosen: Indices, decodes_s: float) -> tuple[Indices, Numbers]:
        """Return those of the chosen whose mean TPOT can still be kept, with the time that they have won: how early
        the last token came, by the mean TPOT since this worker's first, else by its due times."""
        tpots, anchors = self._get(_Of.TPOT), self._get(_Of.ANCHOR)
        since = np.maximum(0.0, self._get(_Of.KNOWN) - self._get(_Of.START) - 1.0)
        anchored = anchors < inf
        won_s = np.where(anchored, np.where(anchored, anchors, 0.0) + since * tpots, self._due_s - tpots) - now_s
        can = won_s + np.maximum(1.0, self._to_come) * (tpots - decodes_s) >= 0.0
        kept = chosen[(can & (tpots > 0.0) & ~self._missed)[chosen]]
        return kept, won_s[kept]

    def _strictest(self, chosen: Indices, targets_s: Numbers, late: bool) -> float:
        """Return the least target in seconds; infinite if there is none. Targets from a deadline rest on a predicted
        length, and the least of many guesses is nearly always wrong: a quarter of these may fall behind, unless prompts
        are `late`."""
        named = self._get(_Of.NAMED)[chosen] > 0.0
        least_s, guesses = float(targets_s[named].min(initial=inf)), np.sort(targets_s[~named])
        return min(least_s, float(guesses[0 if late else (len(guesses) - 1) // 4])) if len(guesses) else least_s

    def has_deadlines(self, chosen: Indices) -> bool:
        return bool(self._get(_Of.DEADLINE)[chosen].any())

    def strictest_s(self, chosen: Indices, *, late: bool) -> float:
        """Return the strictest TPOT promised to these; infinite if there is none."""
        tpots = self._get(_Of.TPOT)[chosen]
        return self._strictest(chosen[tpots > 0.0], tpots[tpots > 0.0], late)

    def spare_s(self, now_s: float, chosen: Indices, decodes_s: float, *, headroom: float) -> float:
        """Return the longest iteration after which all have kept their mean TPOT so far: a TPOT, and what their tokens
        came early. Requests whose promises are lost do not count; infinite if none is left. `decodes_s`: an iteration
        of decodes alone, in which time is won. `headroom`: share of a TPOT left free."""
        kept, won_s = self._attainable(now_s, chosen, decodes_s)
        return float((won_s + self._get(_Of.TPOT)[kept] * (1.0 - headroom)).min(initial=inf))

    def stretched_s(
        self, now_s: float, chosen: Indices, decodes_s: float, *, headroom: float, late: bool = True
    ) -> float:
        """Return `spare_s` where every iteration may take prompts: a request spends max `_STRETCH` of a TPOT of what it
        has won at once, so that gaps stay even, and regains what it lacks in halves of one. `headroom` is kept once,
        not per iteration. If the first token is another worker's, nothing is won. `late`: as in `_strictest`."""
        kept, won_s = self._attainable(now_s, chosen, decodes_s)
        tpots = self._get(_Of.TPOT)[kept]
        won_s = np.where(self._get(_Of.EARNS)[kept] > 0.0, won_s, np.minimum(won_s, 0.0))
        stretched = np.minimum(won_s + tpots * (1.0 - headroom), tpots * (1.0 + _STRETCH))
        return self._strictest(kept, np.maximum(stretched, 0.5 * tpots), late)

    # Rows

    def _paces_s(self, step_s: float) -> Numbers:
        """Return the seconds between two tokens of each, at least an iteration."""
        return np.maximum(step_s, self._get(_Of.TPOT))

    def tokens_per_s(self, step_s: float) -> float:
        """Return the token rate that all need together."""
        return float((1.0 / np.maximum(1e-6, self._paces_s(step_s))).sum())

    def lengths(self) -> tuple[int, float]:
        """Return the prompt tokens and the predicted output tokens of all, one each at least."""
        return int(self._get(_Of.PROMPT).sum()), float(np.maximum(1.0, self._get(_Of.PREDICTED)).sum())

    # Blocks

    def fits(self, kv: KvAllocator, newcomer: Sequence, *, real_time: bool = False, freed_blocks: int = 0) -> bool:
        """Return whether there are blocks for it and for the predicted peak of all sequences, or of all `real_time`
        ones: `kv_forecast.fits` of them (D5). `freed_blocks`: of sequences that give theirs up for it."""
        geometry = kv.geometry
        if geometry.frees_behind_window:
            lasting = [s for s in self.sequences if not real_time or s.request.traffic_class == "rt"]
            return kv_forecast.fits(kv, lasting, newcomer, freed_blocks=freed_blocks)
        held, computed, last = self.targets, self._get(_Of.COMPUTED), self._get(_Of.LAST)
        if real_time and self.real_time < len(self.sequences):
            of = self._get(_Of.EFFORT) == 0.0
            held, computed, last = held[of], computed[of], last[of]
        count = len(held)
        if not count or not leaves_next_blocks(kv, count, newcomer, freed_blocks=freed_blocks):
            return not count
        coming = np.maximum(0.0, last - held)
        # In positions; the rest of every last block is included.
        stored = np.ceil((held - (held - computed == 1.0)) / geometry.block_size)
        blocks = kv.free_blocks + kv.cached_blocks + freed_blocks + int(stored.sum()) * geometry.num_groups
        own_held, own_coming = kv_forecast.holding(newcomer)
        free = geometry.positions(blocks) - int(held.sum()) - own_held
        if int(coming.sum()) + own_coming <= free:
            return True
        holders = zip([*held.tolist(), own_held], [*coming.tolist(), own_coming], strict=True)
        return kv_forecast.peak_growth(holders) <= free


def _key(sequence: Sequence) -> Attempt:
    return sequence.key
