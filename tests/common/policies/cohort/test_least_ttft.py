"""Where requests go: by predicted first token, by prefix, by device; split by times, not by configuration."""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

import msgspec
import pytest

from cohort.common.policies.cohort.admission_check import AdmissionTest, RefuseLate
from cohort.common.policies.cohort.least_ttft import LeastTtft
from cohort.common.policies.interface import ClusterView, Impossible, InstanceView, Placed, Refuse, Wait, WaitingRequest
from cohort.common.policies.settings import CohortSettings
from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from cohort.common.types import (
    Attempt,
    Prediction,
    QueuedWork,
    Request,
    Role,
    SamplingParams,
    Segment,
    Slo,
    StepTimes,
    TrafficClass,
    WorkerCapacity,
    WorkerStats,
)

SLOW = StepTimes(1.3e-3, 1.06e-4, 1.3e-4, 0.022, 6e-9, 1.5e-7)
"""Roughly Qwen2.5-14B on an A100: a decode pass takes 24 ms and more."""
POOR = StepTimes(0.020, 1e-4, 2.5e-4, 0.002, 0.0, 0.0)
"""Prompts are dear beside decode rows: a chunk of 64 tokens takes nearly as long as a pass of 24 rows."""
FAST = StepTimes(1.0e-3, 0.5e-4, 0.5e-4, 0.011, 3e-9, 0.8e-7)


def placement(
    *, own_order: bool = True, caching: bool = True, ordered: bool = True, refuse: RefuseLate = "none"
) -> LeastTtft:
    options = CohortSettings(ordered=ordered)
    return LeastTtft(options, AdmissionTest(refuse), default_output=200.0, own_order=own_order, caching=caching)


def worker(
    name: str,
    *queue: QueuedWork,
    times: StepTimes | None = SLOW,
    role: Role = Role.UNIFIED,
    device: str = "",
    blocks: int = 10_000,
    free: int | None = None,
) -> InstanceView:
    capacity = WorkerCapacity(role, "m", 32_768, 48, 8, 128, 2, 16, blocks, 0, 256, 2048, device)
    return InstanceView(name, capacity, report(*queue, times=times, blocks=blocks, free=free))


def report(
    *queue: QueuedWork, times: StepTimes | None = SLOW, blocks: int = 10_000, free: int | None = None
) -> WorkerStats:
    return WorkerStats(
        total_blocks=blocks,
        free_blocks=blocks if free is None else free,
        running=len(queue),
        queue=list(queue),
        step_times=times,
        step_s=0.03,
    )


def cluster(*views: InstanceView) -> ClusterView:
    return ClusterView({view.instance: view for view in views})


def asked(
    name: str,
    prompt: int | list[int],
    *,
    tpot_s: float = 0.1,
    ttft_s: float = 2.0,
    output: float = 200.0,
    p90: float | None = None,
    salt: str = "",
    traffic_class: TrafficClass = "rt",
    max_tokens: int = 4096,
) -> WaitingRequest:
    tokens = prompt if isinstance(prompt, list) else [crc32(name.encode()) % 1000] * prompt
    prediction = Prediction(output, output, p90 or output, p90 or output)
    request = Request(
        Attempt(name, 1),
        "g",
        tokens,
        len(tokens),
        SamplingParams(max_tokens=max_tokens),
        0.0,
        traffic_class=traffic_class,
        slo=Slo(ttft_s, tpot_s),
        prediction=prediction,
        prefix_salt=salt,
    )
    return WaitingRequest(request, 0.0, prediction)


def where(placed: object) -> list[str | None]:
    assert isinstance(placed, Placed), placed
    return [segment.instance for segment in placed.segments]


def prompt(name: str, left: int, output: int = 100) -> QueuedWork:
    return QueuedWork(name, left, 0, output)


def decode(name: str, context: int = 1000, left: int = 200) -> QueuedWork:
    return QueuedWork(name, 0, context, left)


# -- the least predicted TTFT ---------------------------------------------------------------------------------------


def test_an_idle_worker_is_predicted_to_take_the_prompt_alone() -> None:
    placed = placement().place(0.0, asked("r", 800), cluster(worker("a")), None)
    assert isinstance(placed, Placed)
    assert placed.estimated_s == pytest.approx(step_seconds(SLOW, BatchShape(800, 1, 320_000, 0, 0)))


def test_without_a_worker_it_waits_and_what_no_worker_can_hold_is_impossible() -> None:
    assert isinstance(placement().place(0.0, asked("r", 100), cluster(), None), Wait)
    assert isinstance(placement().place(0.0, asked("r", 100), cluster(worker("a", blocks=20)), None), Impossible)
    two = cluster(worker("a", blocks=20), worker("b", prompt("p", 9000)))
    assert where(placement().place(0.0, asked("r", 100), two, None)) == ["b"]


def test_the_faster_of_two_idle_devices_gets_it_and_the_other_one_once_that_has_more_to_do() -> None:
    views = cluster(worker("slow"), worker("z-fast", times=FAST))
    policy = placement(caching=False)
    taken = [where(policy.place(0.0, asked(f"r{i}", 1000), views, None))[0] for i in range(6)]
    assert taken[0] == "z-fast" and taken.count("z-fast") > taken.count("slow") > 0


def test_short_prompts_pass_long_ones_and_the_forecast_says_so() -> None:
    def forecast(tokens: int, *, own_order: bool, ordered: bool = True) -> float:
        policy = placement(own_order=own_order, ordered=ordered)
        view = worker("a")
        policy.place(0.0, asked("long", 6000, ttft_s=20.0), cluster(view), None)
        view.stats = report(prompt("long", 6000))
        placed = policy.place(0.01, asked("new", tokens, ttft_s=20.0), cluster(view), None)
        assert isinstance(placed, Placed)
        return placed.estimated_s

    alone_s = step_seconds(SLOW, BatchShape(6000, 1, 18_000_000, 0, 0))
    assert forecast(100, own_order=True) < 0.5 * alone_s
    assert forecast(100, own_order=False) > 0.9 * alone_s
    assert forecast(7000, own_order=True) > 1.5 * alone_s
    assert forecast(100, own_order=True, ordered=False) > 0.9 * alone_s, "the workers' order, taken away"


def test_a_newcomer_does_not_delay_others_where_another_worker_is_idle() -> None:
    # In the worker's order it would pass the long prompt, and its own first token come as soon as on the other.
    views = cluster(worker("a", *(prompt(f"p{i}", 5000) for i in range(4))), worker("b", decode("d")))
    assert where(placement().place(0.0, asked("r", 100), views, None)) == ["b"]


def test_what_was_placed_since_the_report_counts() -> None:
    views = cluster(worker("a"), worker("b"), worker("c"))
    policy = placement(caching=False)
    taken = [where(policy.place(0.0, asked(f"r{i}", 2000), views, None))[0] for i in range(3)]
    assert sorted(str(name) for name in taken) == ["a", "b", "c"]
    policy.finished(0.1, "r0")
    assert where(policy.place(0.1, asked("r3", 2000), views, None)) == [taken[0]]


def test_prompts_go_where_fewer_decode_rows_leave_more_of_an_iteration() -> None:
    policy = placement()
    a, b = worker("a"), worker("b")
    for index in range(60):
        policy.place(0.0, asked(f"a{index}", 100), cluster(a), None)
    policy.place(0.0, asked("b0", 100), cluster(b), None)
    a.stats = report(*(decode(f"a{index}") for index in range(60)))
    b.stats = report(decode("b0"))
    assert where(policy.place(0.3, asked("r", 3000), cluster(a, b), None)) == ["b"]


def test_strict_tpots_gather_where_iterations_are_short_already() -> None:
    """On the other worker a request would hold up more prompt work than it waits longer here."""

    def placed(tpot_s: float, there_s: float) -> list[str | None]:
        policy, views = placement(caching=False), cluster(worker("a-loose"), worker("strict"))
        policy.place(0.0, asked("l", 1000, tpot_s=there_s), views, "a-loose")
        policy.place(0.0, asked("s", 1000, tpot_s=0.04), views, "strict")
        views.instances["a-loose"].stats = report(decode("l"))
        views.instances["strict"].stats = report(decode("s"), prompt("p", 200))
        return where(policy.place(0.5, asked("r", 400, tpot_s=tpot_s), views, None))

    assert placed(0.04, 0.2) == ["strict"]
    assert placed(0.2, 0.2) == ["a-loose"]
    assert placed(0.04, 0.04) == ["a-loose"], "there iterations are as short"


def test_workers_whose_decodes_fill_the_bound_come_last() -> None:
    policy = placement()
    a, b = worker("a", blocks=40_000), worker("b", blocks=40_000)
    for index in range(250):
        policy.place(0.0, asked(f"a{index}", 10), cluster(a), None)
    policy.place(0.0, asked("b0", 10), cluster(b), None)
    a.stats = report(*(decode(f"a{index}", 2000) for index in range(250)))
    b.stats = report(decode("b0"), prompt("x", 40_000))
    assert step_seconds(SLOW, BatchShape(0, 0, 0, 251, 502_000)) > 0.1
    assert where(policy.place(0.3, asked("r", 50), cluster(a, b), None)) == ["b"]


def full(name: str, *, ends_after: int) -> InstanceView:
    """A worker of 100 blocks, nearly all held by one row, which ends after so many tokens."""
    return worker(name, decode("d" + name, context=1500, left=ends_after), blocks=100, free=6)


def test_where_blocks_lack_the_first_token_comes_when_rows_end() -> None:
    policy = placement(caching=False)
    placed = policy.place(
        0.0,
        asked("r", 400, output=100, max_tokens=500),
        cluster(full("late", ends_after=90), full("soon", ends_after=40)),
        None,
    )
    assert where(placed) == ["soon"] and isinstance(placed, Placed)
    assert 40 * 0.03 < placed.estimated_s < 40 * 0.03 + 0.2


def test_shorter_prompts_that_keep_coming_take_the_blocks_first() -> None:
    def forecast(shorter: int) -> float:
        policy, elsewhere = placement(caching=False), full("w", ends_after=40)
        for index in range(shorter):
            policy.place(0.1 * index, asked(f"s{index}", 40, output=20, max_tokens=500), cluster(elsewhere), None)
            policy.finished(0.1 * index, f"s{index}")
        placed = policy.place(5.0, asked("r", 400, output=100, max_tokens=500), cluster(elsewhere), None)
        assert isinstance(placed, Placed)
        return placed.estimated_s

    assert forecast(0) < forecast(10) < forecast(50)


def test_best_effort_rows_give_way_to_a_real_time_request_and_not_to_another_one() -> None:
    def forecast(traffic_class: TrafficClass) -> float:
        policy, view = placement(caching=False), worker("w", blocks=100)
        policy.place(0.0, asked("d", 1000, output=500, max_tokens=500, traffic_class="be"), cluster(view), None)
        view.stats = report(decode("d", context=1500, left=90), blocks=100, free=6)
        placed = policy.place(
            0.1, asked("r", 400, output=100, max_tokens=500, traffic_class=traffic_class), cluster(view), None
        )
        assert isinstance(placed, Placed)
        return placed.estimated_s

    assert forecast("rt") < 0.5 < 90 * 0.03 < forecast("be")


def test_a_request_for_which_blocks_come_too_late_is_refused_at_once() -> None:
    policy = placement(caching=False, refuse="all")
    view = full("w", ends_after=300)

    def first_attempt(waiting: WaitingRequest) -> WaitingRequest:
        return replace(waiting, request=msgspec.structs.replace(waiting.request, attempt=Attempt("r", 0)))

    for ttft_s, outcome in ((2.0, Refuse), (20.0, Placed)):
        newcomer = first_attempt(asked("r", 400, output=100, max_tokens=500, ttft_s=ttft_s))
        assert isinstance(policy.place(0.0, newcomer, cluster(view), None), outcome)


def test_memory_that_everything_will_still_need_has_a_price_and_the_upper_estimate_counts() -> None:
    def choice(p90: float | None) -> list[str | None]:
        # The one that computes prompts sooner has little memory left.
        tight = worker("tight", times=FAST, blocks=1000, free=260)
        ample = worker("ample", times=SLOW)
        return where(placement().place(0.0, asked("r", 1000, output=200.0, p90=p90), cluster(tight, ample), None))

    assert choice(None) == ["tight"]
    assert choice(3000.0) == ["ample"]


def test_a_preferred_worker_is_chosen_if_it_is_there() -> None:
    views = cluster(worker("a"), worker("b", prompt("p", 8000)))
    assert where(placement().place(0.0, asked("r", 100), views, "b")) == ["b"]
    assert where(placement().place(0.0, asked("r", 100), views, "gone")) == ["a"]


def test_predictions_are_compared_with_what_reports_show() -> None:
    policy, view = placement(), worker("a")
    placed = policy.place(0.0, asked("r", 800), cluster(view), None)
    assert isinstance(placed, Placed)
    first_s = placed.estimated_s
    seen_s = first_s + 20.5 * 0.03
    policy.place(seen_s - 0.01, asked("x", 8), cluster(view), None)  # a look shortly before the report
    view.stats = report(decode("r", 800 + 20, 100), times=SLOW)
    # 20 tokens after the first one, of 30 ms each, and half an iteration
    policy.place(seen_s, asked("y", 8), cluster(view), None)
    stats = policy.metrics()
    assert stats["ttft_tracked_total"] == 1.0
    assert stats["ttft_bias"] == pytest.approx(1.0, abs=0.15)
    assert stats["ttft_error"] == pytest.approx(0.0, abs=0.15)


# -- prefixes -------------------------------------------------------------------------------------------------------


def session(number: int, tokens: int) -> list[int]:
    return [number * 100_000 + index for index in range(tokens)]


def test_turns_of_a_session_go_where_their_prefix_is_unless_that_worker_is_overloaded() -> None:
    a, b = worker("a"), worker("b")
    policy = placement()
    first = where(policy.place(0.0, asked("t1", session(1, 3000)), cluster(a, b), None))
    policy.finished(1.0, "t1")
    other = "b" if first == ["a"] else "a"
    busy = cluster(a, b).instances[str(first[0])]
    # A little work there is less than the prompt that the cache spares …
    busy.stats = report(prompt("p", 1000))
    assert where(policy.place(2.0, asked("t2", session(1, 3200)), cluster(a, b), None)) == first
    policy.finished(3.0, "t2")
    # … and much work is more.
    busy.stats = report(*(prompt(f"p{i}", 3000) for i in range(4)))
    assert where(policy.place(4.0, asked("t3", session(1, 3400)), cluster(a, b), None)) == [other]
    policy.finished(5.0, "t3")
    # Another session has nothing there.
    busy.stats = report(prompt("p", 1000))
    assert where(policy.place(6.0, asked("o", session(2, 3200)), cluster(a, b), None)) == [other]


def test_a_prefix_of_another_salt_is_not_cached() -> None:
    def second(salt: str) -> float:
        policy, view = placement(), worker("a")
        policy.place(0.0, asked("t1", session(1, 3000), salt="one"), cluster(view), None)
        policy.finished(1.0, "t1")
        placed = policy.place(2.0, asked("t2", session(1, 3000), salt=salt), cluster(view), None)
        assert isinstance(placed, Placed)
        return placed.estimated_s

    assert second("one") < 0.3 * second("other")


def test_a_restarted_worker_has_nothing_cached_and_without_a_cache_nothing_is_expected() -> None:
    def expected(view_after: InstanceView | None, *, caching: bool = True) -> float:
        policy, view = placement(caching=caching), worker("a")
        policy.place(0.0, asked("t1", session(1, 3000)), cluster(view), None)
        policy.finished(1.0, "t1")
        policy.place(2.0, asked("t2", session(1, 3000)), cluster(view_after or view), None)
        return policy.metrics()["prefix_tokens_expected_total"]

    assert expected(None) > 2500
    assert expected(worker("a")) == 0
    assert expected(None, caching=False) == 0


def test_what_others_have_taken_since_is_no_longer_cached() -> None:
    policy, view = placement(), worker("a", blocks=1000)  # 16,000 positions
    policy.place(0.0, asked("t1", session(1, 3000)), cluster(view), None)
    for index in range(6):
        policy.place(1.0 + index, asked(f"x{index}", session(10 + index, 3000)), cluster(view), None)
        policy.finished(1.5 + index, f"x{index}")
    policy.place(9.0, asked("t2", session(1, 3000)), cluster(view), None)
    assert policy.metrics()["prefix_tokens_expected_total"] == 0


def test_what_was_placed_lately_is_cached_however_much_was_placed_before() -> None:
    policy, view = placement(), worker("a", blocks=1000)  # 16,000 positions
    for index in range(8):
        policy.place(float(index), asked(f"x{index}", session(10 + index, 3000)), cluster(view), None)
        policy.finished(0.5 + index, f"x{index}")
    policy.place(9.0, asked("again", session(17, 3000)), cluster(view), None)
    assert policy.metrics()["prefix_tokens_expected_total"] > 2500


# -- devices that are shared ----------------------------------------------------------------------------------------


def test_on_a_shared_device_the_one_whose_role_decodes_gets_everything_and_the_other_once_it_is_gone() -> None:
    prefill = worker("a-prefill", role=Role.PREFILL, device="host:gpu0")
    decoder = worker("b-decode", role=Role.DECODE, device="host:gpu0")
    policy = placement()
    for index in range(5):
        assert where(policy.place(0.1 * index, asked(f"r{index}", 500), cluster(prefill, decoder), None)) == [
            "b-decode"
        ]
    assert policy.metrics()["standby_workers"] == 1.0
    assert where(policy.place(1.0, asked("after", 500), cluster(prefill), None)) == ["a-prefill"]


def test_of_two_alike_the_one_with_rows_keeps_them() -> None:
    first = worker("a", device="host:gpu0")
    second = worker("b", decode("d1"), decode("d2"), device="host:gpu0")
    assert where(placement().place(0.0, asked("r", 500), cluster(first, second), None)) == ["b"]


def test_a_standby_takes_what_the_first_can_never_hold() -> None:
    small = worker("small", decode("d"), device="host:gpu0", blocks=40)
    large = worker("large", device="host:gpu0")
    assert where(placement().place(0.0, asked("r", 500), cluster(small, large), None)) == ["large"]


def test_what_a_standby_computes_slows_the_device() -> None:
    def estimate(*queue: QueuedWork) -> float:
        views = cluster(worker("a", decode("d"), device="host:gpu0"), worker("b", *queue, device="host:gpu0"))
        placed = placement().place(0.0, asked("r", 500), views, "a")
        assert isinstance(placed, Placed)
        return placed.estimated_s

    # Its rows are more than the other's, so the other one stands by.
    lone = worker("c", decode("e"), device="host:gpu1")
    shared = [worker("a", decode("d"), device="host:gpu0"), worker("b", prompt("p", 6000), device="host:gpu0")]
    assert where(placement().place(0.0, asked("r", 500), cluster(*shared, lone), None)) == ["c"]
    assert estimate(prompt("p", 400)) > estimate()


def test_workers_that_do_not_say_their_device_do_not_share_one() -> None:
    policy = placement(caching=False)
    views = cluster(worker("a"), worker("b"))
    assert {str(where(policy.place(0.0, asked(f"r{i}", 2000), views, None))[0]) for i in range(2)} == {"a", "b"}


# -- prefill here, decode there -------------------------------------------------------------------------------------


def steady(times: StepTimes, tpot_s: float, rows: int = 24) -> Placed:
    """One worker decodes so many rows of this promise, another one computes prompts, one more request comes."""
    policy = placement(caching=False)
    home, idle = worker("home", times=times), worker("idle", times=times)
    for index in range(rows):
        policy.place(0.0, asked(f"d{index}", 1000, tpot_s=tpot_s), cluster(home), None)
    home.stats = report(*(decode(f"d{index}") for index in range(rows)), times=times)
    placed = policy.place(0.3, asked("new", 1000, tpot_s=tpot_s), cluster(home, idle), None)
    assert isinstance(placed, Placed)
    return placed


def test_a_request_is_split_where_prompts_would_break_its_promise_and_nowhere_else() -> None:
    pass_s = step_seconds(POOR, BatchShape(0, 0, 0, 25, 26_000))
    chunk_s = step_seconds(POOR, BatchShape(64, 1, 2080, 13, 13_000))
    assert pass_s < 0.0305 < chunk_s
    split = steady(POOR, 0.0305)
    assert split.segments == (Segment(0, 1000, "idle"), Segment(1000, None, "home"))
    # The same queue, the same configuration: a promise that leaves prompts their time, or a device that does.
    assert steady(POOR, 0.1).segments == (Segment(0, None, "idle"),)
    assert steady(SLOW, 0.0305).segments == (Segment(0, None, "idle"),)
    assert steady(FAST, 0.0305).segments == (Segment(0, None, "idle"),)


def test_the_price_of_the_transfer_keeps_a_short_response_whole() -> None:
    policy = placement(caching=False)
    views = [worker(name, times=POOR) for name in ("home", "idle", "idle-2")]
    for index in range(24):
        policy.place(0.0, asked(f"d{index}", 1000, tpot_s=0.0305), cluster(views[0]), None)
    views[0].stats = report(*(decode(f"d{index}") for index in range(24)), times=POOR)
    # Even spread over three devices 24 rows leave no time for a chunk; on two of them they keep the promise.
    long = policy.place(0.3, asked("long", 1000, tpot_s=0.0305, output=300), cluster(*views), None)
    short = policy.place(0.3, asked("short", 1000, tpot_s=0.0305, output=2), cluster(*views), None)
    one = policy.place(0.3, asked("one", 1000, tpot_s=0.0305, max_tokens=1), cluster(*views), None)
    assert [len(where(placed)) for placed in (long, short, one)] == [2, 1, 1]


@pytest.mark.parametrize(
    ("bytes_per_s", "pieces"), [({}, 2), ({"home": 2e10}, 2), ({"home": 1e9}, 2), ({"home": 1e8}, 1)]
)
def test_the_price_is_that_of_the_link_as_it_was_measured(bytes_per_s: dict[str, float], pieces: int) -> None:
    """0.2 GB of KV: 0.01 s, 0.2 s or 2 s for a response that makes up about a second in 300 tokens."""
    policy = placement(caching=False)
    views = [worker(name, times=POOR) for name in ("home", "idle", "idle-2")]
    for index in range(24):
        policy.place(0.0, asked(f"d{index}", 1000, tpot_s=0.0305), cluster(views[0]), None)
    views[0].stats = report(*(decode(f"d{index}") for index in range(24)), times=POOR)
    for other in views[1:]:
        other.stats = msgspec.structs.replace(other.stats, link_rates=bytes_per_s)
    placed = policy.place(0.3, asked("long", 1000, tpot_s=0.0305, output=300), cluster(*views), None)
    assert len(where(placed)) == pieces


def test_decodes_that_need_every_device_are_not_gathered() -> None:
    assert len(where(steady(POOR, 0.0305, rows=24))) == 2
    assert len(where(steady(POOR, 0.0305, rows=32))) == 1


def test_it_goes_by_averages_where_nothing_is_learned() -> None:
    slow, fast = worker("a", times=None), worker("b", times=None)
    slow.stats = msgspec.structs.replace(slow.stats, prefill_tokens_per_s=2000.0, decode_step_s=0.03)
    fast.stats = msgspec.structs.replace(fast.stats, prefill_tokens_per_s=8000.0, decode_step_s=0.03)
    assert where(placement().place(0.0, asked("r", 4000), cluster(slow, fast), None)) == ["b"]
