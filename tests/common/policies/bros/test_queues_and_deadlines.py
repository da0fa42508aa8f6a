"""Token groups (R15), the lazy merge of the queues (R5) against a full sort, and the batch size (R6)."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.policies.bros.batch import AdaptiveBatchSize
from cohort.common.policies.bros.request_queues import BestEffortQueues, RealTimeQueues
from cohort.common.policies.bros.token_groups import TokenGroups
from cohort.common.sequence import Phase, Sequence
from tests.common.policies.bros.kv_world import Memory, request
from tests.examples import examples


def groups(tokens: int = 1) -> TokenGroups:
    return TokenGroups(group_tokens=tokens, default_ttft_s=0.4, default_tpot_s=0.2)


def sample_token(sequence: Sequence, now_s: float) -> None:
    sequence.tokens.append(1)
    sequence.last_token_s = now_s


def test_the_first_token_has_the_ttft_target_and_every_later_one_the_tpot_target() -> None:
    one, sequence = groups(), request("a", 5, arrived_s=10.0)
    assert one.due_s(sequence) == pytest.approx(10.4)
    assert one.residual_s(10.1, sequence, average_s=0.05) == pytest.approx(0.3)
    sample_token(sequence, 10.3)
    assert one.residual_s(10.35, sequence, average_s=0.05) == pytest.approx(0.15)


def test_a_group_shares_one_deadline_and_slack_counts_the_tokens_left_in_it() -> None:
    four, sequence = groups(4), request("a", 5, arrived_s=0.0)
    sample_token(sequence, 1.0)  # group 1 is over; the second began
    assert four.remaining(sequence) == 4
    assert four.residual_s(1.0, sequence, average_s=0.05) == pytest.approx(0.8 - 3 * 0.05)
    sample_token(sequence, 1.3)
    assert four.remaining(sequence) == 3
    assert four.residual_s(1.3, sequence, average_s=0.05) == pytest.approx(0.5 - 2 * 0.05)
    for now_s in (1.4, 1.5, 1.6):
        sample_token(sequence, now_s)
    assert four.remaining(sequence) == 4
    assert four.due_s(sequence) == pytest.approx(2.4)


def test_the_queues_are_merged_by_residual_time() -> None:
    queues = RealTimeQueues(groups())
    waiting = [request(f"w{index}", 5, arrived_s=0.05 * index) for index in range(3)]  # due 0.4, 0.45, 0.5
    pending = [request(f"p{index}", 5) for index in range(2)]
    for sequence, last_s in zip(pending, (0.28, 0.22), strict=True):  # due 0.48, 0.42
        sequence.phase = Phase.RUNNING
        sample_token(sequence, last_s)
    for sequence in (*waiting, *pending):
        queues.add(sequence)
    order = [sequence.request_id for _, _, sequence in queues.urgent_first(0.3, 0.0, 0.0)]
    assert order == ["w0", "p1", "w1", "p0", "w2"]
    # With 0.13 s as the least anything takes, two cannot make it: the started one goes first.
    assert [s.request_id for _, _, s in queues.urgent_first(0.3, 0.0, 0.13)] == ["w1", "p0", "w2"]
    assert [s.request_id for s in queues.urgent_first(0.3, 0.0, 0.13).past_due()] == ["p1", "w0"]


@settings(max_examples=examples(0.6))
@given(seed=st.integers(0, 2**32))
def test_the_lazy_merge_is_the_full_sort(seed: int) -> None:
    random = Random(seed)
    judge = groups(random.choice([1, 3]))
    queues = RealTimeQueues(judge)
    alive: list[Sequence] = []
    for index in range(random.randint(0, 25)):
        sequence = request(f"r{index}", 3, arrived_s=random.random())
        if random.random() < 0.5:
            sequence.phase = Phase.RUNNING
            sample_token(sequence, random.random())
        queues.add(sequence)
        alive.append(sequence)
        if alive and random.random() < 0.3:
            queues.remove(alive.pop(random.randrange(len(alive))))
        elif random.random() < 0.3:
            queues.started(alive[-1])
    least = random.choice([0.0, 0.2])
    expected = sorted((judge.residual_s(1.0, s, 0.05), s.key) for s in alive)
    merged = [(residual, key) for residual, key, _ in queues.urgent_first(1.0, 0.05, least)]
    assert [key for _, key in merged] == [key for residual, key in expected if residual >= least]
    late = queues.urgent_first(1.0, 0.05, least).past_due()
    assert {s.key for s in late} == {key for residual, key in expected if residual < least}
    assert len(queues) == len(alive)


def test_best_effort_by_blocks_to_bring_back() -> None:
    memory = Memory(blocks=3, host_blocks=8)
    whole, apart, new = (request(name, 4, "be", arrived_s=at) for name, at in (("w", 2.0), ("a", 1.0), ("n", 0.0)))
    queues = BestEffortQueues()
    for sequence in (apart, whole):
        memory.prefill(sequence)
        queues.add(sequence)
    queues.add(new)
    rt = request("rt", 7)
    memory.prefill(rt)  # the free block, and part of one of the others
    assert memory.kv.checkpointed(whole.key) + memory.kv.checkpointed(apart.key) == 3
    found_whole, found_apart = queues.by_slots(memory.kv)
    assert [s.request_id for s in found_whole] == ["w"] or [s.request_id for s in found_whole] == ["a"]
    assert [slots for slots, _ in found_apart] == [3]
    assert queues.waiting(5) == [new]
    queues.remove(new)
    assert queues.waiting(5) == []


def test_the_batch_grows_by_steps_and_falls_back_at_once() -> None:
    size = AdaptiveBatchSize(first=8, step=4, most=18)
    seen = []
    for cut_short in (False, False, False, False, True, False):
        seen.append(size.value)
        size.decided(cut_short=cut_short)
    assert (seen, size.value, size.backoffs) == ([8, 12, 16, 18, 18, 8], 12, 1)
