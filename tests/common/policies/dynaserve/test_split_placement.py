"""The global scheduler by hand: idle, short, balanced, loaded; what it believes between reports; what it cannot do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from cohort.common.policies.dynaserve.instance_work import Balance, InstanceWork, work_seconds
from cohort.common.policies.dynaserve.pressure_gate import PressureGate
from cohort.common.policies.dynaserve.split_placement import SplitPlacement
from cohort.common.policies.dynaserve.timeline import SegmentWork
from cohort.common.policies.interface import ClusterView, Impossible, InstanceView, Placed, Wait, WaitingRequest
from cohort.common.policies.settings import DynaServeSettings
from cohort.common.types import (
    Attempt,
    Prediction,
    QueuedWork,
    Request,
    Role,
    SamplingParams,
    Segment,
    StepTimes,
    WorkerCapacity,
    WorkerStats,
)
from tests.examples import examples

GPU = StepTimes(1.3e-3, 1.06e-4, 1.3e-4, 0.022, 6e-9, 1.5e-7)


def placement(balance: Balance = "work", tolerance: float = 0.05, *, await_arrivals: bool = True) -> SplitPlacement:
    return SplitPlacement(
        DynaServeSettings(search_tolerance=tolerance, headroom=0.1, balance=balance, await_arrivals=await_arrivals),
        default_output=256.0,
    )


def instance(
    name: str, *queue: QueuedWork, role: Role = Role.UNIFIED, times: StepTimes | None = GPU, blocks: int = 10_000
) -> InstanceView:
    capacity = WorkerCapacity(role, "m", 32_768, 48, 8, 128, 2, 16, blocks, 0, 256, 2048)
    stats = WorkerStats(
        total_blocks=blocks,
        free_blocks=blocks,
        running=len(queue),
        queue=list(queue),
        step_times=times,
        queued_prefill_tokens=sum(work.prefill_left for work in queue),
    )
    return InstanceView(name, capacity, stats)


def cluster(*views: InstanceView) -> ClusterView:
    return ClusterView({view.instance: view for view in views})


def prompts(count: int, tokens: int = 4000, prefix: str = "p") -> list[QueuedWork]:
    return [QueuedWork(f"{prefix}{index}", tokens, 0, 100) for index in range(count)]


def decodes(count: int, context: int = 1000, left: int = 300) -> list[QueuedWork]:
    return [QueuedWork(f"d{index}", 0, context, left) for index in range(count)]


def request(name: str, prompt: int, predicted: float, most: int = 4096) -> WaitingRequest:
    prediction = Prediction(predicted, predicted, predicted, predicted)
    return WaitingRequest(
        Request(
            Attempt(name, 1), "g", [0] * prompt, prompt, SamplingParams(max_tokens=most), 0.0, prediction=prediction
        ),
        0.0,
        prediction,
    )


def place(policy: SplitPlacement, waiting: WaitingRequest, *views: InstanceView) -> Placed:
    placed = policy.place(0.0, waiting, cluster(*views), None)
    assert isinstance(placed, Placed)
    return placed


def test_an_idle_instance_takes_a_request_whole() -> None:
    placed = place(placement(), request("r", 8000, 500.0), instance("a", *prompts(3)), instance("b"))
    assert placed.segments == (Segment(0, None, "b"),)
    assert placed.reason == "whole: an instance is idle"
    assert placed.estimated_s > 8000 * GPU.token_s


SLOW = StepTimes(1.3e-3, 1.06e-4, 4.0e-4, 0.022, 1.8e-8, 1.5e-7)
"""A third of the compute, the same bandwidth."""
PRICED = structs.replace(GPU, mixed_share=0.2)


def test_an_instance_that_computes_slowly_and_reads_as_fast_decodes_for_the_other() -> None:
    fast, slow = instance("a", *prompts(3), *decodes(10)), instance("b", *prompts(3), *decodes(20), times=SLOW)
    placed = place(placement(), request("r", 1000, 300.0), fast, slow)
    assert placed.segments == (Segment(0, 1000, "a"), Segment(1000, None, "b"))
    # Without the tokens free there it would wait for blocks between two of its tokens.
    full = instance("b", *prompts(3), *decodes(20), times=SLOW, blocks=50)
    assert place(placement(), request("r", 1000, 300.0), fast, full).segments == (Segment(0, None, "a"),)


@pytest.mark.parametrize(
    ("bytes_per_s", "segments"),
    [
        ({"b": 2e10, "c": 2e10}, (Segment(0, 1000, "a"), Segment(1000, None, "b"))),
        ({"b": 1e9, "c": 2e10}, (Segment(0, 1000, "a"), Segment(1000, None, "c"))),
        ({"b": 1e7, "c": 1e7}, (Segment(0, None, "a"),)),
    ],
)
def test_what_a_link_carries_decides_who_decodes_and_whether_it_pays(
    bytes_per_s: dict[str, float], segments: tuple[Segment, ...]
) -> None:
    """0.2 GB of KV: 0.01 s, 0.2 s or 20 s, of which the split saves some tenths."""
    fast = instance("a", *prompts(3), *decodes(10))
    fast.stats = structs.replace(fast.stats, link_rates=bytes_per_s)
    slow = [instance(name, *prompts(3), *decodes(20), times=SLOW) for name in ("b", "c")]
    assert place(placement(), request("r", 1000, 300.0), fast, *slow).segments == segments


def test_the_other_way_round_nothing_is_saved() -> None:
    slow, fast = instance("a", *decodes(10), times=SLOW), instance("b", *prompts(12), *decodes(60))
    assert place(placement(), request("r", 1000, 300.0), slow, fast).segments == (Segment(0, None, "a"),)


@pytest.mark.parametrize(("times", "splits"), [(PRICED, True), (GPU, False)])
def test_where_mixing_has_a_price_few_decodes_become_none(times: StepTimes, splits: bool) -> None:
    few = instance("a", *prompts(2), *decodes(1), times=times)
    many = instance("b", *prompts(3), *decodes(30), times=times)
    placed = place(placement(), request("r", 1000, 300.0), few, many)
    assert (len(placed.segments) == 2) is splits
    if splits:
        assert placed.segments == (Segment(0, 1000, "a"), Segment(1000, None, "b"))
    # What has many keeps its own.
    queued = instance("a", *prompts(4), *decodes(1), times=times)
    soon = instance("b", *decodes(30), times=times)
    assert len(place(placement(), request("r", 3000, 300.0), queued, soon).segments) == 1


def test_idle_instances_save_no_work_whatever_mixing_costs() -> None:
    placed = place(
        placement(), request("r", 1000, 300.0), instance("a", times=PRICED), instance("b", *decodes(3), times=PRICED)
    )
    assert placed.segments == (Segment(0, None, "a"),)


def test_a_prompt_goes_where_it_is_done_first_however_much_there_is_to_decode() -> None:
    """Of all work `a` has more, in responses that take minutes; of `b` every prompt stands before this one."""
    busy = instance("a", *decodes(40, left=2000), *prompts(1, 500))
    queued = instance("b", *prompts(3), *decodes(30))
    placed = place(placement(), request("r", 500, 200.0), busy, queued)
    assert placed.segments == (Segment(0, None, "a"),)


def test_before_anybody_has_measured_anything_it_places_all_the_same() -> None:
    """The cold start of Alg. 1."""
    placed = place(placement(), request("r", 100, 10.0), instance("a", times=None), instance("b", times=None))
    assert placed.segments == (Segment(0, None, "a"),)


@pytest.mark.parametrize("balance", ["work", "end"])
def test_two_equally_loaded_instances_share_a_large_request(balance: Balance) -> None:
    placed = place(
        placement(balance, 0.01), request("r", 8000, 32.0), instance("a", *prompts(2)), instance("b", *prompts(2))
    )
    first, second = placed.segments
    assert {first.instance, second.instance} == {"a", "b"}
    assert first.end == second.start
    assert (first.start, second.end) == (0, None)
    assert first.end is not None and 3000 <= first.end <= 5500
    assert placed.reason == "split in the prompt"


def test_the_more_loaded_of_two_gets_the_smaller_part() -> None:
    views = instance("a", *prompts(3)), instance("b", *prompts(2))
    placed = place(placement(tolerance=0.01), request("r", 8000, 32.0), *views)
    tokens = {s.instance: (s.end or 8052) - s.start for s in placed.segments}
    assert 3000 <= tokens["b"] - tokens["a"] <= 5500  # a prompt of 4,000 more is waiting at a


def test_a_decode_heavy_request_is_split_inside_its_output() -> None:
    views = instance("a", *decodes(100, 1500, 700)), instance("b", *decodes(100, 1500, 700))
    placed = place(placement(tolerance=0.001), request("r", 219, 1467.0), *views)
    assert placed.segments[0].end is not None
    assert placed.reason == "split in the output"
    assert 219 < placed.segments[0].end < 219 + 1487


def test_a_short_request_stays_whole_on_the_less_loaded() -> None:
    views = instance("a", *prompts(3)), instance("b", *prompts(2))
    placed = place(placement(), request("r", 60, 10.0), *views)
    assert placed.segments == (Segment(0, None, "b"),)
    assert placed.reason == "whole: no gain from a split"


def test_by_the_algorithm_as_printed_a_request_is_split_over_idle_instances_as_well() -> None:
    printed = DynaServeSettings(balance="end", await_arrivals=False, whole_where_idle=False)
    reasons = []
    for options in (printed, structs.replace(printed, whole_where_idle=True)):
        placed = SplitPlacement(options, default_output=256.0).place(
            0.0, request("r", 20_000, 32.0), cluster(instance("a"), instance("b")), None
        )
        assert isinstance(placed, Placed)
        reasons.append(placed.reason)
    assert reasons == ["split in the prompt", "whole: an instance is idle"]


def test_under_load_the_next_request_fills_the_gap_of_a_split() -> None:
    """Both instances have 0.7 s of prompts. Requests that came every ten seconds leave one of them idle for most of the
    second half of the newcomer; at ten a second another request will be there long before, unless that counts
    nothing."""
    views = instance("a", *prompts(1, 5000)), instance("b", *prompts(1, 5000))
    reasons = {}
    for gap_s, await_arrivals in ((10.0, True), (0.1, True), (0.1, False)):
        policy = placement(tolerance=0.01, await_arrivals=await_arrivals)
        now_s = 0.0
        for index in range(8):
            now_s += gap_s
            assert isinstance(policy.place(now_s, request(f"{index}", 8000, 32.0), cluster(*views), None), Placed)
            policy.finished(now_s, f"{index}")
        now_s += gap_s
        placed = policy.place(now_s, request("r", 8000, 32.0), cluster(*views), None)
        assert isinstance(placed, Placed)
        reasons[gap_s, await_arrivals] = placed.reason
    split = "split in the prompt"
    assert reasons == {(10.0, True): split, (0.1, True): "whole: no gain from a split", (0.1, False): split}


def test_a_request_just_sent_counts_before_its_report_and_only_once_after() -> None:
    policy = placement()
    views = instance("a"), instance("b")
    names = [place(policy, request(f"r{index}", 4000, 50.0), *views).segments[0].instance for index in range(2)]
    assert names == ["a", "b"]
    work = policy._work["a"]
    believed_s = work.load_s
    assert believed_s == pytest.approx(work_seconds(GPU, SegmentWork(4000, 0, 70)))
    work.refresh(0.1, instance("a", QueuedWork("r0", 4000, 0, 70)), GPU)
    assert work.load_s == pytest.approx(believed_s)
    work.refresh(0.2, instance("a", QueuedWork("r0", 1000, 3000, 70)), GPU)
    assert work.load_s < 0.5 * believed_s


def test_no_answer_is_believed_nearer_to_its_end_than_the_margin() -> None:
    work = InstanceWork("a", pass_s=0.09, least_prefill=16, balance="work", margin_tokens=20)
    work.refresh(0.0, instance("a", QueuedWork("r", 0, 500, 1), QueuedWork("s", 300, 0, 0)), GPU)
    # The second only computes a chunk of a prompt here: no token is sampled, and none is believed to be.
    expected_s = work_seconds(GPU, SegmentWork(0, 500, 20)) + work_seconds(GPU, SegmentWork(300, 0, 0))
    assert work.load_s == pytest.approx(expected_s)


def test_a_request_that_appears_in_no_report_is_forgotten_in_time() -> None:
    work = InstanceWork("a", pass_s=0.09, least_prefill=16, balance="work", margin_tokens=20)
    work.refresh(0.0, instance("a"), GPU)
    work.assign(0.0, "r", SegmentWork(100, 0, 10))
    work.refresh(1.0, instance("a"), GPU)
    assert work.load_s > 0
    work.refresh(3.0, instance("a"), GPU)
    assert work.load_s == 0
    work.assign(3.0, "s", SegmentWork(100, 0, 10))
    work.forget("s")
    assert work.load_s == 0


def test_decodes_at_the_bound_are_avoided() -> None:
    """`full` has less work in seconds, but its decodes alone already take the whole bound."""
    full, queueing = instance("full", *decodes(250, 3000, 2)), instance("queueing", *prompts(9))
    placed = place(placement(), request("r", 100, 5.0), full, queueing)
    assert placed.segments == (Segment(0, None, "queueing"),)


def test_roles_are_kept_where_workers_have_roles() -> None:
    views = instance("p", *prompts(2), role=Role.PREFILL), instance("d", *decodes(5), role=Role.DECODE)
    placed = place(placement(), request("r", 2000, 300.0), *views)
    assert [segment.instance for segment in placed.segments] == ["p", "d"]


def test_alone_there_is_nothing_to_share() -> None:
    assert place(placement(), request("r", 2000, 300.0), instance("a", *prompts(5))).segments == (
        Segment(0, None, "a"),
    )


def test_no_instance_means_wait_and_no_capacity_means_impossible() -> None:
    policy = placement()
    assert isinstance(policy.place(0.0, request("r", 10, 5.0), cluster(), None), Wait)
    small = instance("a", blocks=4), instance("b", blocks=4)
    assert isinstance(policy.place(0.0, request("r", 4000, 5.0), cluster(*small), None), Impossible)


def test_a_preferred_instance_is_chosen() -> None:
    placed = placement().place(0.0, request("r", 10, 5.0), cluster(instance("a"), instance("b")), "b")
    assert isinstance(placed, Placed)
    assert placed.segments[0].instance == "b"


def test_how_well_ends_were_foreseen_is_a_metric() -> None:
    policy = placement()
    placed = place(policy, request("r", 4000, 50.0), instance("a"), instance("b"))
    policy.completed(2 * placed.estimated_s, "r")
    policy.finished(2 * placed.estimated_s, "r")
    stats = policy.metrics()
    assert stats["finish_tracked_total"] == 1
    assert stats["finish_error"] == pytest.approx(0.5)
    assert stats["finish_bias"] == pytest.approx(0.5)
    policy.completed(9.0, "never placed")
    assert policy.metrics()["finish_tracked_total"] == 1


@settings(max_examples=examples(0.8))
@given(
    loads=st.lists(
        st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 400)), max_size=12),
        min_size=2,
        max_size=4,
    ),
    prompt=st.integers(1, 6000),
    predicted=st.floats(1, 2000),
    most=st.integers(1, 2000),
    balance=st.sampled_from(["work", "end"]),
)
def test_segments_always_meet_and_a_split_is_better_than_none(
    loads: list[list[tuple[int, int, int]]], prompt: int, predicted: float, most: int, balance: Balance
) -> None:
    views = [
        instance(f"i{number}", *(QueuedWork(f"{number}-{i}", p, c, d) for i, (p, c, d) in enumerate(load)))
        for number, load in enumerate(loads)
    ]
    policy = placement(balance)
    placed = place(policy, request("r", prompt, predicted, most), *views)
    segments = placed.segments
    assert segments[0].start == 0
    assert segments[-1].end is None
    assert placed.estimated_s > 0
    if len(segments) == 2:
        assert segments[0].end == segments[1].start
        assert 1 <= segments[1].start < prompt + most + 20
        assert segments[0].instance != segments[1].instance
        assert policy.metrics()["split_probes_total"] <= 12


# -- the gate --------------------------------------------------------------------------------------------------------


def gate() -> PressureGate:
    return PressureGate(DynaServeSettings(headroom=0.1), dispatch_ahead_tokens=8192)


def test_the_gate_closes_only_when_decodes_fill_the_bound_everywhere() -> None:
    order = gate()
    order.add(0.0, request("r", 100, 5.0))
    full = decodes(250, 3000, 50)
    assert order.decide(0.0, cluster(instance("a", *full), instance("b", *full))) == []
    assert order.metrics()["held_back_total"] == 1
    assert len(order) == 1
    dispatched = order.decide(0.1, cluster(instance("a", *full), instance("b")))
    assert [dispatch.request_ids for dispatch in dispatched] == [("r",)]


def test_the_gate_never_closes_on_instances_that_do_not_decode_or_say_nothing() -> None:
    for views in ([instance("a")], [instance("a", *decodes(250, 3000), times=None)]):
        order = gate()
        order.add(0.0, request("r", 100, 5.0))
        assert order.decide(0.0, cluster(*views))
