"""The execution predictor against passes simulated one by one; then what a probe adds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.policies.dynaserve.timeline import PassLimits, SegmentWork, Timeline
from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from cohort.common.types import StepTimes
from tests.examples import examples

TIMES = StepTimes(1.3e-3, 1.06e-4, 1.3e-4, 0.022, 6e-9, 1.5e-7)
LIMITS = PassLimits(pass_s=0.09, max_tokens=2048, max_rows=256, least_prefill=16)
SECONDS = StepTimes(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""A pass takes a second whatever is in it."""


def one_by_one(queued_work: list[SegmentWork], times: StepTimes = TIMES, limits: PassLimits = LIMITS) -> list[float]:
    """Every pass: a token for each decode, then prompts in order while the pass stays within its bound."""
    left = [[segment_work.prefill, segment_work.context, segment_work.decode] for segment_work in queued_work]
    ends = [0.0] * len(queued_work)
    now_s = 0.0
    while any(p or d for p, _, d in left):
        decoding = [i for i, (p, _, d) in enumerate(left) if not p and d][: limits.max_rows]
        shape = BatchShape(0, 0, 0, len(decoding), sum(left[i][1] for i in decoding))
        for index in [i for i, (p, _, _) in enumerate(left) if p]:
            headroom = limits.max_tokens - shape.prefill_tokens - shape.decodes
            low, high = 0, min(left[index][0], headroom)
            if step_seconds(times, shape.with_prefill(left[index][1], high)) <= limits.pass_s:
                low = high
            while high - low > 1:
                middle = (low + high) // 2
                fits = step_seconds(times, shape.with_prefill(left[index][1], middle)) <= limits.pass_s
                low, high = (middle, high) if fits else (low, middle)
            if not shape.prefill_tokens:
                low = max(low, min(limits.least_prefill, left[index][0]))
            if not low:
                break
            shape = shape.with_prefill(left[index][1], low)
            left[index][0] -= low
            left[index][1] += low
            if left[index][0]:
                break
        now_s += step_seconds(times, shape)
        for index in decoding:
            left[index][1] += 1
            left[index][2] -= 1
        for index, (p, _, d) in enumerate(left):
            if not p and not d and not ends[index]:
                ends[index] = now_s
    return ends


class Watched(Timeline):
    """With the ends of all pieces, of which placement only needs the last."""

    def _walk(self, starts, ends, context):  # type: ignore[no-untyped-def]
        self.ends = ends
        return super()._walk(starts, ends, context)

    def finish_times(self) -> np.ndarray:
        """Seconds from now at which each segment is done, in the order given."""
        return np.interp(self.ends, self._edges, self._elapsed)


def test_decodes_by_hand() -> None:
    timeline = Watched([SegmentWork(0, 10, 3), SegmentWork(0, 10, 5)], SECONDS, LIMITS)
    assert timeline.end_s == pytest.approx(5.0)
    assert timeline.finish_times() == pytest.approx([3.0, 5.0])
    assert timeline.end_with(SegmentWork(0, 10, 4)) == pytest.approx(5.0)
    assert timeline.end_with(SegmentWork(0, 10, 9)) == pytest.approx(9.0)
    assert timeline.finish_of(SegmentWork(0, 10, 4)) == pytest.approx(4.0)
    assert timeline.finish_of(SegmentWork(0, 10, 4), earliest_s=2.0) == pytest.approx(6.0)


def test_a_sequence_without_a_row_waits_for_one() -> None:
    timeline = Watched(
        [SegmentWork(0, 1, 4), SegmentWork(0, 1, 2), SegmentWork(0, 1, 3)], SECONDS, PassLimits(0.09, 2048, 2, 16)
    )
    assert timeline.finish_times() == pytest.approx([4.0, 2.0, 5.0])


def test_nothing_takes_no_time() -> None:
    timeline = Timeline([], TIMES, LIMITS)
    assert timeline.end_s == 0.0
    assert timeline.end_with(SegmentWork(0, 0, 0)) == 0.0
    alone = one_by_one([SegmentWork(3000, 0, 40)])[0]
    assert timeline.end_with(SegmentWork(3000, 0, 40)) == pytest.approx(alone, rel=0.05)


queued_work = st.lists(
    st.one_of(
        st.builds(SegmentWork, st.just(0), st.integers(50, 4000), st.integers(1, 300)),
        st.builds(SegmentWork, st.integers(50, 4000), st.just(0), st.integers(0, 300)),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=examples(0.4))
@given(queued_work)
def test_ends_are_those_of_passes_one_by_one(queue: list[SegmentWork]) -> None:
    ends = one_by_one(queue)
    timeline = Watched(queue, TIMES, LIMITS)
    assert timeline.end_s == pytest.approx(max(ends), rel=0.05, abs=0.1)
    assert np.abs(timeline.finish_times() - np.array(ends)).max() <= 0.05 * max(ends) + 0.1


@settings(max_examples=examples(0.4))
@given(queued_work, st.integers(1, 3000), st.integers(1, 300), st.booleans())
def test_a_probe_adds_as_much_as_a_new_simulation(
    queue: list[SegmentWork], tokens: int, decode: int, prompt: bool
) -> None:
    extra = SegmentWork(tokens, 0, decode) if prompt else SegmentWork(0, tokens, decode)
    ends = one_by_one([*queue, extra])
    timeline = Timeline(queue, TIMES, LIMITS)
    assert timeline.end_with(extra) == pytest.approx(max(ends), rel=0.08, abs=0.15)
    assert timeline.finish_of(extra) == pytest.approx(ends[-1], rel=0.1, abs=0.2)
    assert timeline.end_with(extra) >= timeline.end_s


@settings(max_examples=examples(0.4))
@given(queued_work, st.integers(0, 2000), st.integers(1, 200), st.integers(1, 200))
def test_more_work_never_ends_earlier(queue: list[SegmentWork], prefill: int, decode: int, more: int) -> None:
    timeline = Timeline(queue, TIMES, LIMITS)
    less_s = timeline.end_with(SegmentWork(prefill, 100, decode))
    assert timeline.end_with(SegmentWork(prefill, 100, decode + more)) >= less_s - 1e-9
    assert timeline.end_with(SegmentWork(prefill + more, 100, decode)) >= less_s - 1e-9
