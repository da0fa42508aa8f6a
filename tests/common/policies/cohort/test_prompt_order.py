"""The order of prompts: who can still keep its promise before who cannot, shortest first, and nobody waits for ever."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.cohort import prompt_order
from cohort.common.policies.cohort.feasible_set import Job, most_in_time
from cohort.common.policies.cohort.promise import due_s, is_promised
from cohort.common.policies.cohort.prompt_order import PromptOrder, PromptQueue
from cohort.common.sequence import Sequence
from tests.common.policies.cohort.one_by_one import missed_first
from tests.common.policies.cohort.promised import promised

TOKEN_S = 0.001


def ordered(now_s: float, prompts: list[Sequence], order: PromptOrder | None = None) -> list[str]:
    queue = PromptQueue(order or PromptOrder())
    for each in prompts:
        queue.add(now_s, each)
    queue.advance(now_s, TOKEN_S)
    return [each.request_id for each in queue]


def test_class_then_feasible_then_shortest_then_late_by_due_time() -> None:
    prompts = [
        promised("best effort, short", 1, traffic_class="be", ttft_s=0.0),
        promised("late", 400, arrived_s=-0.9),
        promised("late for longer", 5, arrived_s=-2.0),
        promised("long", 500),
        promised("short", 20),
        promised("no promise", 2, ttft_s=0.0),
    ]
    expected = ["short", "long", "late for longer", "late", "no promise", "best effort, short"]
    assert ordered(0.0, prompts) == expected


def test_a_choice_is_as_long_as_all_of_its_request() -> None:
    """By rank, and in a plan, which looks at no more than 128 prompts."""
    prompts = [promised(f"choice {index}", 3, ttft_s=9.0, choices=128) for index in range(128)]
    prompts += [promised("plain", 12, ttft_s=9.0, arrived_s=0.1), promised("longer", 400, ttft_s=9.0)]
    assert ordered(0.1, prompts)[0] == planned(0.1, prompts, quick_s=0.05)[0] == "plain"
    assert ordered(0.1, prompts)[-1] == "longer", "the choices are 384 tokens"


def test_earliest_due_is_a_setting() -> None:
    prompts = [promised("long and urgent", 100, ttft_s=0.5), promised("short", 10, ttft_s=0.9)]
    assert ordered(0.0, prompts) == ["short", "long and urgent"]
    assert ordered(0.0, prompts, PromptOrder(first="earliest_due")) == ["long and urgent", "short"]


def test_without_its_order_prompts_come_first_come_first_served_within_a_class() -> None:
    prompts = [
        promised("late", 900, arrived_s=-0.9),
        promised("best", 10, arrived_s=-5.0, traffic_class="be"),
        promised("short", 10, arrived_s=-0.1),
    ]
    assert ordered(0.0, prompts, PromptOrder(first="fcfs")) == ["late", "short", "best"]


def test_a_priority_counts_within_its_class() -> None:
    prompts = [
        promised("urgent", 90, priority=-1),
        promised("short", 10),
        promised("best", 1, traffic_class="be", priority=-9),
    ]
    assert ordered(0.0, prompts) == ["urgent", "short", "best"]


def test_a_stream_that_lost_its_worker_goes_on_before_new_prompts_until_it_has_a_token() -> None:
    stream = promised("stream", 300, known=50, arrived_s=-7.0, waited_s=7.0)
    prompts = [promised("short", 10), stream, promised("best effort", 1, traffic_class="be")]
    assert ordered(0.0, prompts) == ["stream", "short", "best effort"]
    stream.tokens.append(1)
    assert ordered(0.0, prompts) == ["short", "stream", "best effort"]


def test_tokens_of_a_former_attempt_earn_no_time() -> None:
    stream = promised("stream", 300, known=50, arrived_s=-7.0, waited_s=7.0)
    assert due_s(stream) == 1.0
    stream.tokens.append(1)
    assert due_s(stream) == 1.1


def test_the_longest_wait_counts_after_a_minute_whatever_the_class_and_only_what_is_still_there() -> None:
    queue = PromptQueue(PromptOrder())
    older = promised("older", 900, arrived_s=-61.0, traffic_class="be", ttft_s=0.0)
    for each in (promised("old", 900, arrived_s=-60.5, priority=3), older, promised("short", 10)):
        queue.add(0.0, each)
    assert queue.longest_waiting(-1.1) is None
    assert queue.longest_waiting(0.0) is older
    queue.changed(0.0, older)
    assert queue.longest_waiting(0.0) is older
    queue.remove(older)
    assert queue.longest_waiting(-0.6) is None
    old = queue.longest_waiting(0.0)
    assert old is not None and old.request_id == "old"
    queue.add(0.0, older)
    assert queue.longest_waiting(0.0) is older


def test_what_goes_ahead_is_planned_first_and_once() -> None:
    prompts = [promised("short", 80), promised("urgent", 300, ttft_s=0.4), promised("late", 1, arrived_s=-70.0)]
    queue = PromptQueue(PromptOrder(first="most_in_time"))
    for each in prompts:
        queue.add(0.0, each)
    queue.advance(0.0, TOKEN_S)
    for ahead in prompts:
        others = [each.request_id for each in queue.plan(0.0, 0.0) if each is not ahead]
        plan = queue.plan(0.0, 0.0, ahead=ahead)
        assert plan.first is ahead
        assert [each.request_id for each in plan] == [ahead.request_id, *others]
        assert [each is ahead for each in queue.in_rank_order(ahead)] == [True, False, False]


def test_a_prompt_that_was_preempted_is_due_when_its_next_token_is() -> None:
    one = promised("r", 10, ttft_s=1.0, tpot_s=0.1)
    assert due_s(one) == 1.0 and not missed_first(0.9, one) and missed_first(1.1, one)
    one.tokens += [7] * 5
    assert due_s(one) == 1.5
    one.prefill_done_s = 0.8
    assert not missed_first(9.0, one), "its first token came in time"


def test_a_resubmitted_request_has_the_time_of_a_first_token_again() -> None:
    one = promised("r", 10, arrived_s=-30.0)
    assert missed_first(0.0, one)
    one.request = msgspec.structs.replace(one.request, waited_s=30.0)
    assert due_s(one) == 1.0 and not missed_first(0.0, one)


def planned(now_s: float, prompts: list[Sequence], *, pace_s: float = 0.0, quick_s: float = 0.0) -> list[str]:
    queue = PromptQueue(PromptOrder(first="most_in_time", caution=1.0, quick_s=quick_s))
    for each in prompts:
        queue.add(now_s, each)
    queue.advance(now_s, TOKEN_S)
    return [each.request_id for each in queue.plan(now_s, pace_s)]


def test_a_plan_keeps_the_urgent_long_prompt_that_shortest_first_would_lose() -> None:
    prompts = [promised("long", 900), promised("short", 200, ttft_s=2.0), promised("tiny", 50)]
    assert ordered(0.0, prompts) == ["tiny", "short", "long"]
    assert planned(0.0, prompts) == ["tiny", "long", "short"]


def test_a_short_prompt_never_waits_for_a_long_one_that_is_due() -> None:
    """Whatever that one loses: a request may cost its neighbours no more than a step."""
    prompts = [promised("long", 950), promised("quick", 100, ttft_s=9.0), promised("short", 200, ttft_s=9.0)]
    assert planned(0.0, prompts, quick_s=100 * TOKEN_S) == ["quick", "long", "short"]


def test_a_plan_leaves_out_the_longest_where_not_all_make_it() -> None:
    prompts = [promised("long", 900, ttft_s=0.95), promised("one", 400), promised("two", 500)]
    assert planned(0.0, prompts) == ["one", "two", "long"]
    assert planned(0.0, prompts, pace_s=0.0021) == ["one", "two", "long"], "at this pace one of them alone makes it"


def test_a_plan_counts_the_pace_and_what_goes_before() -> None:
    prompts = [promised("urgent", 300, ttft_s=0.4), promised("short", 80)]
    assert planned(0.0, prompts) == ["short", "urgent"]
    assert planned(0.0, prompts, pace_s=0.0013) == ["urgent", "short"]
    ahead = promised("ahead", 200)
    queue = PromptQueue(PromptOrder(first="most_in_time"))
    for each in (ahead, promised("long", 700, ttft_s=0.8), promised("small", 100, ttft_s=0.5)):
        queue.add(0.0, each)
    queue.advance(0.0, TOKEN_S)
    assert [each.request_id for each in queue.plan(0.0, 0.0, ahead=ahead)] == ["ahead", "small", "long"]


def test_a_plan_changes_only_the_order_of_those_that_can_make_it() -> None:
    prompts = [
        promised("best effort", 1, traffic_class="be", ttft_s=0.0),
        promised("late", 5, arrived_s=-2.0),
        promised("second", 10, priority=1),
        promised("short", 20),
    ]
    assert planned(0.0, prompts) == ordered(0.0, prompts) == ["short", "late", "second", "best effort"]


@dataclass
class Act:
    what: str
    index: int
    amount: float


ACTS = st.builds(
    Act,
    st.sampled_from(["add", "remove", "compute", "wait", "wait", "price"]),
    st.integers(0, 30),
    st.floats(0.01, 30.0),
)
PROMPTS = st.lists(
    st.builds(
        promised,
        st.just("?"),
        st.integers(2, 2000),
        arrived_s=st.floats(-50.0, 5.0),
        ttft_s=st.sampled_from([0.0, 0.3, 1.0, 5.0, 100.0]),
        tpot_s=st.sampled_from([0.0, 0.05]),
        traffic_class=st.sampled_from(["rt", "be"]),
        priority=st.sampled_from([0, 0, 1]),
    ),
    min_size=1,
    max_size=12,
)


ORDERS = [
    PromptOrder(first="shortest"),
    PromptOrder(first="most_in_time"),
    PromptOrder(first="earliest_due"),
    PromptOrder(first="fcfs"),
]


def planned_at_once(ranked: list[Sequence], order: PromptOrder, now_s: float, token_s: float) -> list[Sequence]:
    """All of the plan, of all that wait."""
    if order.first != "most_in_time":
        return ranked
    at_s, plan = now_s, list[Sequence]()
    for key, entries in groupby(ranked, key=lambda s: order.rank(now_s, s, token_s)[0][:3]):
        group = list(entries)
        if not key[0] and key[2] == 1:  # real-time, and can still make it
            jobs = [(due_s(s), s.uncomputed * token_s * order.caution) for s in group]
            kept, left_out = most_in_time(jobs, at_s)
            kept.sort(key=lambda index: jobs[index][1] > order.quick_s)
            at_s += sum(group[index].uncomputed for index in kept) * token_s * order.caution
            group = [group[index] for index in (*kept, *sorted(left_out))]
        elif not key[0] and key[2] == 0:  # interrupted
            at_s += sum(s.uncomputed for s in group) * token_s * order.caution
        plan += group
    return plan


def test_where_rows_lack_the_longest_response_is_left_out_and_the_others_go_by_due_time() -> None:
    queue = PromptQueue(PromptOrder(first="most_in_time", caution=1.0))
    for name, prompt, ttft_s, response in (("a", 20, 0.5, 300), ("b", 900, 0.9, 40), ("c", 10, 0.95, 50)):
        each = promised(name, prompt, ttft_s=ttft_s)
        each.predicted = float(response)
        queue.add(0.0, each)
    queue.advance(0.0, 0.0001)
    assert [each.request_id for each in queue.plan(0.0, 0.0, 0.3)] == ["a", "b", "c"], "a row for each in time"
    assert [each.request_id for each in queue.plan(0.0, 0.0, 0.4)] == ["b", "c", "a"]
    assert [each.request_id for each in queue.plan(0.0, 0.0)] == ["c", "a", "b"]


def test_a_plan_looks_at_what_is_asked_for_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def counted(jobs: list[Job], start_s: float, sizes: list[float]) -> tuple[list[int], list[int]]:
        looked.append(len(jobs))
        return most_in_time(jobs, start_s, sizes)

    monkeypatch.setattr(prompt_order, "most_in_time", counted)
    queue = PromptQueue(PromptOrder(first="most_in_time"))
    for index in range(1000):
        queue.add(0.0, promised(f"r{index}", 2 + index, ttft_s=99.0, priority=index % 2))
    plan = queue.plan(0.0, 0.0)
    assert plan.first is next(plan)
    assert looked == [128], "of one priority, the shortest"
    assert len(list(plan)) == 999 and looked == [128, 128]


def test_a_plan_can_leave_out_the_rest_of_a_class() -> None:
    queue = PromptQueue(PromptOrder(first="most_in_time"))
    for name, arrived_s, priority in (("a", 0.0, 0), ("b", 0.0, 0), ("c", 0.0, 1), ("d", -61.0, 1)):
        queue.add(0.0, promised(name, 50, arrived_s=arrived_s, priority=priority, traffic_class="be", ttft_s=0.0))
    queue.advance(0.0, TOKEN_S)
    names = []
    for sequence in (plan := queue.plan(0.0, 0.0)):
        names.append(sequence.request_id)
        plan.skip()
    assert names == ["a", "d"]


@given(PROMPTS, st.lists(ACTS, max_size=40), st.sampled_from(ORDERS))
def test_the_queue_equals_sorting_everything(prompts: list[Sequence], acts: list[Act], order: PromptOrder) -> None:
    queue, inside, now_s, token_s = PromptQueue(order), {}, 6.0, TOKEN_S
    for index, each in enumerate(prompts):
        each.key = msgspec.structs.replace(each.key, request_id=f"r{index}")
    queue.advance(now_s, token_s)
    ranked_by_s = token_s
    for act in acts:
        each = prompts[act.index % len(prompts)]
        match act.what:
            case "add" if each.key not in inside:
                queue.add(now_s, each)
                inside[each.key] = each
            case "remove":
                assert queue.remove(each) == (inside.pop(each.key, None) is not None)
            case "compute" if each.key in inside:
                each.computed += min(each.uncomputed - 1, int(act.amount * 20))
                queue.changed(now_s, each)
            case "wait":
                now_s += act.amount
            case "price":
                token_s = act.amount / 1000
        queue.advance(now_s, token_s)
        if abs(token_s - ranked_by_s) > 0.1 * ranked_by_s:
            ranked_by_s = token_s
        expected = sorted(inside.values(), key=lambda s: order.rank(now_s, s, ranked_by_s)[0])
        assert [s.key for s in queue] == [s.key for s in expected]
        expected_plan = planned_at_once(expected, order, now_s, ranked_by_s)
        assert [s.key for s in queue.plan(now_s, 0.0)] == [s.key for s in expected_plan]
        assert queue.is_any_late(now_s) == any(is_promised(s) and now_s > due_s(s) for s in expected)
        assert [queue.tokens(most) for most in (0, 700, 10**9)] == [
            min(most, sum(s.uncomputed for s in expected)) for most in (0, 700, 10**9)
        ]
        assert len(queue) == len(inside) and all(s in queue for s in inside.values())
