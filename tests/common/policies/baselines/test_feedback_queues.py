"""FastServe's queues by hand: skip-join, demotion by quantum, promotion of the starving."""

from __future__ import annotations

from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.baselines.feedback_queues import SkipJoinQueues
from cohort.common.policies.baselines.ranked_batching import RankedBatching
from cohort.common.policies.baselines.reserved_allocation import known_positions
from cohort.common.policies.interface import IterationPlan, Ran
from cohort.common.sequence import Row
from tests.common.policies.baselines.drive import cache, names, sequence, step


def queues(quantum_s: float = 1.0) -> SkipJoinQueues:
    return SkipJoinQueues(levels=3, quantum_s=quantum_s, starvation_s=10.0)


def level(policy: SkipJoinQueues, one: object) -> int | float | str:
    return policy.key(one)[1]  # type: ignore[arg-type]


def test_a_newcomer_skips_queues_that_its_prompt_would_use_up() -> None:
    policy = queues()
    policy.observe(Ran(IterationPlan(rows=[Row(sequence("x", 10), 0, 10)]), 0.0, (1.0,)))  # 0.1 s per prompt token
    levels = {}
    for prompt in (5, 10, 15, 20, 35, 400):
        one = sequence(f"p{prompt}", prompt)
        policy.added(0.0, one)
        levels[prompt] = level(policy, one)
    # Quanta 1, 2, 4 s cover 10, 20, 40 tokens; longer prompts join the last.
    assert levels == {5: 0, 10: 0, 15: 1, 20: 1, 35: 2, 400: 2}


def test_a_request_that_uses_up_a_quantum_goes_down_and_stays_in_the_last() -> None:
    policy = queues()
    one = sequence("a", 1)
    policy.added(0.0, one)
    seen = []
    for now in range(8):
        policy.observe(Ran(IterationPlan(rows=[Row(one, 0, 1)]), float(now), (1.0,)))
        seen.append(level(policy, one))
    assert seen == [1, 1, 2, 2, 2, 2, 2, 2]  # one second in queue 0, two in queue 1


def test_the_first_quantum_is_learned_from_iterations_without_prefill() -> None:
    policy = queues(quantum_s=0.0)
    one, two = sequence("a", 1), sequence("b", 1)
    policy.added(0.0, one)
    policy.observe(Ran(IterationPlan(rows=[Row(one, 0, 1)]), 0.0, (0.5,)))  # the quantum is now 0.5 s, and used up
    policy.added(0.0, two)
    policy.observe(Ran(IterationPlan(rows=[Row(two, 0, 1)]), 0.0, (0.4,)))
    assert (level(policy, one), level(policy, two)) == (1, 0)


def test_the_starving_move_to_the_top() -> None:
    policy = queues()
    one = sequence("a", 1)
    policy.added(0.0, one)
    policy.observe(Ran(IterationPlan(rows=[Row(one, 0, 1)]), 1.0, (5.0,)))
    policy.begin(11.0, [one])
    assert level(policy, one) == 1
    policy.begin(11.1, [one])
    assert (level(policy, one), policy.metrics()["starvation_promotions_total"]) == (0, 1.0)


def test_a_promotion_is_worth_a_quantum_of_the_last_queue_and_ends_there() -> None:
    policy = queues()  # quanta 1, 2, 4 s
    one = sequence("a", 1)
    policy.added(0.0, one)
    policy.observe(Ran(IterationPlan(rows=[Row(one, 0, 1)]), 1.0, (1.0,)))
    policy.begin(12.0, [one])
    seen = []
    for now in range(12, 16):
        policy.observe(Ran(IterationPlan(rows=[Row(one, 0, 1)]), float(now), (1.0,)))
        seen.append(level(policy, one))
    assert seen == [0, 0, 0, 2]


def test_newcomers_run_before_requests_that_had_their_share() -> None:
    ranking = queues()
    policy = RankedBatching(
        ranking, IterationLimits(1, 32, 32, "recompute"), reservation=known_positions, evicting=True
    )
    kv = cache(40)
    policy.add(0.0, sequence("old", 3))
    assert names(step(policy, kv, 0.0, 2.0)) == ["old"]
    policy.add(1.0, sequence("new", 1, arrived_s=1.0))
    assert names(step(policy, kv, 1.0, 0.4)) == ["new"]
    assert names(step(policy, kv, 2.0, 0.7)) == ["new"]  # 1.1 s used: down to where `old` has been for longer
    assert names(step(policy, kv, 3.0, 0.1)) == ["old"]
    assert policy.metrics()["queue_1"] == 2.0
