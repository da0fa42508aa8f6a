"""Steps of several ranks as GPUs run them, on the processor: the same classes recorded in the same order, and replayed.

The recorder is the plain one, so an exchange of a recorded step is gloo's; all else is what GPUs run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.ranks import group_steps
from cohort.common.engine.ranks import ranks as ranks_module
from cohort.common.engine.ranks.followers import EXIT_RANK_LOST
from cohort.common.engine.ranks.group_steps import AgreedRecorder, GroupSteps, StepDeadlines
from cohort.common.engine.ranks.rank_messages import RankLost
from cohort.common.engine.ranks.ranks import RankComm, RankSettings
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import SamplingRow, ScoringRow, StepBatch
from cohort.common.engine.step.decode_classes import CaptureBudget, MixedClass, StepClass
from cohort.common.engine.step.recorded_steps import Recorded, StepResult, record_all
from cohort.common.engine.weights.linear import Embedding, Linear
from cohort.common.errors import InvariantViolated
from tests.common.engine.driver import (
    Driver,
    check_schedule,
    make_runner,
    random_prompts,
    reference_generate,
    run_chunked,
    run_together,
)
from tests.common.engine.forward.test_steps_behind import chain, present
from tests.common.engine.groups import group_runner
from tests.examples import another_of_its_kind, examples

MUCH = 1 << 40
LONG_S = 20.0
"""The longest to wait for what takes milliseconds."""


class _Told:
    """What rank 0 says of each step."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.classes: list[StepClass] = []
        followers: Any = runner.followers
        step = followers.step

        def telling(batch: StepBatch, taken: StepClass = None, awaited: int = 0) -> None:
            self.classes.append(taken)
            step(batch, taken, awaited)

        monkeypatch.setattr(followers, "step", telling)


CASES = [
    ("qwen3", 2),
    pytest.param(("llama-bias-llama3", 2), marks=another_of_its_kind()),
    pytest.param(("qwen2-moe", 2), marks=another_of_its_kind()),
    pytest.param(("gpt-oss", 2), marks=another_of_its_kind()),
    pytest.param(("deepseek3", 2), marks=another_of_its_kind()),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]} on {case[1]}")
def group(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Iterator[tuple[ModelRunner, Path]]:
    name, degree = request.param
    folder = model_folder(name)
    with group_runner(folder, degree, graphs=(MUCH,) * degree) as runner:
        runner.warm_up()
        yield runner, folder


def test_answers_are_transformers_own(group: tuple[ModelRunner, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """And every step with decode rows alone, or a prompt beside them, is a recorded one, over buffers that stay."""
    runner, folder = group
    assert runner.captured_batch_sizes == (1, 2, 4, 8, 16)
    steps, ranks, told = runner._device_steps, runner.ranks, _Told(runner, monkeypatch)
    assert steps is not None and ranks is not None
    expected = reference_generate(folder, random_prompts((5, 33, 9)), 10)

    def places() -> list[int]:
        return [each.data_ptr() for each in (ranks._send_buffer, ranks._gather_buffer, ranks._logits_buffer)]

    before = places()
    for schedule, options in ((run_together, {}), (run_chunked(7), {"shuffle": 4, "reverse": True})):
        runner.kv.with_spare.copy_(torch.randn_like(runner.kv.with_spare))  # on rank 0; whatever was there before
        assert check_schedule(runner, expected, schedule, **options) <= 1
    assert None not in told.classes and {1, 2, 4, MixedClass(16, 8), MixedClass(64, 8)} <= set(told.classes)
    assert places() == before


def test_what_is_not_recorded_runs_on_all_ranks_in_between(
    group: tuple[ModelRunner, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine prompts at once, and one that is scored."""
    runner, folder = group
    told = _Told(runner, monkeypatch)
    prompts = random_prompts(range(4, 13))
    answers, scores = [], []
    for of in (make_runner(folder), runner):
        driver = Driver(of)
        for index, prompt in enumerate(prompts):
            driver.add(str(index), prompt)
        for _ in range(2):
            driver.step([(name, driver.remaining(name)) for name in driver.requests])
        answers.append([request.tokens for request in driver.requests.values()])
        driver.add("scored", prompts[0])
        batch = replace(driver.batch([("scored", 4)]), scoring=(ScoringRow(0, 0, tuple(prompts[0][1:]), 0),))
        scores.append([score.logprob for score in of.execute(batch).scores[0]])
        driver.step([("0", 1)])
    assert answers[0] == answers[1]
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)
    assert told.classes == [None, 16, None, 1]


def test_steps_behind_one_another_have_the_tokens_of_steps_one_by_one(group: tuple[ModelRunner, Path]) -> None:
    """Two under way all the time, and only rank 0 samples; and hands out the tokens."""
    runner, folder = group
    answers = []
    for of in (make_runner(folder), runner):
        driver = Driver(of, shuffle=3)
        for index, prompt in enumerate(random_prompts([5, 9, 3, 12])):
            driver.add(str(index), prompt, SamplingRow(index, 0, temperature=0.9 * (index % 2), top_p=0.9))
        driver.step([(name, driver.remaining(name)) for name in driver.requests])
        if of is runner:
            chain(driver, 12)
        for step in range(12 if of is not runner else 0):
            driver.step([(name, 1) for name in present(driver, step)])
        answers.append([request.tokens for request in driver.requests.values()])
    assert answers[0] == answers[1]


def test_a_replay_that_never_ends_ends_the_group(
    group: tuple[ModelRunner, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does whose other ranks are gone: the device waits for them, and the host for the device."""
    runner, _ = group
    steps: Any = runner._device_steps
    assert runner.ranks is not None
    ended, said = threading.Event(), list[str]()

    class Mark:
        def wait(self) -> None:
            assert ended.wait(LONG_S)

    class Stream(type(steps.stream)):  # type: ignore[misc]
        def mark(self) -> Mark:
            return Mark()

    def end(reason: str) -> None:
        said.append(reason)
        ended.set()

    monkeypatch.setattr(runner.ranks, "on_failure", end)
    monkeypatch.setattr(steps, "_group", GroupSteps(runner.ranks, runner.followers, limit_s=0.05))
    monkeypatch.setattr(steps, "stream", Stream())
    driver = Driver(runner)
    driver.add("0", random_prompts([1])[0])
    driver.step([("0", 1)])
    assert said == ["a step is not over after 0 s: another rank does not compute it"]


# -- what they agree on -----------------------------------------------------------------------------------------------


class _Table:
    """Ranks as threads of this process, which exchange numbers."""

    def __init__(self, ranks: int) -> None:
        self._said = [0] * ranks
        self._together = threading.Barrier(ranks, timeout=LONG_S)

    def most(self, rank: int) -> Callable[[int], int]:
        def ask(value: int) -> int:
            self._said[rank] = value
            self._together.wait()
            found = max(self._said)
            self._together.wait()
            return found

        return ask

    def everywhere(self, run: Callable[[int], Any]) -> list[Any]:
        """What each rank returns, or raises."""
        found: list[Any] = [None] * len(self._said)

        def one(rank: int) -> None:
            try:
                found[rank] = run(rank)
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(found))]
        for each in threads:
            each.start()
        for each in threads:
            each.join(LONG_S)
        return found


class _Own:
    """A rank's recorder, which takes from a list what each capture comes to."""

    def __init__(self, outcomes: list[int | type[Exception]]) -> None:
        self._outcomes, self.warmed = iter(outcomes), 0

    def warm_up(self, step: Callable[[], StepResult]) -> None:
        self.warmed += 1
        step()

    def capture(self, step: Callable[[], StepResult]) -> Recorded:
        outcome = next(self._outcomes)
        if not isinstance(outcome, int):
            raise outcome("not here")
        return Recorded(step, outcome)


def _nothing() -> StepResult:
    return StepResult(torch.empty(0), None)


_outcome = st.one_of(st.integers(0, 60), st.just(torch.OutOfMemoryError), st.just(RuntimeError))


@settings(max_examples=examples(0.5))
@given(st.lists(st.tuples(_outcome, _outcome), min_size=5, max_size=5), st.integers(0, 120))
def test_all_ranks_have_recorded_the_same(outcomes: list[tuple[Any, Any]], budget: int) -> None:
    """Whatever happens to each: by brute force, what fits when every step costs what it cost the worst."""
    table, classes = _Table(2), (16, 8, 4, 2, 1)
    own = [_Own([pair[rank] for pair in outcomes]) for rank in range(2)]

    def record(rank: int) -> tuple[list[int], int]:
        recorder, spent = AgreedRecorder(own[rank], table.most(rank)), CaptureBudget(budget)
        found = record_all("steps", classes, lambda _: _nothing, recorder, spent, 10)
        return list(found), spent.spent_bytes

    first, second = table.everywhere(record)
    assert first == second and own[0].warmed == own[1].warmed
    expected, spent, estimate, each = list[int](), 0, 10, iter(outcomes)
    for size in classes:
        if spent + estimate > budget:
            continue
        costs = next(each)
        if RuntimeError in costs:
            break
        if torch.OutOfMemoryError in costs or spent + max(costs) > budget:
            continue
        spent, estimate = spent + max(costs), max(costs)
        expected.append(size)
    assert first == (expected, spent)


def test_a_rank_that_cannot_run_a_step_at_all_says_so_and_ends() -> None:
    """Nothing can be agreed on any more: the others wait within the step. A batch is refused without end otherwise."""

    def refusing() -> StepResult:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(RankLost, match="does not run on this one: no room"):
        AgreedRecorder(_Own([]), lambda value: value).record(refusing)


def test_a_follower_that_has_recorded_other_classes_is_refused(
    group: tuple[ModelRunner, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what it answers differs here; it goes on."""
    runner, _ = group
    assert runner.followers is not None
    steps: Any = runner._device_steps
    own = steps.recorded

    def recorded_less() -> Any:
        runner.record_steps((1,))
        return own._replace(decode=own.decode[1:])

    with pytest.raises(InvariantViolated, match=r"rank 1 has recorded .*decode=\(1, 2, 4, 8, 16\).*, and rank 0 "):
        runner.followers.ready_steps(lambda: None, recorded_less, (1,))


def test_a_class_that_a_rank_lacks_ends_the_group(
    group: tuple[ModelRunner, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of the group."""
    runner, _ = group
    assert runner.ranks is not None and runner.followers is not None
    said: list[str] = []
    monkeypatch.setattr(runner.ranks, "on_failure", said.append)
    driver = Driver(runner)
    driver.add("0", [5, 6, 7])
    driver.step([("0", 3)])
    runner.followers.step(driver.batch([("0", 1)]), 3)
    with pytest.raises((RankLost, RuntimeError)):
        driver.step([("0", 1)])
    assert said and "rank 0 of 2" in said[0]


def test_recorded_exchanges_stay_where_they_are(model_folder: Callable[[str], Path]) -> None:
    geometry = read_geometry(model_folder("qwen3"))
    ranks = RankComm(RankSettings(0, 2, "", lambda: None), geometry, torch.device("cpu"))
    ranks.reserve(8, 4, torch.float32)
    before = ranks._send_buffer.data_ptr()
    ranks.freeze_buffers()
    ranks._send_view(8, geometry.hidden_size, torch.float32)
    ranks._logits_view(4)
    assert ranks._send_buffer.data_ptr() == before
    with pytest.raises(InvariantViolated, match="larger buffer"):
        ranks._send_view(MUCH, 1, torch.float32)
    with pytest.raises(InvariantViolated, match="larger buffer"):
        ranks._logits_view(5)


def test_what_gpus_exchange_is_the_whole(model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's rank by its own code; the threads' all-reduce is NCCL's."""
    geometry = read_geometry(model_folder("qwen3"))
    hidden, tokens, table = geometry.hidden_size, 7, _Table(2)
    whole, residual = torch.randn(geometry.vocab_size, hidden), torch.randn(tokens, hidden)
    weight, x = torch.randn(hidden, 10), torch.randn(tokens, 10)
    ids = torch.tensor([0, geometry.vocab_size - 1, 5, 120, 99, 100, 101])
    parts: list[torch.Tensor] = [torch.empty(0)] * 2

    def all_reduce(part: torch.Tensor) -> None:
        rank = int(threading.current_thread().name)
        parts[rank] = part.clone()
        table.most(rank)(0)
        part.copy_(parts[0] + parts[1])
        table.most(rank)(0)

    monkeypatch.setattr(ranks_module.dist, "all_reduce", all_reduce)

    def compute(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        threading.current_thread().name = str(rank)
        ranks = RankComm(RankSettings(rank, 2, "", lambda: None), geometry, torch.device("cpu"))
        ranks._on_gpu = True
        first, end = ranks.share.vocabulary
        own, columns = slice(first, end), slice(5 * rank, 5 * rank + 5)
        embedded, added = torch.full((tokens, hidden), float("nan")), residual.clone()
        ranks.embed(Embedding(whole[own].contiguous()), ids, embedded)
        ranks.allreduce_linear(Linear(weight[:, columns].contiguous(), None), x[:, columns].contiguous(), added)
        return embedded, added

    for embedded, added in table.everywhere(compute):
        assert torch.equal(embedded, whole[ids])
        torch.testing.assert_close(added, residual + x @ weight.t())


def test_a_follower_whose_step_never_ends_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may be stopped and say nothing; the follower's main thread waits for the device."""
    ended, codes, said = threading.Event(), list[int](), list[str]()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(group_steps.os, "_exit", end)
    ranks: Any = SimpleNamespace(on_failure=said.append)
    GroupSteps(ranks, None, limit_s=0.02).begin()
    assert ended.wait(LONG_S) and codes == [EXIT_RANK_LOST] and len(said) == 1


def test_only_a_step_that_is_late_is_said_to_be() -> None:
    late = threading.Event()
    deadlines = StepDeadlines(0.1, late.set)
    for _ in range(3):
        deadlines.begin()()
    assert not late.wait(0.25)
    first, second = deadlines.begin(), deadlines.begin()
    first()
    first()
    assert late.wait(LONG_S)
    second()
