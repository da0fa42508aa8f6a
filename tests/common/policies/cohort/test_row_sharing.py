"""More sequences than rows: as many as their TPOTs leave time for, and every one of them keeps its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.cohort.row_sharing import admissible_rows, in_turn, lasting_shape, longest_shared_s
from cohort.common.policies.step_times.step_cost import BatchShape
from cohort.common.sequence import Sequence
from tests.common.policies.cohort.one_by_one import table
from tests.common.policies.cohort.promised import promised

STEP_S = 0.04
HEADROOM = 0.05


def decoding(*tpots_s: float) -> list[Sequence]:
    return [promised(f"r{index}", 4, tpot_s=tpot_s) for index, tpot_s in enumerate(tpots_s)]


def test_twice_as_many_sequences_as_rows_where_an_iteration_takes_half_a_tpot() -> None:
    assert admissible_rows(table(decoding(*[0.08] * 10)), 10, STEP_S, 0.0) == 10
    assert admissible_rows(table(decoding(*[0.08] * 20)), 10, STEP_S, 0.0) == 0
    assert admissible_rows(table(decoding(*[0.08] * 10)), 10, STEP_S, 0.1) == 8, "headroom stays"


def test_a_sequence_without_a_tpot_keeps_its_row() -> None:
    assert admissible_rows(table(decoding(*[0.0] * 10)), 10, STEP_S, 0.0) == 0
    effort = [promised(f"e{index}", 4, traffic_class="be") for index in range(10)]
    assert admissible_rows(table(effort), 10, STEP_S, 0.0) == 0
    assert admissible_rows(table(decoding(0.0)), 10, STEP_S, 0.5) == 9, "rows that are free are free"
    assert admissible_rows(table([]), 10, STEP_S, 0.5) == admissible_rows(table([]), 10, 0.0, 0.5) == 10


def test_an_iteration_is_as_long_as_all_of_them_can_bear() -> None:
    assert round(longest_shared_s(table(decoding(*[0.08] * 20)), 10, STEP_S, 0.0), 6) == 0.04
    assert round(longest_shared_s(table(decoding(*[0.08] * 20, 0.0)), 10, STEP_S, 0.0), 6) == round(10 / (250 + 25), 6)


def test_an_iteration_that_goes_on_holds_long_contexts_and_the_prompts_of_those_that_follow() -> None:
    running = decoding(0.1, 0.1)
    for each, predicted in zip(running, (10.0, 6.0), strict=True):
        each.predicted = predicted
    shape = lasting_shape(table(running), 40)
    assert (shape.decodes, shape.decode_context) == (40, 40 * 12), "prompts of 4, responses of 8"
    assert shape.prefill_tokens == 20, "one of forty ends in every fifth of an iteration"
    assert lasting_shape(table([]), 40).prefill_tokens == 0


def at_10_ms(shape: BatchShape) -> float:
    return 0.01 * shape.decodes


def of_request(choices: int, count: int) -> list[Sequence]:
    return [promised(f"of {choices}: {index:02}", 4, choices=choices) for index in range(count)]


def test_choices_beyond_eight_have_the_rows_that_fit_and_an_eighth_if_none_does() -> None:
    plain, some, many = of_request(1, 2), of_request(8, 2), of_request(32, 32)
    everybody = [*many[:9], *plain, *some, *many[9:]]
    assert in_turn(everybody, at_10_ms, 0.36) == everybody
    assert in_turn(everybody, at_10_ms, 0.10) == [*many[:6], *plain, *some]
    assert in_turn(everybody, at_10_ms, 0.0) == [*many[:4], *plain, *some]
    assert in_turn(everybody, lambda shape: None, 0.0) == everybody, "nothing is known of this machine"
    assert in_turn([*plain, *some], at_10_ms, 0.0) == [*plain, *some]


@given(st.integers(9, 128), st.integers(0, 60), st.floats(0.0, 1.0))
def test_every_choice_has_a_row_in_as_many_iterations(choices: int, others: int, within_s: float) -> None:
    many, plain = of_request(choices, choices), of_request(1, others)
    waited = dict.fromkeys((each.key for each in many), 0)
    for number in range(20):
        chosen = in_turn([*many, *plain], at_10_ms, within_s)
        assert chosen[-others:] == plain or not others
        assert at_10_ms(BatchShape.of_decodes(len(chosen), 0)) <= max(within_s, 0.01 * (others - (-choices // 8)))
        for each in many:
            if each in chosen:
                each.last_token_s, waited[each.key] = number + 0.5, 0
            else:
                waited[each.key] += 1
    assert max(waited.values()) < 8


@given(st.lists(st.sampled_from([0.0, 0.03, 0.05, 0.08, 0.1, 0.2]), min_size=1, max_size=60), st.integers(1, 8))
def test_every_one_that_is_let_in_keeps_its_tpot(tpots_s: list[float], rows: int) -> None:
    running: list[Sequence] = []
    for index, tpot_s in enumerate(tpots_s):
        each = promised(f"r{index}", 4, tpot_s=max(tpot_s, STEP_S) if tpot_s else 0.0)
        if admissible_rows(table([*running, each]), rows, STEP_S, HEADROOM) or len(running) < rows:
            running.append(each)
    tokens = dict.fromkeys((each.key for each in running), 0)
    steps = 150
    for step in range(steps):
        now_s = step * STEP_S
        at = table(running, now_s)
        for each in at.at(at.due_first(now_s, at.ranked(), STEP_S))[:rows]:
            gap_s = now_s + STEP_S - (each.last_token_s if each.last_token_s is not None else 0.0)
            assert gap_s <= max(STEP_S, each.request.slo.tpot_s) + STEP_S + 1e-9 or tokens[each.key] == 0
            each.last_token_s = now_s + STEP_S
            tokens[each.key] += 1
    for each in running:
        wanted_s = max(STEP_S, each.request.slo.tpot_s)
        assert tokens[each.key] * wanted_s >= 0.9 * steps * STEP_S, "nine tenths: gaps are whole iterations"
