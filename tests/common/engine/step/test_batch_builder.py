"""From plan to arrays: positions, slots, tables and directions against a plain reading of the block tables."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from random import Random
from zlib import crc32

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.engine.step.batch import StepBatch
from cohort.common.engine.step.batch_builder import BatchBuilder
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.interface import IterationPlan
from cohort.common.sequence import Row, Sequence
from cohort.common.types import Attempt, KvGeometry, Request, SamplingParams

SIZE = 4


class Directed(PagedAllocator):
    """Blocks filled from the right, for every second block."""

    def directions(self, key: str) -> Seq[int]:
        return [index % 2 for index in range(len(self.blocks(key)))]


def running(name: str, known: int, computed: int, **sampling: float) -> Sequence:
    tokens = [crc32(f"{name} {i}".encode()) % 1000 for i in range(known)]
    request = Request(Attempt(name, 1), "g", tokens[:1], 1, SamplingParams(max_tokens=99, seed=5, **sampling), 0.0)  # type: ignore[arg-type]
    return Sequence(request, tokens, None, 0, 0.0, computed=computed)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 19), st.integers(1, 20)), min_size=1, max_size=6),
    st.booleans(),
)
def test_every_token_lands_in_its_slot(shapes: list[tuple[int, int, int]], directed: bool) -> None:
    geometry = KvGeometry(1, 1, 1, 1, SIZE)
    kv = (Directed if directed else PagedAllocator)(geometry, 64, 0, prefix_caching=False)
    rows = []
    for index, (known, computed, count) in enumerate(shapes):
        computed = min(computed, known - 1)
        sequence = running(f"s{index}", known, computed)
        assert kv.admit(sequence) == 0
        rows.append(Row(sequence, computed, min(count, known - computed)))
    batch, sampled = BatchBuilder(kv).build(IterationPlan(rows=rows))
    batch.check()
    token = 0
    for index, row in enumerate(rows):
        blocks = kv.blocks(row.sequence.key)
        for position in range(row.start, row.start + row.count):
            offset = position % SIZE
            if directed and (position // SIZE) % 2 == 1:
                offset = SIZE - 1 - offset
            assert batch.token_ids[token] == row.sequence.tokens[position]
            assert batch.positions[token] == position
            assert batch.slot_mapping[token] == blocks[position // SIZE] * SIZE + offset
            token += 1
        width = geometry.blocks_for(row.start + row.count)
        assert batch.block_tables[index, :width].tolist() == list(blocks[:width])
        assert batch.context_lens[index] == row.start + row.count
    assert token == batch.num_tokens
    assert (batch.directions is not None) == directed
    assert sampled == [row.sequence for row in rows if row.start + row.count == row.sequence.known]
    assert [row.position for row in batch.sampling] == [sequence.known for sequence in sampled]


def _same(ours: StepBatch, fresh: StepBatch) -> bool:
    """Whether both batches say the same; what is beyond a row's context says nothing."""
    equal = all(
        np.array_equal(getattr(ours, name), getattr(fresh, name))
        for name in ("token_ids", "positions", "query_start", "context_lens", "slot_mapping", "sample_rows")
    )
    lens = zip(ours.block_tables, fresh.block_tables, -(-ours.context_lens // SIZE), strict=True)
    drawn = zip(ours.sampling, fresh.sampling, strict=True)
    return (
        equal
        and ours.scoring == fresh.scoring
        and all(mine[:width].tolist() == theirs[:width].tolist() for mine, theirs, width in lens)
        and all(mine == theirs or (mine.plain_greedy and theirs.plain_greedy) for mine, theirs in drawn)
    )


@given(st.integers(0, 2**32), st.booleans())
def test_what_stands_from_step_to_step_is_what_would_be_built_anew(seed: int, directed: bool) -> None:
    """Sequences come and go, are computed in chunks, skip steps, lose their blocks and get others."""
    random = Random(seed)
    kv = (Directed if directed else PagedAllocator)(KvGeometry(1, 1, 1, 1, SIZE), 200, 200, prefix_caching=False)
    builder, alive = BatchBuilder(kv), list[Sequence]()
    for step in range(30):
        plan = IterationPlan()
        if len(alive) < 6 and random.random() < 0.4:
            greedy = {"temperature": 0} if random.random() < 0.5 else {}
            alive.append(running(f"s{step}", random.randint(1, 9), 0, min_tokens=3, stop_token_ids=(7,), **greedy))  # type: ignore[arg-type]
            kv.admit(alive[-1])
        if alive and random.random() < 0.2:
            kv.release(alive.pop(random.randrange(len(alive))).key)
        if alive and random.random() < 0.2:
            moved = random.choice(alive)
            if moved.computed and random.random() < 0.5:
                assert kv.swap_out(moved)
                kv.admit(other := running(f"t{step}", 9, 0))
                assert kv.swap_in(moved)
                kv.release(other.key)
                plan.copies = kv.take_copies()
            else:
                kv.release(moved.key)
                moved.computed = 0
                kv.admit(moved)
        for sequence in alive:
            if random.random() < 0.9:
                count = min(sequence.uncomputed, random.choice([1, 1, 4]))
                assert kv.extend(sequence, sequence.computed + count)
                plan.rows.append(Row(sequence, sequence.computed, count))
        if not plan.rows and not plan.copies:
            continue
        ours, sampled = builder.build(plan)
        fresh, expected = BatchBuilder(kv).build(plan)
        assert _same(ours, fresh) and sampled == expected
        for row in plan.rows:
            row.sequence.computed += row.count
            if row.sequence.computed == row.sequence.known:
                row.sequence.tokens.append(random.randrange(1000))


def test_a_step_behind_another_takes_its_tokens_from_it() -> None:
    kv = PagedAllocator(KvGeometry(1, 1, 1, 1, SIZE), 20, 0, prefix_caching=False)
    sequences = [running(name, 4, 3) for name in "abc"]
    for sequence in sequences:
        kv.admit(sequence)
    builder = BatchBuilder(kv)
    _, sampled = builder.build(IterationPlan(rows=[Row(sequence, 3, 1) for sequence in sequences]))
    going_on = [sequences[0], sequences[2]]
    for sequence in going_on:
        kv.extend(sequence, 5)
    plan = IterationPlan(rows=[Row(sequence, 4, 1) for sequence in going_on])
    behind, also = builder.build(plan, sampled)
    behind.check()
    assert also == going_on
    assert behind.token_source is not None and behind.token_source.tolist() == [0, 2]
    for sequence, token in zip(sequences, (11, 12, 13), strict=True):
        sequence.tokens.append(token)
        sequence.computed = 4
    assert _same(behind.after(np.array([11, 12, 13])), BatchBuilder(kv).build(plan)[0])


def test_a_prompt_that_has_ended_stands_behind_rows_that_stood_behind_it() -> None:
    kv = PagedAllocator(KvGeometry(1, 1, 1, 1, SIZE), 20, 0, prefix_caching=False)
    prompt, decoding = running("a", 5, 0), running("b", 4, 3)
    for sequence in (prompt, decoding):
        kv.admit(sequence)
    builder = BatchBuilder(kv)
    _, sampled = builder.build(IterationPlan(rows=[Row(prompt, 0, 5), Row(decoding, 3, 1)]))
    assert sampled == [prompt, decoding]
    plan = IterationPlan(rows=[Row(decoding, 4, 1), Row(prompt, 5, 1)])
    assert kv.extend_ahead(plan.rows) is None
    behind, _ = builder.build(plan, sampled)
    behind.check()
    assert behind.token_source is not None and behind.token_source.tolist() == [1, 0]
    for sequence, token, computed in ((prompt, 11, 5), (decoding, 12, 4)):
        sequence.tokens.append(token)
        sequence.computed = computed
    assert _same(behind.after(np.array([11, 12])), BatchBuilder(kv).build(plan)[0])


def test_a_chunk_behind_another_has_its_own_tokens_and_samples_with_the_last() -> None:
    kv = PagedAllocator(KvGeometry(1, 1, 1, 1, SIZE), 20, 0, prefix_caching=False)
    prompt, decoding = running("a", 13, 0), running("b", 4, 3)
    for sequence in (prompt, decoding):
        kv.admit(sequence)
    builder = BatchBuilder(kv)
    _, sampled = builder.build(IterationPlan(rows=[Row(prompt, 0, 5), Row(decoding, 3, 1)]))
    assert sampled == [decoding]
    for plan, sources in (
        (IterationPlan(rows=[Row(prompt, 5, 5), Row(decoding, 4, 1)]), [-1] * 5 + [0]),
        (IterationPlan(rows=[Row(prompt, 10, 3), Row(decoding, 5, 1)]), [-1] * 3 + [0]),
        (IterationPlan(rows=[Row(decoding, 6, 1), Row(prompt, 13, 1)]), [1, 0]),
    ):
        assert kv.extend_ahead(plan.rows) is None
        behind, also = builder.build(plan, sampled)
        behind.check()
        assert behind.token_source is not None and behind.token_source.tolist() == sources
        before, tokens = sampled, [17 + index for index in range(len(sampled))]
        for sequence, token in zip(before, tokens, strict=True):
            sequence.tokens.append(token)
        for row in plan.rows:
            row.sequence.computed = row.start
        expected, again = BatchBuilder(kv).build(plan)
        assert _same(behind.after(np.array(tokens)), expected) and also == again
        sampled = also


def test_a_chunk_behind_a_chunk_is_a_step_of_its_own() -> None:
    """None of its tokens comes from the step before: it is the same batch as if it were decided."""
    kv = PagedAllocator(KvGeometry(1, 1, 1, 1, SIZE), 20, 0, prefix_caching=False)
    prompt = running("a", 13, 0)
    kv.admit(prompt)
    builder = BatchBuilder(kv)
    _, sampled = builder.build(IterationPlan(rows=[Row(prompt, 0, 5)]))
    plan = IterationPlan(rows=[Row(prompt, 5, 8)])
    behind, also = builder.build(plan, sampled)
    prompt.computed = 5
    assert sampled == [] and also == [prompt]
    assert behind.token_source is None and _same(behind, BatchBuilder(kv).build(plan)[0])


def test_what_sampling_looks_back_on_is_left_to_the_engine_while_a_token_is_under_way() -> None:
    kv = PagedAllocator(KvGeometry(1, 1, 1, 1, SIZE), 20, 0, prefix_caching=False)
    sequence = running("a", 4, 3, frequency_penalty=0.5, grammar="root ::= [a-z]+")
    kv.admit(sequence)
    builder = BatchBuilder(kv)
    first, sampled = builder.build(IterationPlan(rows=[Row(sequence, 3, 1)]))
    plan = IterationPlan(rows=[Row(sequence, 4, 1)])
    assert kv.extend_ahead(plan.rows) is None
    behind, _ = builder.build(plan, sampled)
    history, grammar = behind.sampling[0].history, behind.sampling[0].grammar
    assert history is not None and grammar is not None
    known = sequence.tokens[1:]  # behind a prompt of one token
    assert (history.output_tokens, grammar.output) == (3, known)
    assert behind.needs_last_tokens and not first.needs_last_tokens
    for _ in range(2):  # a step that the device refuses memory for is begun again
        behind.apply_last_tokens(np.array([7]))
        assert (history.output_tokens, grammar.output) == (4, [*known, 7])
    sequence.tokens += [7, 8]
    sequence.computed = 5
    kv.extend(sequence, 6)
    builder.build(IterationPlan(rows=[Row(sequence, 5, 1)]))
    assert (history.output_tokens, grammar.output) == (5, [*known, 7, 8]), "none is counted twice, none is left out"


def test_a_scored_prompt_that_has_ended_is_not_scored_again() -> None:
    kv = PagedAllocator(KvGeometry(1, 1, 1, 1, SIZE), 20, 0, prefix_caching=False)
    prompt = running("a", 5, 0, prompt_logprobs=0)
    prompt.request = msgspec.structs.replace(prompt.request, prompt_tokens=5)
    kv.admit(prompt)
    builder = BatchBuilder(kv)
    first, sampled = builder.build(IterationPlan(rows=[Row(prompt, 0, 5)]))
    plan = IterationPlan(rows=[Row(prompt, 5, 1)])
    assert kv.extend_ahead(plan.rows) is None
    behind, _ = builder.build(plan, sampled)
    assert len(first.scoring) == 1 and behind.scoring == ()


def test_end_tokens_are_banned_until_enough_is_there() -> None:
    kv = PagedAllocator(KvGeometry(1, 1, 1, 1, SIZE), 8, 0)
    sequence = running("a", 3, 0, min_tokens=3, stop_token_ids=(7,))  # type: ignore[arg-type]
    kv.admit(sequence)
    batch, _ = BatchBuilder(kv).build(IterationPlan(rows=[Row(sequence, 0, 3)]))
    assert batch.sampling[0].banned == (7,)  # two output tokens exist, the third is drawn now
    sequence.tokens.append(1)
    batch, _ = BatchBuilder(kv).build(IterationPlan(rows=[Row(sequence, 3, 1)]))
    assert batch.sampling[0].banned == ()
