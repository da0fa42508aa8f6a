"""The profiler's rounds and budget, its mixed shapes, and the process that writes them for `cohort profile`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml

from cohort.common.engine.worker import profile_process
from cohort.common.engine.worker.profile_process import (
    Profile,
    StepShape,
    default_shapes,
    measure,
    point_of,
    step_batch,
)
from cohort.common.policies.step_times.profile_table import ProfileTable

SHAPES = [StepShape(1, 16, 16), StepShape(4, 1, 20), StepShape(1, 8, 8, 2, 20)]


class FakeRunner:
    """A step takes a second for each of its tokens."""

    block_size = 8
    device = SimpleNamespace(type="cpu")
    geometry = SimpleNamespace(vocab_size=64)

    def __init__(self) -> None:
        self.kv = SimpleNamespace(blocks=range(20))
        self.now_s = 0.0
        self.ran: list[int] = []

    def execute(self, batch: Any) -> None:
        self.ran.append(batch.num_tokens)
        self.now_s += batch.num_tokens


def test_shapes_run_in_turn_after_a_round_that_does_not_count() -> None:
    runner = FakeRunner()
    points = measure(runner, SHAPES, repeats=2, clock=lambda: runner.now_s)  # type: ignore[arg-type]
    assert runner.ran == 3 * [16, 4, 10]
    assert [(point.shape, point.median_s, point.repeats) for point in points] == [
        (SHAPES[0], 16.0, 2),
        (SHAPES[1], 4.0, 2),
        (SHAPES[2], 10.0, 2),
    ]


@pytest.mark.parametrize(("device", "ran"), [("cpu", [16, 300, 16]), ("cuda", [300, 16, 300, 16])])
def test_on_a_processor_the_first_long_step_counts(device: str, ran: list[int]) -> None:
    runner = FakeRunner()
    runner.device, runner.kv = SimpleNamespace(type=device), SimpleNamespace(blocks=range(80))
    measure(runner, [StepShape(1, 300, 300), SHAPES[0]], repeats=1, clock=lambda: runner.now_s)  # type: ignore[arg-type]
    assert runner.ran == ran


def test_no_round_begins_after_the_budget_but_the_first() -> None:
    for budget_s, rounds in ((1.0, 1), (65.0, 2), (1000.0, 5)):
        runner = FakeRunner()
        points = measure(runner, SHAPES, repeats=5, budget_s=budget_s, clock=lambda: runner.now_s)  # type: ignore[arg-type]  # noqa: B023
        assert {point.repeats for point in points} == {rounds}


def test_scatter_leaves_out_the_slowest() -> None:
    assert point_of(SHAPES[0], [1.0, 1.0, 1.0, 9.0]).scatter == 0.0
    assert point_of(SHAPES[0], [0.9, 1.0, 1.1, 9.0]).scatter == pytest.approx(0.1)
    assert point_of(SHAPES[0], [2.0]).scatter == 0.0


def test_mixed_shapes_stay_within_the_engine() -> None:
    mixed = [shape for shape in default_shapes(1024, 8, 256) if shape.decodes]
    assert {(shape.tokens_per_row, shape.decodes) for shape in mixed} == {(16, 1), (16, 4), (64, 1), (64, 4)}
    for shape in mixed:
        batch = step_batch(shape, block_size=16, num_blocks=400)
        assert batch is not None
        batch.check()
        assert batch.num_tokens == shape.tokens_per_row + shape.decodes


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


def test_tokens_are_spread_over_the_vocabulary() -> None:
    """The same one in all rows would go to the same experts of a mixture."""
    batch = step_batch(StepShape(8, 4, 16), block_size=16, num_blocks=400, vocabulary=512)
    assert batch is not None
    assert len(set(batch.token_ids.tolist())) == 32 and batch.token_ids.max() < 512


def test_the_process_measures_the_shapes_that_it_may_run(
    model_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, output = tmp_path / "config.yaml", tmp_path / "points.json"
    folder = model_folder("llama")
    config.write_text(yaml.safe_dump({"model": {"path": str(folder)}, "kv": {"memory_bytes": 1 << 20}}))
    command = ["--config", str(config), "--threads", "1", "--repeats", "1", "--max-context", "64"]
    command += ["--model-name", "tiny", "--output", str(output)]
    assert profile_process.main(command) == 0
    found = msgspec.json.decode(output.read_bytes(), type=Profile)
    assert [point.shape for point in found.points] == [StepShape(1, 16, 16), StepShape(1, 64, 64)]
    assert found.model_folder == str(folder) and found.memory_bytes > 0 and found.units == 1
    assert (found.model_shape["name"], found.model_shape["layers"], found.model_shape["kv_heads"]) == ("tiny", 3, 2)
    table = ProfileTable()
    table.load(output.read_bytes())  # schedulers start from the same file
    assert len(table) == 2
