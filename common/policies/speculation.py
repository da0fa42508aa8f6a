"""How many drafted tokens decode rows may carry in an iteration: as many as bring more tokens a second.

Asked by the worker's machine behind every scheduler's plan. Each further position is a chance of one more token, at a
price that the learned step times know: little where reading the weights takes the time, a full share where computing
does. Positions are worth it in the order of their chances as long as tokens a second grow (the goodput rule of
SpecInfer and SmartSpec, one position at a time), and the iteration keeps the TPOT SLO of each of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from cohort.common.sequence import Sequence
from cohort.common.types import StepTimes

_FADES = 0.9
"""Weight of what was seen before, each time a proposal is judged: requests change between quoting and new text."""
_PRIOR_WEIGHT = 2.0
"""Judged tokens that the average over requests counts for, where a request has few of its own."""
_FIRST_CHANCE = 0.5
_COMMON = 0.02
"""Weight of one judged proposal in the average over requests."""
_GAIN = 1.03
"""Factor on tokens a second below which drafts are not worth it: prices are not known better."""
_WAIT = 0.05
"""Cost of waiting for the iteration before, as a share of one: the host's work, which planning ahead hides."""
_LIKELY = 0.9
_MAX_REUSES = 8
"""Iterations of as many rows for which one answer to whether drafts could pay holds."""
_EACH, _NOTED = 32, 4
"""First iterations, each noted; later, without drafts, one of `_NOTED`."""
_LOOKAHEAD = 4
"""Positions beyond the best number so far at which the search ends."""
_NEW, _CORRECTION_PRIOR = 0.1, 2.0
"""Weight of a measured iteration, and of the step times before any was measured."""
_FORGETS = 0.98
"""Weight that a request's record keeps in an iteration without drafts, so that a draft model is asked again."""
_UNKNOWN = StepTimes(0.0, 0.0, 0.25, 1.0, 0.0, 0.0)
"""Times until step times are learned, in iterations of one row: four positions cost as much as the weights."""

Candidates = Seq[tuple[Sequence, int]]
"""Sequences, each with the most drafts that its own end leaves it."""


class Mean:
    """Moving mean that starts as a plain one."""

    def __init__(self, prior: float = 0.0, weight: float = 0.0) -> None:
        self.value, self._count = prior, weight

    @property
    def known(self) -> bool:
        return self._count > 0

    def note(self, value: float) -> None:
        self._count += 1.0
        self.value += max(_NEW, 1.0 / self._count) * (value - self.value)


class StepPrices:
    """Seconds of decode rows with further positions, by step times and what was measured."""

    def __init__(self) -> None:
        self._learned = False
        self._plain = Mean()
        """Logarithm of measured over estimated time, without drafts."""
        self._more: dict[int, Mean] = {}
        """Logarithm of the further ratio with drafts, by the octave of their positions."""

    @property
    def known(self) -> bool:
        """Whether an iteration was measured, so that seconds are some."""
        return self._plain.known

    def seconds(self, times: StepTimes | None, shape: BatchShape, positions: int) -> float:
        """Return the seconds of `shape` with drafted positions, each as dear as a row of its own."""
        more = self._more.get(positions.bit_length())
        correction = self._plain.value + (more.value if more is not None and positions else 0.0)
        return _model_s(times, shape, positions) * math.exp(correction)

    def note(self, times: StepTimes | None, shape: BatchShape, positions: int, seconds: float) -> None:
        if (times is not None) != self._learned:  # other units
            self._learned, self._plain = times is not None, Mean()
        measured = math.log(max(seconds, 1e-9) / _model_s(times, shape, positions))
        if not positions:
            self._plain.note(measured)
        elif self._plain.known:
            more = self._more.setdefault(positions.bit_length(), Mean(0.0, _CORRECTION_PRIOR))
            more.note(measured - self._plain.value)


def _model_s(times: StepTimes | None, shape: BatchShape, positions: int) -> float:
    if positions:
        context = shape.decode_context * positions // max(1, shape.decodes)
        shape = shape._replace(decodes=shape.decodes + positions, decode_context=shape.decode_context + context)
    return max(step_seconds(times or _UNKNOWN, shape), 1e-9)


class Speculation:
    """Drafts of one worker."""

    def __init__(self, max_drafts: int, *, uses_draft_model: bool = False) -> None:
        """`max_drafts`: of one row. `uses_draft_model`: drafts have a price of their own, and any text has some."""
        self._max_drafts = max_drafts
        self.uses_draft_model = uses_draft_model
        self._draft = Mean()
        """Seconds that one draft of each row takes, where a model makes them."""
        self._prices = StepPrices()
        self._common = _FIRST_CHANCE
        """Chance of a proposed token over all requests."""
        self._ran = 0
        """Iterations so far."""
        self._was_worthwhile, self._of_rows, self._worthwhile_reused = True, 0, 0
        """Last answer to whether drafts could pay, for which rows, and how often it was given."""

    def chance(self, sequence: Sequence) -> float:
        """Return the chance that the next proposed token is right, if those before it are."""
        tried, right = sequence.drafts_judged, sequence.drafts_right
        return (right + _PRIOR_WEIGHT * self._common) / (tried + _PRIOR_WEIGHT)

    def judged(self, sequence: Sequence, proposed: int, right: int) -> None:
        """Record that of `proposed` tokens the first `right` came; those behind a wrong one say nothing. Expected
        tokens count alike where they were not computed, so no iteration is spent on finding out."""
        looked_at = min(right + 1, proposed)
        sequence.drafts_judged = _FADES * sequence.drafts_judged + looked_at
        sequence.drafts_right = _FADES * sequence.drafts_right + right
        self._common += _COMMON * (right / looked_at - self._common)

    def ran(self, times: StepTimes | None, shape: BatchShape, drafted: int, seconds: float) -> None:
        """Record an iteration of decode rows, with `drafted` positions in all."""
        self._ran += 1
        if drafted or self._ran <= _EACH or self._ran % _NOTED == 0:
            self._prices.note(times, shape, drafted, seconds)

    def drafted(self, deepest: int, seconds: float) -> None:
        """Record the seconds in which `deepest` drafts of a row were made, or fewer of others."""
        if self.uses_draft_model and deepest:
            self._draft.note(seconds / deepest)

    def unjudged(self, sequence: Sequence) -> None:
        """Reduce the weight of the record of a sequence for which a model made no drafts in an iteration."""
        if self.uses_draft_model:
            sequence.drafts_judged *= _FORGETS
            sequence.drafts_right *= _FORGETS

    def is_worthwhile(self, times: StepTimes | None, shape: BatchShape) -> bool:
        """Return whether rows of this shape would get drafts if these were as good as certain."""
        if not self._prices.known:
            return True
        plain_s, rows = self._prices.seconds(times, shape, 0), shape.decodes
        self._of_rows, self._worthwhile_reused, self._was_worthwhile = rows, 0, False
        for positions, deepest in ((1, 1), (rows * self._max_drafts, self._max_drafts)):
            tokens = rows + _LIKELY * positions
            taken_s = self._prices.seconds(times, shape, positions) + deepest * self._draft.value
            self._was_worthwhile = self._was_worthwhile or tokens / taken_s > _GAIN * rows / plain_s
        return self._was_worthwhile

    def lately(self, rows: int) -> bool | None:
        """Return what `is_worthwhile` said of as many rows in the last iterations; None: it has to be asked."""
        self._worthwhile_reused += 1
        return self._was_worthwhile if rows == self._of_rows and self._worthwhile_reused < _MAX_REUSES else None

    def allot(
        self, times: StepTimes | None, shape: BatchShape, candidates: Candidates, *, most: int, within_s: float
    ) -> list[int]:
        """Return the drafts of each sequence, `most` of all together; `shape`: of all rows. `within_s`: bound, maybe
        infinite."""
        return self._best(times, shape, candidates, most, within_s)[0]

    def worth_waiting(
        self, times: StepTimes | None, shape: BatchShape, candidates: Candidates, *, most: int, within_s: float
    ) -> bool:
        """Return whether the next iteration should wait for the token before its drafts instead of being planned ahead.
        The wait is certain, drafts come if that token is as expected; a model makes some whatever it is."""
        if not self.uses_draft_model:
            # However little positions cost: a row's drafts bring no more than the sum of its chances' powers.
            likeliest, brought = 0.0, 0.0
            for sequence, limit in candidates:
                if limit > 0:
                    chance = self.chance(sequence)
                    likeliest = max(likeliest, chance)
                    brought += min(chance / (1.0 - chance), self._max_drafts) if chance < 1.0 else self._max_drafts
            if brought * likeliest <= _WAIT * shape.decodes:
                return False
        allotted, faster = self._best(times, shape, candidates, most, within_s)
        if self.uses_draft_model:
            return faster - 1.0 > _WAIT
        chances = [self.chance(each) for (each, _), count in zip(candidates, allotted, strict=True) if count]
        return (faster - 1.0) * max(chances, default=0.0) > _WAIT

    def _best(
        self, times: StepTimes | None, shape: BatchShape, candidates: Candidates, most: int, within_s: float
    ) -> tuple[list[int], float]:
        """Return drafts of each, and by how much they raise tokens a second."""
        allotted = [0] * len(candidates)
        if not self._prices.known or most < 1:
            return allotted, 1.0
        chances = [self.chance(sequence) for sequence, _ in candidates]
        limits = [min(limit, self._max_drafts) for _, limit in candidates]
        plain_s = self._prices.seconds(times, shape, 0)
        tokens, best_rate, best = float(shape.decodes), _GAIN * shape.decodes / plain_s, 0
        gains = [chance if limit > 0 else 0.0 for chance, limit in zip(chances, limits, strict=True)]
        order, deepest = list[int](), 0
        while len(order) < min(most, best + _LOOKAHEAD):
            index = max(range(len(gains)), key=gains.__getitem__)
            if gains[index] <= 0.0:
                break
            tokens += gains[index]
            order.append(index)
            deepest = max(deepest, allotted[index] + 1)
            taken_s = self._prices.seconds(times, shape, len(order)) + deepest * self._draft.value
            if taken_s > within_s:
                break
            if tokens / taken_s > best_rate:
                best_rate, best = tokens / taken_s, len(order)
            allotted[index] += 1
            gains[index] = gains[index] * chances[index] if allotted[index] < limits[index] else 0.0
        allotted = [0] * len(candidates)
        for index in order[:best]:
            allotted[index] += 1
        return allotted, best_rate * plain_s / shape.decodes if best else 1.0

    def metrics(self) -> dict[str, float]:
        found = {"draft_chance": self._common}
        return found | {"draft_seconds": self._draft.value} if self.uses_draft_model else found
