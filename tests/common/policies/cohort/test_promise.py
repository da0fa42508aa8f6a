"""Due times: of SLOs of tokens, and of a deadline for the whole response."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.cohort.promise import due_s, is_promised, targets, tpot_s, ttft_s
from cohort.common.sequence import Sequence
from cohort.common.types import Slo
from tests.common.policies.cohort.one_by_one import missed_first
from tests.common.policies.cohort.promised import promised


def with_deadline(deadline_s: float, *, predicted: float = 100.0, arrived_s: float = 0.0) -> Sequence:
    made = promised("d", 40, arrived_s=arrived_s)
    made.request = msgspec.structs.replace(made.request, slo=Slo(deadline_s=deadline_s))
    made.predicted = predicted
    return made


def decoded(sequence: Sequence, first_s: float, tokens: int) -> Sequence:
    sequence.prefill_done_s = first_s
    sequence.tokens += [1] * tokens
    return sequence


def test_what_a_client_names_goes_before_what_follows_from_its_deadline() -> None:
    assert targets(Slo(2.0, 0.1), 50.0) == (2.0, 0.1)
    assert targets(Slo(2.0, 0.1, 9.0), 50.0) == (2.0, 0.1)
    assert targets(Slo(deadline_s=8.0), 60.0) == (2.0, pytest.approx(0.1))
    assert targets(Slo(ttft_s=3.0, deadline_s=8.0), 50.0) == (3.0, pytest.approx(0.1))
    assert targets(Slo(), 50.0) == (0.0, 0.0)


@given(st.floats(0.5, 50.0), st.integers(2, 500), st.floats(0.0, 1.0))
def test_the_last_predicted_token_is_due_at_the_deadline(deadline_s: float, tokens: int, began: float) -> None:
    waiting = with_deadline(deadline_s, predicted=float(tokens), arrived_s=5.0)
    assert 5.0 < due_s(waiting) < 5.0 + deadline_s
    running = decoded(waiting, 5.0 + began * deadline_s, tokens - 1)
    assert due_s(running) == pytest.approx(5.0 + deadline_s)


def test_an_early_first_token_leaves_the_others_more_time() -> None:
    early, late = (decoded(with_deadline(10.0), first_s, 1) for first_s in (1.0, 4.0))
    assert tpot_s(early) > tpot_s(with_deadline(10.0)) > tpot_s(late) == pytest.approx(6.0 / 99)


def test_a_deadline_is_given_up_when_twice_the_pace_would_not_do() -> None:
    half_way = decoded(with_deadline(11.0), 1.1, 50)
    assert is_promised(half_way) and ttft_s(half_way) == pytest.approx(2.75)
    assert not missed_first(8.4, half_way) and missed_first(8.7, half_way)
    waiting = with_deadline(11.0)
    assert not missed_first(2.7, waiting) and missed_first(2.8, waiting)
