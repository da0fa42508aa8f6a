"""What a round of `cohort bench recovery` makes of the times at which tokens came."""

from __future__ import annotations

import pytest

from cohort.services.bench.child import MeasurementFailed
from cohort.services.bench.live.recovery import Round, round_of, summarise


def test_only_gaps_that_end_after_the_kill_count_as_its_cost() -> None:
    """The first stream waits from 1.0 over the kill at 1.1 to 1.5; the second had its longest gap before."""
    streams = [[0.8, 0.9, 1.0, 1.5, 1.6], [0.2, 0.9, 1.0, 1.2, 1.3]]
    told = round_of(streams, killed_s=1.1, back_s=4.1)
    assert (told.gap_s, told.usual_s, told.back_s) == pytest.approx((0.5, 0.7, 3.0))
    assert (told.streams, told.early) == (2, 2)


def test_a_stream_that_waits_for_the_restart_did_not_go_on_early_and_one_that_had_ended_was_not_hit() -> None:
    streams = [[0.9, 1.0, 4.5, 4.6], [0.9, 1.0, 1.2, 1.3], [0.5, 0.6]]
    told = round_of(streams, killed_s=1.1, back_s=4.1)
    assert told.gap_s == pytest.approx(3.5)
    assert (told.streams, told.early) == (2, 1)


def test_a_kill_that_hits_no_stream_measures_nothing() -> None:
    with pytest.raises(MeasurementFailed, match="every stream had ended"):
        round_of([[0.5, 0.6], [0.4, 0.9]], killed_s=1.1, back_s=4.1)


def test_rounds_become_their_median_and_their_largest() -> None:
    rounds = [Round(gap_s, 0.05, 3.0, 4, 4) for gap_s in (0.2, 0.1, 0.4)]
    found = summarise("disaggregated", "decode-0", rounds)
    assert (found.gap_s.median, found.gap_s.max) == (0.2, 0.4)
