"""The simulated cluster: a case by hand, every request ends, jumping equals one by one, same seed same run."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cohort.common.errors import ConfigError
from cohort.common.machines.worker.fast_forward import FastForward
from cohort.common.policies.cost_model import StepWork, prefill_pairs
from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.kv_interface import KvCopy
from cohort.common.types import Role, Slo
from cohort.common.workloads.items import ClosedLoopPart, WorkItem, Workload
from cohort.services.simulator.core.cluster import SimCluster
from cohort.services.simulator.core.deployment import spread_roles
from cohort.services.simulator.core.engine import MAX_FAST_FORWARD, plan_cost
from cohort.services.simulator.core.report import make_report
from cohort.services.simulator.core.sim_options import SimOptions
from cohort.services.simulator.hardware.hardware import load_cluster
from tests.examples import examples
from tests.services.simulator.lab import MODEL, Recorded, cache_of, cluster, config, run, workload


def test_one_request_takes_the_cost_of_its_iterations():
    sim = run(config(engine={"max_step_tokens": 64}), cluster(), workload((0.0, 100, 3)))
    cost = sim.costs[0]
    steps = [
        StepWork(64, 1, 0, prefill_pairs(0, 64), 64),
        StepWork(36, 1, 1, prefill_pairs(64, 36), 100),
        StepWork(1, 1, 1, 0, 0, 1, 101, 101),
        StepWork(1, 1, 1, 0, 0, 1, 102, 102),
    ]
    # Submit, StartSegment and the tokens each travel once.
    travel = 3 * sim.cluster.control_latency_s
    first = sum(cost.step_s(step) for step in steps[:2]) + travel
    expected = [first, first + cost.step_s(steps[2]), first + cost.step_s(steps[2]) + cost.step_s(steps[3])]
    assert sim.token_times["r0"] == pytest.approx(expected)
    stats = sim.clients.all
    assert stats.ttft.sum_s == pytest.approx(expected[0])
    assert stats.tpot.sum_s == pytest.approx((expected[2] - expected[0]) / 2)
    assert stats.jct.sum_s == pytest.approx(expected[2])
    assert stats.normalised.sum_s == pytest.approx(expected[2] / 3)


def test_unlike_instances_take_the_time_and_have_the_memory_of_their_own_devices():
    unlike = load_cluster("h200:1+a100-80:2")
    # One after another, in turn: each instance serves one of them.
    load = workload((0.0, 400, 8), (5.0, 400, 8), (10.0, 400, 8))
    sim = run(config(policies={"placement": "colocated_in_turn"}), unlike, load)
    fast, *slow = sim.workers
    alone = [run(config(), load_cluster(device), workload((0.0, 400, 8))) for device in ("h200", "a100-80")]
    assert [worker.tally.busy_s for worker in (fast, *slow)] == pytest.approx(
        [alone[0].workers[0].tally.busy_s] + 2 * [alone[1].workers[0].tally.busy_s]
    )
    assert fast.tally.busy_s < slow[0].tally.busy_s
    blocks = [worker.machine.kv.total_blocks for worker in sim.workers]
    assert blocks == [alone[0].workers[0].machine.kv.total_blocks] + 2 * [alone[1].workers[0].machine.kv.total_blocks]
    report = make_report(sim, "unlike", Workload("unlike", ()).facts)
    assert report.device == "1 x 1 h200 (scaled from h100-80) + 2 x 1 a100-80"
    # What is in use of a device is a share of its own peak.
    shares = [
        instance.compute / worker.tally.flops for instance, worker in zip(report.instances, sim.workers, strict=True)
    ]
    peaks = [cost.peak_flops_per_s for cost in sim.costs]
    assert [share * peak for share, peak in zip(shares, peaks, strict=True)] == pytest.approx(
        3 * [1 / report.duration_s]
    )


def test_disaggregated_kv_crosses_the_link_once():
    sim = run(config("disaggregated"), cluster(2), workload((0.0, 160, 5)))
    assert sim.ports.moved_bytes == 10 * sim.geometry.block_bytes
    prefill, decode = sim.workers
    assert (prefill.machine.counters.prefill_tokens, prefill.machine.counters.decode_tokens) == (160, 0)
    assert decode.machine.counters.decode_tokens == 4
    assert len(sim.token_times["r0"]) == 5


def test_a_kv_offer_that_leaves_blocks_does_not_end_steps_run_ahead(monkeypatch: pytest.MonkeyPatch):
    load = workload((0.0, 40, 300), (0.05, 300, 20), (0.1, 300, 20), (0.15, 300, 20))
    for blocks in (400, 45):  # enough for all; the last offers wait until the first requests have ended
        preset = config("disaggregated", kv=cache_of(blocks))
        monkeypatch.undo()
        kept = run(preset, cluster(2), load)
        monkeypatch.setattr(FastForward, "shows_in_state", lambda self, message: False)
        ended = run(preset, cluster(2), load)
        assert kept.token_times == ended.token_times and kept.ended == ended.ended
        assert kept.void < ended.void


def test_tokens_of_steps_run_ahead_are_told_once_however_many_reports_come_in_between():
    load = workload((0.0, 40, 900), (0.01, 60, 900))
    sim, told = SimCluster(config(), cluster(), MODEL, load, SimOptions()), []
    tell = sim.clients.repeated
    sim.clients.repeated = lambda worker, rows, times_s, at_s: (  # type: ignore[method-assign]
        told.append(len(times_s)),
        tell(worker, rows, times_s, at_s),
    )[1]
    sim.run()
    assert sim.clients.all.finished == 2 and sim.clients.all.output_tokens == 1800
    # As few as the longest runs allow, whatever reports applied meanwhile.
    assert len(told) <= 2 + sum(told) // (MAX_FAST_FORWARD - 1) + 2


def test_a_prompt_beyond_the_context_is_refused_and_an_answer_is_cut_there():
    sim = run(config(), cluster(), workload((0.0, 2048, 5), (0.0, 2000, 100)))
    assert sim.clients.all.refused == {"the prompt exceeds the model's context": 1}
    assert len(sim.token_times["r1"]) == 48
    assert sim.clients.clipped_outputs == 1


def test_shared_prefixes_are_computed_once():
    blocks = tuple(range(4))
    items = tuple(WorkItem(float(i), 300, 4, hash_ids=blocks, hash_block=64) for i in range(2))
    sim = run(config(), cluster(), Workload("shared", items))
    # 256 tokens are named by hash ids; the rest is each request's own.
    assert sim.workers[0].machine.counters.prefill_tokens == 300 + (300 - 256)


def test_a_full_cache_preempts_and_every_request_ends():
    load = workload(*((0.001 * i, 100, 200) for i in range(8)))
    sim = run(config(kv=cache_of(60)), cluster(), load)
    assert sim.workers[0].machine.counters.preemptions > 0
    assert [len(sim.token_times[f"r{i}"]) for i in range(8)] == [200] * 8


def test_swapping_costs_the_host_link():
    load = workload(*((0.001 * i, 100, 200) for i in range(8)))
    sim = run(config(kv=cache_of(60), engine={"preemption": "swap"}), cluster(), load)
    assert sim.workers[0].tally.swapped_bytes > 0
    assert sim.clients.all.finished == 8


def test_on_one_core_an_iteration_also_waits_for_the_services_work():
    load = {"service_step_s": 0.0005, "service_row_s": 0.0002}
    one = workload((0.0, 100, 3))
    alone, crowded = (run(config(), cluster(1, **extra), one) for extra in ({}, load | {"cores": 1}))
    delays = [b - a for a, b in zip(alone.token_times["r0"], crowded.token_times["r0"], strict=True)]
    assert delays == pytest.approx([0.0007, 0.0014, 0.0021])
    # A second core has room for that, until a second engine wants it.
    roomy = run(config(), cluster(1, cores=2, **load), one)
    assert roomy.token_times == alone.token_times


def test_engines_share_cores_in_equal_parts():
    both = workload((0.0, 100, 50), (0.0, 100, 50))
    apart, shared = (run(config(), cluster(2, cores=cores), both) for cores in (0, 1))
    for request in ("r0", "r1"):
        once, twice = (sim.token_times[request] for sim in (apart, shared))
        # Decoding side by side on one core takes exactly twice as long; the last to end is alone for a moment.
        assert twice[40] - twice[10] == pytest.approx(2 * (once[40] - once[10]))


@pytest.mark.parametrize(("before_s", "plans_ahead", "steps"), [(0.010, True, 1), (0.003, True, 2), (0.003, False, 1)])
def test_what_arrives_behind_the_planned_step_waits_for_it_too(before_s: float, plans_ahead: bool, steps: int):
    """Where steps run one by one they are planned as early as live workers do it: steady ones 2.5 ms before the end."""
    slow = cluster(1, cores=1, service_step_s=0.02)
    settings = config(engine={"plan_ahead": plans_ahead})
    ends_s = run(settings, slow, workload((0.0, 100, 200))).token_times["r0"]
    sim = run(settings, slow, workload((0.0, 100, 200), (ends_s[100] - before_s, 20, 2)))
    assert (sim.workers[0].machine.state.counters.planned_ahead > 150) == plans_ahead
    newcomer_s, decoding_s = sim.token_times["r1"][0], sim.token_times["r0"]
    assert newcomer_s == pytest.approx(decoding_s[100 + steps], abs=1e-6)
    assert len(decoding_s) == 200 and len(sim.token_times["r1"]) == 2


@pytest.mark.parametrize(
    "preset", ["unified", "cohort", "disaggregated", "ecoserve", "bros", "dynaserve", "alignedserve"]
)
def test_nothing_planned_ahead_is_lost_or_doubled(preset: str):
    """On shared cores, in a cache too small for all."""
    lengths = [(0.02 * number, 40 + 30 * (number % 5), 20 + 9 * (number % 4)) for number in range(16)]
    slow = cluster(2, cores=2, service_step_s=0.005)
    sim = run(config(preset, kv=cache_of(40)), slow, workload(*lengths))
    assert sum(worker.machine.state.counters.planned_ahead for worker in sim.workers) > 20
    assert {name: len(times) for name, times in sim.token_times.items()} == {
        f"r{number}": output for number, (_, _, output) in enumerate(lengths)
    }


def test_workers_of_one_device_take_turns_and_divide_its_memory():
    both = workload((0.0, 100, 50), (0.0, 100, 50))
    apart, shared = (run(config(), cluster(2, workers_per_device=count), both) for count in (1, 2))
    for request in ("r0", "r1"):
        once, twice = (sim.token_times[request] for sim in (apart, shared))
        assert twice[40] - twice[10] == pytest.approx(2 * (once[40] - once[10]))
    blocks = [sim.workers[0].machine.kv.total_blocks for sim in (apart, shared)]
    assert blocks[1] < blocks[0] / 2  # each holds the weights
    # Of four on two devices only those of the same one delay each other.
    alone, beside = workload((0.0, 100, 50)), workload((0.0, 100, 50), (0.0, 100, 50))
    four = run(config(policies={"placement": "colocated_in_turn"}), cluster(4, workers_per_device=2), beside)
    two = run(config(), cluster(2, workers_per_device=2), alone)
    assert (
        four.token_times["r0"][40] - four.token_times["r0"][10] > two.token_times["r0"][40] - two.token_times["r0"][10]
    )


def test_closed_loop_users_ask_again_when_answered():
    part = ClosedLoopPart(2, tuple(WorkItem(0.0, 50, 10) for _ in range(6)))
    sim = run(config(), cluster(), Workload("users", (), closed_loop=(part,)))
    assert sim.clients.all.finished == 6
    starts = sorted(times[0] for times in sim.token_times.values())
    ends = sorted(times[-1] for times in sim.token_times.values())
    assert all(start > end for start, end in zip(starts[2:], ends, strict=False))


def test_slo_attainment_is_counted():
    sim = run(config(), cluster(), workload((0.0, 100, 5), (0.0, 100, 5), slo=Slo(ttft_s=1e-6, tpot_s=10.0)))
    report = make_report(sim, "test", Workload("test", ()).facts)
    slo = report.overall.slo
    assert slo is not None
    assert (slo.attainment, slo.ttft, slo.tpot) == (0.0, 0.0, 1.0)


def test_what_is_unserved_at_the_horizon_was_sent_and_not_kept():
    load = workload(*((0.0, 100, output) for output in (5, 5, 100_000)), slo=Slo(ttft_s=100.0))
    report = make_report(run(config(), cluster(), load, horizon_s=1.0), "test", Workload("test", ()).facts)
    slo = report.overall.slo
    assert slo is not None and report.overall.finished == 2
    assert (slo.sent, slo.judged, slo.attainment) == (3, 2, 1.0)
    assert slo.kept_of_sent == pytest.approx(2 / 3)
    assert report.by_class["rt"].slo == slo


def test_requests_unserved_at_the_horizon_count_in_the_latency_to_the_end():
    load = workload((0.0, 100, 5), (0.5, 100, 1000))
    report = make_report(run(config(), cluster(), load, horizon_s=1.0), "test", Workload("test", ()).facts)
    finished = report.overall.normalised_ms
    assert finished is not None and report.overall.finished == 1
    to_end = (finished.mean + 1e3 * 0.5 / 1000) / 2
    assert report.by_class["rt"].normalised_to_end_ms == pytest.approx(to_end, rel=0.05)
    assert report.overall.normalised_to_end_ms == report.by_class["rt"].normalised_to_end_ms
    ended = make_report(run(config(), cluster(), load), "test", Workload("test", ()).facts).overall
    assert ended.normalised_ms is not None and ended.normalised_to_end_ms == pytest.approx(ended.normalised_ms.mean)


def test_a_gpu_sends_checkpoints_beside_the_rows():
    """R12 · Time of an iteration whose copies go out: of a device that gathers them, and of a processor."""
    geometry = MODEL.kv_geometry(16)
    plan = IterationPlan(
        copies=[KvCopy("out", "slot", (1, 2), (3, 4)), KvCopy("in", "block", (5,), (6,), concurrent=True)]
    )
    slots, block = 2 * geometry.token_bytes, geometry.block_bytes
    on_gpu, elsewhere = plan_cost(plan, geometry, device_stages=True), plan_cost(plan, geometry)
    assert (on_gpu.copied_bytes, on_gpu.concurrent_bytes) == (0, slots + block)
    assert (elsewhere.copied_bytes, elsewhere.concurrent_bytes) == (slots, block)
    plan.copies.append(KvCopy("in", "slot", (9,), (3,)))  # what it needs has just gone out
    waits = plan_cost(plan, geometry, device_stages=True)
    assert (waits.copied_bytes, waits.concurrent_bytes) == (slots + geometry.token_bytes, block)


def overloaded(**options):
    """Sixty prompts of 2,000 tokens at once: they take 70 ms, the TTFT SLO is 20 ms."""
    load = workload(*((0.001 * i, 2000, 3) for i in range(60)), slo=Slo(ttft_s=0.02))
    sim = run(config("cohort"), cluster(), load, **options)
    return make_report(sim, "test", Workload("test", ()).facts)


def test_what_is_refused_was_sent_and_not_kept():
    report = overloaded()
    refused = report.overall.refused["infeasible"]
    slo = report.overall.slo
    assert slo is not None and 0 < refused < 60
    assert (slo.sent, report.overall.finished, report.manager["refused_infeasible_total"]) == (
        60,
        60 - refused,
        refused,
    )
    assert 0 < slo.kept_of_sent <= 1 - refused / 60


@pytest.mark.parametrize("if_late", ["serve", "best_effort"])
def test_simulated_clients_may_prefer_another_outcome(if_late):
    report = overloaded(if_late=if_late)
    assert (report.overall.finished, report.overall.refused) == (60, {})
    assert (report.manager["demoted_total"] > 0) is (if_late == "best_effort")
    assert report.overall.slo is not None and report.overall.slo.kept_of_sent < 1


def test_warm_up_counts_nothing_and_loses_no_request():
    load = workload(*((0.1 * i, 100, 20) for i in range(20)))
    whole, late = run(config(), cluster(), load), run(config(), cluster(), load, warmup_s=1.0)
    assert late.token_times == whole.token_times
    assert 0 < late.clients.all.finished < whole.clients.all.finished == 20


def test_the_horizon_ends_a_run():
    sim = run(config(), cluster(), workload(*((float(i), 500, 500) for i in range(100))), horizon_s=5.0)
    assert sim.events.now_s <= 5.0
    report = make_report(sim, "test", Workload("test", ()).facts)
    assert not report.ended
    assert any("had not ended" in note for note in report.notes)


# -- determinism -------------------------------------------------------------------------------------------------


def outcome(sim: Recorded) -> object:
    tallies = [
        (w.tally.steps, w.tally.rows, w.tally.useful_tokens, w.tally.padded_tokens, w.tally.swapped_bytes)
        for w in sim.workers
    ]
    counters = [w.machine.counters for w in sim.workers]
    return sim.token_times, sim.ended, tallies, counters, sim.ports.moved_bytes, sim.clients.all.refused


lengths = st.lists(
    st.tuples(st.floats(0, 0.5, allow_nan=False), st.integers(1, 300), st.integers(1, 150)), min_size=1, max_size=14
)


@settings(max_examples=examples(0.4))
@given(
    lengths=lengths,
    preset=st.sampled_from(["unified", "disaggregated"]),
    blocks=st.sampled_from([45, 80, 1000]),
    preemption=st.sampled_from(["swap", "recompute"]),
    rows=st.sampled_from([3, 256]),
    shared=st.booleans(),
    attention=st.sampled_from(["split_kv", "unit_per_row"]),
    chunk=st.sampled_from([32, 512]),
    horizon_s=st.sampled_from([0.3, float("inf")]),
)
@example(  # jumps so short and so often interrupted that the void ends outnumber what they saved
    lengths=[
        (0.06935153131884887, 178, 111),
        (0.04025121887446193, 73, 73),
        (0.36244040977111786, 81, 111),
        (6.103515625e-05, 199, 118),
        (6.103515625e-05, 220, 20),
        (0.3227556692069871, 1, 97),
        (0.05568439256743686, 145, 74),
        (0.430732190286534, 127, 104),
        (0.19128721231065066, 101, 104),
        (0.004, 128, 51),
        (1.2779493321734365e-237, 177, 128),
        (0.07419306581084341, 275, 113),
        (0.430732190286534, 241, 32),
    ],
    preset="disaggregated",
    blocks=80,
    preemption="recompute",
    rows=3,
    shared=False,
    attention="unit_per_row",
    chunk=32,
    horizon_s=0.3,
)
def test_jumping_over_repeated_iterations_changes_nothing(
    lengths, preset, blocks, preemption, rows, shared, attention, chunk, horizon_s
):
    items = tuple(
        WorkItem(at, prompt, output, session="one" if shared and index % 2 else "")
        for index, (at, prompt, output) in enumerate(sorted(lengths))
    )
    load = Workload("random", items)
    engine = {"preemption": preemption, "max_rows": rows, "prefill_chunk": chunk}
    chosen = config(preset, kv=cache_of(blocks), engine=engine)
    where = cluster(2, decode_attention=attention)
    one_by_one = run(chosen, where, load, jump=False, horizon_s=horizon_s)
    jumping = run(chosen, where, load, horizon_s=horizon_s)
    assert outcome(jumping) == outcome(one_by_one)
    assert jumping.events.handled - jumping.void <= one_by_one.events.handled
    if horizon_s < float("inf"):
        return
    # The run ends with the last token; a word that frees the next worker's blocks may still be on its way.
    jumping.events.run(jumping.events.now_s + 1.0, lambda: all(w.machine.idle for w in jumping.workers))
    assert [w.machine.kv.owners() for w in jumping.workers] == [{}, {}]


def test_jumps_are_taken():
    load = workload((0.0, 100, 1000))
    assert run(config(), cluster(), load).events.handled < run(config(), cluster(), load, jump=False).events.handled / 5


def test_jumps_go_on_while_a_prompt_arrives_in_pieces():
    """Announcing it, its chunks and reports disturb no worker: only its offer, which takes blocks, and its
    acceptance."""
    items = (WorkItem(0.0, 64, 1500), WorkItem(0.5, 2000, 2))
    load, chosen = Workload("pieces", items), config("disaggregated", engine={"max_step_tokens": 100})
    ends = {}
    for jump in (False, True):
        sim = run(chosen, cluster(2), load, jump=jump)
        ends[jump] = sim.workers[1].epoch
        assert sim.workers[1].machine.counters.transfers_in == 2
    assert ends[False] == 1499  # the first token comes with the prompt
    assert ends[True] <= 1499 / MAX_FAST_FORWARD + 12


def test_the_same_seed_gives_the_same_run_and_another_may_not():
    load = workload(*((0.01 * i, 100 + i, 50) for i in range(30)))
    options = {"predictor": "noisy", "predictor_sigma": 30.0}
    chosen = config("disaggregated")
    first, second = (run(chosen, cluster(2), load, seed=3, **options) for _ in range(2))
    assert outcome(first) == outcome(second)
    predictions = [
        SimCluster(chosen, cluster(2), MODEL, load, SimOptions(seed=seed, **options)).clients._predict(100, 1000)
        for seed in (3, 3, 4)
    ]
    assert predictions[0] == predictions[1] != predictions[2]


# -- roles and bad input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "instances", "expected"),
    [
        ("unified", 5, {Role.UNIFIED: 5}),
        ("disaggregated", 2, {Role.PREFILL: 1, Role.DECODE: 1}),
        ("disaggregated", 7, {Role.PREFILL: 4, Role.DECODE: 3}),
    ],
)
def test_roles_keep_the_presets_shares(preset, instances, expected):
    assert spread_roles(config(preset), instances) == expected


def test_too_few_instances_for_the_roles_is_said():
    with pytest.raises(ConfigError, match=r"2 roles \(prefill, decode\) need as many instances"):
        spread_roles(config("disaggregated"), 1)


def test_a_model_that_does_not_fit_is_said_with_the_field():
    from cohort.services.simulator.hardware.hardware import load_model

    with pytest.raises(ConfigError, match="tensor_parallel: opt-175b"):
        SimCluster(config(), cluster(), load_model("opt-175b"), workload((0.0, 1, 1)), SimOptions())
    with pytest.raises(ConfigError, match=r"kv\.memory_bytes"):
        SimCluster(config(kv={"memory_bytes": 10**14}), cluster(), MODEL, workload((0.0, 1, 1)), SimOptions())


@pytest.mark.parametrize(
    ("item", "field"), [((0.0, -1, 5), "prompt_tokens"), ((0.0, 1, 0), "output_tokens"), ((-1.0, 1, 1), "arrival_s")]
)
def test_bad_items_are_named(item, field):
    with pytest.raises(ConfigError, match=rf"item 0: {field}"):
        SimCluster(config(), cluster(), MODEL, workload(item), SimOptions())


def test_unsorted_times_are_named():
    with pytest.raises(ConfigError, match=r"item 1: arrival_s 1\.0 is before 2\.0"):
        SimCluster(config(), cluster(), MODEL, workload((2.0, 1, 1), (1.0, 1, 1)), SimOptions())


def test_many_instances_run():
    load = workload(*((0.001 * i, 64, 8) for i in range(300)))
    sim = run(config(kv=cache_of(200)), cluster(200), load)
    assert sim.clients.all.finished == 300
