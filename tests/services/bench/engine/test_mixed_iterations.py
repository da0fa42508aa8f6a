"""Mixed iterations and their parts: the right slots, and the table by hand."""

from __future__ import annotations

from cohort.common.engine.worker.profiler import StepPoint, StepShape, step_batch
from cohort.services.bench.engine.inside.mixed_iterations import shapes, table


def test_every_mixed_shape_comes_with_its_parts() -> None:
    wanted = shapes([16, 64], [1, 4], [32])
    assert len(wanted) == 2 + 2 + 4
    for mixed in wanted[4:]:
        assert StepShape(1, mixed.tokens_per_row, mixed.context) in wanted
        assert StepShape(mixed.decodes, 1, mixed.decode_context) in wanted


def test_every_row_has_blocks_of_its_own() -> None:
    batch = step_batch(StepShape(1, 3, 6, decodes=2, decode_context=5), block_size=4, num_blocks=6)
    assert batch is not None
    assert batch.block_tables.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert batch.query_start.tolist() == [0, 3, 4, 5]
    assert batch.positions.tolist() == [3, 4, 5, 4, 4]
    assert batch.slot_mapping.tolist() == [3, 4, 5, 12, 20]
    assert batch.context_lens.tolist() == [6, 5, 5]
    assert len(batch.sampling) == len(batch.sample_rows) == 3


def test_what_the_cache_cannot_hold_is_no_batch() -> None:
    shape = StepShape(1, 3, 6, decodes=2, decode_context=5)
    assert step_batch(shape, block_size=4, num_blocks=5) is None
    assert step_batch(StepShape(1, 7, 6), block_size=4, num_blocks=6) is None


def test_the_table_compares_with_both_parts() -> None:
    chunk, rows = StepShape(1, 16, 16), StepShape(4, 1, 32)
    mixed, lonely = StepShape(1, 16, 16, 4, 32), StepShape(1, 16, 16, 8, 32)
    points = [StepPoint(shape, seconds, seconds, 1) for shape, seconds in ((chunk, 0.03), (rows, 0.01), (mixed, 0.036))]
    lines = table([*points, StepPoint(lonely, 1.0, 1.0, 1)]).splitlines()
    assert lines[2:] == ["| 16 | 4 | 32 | 30.0 | 10.0 | 36.0 | 0.90 | 1.20 |"]
