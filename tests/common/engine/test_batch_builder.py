"""From plan to arrays: positions, slots, tables and directions against a plain reading of the block tables."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from hypothesis import given
from hypothesis import strategies as st

from cohort.common.engine.batch_builder import build_batch
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.interface import IterationPlan, Row
from cohort.common.sequence import Sequence
from cohort.common.types import Attempt, KvGeometry, Request, SamplingParams

SIZE = 4


class Directed(PagedAllocator):
    """Blocks filled from the right, for every second block."""

    def directions(self, key: str) -> Seq[int]:
        return [index % 2 for index in range(len(self.blocks(key)))]


def running(name: str, known: int, computed: int, **sampling: int) -> Sequence:
    tokens = [hash((name, i)) % 1000 for i in range(known)]
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
    batch, sampled = build_batch(IterationPlan(rows=rows), kv)
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


def test_end_tokens_are_banned_until_enough_is_there() -> None:
    kv = PagedAllocator(KvGeometry(1, 1, 1, 1, SIZE), 8, 0)
    sequence = running("a", 3, 0, min_tokens=3, stop_token_ids=(7,))  # type: ignore[arg-type]
    kv.admit(sequence)
    batch, _ = build_batch(IterationPlan(rows=[Row(sequence, 0, 3)]), kv)
    assert batch.sampling[0].banned == (7,)  # two output tokens exist, the third is drawn now
    sequence.tokens.append(1)
    batch, _ = build_batch(IterationPlan(rows=[Row(sequence, 3, 1)]), kv)
    assert batch.sampling[0].banned == ()
