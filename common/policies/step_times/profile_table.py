"""Measured iterations by composition, and estimates from them for any other: the profile table of Alg. 2.

Cells hold what was measured there; a curve through all cells (`step_fit`) answers for compositions that have not run
yet. Starts empty or from a profile, refines itself while serving, and can be exported. Does no I/O.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import msgspec

from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from cohort.common.policies.step_times.step_fit import fit_step_times
from cohort.common.types import StepTimes

_NEW = 0.1
"""Weight of a new measurement in a cell that has seen ten."""
_WILD = 0.2
"""Distance (in logarithm) from a settled cell up to which a measurement moves it."""
_SETTLED = 5
_HALF_CONFIDENCE = 4.0
"""Measurements after which a cell corrects the curve by half its deviation from it."""
_SMOOTH = 0.02
"""Weight of an iteration in the moving mean of errors."""
_FIRST_FIT = 6
"""Cells that a curve needs."""
_FIT_EVERY = 2048
"""Measurements between two fits at most; the first ones come after a few, then doubling."""

CellKey = tuple[int, ...]
IterationKind = Literal["decode", "mixed", "prefill"]


class _Cell(msgspec.Struct, array_like=True):
    """Running means of what was measured: shape and logarithm of seconds."""

    count: int
    prefill_tokens: float
    prefill_rows: float
    prefill_pairs: float
    decodes: float
    decode_context: float
    log_s: float
    copied: float = 0.0

    @property
    def shape(self) -> BatchShape:
        return BatchShape(
            round(self.prefill_tokens),
            round(self.prefill_rows),
            round(self.prefill_pairs),
            round(self.decodes),
            round(self.decode_context),
            round(self.copied),
        )


class _State(msgspec.Struct, tag_field="kind", tag="dynaserve-profile-table"):
    version: int
    cells: list[tuple[CellKey, _Cell]]


class ProfileShape(msgspec.Struct):
    rows: int
    tokens_per_row: int
    context: int
    decodes: int = 0
    decode_context: int = 0


class ProfilePoint(msgspec.Struct):
    shape: ProfileShape
    median_s: float


class _Profile(msgspec.Struct):
    """Points read from the file that `cohort profile` writes."""

    points: list[ProfilePoint]


def cell_key(shape: BatchShape) -> CellKey:
    """D5 · Return the table's key: prefill tokens, mean context, decode rows; each in half octaves, so that neighbours
    in a cell differ by some 40 % and a few hundred cells hold everything. Copies of KV are a fourth number."""
    key = (_bin(shape.prefill_tokens), _bin(shape.mean_context), _bin(shape.decodes))
    return (*key, _bin(shape.copied)) if shape.copied else key


def kind_of(shape: BatchShape) -> IterationKind:
    return "mixed" if shape.mixed else "decode" if shape.decodes else "prefill"


@lru_cache(4096)
def _bin(value: float) -> int:
    return int(2.0 * math.log2(value + 1.0) + 0.5)


class ProfileTable:
    """D5 · DynaServe §4.2: latency by (prefill tokens, mean context, decode count), refined by every iteration.

    Differs from the paper: it prints no rule for compositions without a measurement; here a curve through all cells
    gives the value and the cell, where there is one, corrects it. Single outliers (a page fault, a neighbour) are
    clipped.
    """

    def __init__(self) -> None:
        self._cells: dict[CellKey, _Cell] = {}
        self._deviations: dict[CellKey, float] = {}
        """Logarithms of cells over the curve, as far as they were asked for since the cell or the curve changed."""
        self.step_times: StepTimes | None = None
        """Fitted curve; None until enough was measured."""
        self._seen = 0
        self._next_fit = 8
        self.error = 0.0
        """Moving mean of |log(estimate / measured)| at the time of each measurement."""
        self._errors: dict[IterationKind, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._cells)

    @property
    def suffices(self) -> bool:
        """Whether the cells are enough for a curve; the next fit may still be some iterations away."""
        return len(self._cells) >= _FIRST_FIT

    def error_of(self, kind: IterationKind) -> float:
        """Return this process' moving mean of |estimate / measured - 1| for the kind; 0 before any."""
        return self._errors.get(kind, (0, 0.0))[1]

    def record(self, shape: BatchShape, seconds: float) -> None:
        """Alg. 2, first step: Record the batch that just ran."""
        if seconds <= 0.0 or not shape.prefill_rows + shape.decodes + shape.copied:
            return
        estimate = self.estimate(shape)
        if estimate:
            self.error += _SMOOTH * (abs(math.log(estimate / seconds)) - self.error)
            self._judge(kind_of(shape), abs(estimate / seconds - 1.0))
        self._put(shape, seconds)
        self._seen += 1
        if self._seen >= self._next_fit:
            self._next_fit = self._seen + min(_FIT_EVERY, self._seen)
            self._fit()

    def estimate(self, shape: BatchShape) -> float | None:
        """Return an iteration's seconds; None until there is a curve."""
        times = self.step_times
        if times is None:
            return None
        curve_s = step_seconds(times, shape)
        key = cell_key(shape)
        cell = self._cells.get(key)
        if cell is None or curve_s == 0.0:
            return curve_s
        deviation = self._deviations.get(key)
        if deviation is None:
            deviation = self._deviations[key] = cell.log_s - math.log(step_seconds(times, cell.shape))
        return curve_s * math.exp(deviation * cell.count / (cell.count + _HALF_CONFIDENCE))

    def prefill_budget(self, base: BatchShape, start: int, most: int, within_s: float) -> int:
        """D5 · Return the most tokens, max `most`, of a prompt computed up to `start` that keep the batch `base` within
        `within_s`. 0 if none fit; `most` while nothing is known."""
        if most <= 0:
            return 0
        whole_s = self.estimate(base.with_prefill(start, most))
        if whole_s is None or whole_s <= within_s:
            return most
        low, high = 0, most  # low fits (or is none), high does not
        while high - low > 1:
            middle = (low + high) // 2
            estimate_s = self.estimate(base.with_prefill(start, middle))
            if estimate_s is None or estimate_s <= within_s:
                low = middle
            else:
                high = middle
        return low

    def export(self) -> bytes:
        return msgspec.json.encode(_State(1, list(self._cells.items())))

    def load(self, data: bytes) -> None:
        """Add an exported table, or the points of `cohort profile`. Raises `ValueError` for anything else."""
        try:
            self._cells.update(msgspec.json.decode(data, type=_State).cells)
        except msgspec.ValidationError:
            try:
                profile = msgspec.json.decode(data, type=_Profile)
            except msgspec.MsgspecError as error:
                raise ValueError(f"neither a profile table nor a profile: {error}") from error
            for point in profile.points:
                self._put(_measured_shape(point.shape), point.median_s)
        except msgspec.DecodeError as error:
            raise ValueError(f"not JSON: {error}") from error
        self._fit()

    def _judge(self, kind: IterationKind, off: float) -> None:
        judged, error = self._errors.get(kind, (0, 0.0))
        judged += 1
        self._errors[kind] = judged, error + max(_SMOOTH, 1.0 / judged) * (off - error)

    def _put(self, shape: BatchShape, seconds: float) -> None:
        key, log_s = cell_key(shape), math.log(seconds)
        self._deviations.pop(key, None)
        cell = self._cells.get(key)
        if cell is None:
            self._cells[key] = _Cell(
                1,
                float(shape.prefill_tokens),
                float(shape.prefill_rows),
                float(shape.prefill_pairs),
                float(shape.decodes),
                float(shape.decode_context),
                log_s,
                float(shape.copied),
            )
            return
        cell.count += 1
        weight = max(_NEW, 1.0 / cell.count)
        if cell.count > _SETTLED and abs(log_s - cell.log_s) > _WILD:
            # The measurement is clipped, not its shape: shapes are exact. So a cell follows a lasting change, slowly.
            log_s = cell.log_s + math.copysign(_WILD, log_s - cell.log_s)
        cell.log_s += weight * (log_s - cell.log_s)
        cell.prefill_tokens += weight * (shape.prefill_tokens - cell.prefill_tokens)
        cell.prefill_rows += weight * (shape.prefill_rows - cell.prefill_rows)
        cell.prefill_pairs += weight * (shape.prefill_pairs - cell.prefill_pairs)
        cell.decodes += weight * (shape.decodes - cell.decodes)
        cell.decode_context += weight * (shape.decode_context - cell.decode_context)
        cell.copied += weight * (shape.copied - cell.copied)

    def _fit(self) -> None:
        if not self.suffices:
            return
        self._deviations.clear()
        cells = list(self._cells.values())
        self.step_times = fit_step_times(
            [cell.shape for cell in cells],
            [math.exp(cell.log_s) for cell in cells],
            [float(min(cell.count, 10)) for cell in cells],
            self.step_times,
        )


def _measured_shape(shape: ProfileShape) -> BatchShape:
    """Return the shape of a profile's point, whose `context` counts positions after the step."""
    if shape.tokens_per_row == 1:
        return BatchShape.of_decodes(shape.rows, shape.rows * shape.context)
    batch = BatchShape.of_decodes(shape.decodes, shape.decodes * shape.decode_context)
    for _ in range(shape.rows):
        batch = batch.with_prefill(shape.context - shape.tokens_per_row, shape.tokens_per_row)
    return batch
