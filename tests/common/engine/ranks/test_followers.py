"""The ranks beside the first: what they are told reaches them whole, and none of them outlives the others."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import distributed_c10d

from cohort.common.engine.ranks.rank_messages import RankLost, Step, batch_of, encoded, receive_command, step_of
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import SamplingRow, ScoringRow, StepBatch
from cohort.common.engine.step.decode_classes import MixedClass, StepClass
from cohort.common.errors import InvariantViolated, ModelError
from tests.common.engine.driver import (
    Driver,
    check_schedule,
    make_runner,
    random_prompts,
    reference_generate,
    run_together,
)
from tests.common.engine.groups import group_runner
from tests.examples import another_of_its_kind

SENT = (
    "token_ids",
    "positions",
    "query_start",
    "context_lens",
    "block_tables",
    "directions",
    "slot_mapping",
    "sample_rows",
    "padding",
)


def test_a_step_that_fails_on_one_rank_fails_the_group(model_folder: Callable[[str], Path]) -> None:
    """The rest of what a death means is tested with whole workers (`tests/chaos`). Before: one rank has no memory for
    recorded steps, so none records any."""
    folder = model_folder("qwen3")
    expected = reference_generate(folder, random_prompts((5, 12)), 4)
    with group_runner(folder, 2, graphs=(1 << 40, 1)) as runner:
        runner.warm_up()
        assert runner.captured_batch_sizes == ()
        assert check_schedule(runner, expected, run_together) <= 1

        assert runner.followers is not None and runner.ranks is not None
        said: list[str] = []
        runner.ranks.on_failure = said.append
        driver = Driver(runner)
        driver.add("0", random_prompts([5])[0])
        driver.step([("0", 5)])
        (pid,) = runner.followers.pids
        os.kill(pid, 9)
        with pytest.raises((RankLost, RuntimeError)):
            for _ in range(3):
                driver.step([("0", driver.remaining("0"))])
        assert said and "rank 0 of 2" in said[0]
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_recorded_steps_of_two_gpus_answer_as_transformers(model_folder: Callable[[str], Path]) -> None:
    """All of it over NCCL; float32, whose sums in another order are near."""
    folder, devices = model_folder("qwen3"), ("cuda:0", "cuda:1")
    expected = reference_generate(folder, random_prompts((5, 33, 9)), 12)
    with group_runner(folder, 2, graphs=(1 << 31, 1 << 31), devices=devices) as runner:
        runner.warm_up()
        assert runner.captured_batch_sizes == (1, 2, 4, 8, 16)
        assert check_schedule(runner, expected, run_together) <= 1


@another_of_its_kind()
def test_ranks_that_would_record_different_steps_do_not_start(model_folder: Callable[[str], Path]) -> None:
    with group_runner(model_folder("qwen3"), 2, graphs=(1 << 40, 1 << 40)) as runner:
        steps: Any = runner._device_steps
        steps.mixed.pending_classes = steps.mixed.pending_classes[1:]
        with pytest.raises(InvariantViolated, match="would record different steps"):
            runner.warm_up()


def test_a_rank_that_does_not_answer_counts_as_lost(model_folder: Callable[[str], Path]) -> None:
    with group_runner(model_folder("qwen3"), 2) as runner:
        assert runner.followers is not None and runner.ranks is not None
        said: list[str] = []
        runner.ranks.on_failure = said.append
        driver = Driver(runner)
        driver.add("0", random_prompts([5])[0])
        driver.step([("0", 5)])
        (pid,) = runner.followers.pids
        os.kill(pid, signal.SIGSTOP)
        # Instead of `ranks.EXCHANGE_TIMEOUT_S`, and not before: a group connects within that.
        distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), distributed_c10d.GroupMember.WORLD)
        with pytest.raises((RankLost, RuntimeError)):
            driver.step([("0", 1)])
        assert said and "rank 0 of 2" in said[0]
    assert not Path(f"/proc/{pid}").exists()


def test_sixteen_bits_are_summed_unrounded_and_alike_in_every_batch(model_folder: Callable[[str], Path]) -> None:
    """The terms are float32: two ranks are no farther from one device than the order of a sum."""
    folder = model_folder("qwen3")
    prompts = random_prompts([21, 30, 17])

    def logprobs(runner: ModelRunner, names: list[str]) -> list[float]:
        driver = Driver(runner)
        for name, prompt in zip("abc", prompts, strict=True):
            driver.add(name, prompt, SamplingRow(seed=1, position=len(prompt), temperature=0.0, logprobs=8))
        output = driver.step([(name, driver.remaining(name)) for name in names])
        found = output.logprobs[names.index("a")]
        assert found is not None
        return list(found.top_logprobs)

    alone = logprobs(make_runner(folder, dtype="bfloat16"), ["a"])
    with group_runner(folder, 2, dtype="bfloat16") as runner:
        of_two = logprobs(runner, ["a"])
        assert logprobs(runner, ["b", "c", "a"]) == of_two
        assert logprobs(runner, ["b", "a"]) == of_two
    assert of_two == pytest.approx(alone, abs=0.05)


def test_a_share_that_cannot_be_loaded_is_an_error_of_the_worker(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = model_folder("qwen3")
    for file in whole.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match="safetensors"), group_runner(tmp_path, 2):
        pass


@pytest.mark.parametrize("directions", [None, np.array([[0, 1], [1, 0]], dtype=np.uint8)])
@pytest.mark.parametrize("padding", [None, np.array([1, 0], dtype=np.int32)])
def test_a_step_arrives_as_it_was(directions: np.ndarray | None, padding: np.ndarray | None) -> None:
    batch = StepBatch(
        token_ids=np.array([4, 5, 6, 7], dtype=np.int64),
        positions=np.array([0, 1, 2, 9], dtype=np.int64),
        query_start=np.array([0, 3, 4], dtype=np.int32),
        context_lens=np.array([3, 10], dtype=np.int32),
        block_tables=np.array([[3, 4], [5, 6]], dtype=np.int32),
        directions=directions,
        slot_mapping=np.array([24, 25, 26, 49], dtype=np.int64),
        sample_rows=np.zeros(0, dtype=np.int32),
        sampling=(),
        padding=padding,
        scoring=(ScoringRow(0, 0, (5, 6), 2),),
    )
    step: Step = step_of(batch)
    found = batch_of(step)
    for name in SENT:
        ours, theirs = getattr(batch, name), getattr(found, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
    assert found.scoring == batch.scoring


@pytest.mark.parametrize("taken", [None, 8, MixedClass(16, 8)])
def test_what_takes_a_step_is_said_with_it(taken: StepClass) -> None:
    one, half = np.ones(1, dtype=np.int64), np.ones(1, dtype=np.int32)
    starts, tables, rows = np.array([0, 1], dtype=np.int32), np.ones((1, 1), dtype=np.int32), np.zeros(1, np.int32)
    batch = StepBatch(one, one, starts, half, tables, None, one, rows, (), token_source=2 * one)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(encoded(step_of(batch, taken, 3)))
        found = receive_command(theirs)
    assert isinstance(found, Step) and found.taken == taken and type(found.taken) is type(taken)
    source = batch_of(found).token_source
    assert source is not None and source.tolist() == [2] and found.awaited == 3
