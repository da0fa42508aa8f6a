"""What `RunningTable` says of all sequences at once, asked of one sequence after another: its brute force."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

import numpy as np

from cohort.common.policies.baselines.batch_builder import RankKey, by_arrival
from cohort.common.policies.cohort.promise import began_s, due_s, is_promised, tpot_s, ttft_s
from cohort.common.policies.cohort.running_table import Indices, RunningTable
from cohort.common.policies.dynaserve import kv_forecast
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Sequence


def missed_first(now_s: float, sequence: Sequence) -> bool:
    """Return whether the first token missed its TTFT; with a deadline, whether it would need twice the planned pace."""
    if not is_promised(sequence):
        return False
    if sequence.output_tokens and not sequence.request.slo.ttft_s:
        to_come = max(0.0, sequence.predicted - sequence.output_tokens)
        return now_s > due_s(sequence) + 0.5 * to_come * tpot_s(sequence)
    first_due_s = began_s(sequence) + ttft_s(sequence)
    if sequence.output_tokens == 0:
        return now_s > first_due_s
    return sequence.prefill_done_s is not None and sequence.prefill_done_s > first_due_s


def victim_rank(now_s: float, sequence: Sequence) -> RankKey:
    to_come = max(0.0, sequence.predicted - sequence.output_tokens)
    slack_s = due_s(sequence) + 0.5 * to_come * tpot_s(sequence)
    best_effort = sequence.request.traffic_class != "rt"
    return (best_effort, missed_first(now_s, sequence), slack_s, *by_arrival(sequence))


def strictest_s(targets: Iterable[tuple[Sequence, float]], *, late: bool) -> float:
    targets = list(targets)
    guesses = sorted(target_s for sequence, target_s in targets if not sequence.request.slo.tpot_s)
    named = [target_s for sequence, target_s in targets if sequence.request.slo.tpot_s]
    return min([*named, *guesses[0 if late else max(0, len(guesses) - 1) // 4 :][:1]], default=inf)


def attainable(now_s: float, decoding: Iterable[Sequence], decodes_s: float) -> Iterator[tuple[Sequence, float]]:
    for sequence in decoding:
        target_s, request = tpot_s(sequence), sequence.request
        if not target_s or not is_promised(sequence) or missed_first(now_s, sequence):
            continue
        if sequence.prefill_done_s is None or not request.slo.ttft_s:
            won_s = due_s(sequence) - target_s - now_s
        else:
            tokens = max(0, sequence.output_tokens - request.output_known - 1)
            won_s = sequence.prefill_done_s + tokens * target_s - now_s
        if won_s + max(1.0, sequence.predicted - sequence.output_tokens) * (target_s - decodes_s) >= 0.0:
            yield sequence, won_s


def pace_s(sequence: Sequence, step_s: float) -> float:
    return max(step_s, tpot_s(sequence)) if is_promised(sequence) else step_s


class OneByOne(RunningTable):
    """Asks every sequence anew."""

    _now_s = 0.0

    def read(self, now_s: float) -> None:
        super().read(now_s)
        self._now_s = now_s

    def ranked(self, *, by_slack: bool = True) -> Indices:
        assert by_slack
        return self.places(sorted(self.sequences, key=lambda s: victim_rank(self._now_s, s)))

    def decoding(self, order: Indices) -> Indices:
        return self.places([s for s in self.at(order) if s.uncomputed == 1])

    def due_first(self, now_s: float, decoding: Indices, step_s: float) -> Indices:
        def rank(s: Sequence) -> RankKey:
            return (now_s if s.last_token_s is None else s.last_token_s + pace_s(s, step_s), s.key)

        return self.places(sorted(self.at(decoding), key=rank))

    def context(self, chosen: Indices) -> int:
        return sum(s.computed + 1 for s in self.at(chosen))

    def has_deadlines(self, chosen: Indices) -> bool:
        return any(s.request.slo.deadline_s for s in self.at(chosen))

    def strictest_s(self, chosen: Indices, *, late: bool) -> float:
        return strictest_s([(s, tpot_s(s)) for s in self.at(chosen) if is_promised(s) and tpot_s(s)], late=late)

    def spare_s(self, now_s: float, chosen: Indices, decodes_s: float, *, headroom: float) -> float:
        kept = attainable(now_s, self.at(chosen), decodes_s)
        return min([won_s + tpot_s(s) * (1.0 - headroom) for s, won_s in kept], default=inf)

    def stretched_s(
        self, now_s: float, chosen: Indices, decodes_s: float, *, headroom: float, late: bool = True
    ) -> float:
        targets: list[tuple[Sequence, float]] = []
        for sequence, won_s in attainable(now_s, self.at(chosen), decodes_s):
            target_s, won_s = tpot_s(sequence), won_s if sequence.prefill_done_s is not None else min(won_s, 0.0)
            stretched = min(won_s + target_s * (1.0 - headroom), target_s * 1.1)
            targets.append((sequence, max(stretched, 0.5 * target_s)))
        return strictest_s(targets, late=late)

    def tokens_per_s(self, step_s: float) -> float:
        return float(np.sum([1.0 / max(1e-6, pace_s(s, step_s)) for s in self.sequences]))

    def lengths(self) -> tuple[int, float]:
        prompts = sum(s.request.prompt_tokens for s in self.sequences)
        return prompts, float(np.sum([max(1.0, s.predicted) for s in self.sequences]))

    def fits(self, kv: KvAllocator, newcomer: Sequence, *, real_time: bool = False, freed_blocks: int = 0) -> bool:
        lasting = [s for s in self.sequences if not real_time or s.request.traffic_class == "rt"]
        return kv_forecast.fits(kv, lasting, newcomer, freed_blocks=freed_blocks)


def table(sequences: Iterable[Sequence], now_s: float = 0.0) -> RunningTable:
    """Return a table of these, read."""
    made = RunningTable()
    for sequence in sequences:
        made.add(sequence)
    made.read(now_s)
    return made
