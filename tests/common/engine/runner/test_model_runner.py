"""The model runner's own decisions: device, dtype, memory, threads; and the profiler that drives it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from cohort.common.engine.device import device_name
from cohort.common.engine.device.device_name import resolve_device, resolve_dtype
from cohort.common.engine.runner import model_runner
from cohort.common.engine.step.batch import trial_batch
from cohort.common.engine.worker.profile_process import StepShape, default_shapes, measure
from cohort.common.errors import ConfigError
from tests.common.engine.driver import Driver, make_runner, random_prompts, refusing

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_auto_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    for native, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(device_name, "native_bfloat16", lambda native=native: native)
        assert resolve_dtype("auto", CPU) == expected
    assert resolve_dtype("auto", CUDA) == "bfloat16"
    assert resolve_dtype("float16", CPU) == "float16"
    with pytest.raises(ConfigError, match=r"model\.dtype.*int8"):
        resolve_dtype("int8", CPU)


def test_device() -> None:
    assert resolve_device("cpu") == CPU
    with pytest.raises(ConfigError, match=r"engine\.device.*abacus"):
        resolve_device("abacus")
    if not torch.cuda.is_available():
        assert resolve_device("auto") == CPU
        with pytest.raises(ConfigError, match="finds no CUDA device"):
            resolve_device("cuda:0")


def test_runs_in_halves_when_the_device_refuses(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(model_folder("llama"))
    driver = Driver(runner)
    for index, prompt in enumerate(random_prompts([5, 9, 14, 7, 3])):
        driver.add(str(index), prompt)
    batch = driver.batch([(str(index), len(driver.requests[str(index)].tokens)) for index in range(5)])
    expected = runner.execute(batch).tokens.tolist()
    monkeypatch.setattr(runner, "_execute", refusing(runner._execute, most_rows=2))
    assert runner.execute(batch).tokens.tolist() == expected
    assert runner.oom_retries == 2  # 5 rows → 2 + 3, 3 → 1 + 2
    monkeypatch.setattr(runner, "_execute", lambda batch: (_ for _ in ()).throw(torch.OutOfMemoryError("no room")))
    with pytest.raises(torch.OutOfMemoryError):
        runner.execute(batch)


def test_threads_hold_in_the_thread_that_steps(model_folder: Callable[[str], Path]) -> None:
    runner = make_runner(model_folder("llama"), threads=2)
    torch.set_num_threads(1)
    seen: list[int] = []
    batch = trial_batch(2, 3, 5, block_size=8, num_blocks=96)
    assert batch is not None

    def step() -> None:
        runner.execute(batch)
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=step)
    thread.start()
    thread.join(timeout=60)
    torch.set_num_threads(1)
    assert seen == [2]


def test_warm_up_and_a_step_beyond_the_announced_size(model_folder: Callable[[str], Path]) -> None:
    runner = make_runner(model_folder("llama"), max_step_tokens=16)
    runner.warm_up()
    driver = Driver(runner)
    prompt = random_prompts([40])[0]
    driver.add("long", prompt)
    driver.step([("long", 40)])
    small = Driver(make_runner(model_folder("llama")))
    small.add("long", prompt)
    small.step([("long", 40)])
    assert driver.requests["long"].tokens == small.requests["long"].tokens


@pytest.mark.parametrize(("rows", "tokens", "context"), [(1, 1, 1), (3, 1, 17), (2, 5, 9), (1, 40, 40)])
def test_trial_batches_are_consistent(rows: int, tokens: int, context: int) -> None:
    batch = trial_batch(rows, tokens, context, block_size=8, num_blocks=12)
    assert batch is not None
    batch.check()
    assert (batch.num_rows, batch.num_tokens) == (rows, rows * tokens)


def test_trial_batch_that_does_not_fit() -> None:
    assert trial_batch(3, 1, 40, block_size=8, num_blocks=12) is None
    assert trial_batch(1, 9, 8, block_size=8, num_blocks=12) is None


def test_profiler_measures_batches_that_fit(model_folder: Callable[[str], Path]) -> None:
    runner = make_runner(model_folder("llama"), num_blocks=12)
    shapes = [StepShape(1, 16, 16), StepShape(4, 1, 20), StepShape(9, 1, 20)]
    points = measure(runner, shapes, repeats=3)
    assert [point.shape for point in points] == shapes[:2]
    assert all(0 < point.fastest_s <= point.median_s for point in points)


def test_default_shapes_stay_within_the_engine() -> None:
    shapes = list(default_shapes(max_context=1024, max_rows=16, max_step_tokens=512))
    assert {shape.rows for shape in shapes} == {1, 2, 4, 8, 16}
    assert max(shape.context for shape in shapes) <= 1024
    assert max(shape.rows * shape.tokens_per_row for shape in shapes) == 512
    assert all(shape.context >= shape.tokens_per_row for shape in shapes)
    assert len(shapes) == len(set(shapes))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_in_one_call_compute_the_same_bits(model_folder: Callable[[str], Path], family: str, dtype: str) -> None:
    """As one by one: cache and logits, with prefill and decode rows together."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for together in (True, False):
        runner = make_runner(model_folder(family), dtype=dtype)
        driver = Driver(runner)
        for index, prompt in enumerate(random_prompts([5, 19, 14])):
            driver.add(str(index), prompt)
        driver.step([("0", 5)])
        batch = driver.batch([("1", 19), ("2", 14), ("0", 1)])
        inputs = model_runner.step_inputs(batch, runner.block_size, runner.device)
        with torch.inference_mode(), nullcontext() if together else runner.one_by_one():
            logits = runner._model.forward(inputs, runner.kv.blocks)
        kept.append((logits.clone(), runner.kv.blocks.clone()))
    assert torch.equal(kept[0][0], kept[1][0])
    assert torch.equal(kept[0][1], kept[1][1])
