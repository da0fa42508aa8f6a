"""UELLM-like batches by hand: their members, when the next batch begins, rectangles."""

from __future__ import annotations

import msgspec

from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.baselines.predicted_batches import PredictedBatches
from cohort.common.policies.baselines.reserved_allocation import predicted_positions
from cohort.services.simulator.core.engine import plan_cost
from tests.common.policies.baselines.drive import cache, leave, names, rows, sequence, step

RULE = predicted_positions(0.0)


def policy(rows: int = 4, tokens: int = 32, *, padded: bool = False) -> PredictedBatches:
    return PredictedBatches(IterationLimits(rows, tokens, tokens, "recompute", padded), reservation=RULE)


def test_the_oldest_chooses_its_batch_by_prediction_and_no_request_joins_later() -> None:
    batches, kv = policy(), cache(60, reservation=RULE)
    everybody = {
        name: sequence(name, 4, predicted=predicted, arrived_s=at, max_tokens=60)
        for at, (name, predicted) in enumerate((("a", 10), ("far", 40), ("near", 12), ("edge", 15), ("out", 6)))
    }
    for one in everybody.values():
        batches.add(0.0, one)
    assert names(step(batches, kv)) == ["a", "near", "edge"]
    batches.add(0.0, sequence("late", 4, predicted=10, arrived_s=9.0))
    assert rows(step(batches, kv)) == [("a", 4, 1), ("near", 4, 1), ("edge", 4, 1)]
    for name in ("a", "edge"):
        leave(batches, kv, everybody[name])
    assert names(step(batches, kv)) == ["near"]
    leave(batches, kv, everybody["near"])
    assert names(step(batches, kv)) == ["far"]  # now the oldest
    assert batches.metrics()["batches_total"] == 2.0


def test_a_batch_is_bounded_by_rows_and_by_memory_as_predicted() -> None:
    batches, kv = policy(rows=2), cache(60, reservation=RULE)
    for at, predicted in enumerate((10, 14, 11)):
        batches.add(0.0, sequence(f"s{predicted}", 4, predicted=predicted, arrived_s=at))
    assert names(step(batches, kv)) == ["s10", "s11"]
    batches, kv = policy(), cache(7, reservation=RULE)
    for at, name in enumerate("abc"):
        batches.add(0.0, sequence(name, 4, predicted=9, arrived_s=at, max_tokens=20))  # 12 positions, three blocks
    assert names(step(batches, kv)) == ["a", "b"]


def test_without_pages_every_row_takes_as_much_as_the_longest_prompt_and_answer_together() -> None:
    for rectangular, expected in ((False, ["a", "b", "c"]), (True, ["a", "b"])):
        batches = PredictedBatches(
            IterationLimits(4, 64, 64, "recompute"), reservation=RULE, rectangular_kv=rectangular
        )
        kv = cache(12, reservation=RULE)
        # 4 + 8, 16 + 8 and 4 + 8 positions, the last never processed: 3, 6 and 3 blocks of four, or 6 for every row.
        for at, (name, prompt) in enumerate((("a", 4), ("b", 16), ("c", 4))):
            batches.add(0.0, sequence(name, prompt, predicted=9, arrived_s=at, max_tokens=20))
        assert names(step(batches, kv)) == expected


def test_all_prompts_come_before_the_first_token() -> None:
    batches, kv = policy(tokens=8), cache(60, reservation=RULE)
    for at, name in enumerate("abc"):
        batches.add(0.0, sequence(name, 5, arrived_s=at))
    assert [rows(step(batches, kv)) for _ in range(2)] == [[("a", 0, 5), ("b", 0, 3)], [("b", 3, 2), ("c", 0, 5)]]
    assert names(step(batches, kv)) == ["a", "b", "c"]


def test_padded_prompts_are_rectangles_no_larger_than_an_iteration() -> None:
    batches, kv = policy(padded=True), cache(60, reservation=RULE)
    for at, prompt in enumerate((4, 10, 12)):
        batches.add(0.0, sequence(f"s{prompt}", prompt, arrived_s=at))
    plan = step(batches, kv)
    assert (names(plan), plan.padded_to) == (["s4", "s10"], 10)  # three rows of twelve would be 36 tokens
    plan = step(batches, kv)
    assert (names(plan), plan.padded_to) == (["s12"], 12)
    assert step(batches, kv).padded_to == 0


def test_in_a_static_batch_ended_rows_compute_on_until_its_end() -> None:
    for static in (False, True):
        batches = PredictedBatches(IterationLimits(4, 64, 64, "recompute"), reservation=RULE, static=static)
        kv = cache(60, reservation=RULE)
        members = {name: sequence(name, prompt, arrived_s=prompt) for name, prompt in (("a", 4), ("b", 10), ("c", 6))}
        for one in members.values():
            batches.add(0.0, one)
        plan = step(batches, kv)
        assert (len(plan.rows), plan.ended_rows, plan.ended_context) == (3, 0, 0)  # prompts
        plan = step(batches, kv)
        # Contexts of 5, 11 and 7: in a static batch all attend to 11.
        assert (plan.ended_rows, plan.ended_context) == ((0, 10) if static else (0, 0))
        leave(batches, kv, members["b"])
        plan = step(batches, kv)
        # 6 and 8 are left, and a row that has ended.
        assert (len(plan.rows), plan.ended_rows, plan.ended_context) == (2, *((1, 10) if static else (0, 0)))
        alone = plan_cost(msgspec.structs.replace(plan, ended_rows=0, ended_context=0), kv.geometry).work
        padded = plan_cost(plan, kv.geometry).work
        assert padded.decode_rows - alone.decode_rows == int(static)
        assert padded.decode_context - alone.decode_context == (10 if static else 0)
        for name in ("a", "c"):
            leave(batches, kv, members[name])
        batches.add(0.0, sequence("next", 4))
        step(batches, kv)
        assert step(batches, kv).ended_rows == 0
