"""How many drafts rows are given: what chances and prices make of it, and that it stays off where it does not pay."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.speculation import Speculation
from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from cohort.common.sequence import Sequence
from cohort.common.types import Attempt, Request, SamplingParams, StepTimes

WEIGHTS = StepTimes(1e-3, 1e-4, 2e-4, 2e-2, 1e-9, 1e-8)
"""Reading the weights takes the time: a hundred tokens cost little more than one."""
COMPUTING = StepTimes(0.0, 0.0, 2e-3, 1e-4, 1e-9, 1e-8)
"""Each token costs the same."""
MOST = 8


def _sequence(name: str = "r", judged: float = 0.0, right: float = 0.0) -> Sequence:
    request = Request(Attempt(name, 0), "g", [1] * 8, 8, SamplingParams(max_tokens=400), 0.0)
    sequence = Sequence(request, list(request.tokens), None, 0, 0.0)
    sequence.drafts_judged, sequence.drafts_right = judged, right
    return sequence


def _shape(rows: int) -> BatchShape:
    return BatchShape(0, 0, 0, rows, 100 * rows)


def _policy(times: StepTimes, rows: int = 1, slower: float = 1.0) -> Speculation:
    """Of a worker whose iterations take what its times say."""
    policy = Speculation(MOST)
    policy.ran(times, _shape(rows), 0, slower * step_seconds(times, _shape(rows)))
    return policy


def _allot(
    policy: Speculation, times: StepTimes, sequences: list[Sequence], within_s: float = math.inf, limit: int = MOST
) -> list[int]:
    candidates = [(sequence, limit) for sequence in sequences]
    return policy.allot(times, _shape(len(sequences)), candidates, most=200, within_s=within_s)


def test_nothing_is_drafted_before_an_iteration_was_measured() -> None:
    assert _allot(Speculation(MOST), WEIGHTS, [_sequence(judged=9.0, right=9.0)]) == [0]


def test_one_row_whose_drafts_are_right_has_as_many_as_it_may() -> None:
    policy = _policy(WEIGHTS)
    quoting = _sequence(judged=10.0, right=10.0)
    assert _allot(policy, WEIGHTS, [quoting]) == [MOST]
    assert _allot(policy, WEIGHTS, [quoting], limit=3) == [3]


def test_drafts_that_fail_are_given_up_and_come_back() -> None:
    policy, sequence = _policy(WEIGHTS), _sequence()
    assert _allot(policy, WEIGHTS, [sequence]) > [0]
    for _ in range(12):
        policy.judged(sequence, 4, 0)
    before = _allot(policy, COMPUTING, [sequence])
    assert before == [0] and policy.chance(sequence) < 0.1
    for _ in range(12):  # only looked at: nothing was computed for it
        policy.judged(sequence, 1, 1)
    assert policy.chance(sequence) > 0.7
    assert _allot(policy, WEIGHTS, [sequence])[0] >= 4


def test_where_each_position_costs_a_full_share_none_is_drafted() -> None:
    for rows in (2, 4, 16):
        quoting = [_sequence(str(index), 10.0, 10.0) for index in range(rows)]
        assert _allot(_policy(COMPUTING, rows), COMPUTING, quoting) == [0] * rows


def test_the_engine_need_not_look_where_not_even_sure_drafts_would_pay() -> None:
    assert _policy(WEIGHTS).is_worthwhile(WEIGHTS, _shape(1))
    assert _policy(WEIGHTS, 4).is_worthwhile(WEIGHTS, _shape(4))
    assert not _policy(COMPUTING, 4).is_worthwhile(COMPUTING, _shape(4))


def test_a_row_that_quotes_comes_before_one_that_tells() -> None:
    times = StepTimes(0.0, 0.0, 1e-3, 4e-3, 0.0, 0.0)
    telling, quoting = _sequence("t", 10.0, 1.0), _sequence("q", 10.0, 9.8)
    less, more = _allot(_policy(times, 2), times, [telling, quoting])
    assert less < more


def test_an_iteration_with_drafts_keeps_the_strictest_tpot() -> None:
    policy, quoting = _policy(WEIGHTS), _sequence(judged=10.0, right=10.0)
    plain_s = step_seconds(WEIGHTS, _shape(1))
    assert _allot(policy, WEIGHTS, [quoting], within_s=plain_s) == [0]
    assert 0 < _allot(policy, WEIGHTS, [quoting], within_s=plain_s + 3.5e-4)[0] < MOST


def test_a_price_that_the_times_do_not_know_is_learned() -> None:
    """Iterations with drafts turn out three times as long."""
    policy, shape = _policy(WEIGHTS), _shape(1)
    doubtful = _sequence(judged=20.0, right=12.0)
    before = _allot(policy, WEIGHTS, [doubtful])[0]
    assert before > 0
    for drafted in (1, 2, 4, 8) * 20:
        policy.ran(WEIGHTS, shape, drafted, 3.0 * step_seconds(WEIGHTS, shape))
    assert _allot(policy, WEIGHTS, [doubtful]) == [0]


def test_an_iteration_waits_for_the_one_before_it_only_for_drafts_that_are_likely() -> None:
    """Waiting is certain; the drafts come if the token before them is as expected."""
    times = StepTimes(0.0, 0.0, 1e-3, 4e-3, 0.0, 0.0)
    policy, shape = _policy(times), _shape(1)
    quoting, telling = _sequence("q", 10.0, 9.8), _sequence("t", 10.0, 1.0)
    for sequence, waits in ((quoting, True), (telling, False)):
        assert policy.worth_waiting(times, shape, [(sequence, MOST)], most=9, within_s=math.inf) is waits
    assert _allot(policy, times, [telling])[0] > 0, "without a wait they would be worth it"


@given(
    rows=st.integers(1, 12),
    judged=st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 1.0)), min_size=12, max_size=12),
    token_s=st.floats(1e-6, 1e-2),
    floor_s=st.floats(1e-4, 1e-1),
    most=st.integers(0, 40),
    within=st.floats(0.5, 3.0),
    slower=st.floats(0.5, 2.0),
)
def test_what_is_allotted_is_worth_its_time(
    rows: int,
    judged: list[tuple[float, float]],
    token_s: float,
    floor_s: float,
    most: int,
    within: float,
    slower: float,
) -> None:
    """Never more than may be, never beyond the bound, and never fewer tokens a second than without."""
    times = StepTimes(0.0, 0.0, token_s, floor_s, 0.0, 0.0)
    sequences = [_sequence(str(index), seen, seen * share) for index, (seen, share) in enumerate(judged[:rows])]
    policy, shape = _policy(times, rows, slower), _shape(rows)
    plain_s = slower * step_seconds(times, shape)
    limits = [index % (MOST + 3) for index in range(rows)]
    allotted = policy.allot(
        times, shape, list(zip(sequences, limits, strict=True)), most=most, within_s=within * plain_s
    )
    assert sum(allotted) <= most
    assert all(0 <= count <= min(limit, MOST) for count, limit in zip(allotted, limits, strict=True))
    if sum(allotted):
        taken_s = slower * step_seconds(times, shape._replace(decodes=rows + sum(allotted)))
        assert taken_s <= within * plain_s * 1.0001
        expected = rows + sum(
            policy.chance(sequence) ** place
            for sequence, count in zip(sequences, allotted, strict=True)
            for place in range(1, count + 1)
        )
        assert expected / taken_s > rows / plain_s


def test_drafts_of_a_model_have_their_price() -> None:
    """Each further one of a row costs what the model takes for it; of several rows they are made together."""
    likely = [_sequence(str(index), judged=10.0, right=8.0) for index in range(2)]
    plain_s = step_seconds(WEIGHTS, _shape(1))
    given: list[list[int]] = []
    for share in (0.0, 0.1, 0.3, 1.0):
        policy = Speculation(MOST, uses_draft_model=True)
        policy.ran(WEIGHTS, _shape(1), 0, plain_s)
        policy.drafted(4, 4 * share * plain_s)
        given.append(_allot(policy, WEIGHTS, likely[:1]))
        assert policy.is_worthwhile(WEIGHTS, _shape(1)) is (share < 1.0)
        if share == 0.3:
            assert _allot(policy, WEIGHTS, likely) >= given[-1] * 2, "no dearer than for one"
            assert policy.worth_waiting(WEIGHTS, _shape(1), [(likely[0], MOST)], most=20, within_s=math.inf)
            assert _allot(policy, WEIGHTS, likely[:1], within_s=1.1 * plain_s) == [0], "within the SLO, drafting too"
    assert given == sorted(given, reverse=True)
    assert given[0] == [MOST] and 0 < given[2][0] < given[1][0] < MOST and given[3] == [0]


def test_a_model_is_asked_again_after_a_while() -> None:
    asked, looked = Speculation(MOST, uses_draft_model=True), Speculation(MOST)
    for policy, returns in ((asked, True), (looked, False)):
        policy.ran(WEIGHTS, _shape(1), 0, step_seconds(WEIGHTS, _shape(1)))
        policy.drafted(1, 0.2 * step_seconds(WEIGHTS, _shape(1)))
        sequence = _sequence(judged=20.0, right=0.0)
        assert policy.chance(sequence) < 0.1
        for _ in range(200):
            policy.unjudged(sequence)
        assert (policy.chance(sequence) > 0.4) is returns


def test_whether_drafts_could_pay_is_asked_anew_after_some_iterations_or_with_other_rows() -> None:
    policy = _policy(WEIGHTS, 4)
    assert policy.lately(4) is None
    assert policy.is_worthwhile(WEIGHTS, _shape(4))
    assert [policy.lately(4) for _ in range(8)] == [True] * 7 + [None]
    assert not policy.is_worthwhile(COMPUTING, _shape(4))
    assert policy.lately(4) is False and policy.lately(1) is None


@given(
    st.lists(st.tuples(st.floats(0, 20), st.floats(0, 1), st.integers(0, MOST)), min_size=1, max_size=8),
    st.sampled_from([WEIGHTS, COMPUTING]),
)
def test_what_cannot_be_worth_waiting_for_is_told_without_a_search(
    records: list[tuple[float, float, int]], times: StepTimes
) -> None:
    """The quick answer is the long one."""
    policy = _policy(times, len(records))
    candidates = [
        (_sequence(str(i), judged, judged * share), limit) for i, (judged, share, limit) in enumerate(records)
    ]
    shape = _shape(len(records))
    allotted, faster = policy._best(times, shape, candidates, 200, math.inf)
    chances = [policy.chance(each) for (each, _), count in zip(candidates, allotted, strict=True) if count]
    searched = (faster - 1.0) * max(chances, default=0.0) > 0.05
    assert policy.worth_waiting(times, shape, candidates, most=200, within_s=math.inf) == searched
