"""Steps launched behind one that runs, on the processor: tokens that no host has seen, chunks, penalties, grammars."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cohort.common import grammar
from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.step.batch import SamplingRow
from cohort.common.errors import InvariantViolated
from cohort.common.sampling_inputs import GrammarInputs, TokenHistory
from tests.common.engine.driver import (
    Driver,
    compile_grammars,
    make_runner,
    random_prompts,
    refusing,
    save_random_model,
)
from tests.common.engine.forward.test_device_steps import END, GRAPHS, device_runner
from tests.engine_models import CONFIGS
from tests.services.gateway.tiny_model import byte_level


@pytest.mark.parametrize("device_steps", [False, True])
@pytest.mark.parametrize("graphs", [GRAPHS, DeviceShare(graphs=0)])
def test_steps_behind_one_another_have_the_tokens_of_steps_one_by_one(
    model_folder: Callable[[str], Path], device_steps: bool, graphs: DeviceShare
) -> None:
    """Two under way all the time; rows leave, tokens are drawn, and no token reaches the host before the next step."""
    folder = model_folder("llama")
    steps = 12
    answers = []
    for behind in (False, True):
        runner = make_runner(folder, device_steps=device_steps, share=graphs)
        runner.warm_up()
        driver = Driver(runner, shuffle=3)
        for index, prompt in enumerate(random_prompts([5, 9, 3, 12])):
            sampling = SamplingRow(seed=index, position=0, temperature=0.9 * (index % 2), top_p=0.9)
            driver.add(str(index), prompt, sampling)
        driver.step([(name, driver.remaining(name)) for name in driver.requests])
        for step in range(steps if not behind else 0):
            driver.step([(name, 1) for name in present(driver, step)])
        if behind:
            chain(driver, steps)
        answers.append([request.tokens for request in driver.requests.values()])
    assert answers[0] == answers[1]


def present(driver: Driver, step: int) -> list[str]:
    """Request 1 leaves after three steps, request 0 after seven."""
    return [name for name in driver.requests if step < {"1": 3, "0": 7}.get(name, 99)]


def chain(driver: Driver, steps: int) -> None:
    before: list[str] = []
    under_way: list[tuple[list[str], Any]] = []
    for step in range(steps):
        names = present(driver, step)
        for name in names:
            if under_way:
                driver.requests[name].tokens.append(_COUNTED)
        batch = driver.batch([(name, 1) for name in names])
        if under_way:
            source = np.array([before.index(name) for name in names], dtype=np.int64)
            batch = dataclasses.replace(batch, token_source=source)
        for name in names:
            driver.requests[name].computed += 1
        under_way.append((names, driver.runner.launch(batch)))
        before = names
        if len(under_way) > 1:
            _land(driver, *under_way.pop(0))
    _land(driver, *under_way.pop(0))


_COUNTED = -1
"""A token that will be there."""


def _land(driver: Driver, names: list[str], launched: Any) -> None:
    """A step's tokens take the places of those that were counted."""
    for name, token in zip(names, launched.finish().tokens.tolist(), strict=True):
        request = driver.requests[name]
        if request.tokens[-1] == _COUNTED:
            request.tokens[-1] = token
        else:
            request.tokens.append(token)


@pytest.mark.parametrize("device_steps", [False, True])
@pytest.mark.parametrize("graphs", [GRAPHS, DeviceShare(graphs=0)])
def test_prompts_go_on_behind_steps_whose_tokens_are_under_way(
    model_folder: Callable[[str], Path], device_steps: bool, graphs: DeviceShare
) -> None:
    """Chunks beside decode rows, and the last token of a prompt as a row of its own, between rows that go on."""
    folder = model_folder("llama")
    plans: list[list[tuple[str, int]]] = [
        [("0", 5), ("1", 3)],
        [("2", 8), ("0", 1), ("1", 1)],
        [("2", 8), ("0", 1), ("1", 1)],
        [("0", 1), ("2", 1), ("1", 1)],
        [("0", 1), ("2", 1), ("1", 1)],
        [("3", 30), ("2", 1), ("1", 1)],
        [("3", 30)],
        [("3", 10)],
        [("3", 1)],
    ]
    answers = []
    for behind in (False, True):
        runner = make_runner(folder, device_steps=device_steps, share=graphs)
        runner.warm_up()
        driver = Driver(runner, shuffle=3, reverse=True)
        for index, prompt in enumerate(random_prompts([5, 3, 17, 70])):
            driver.add(str(index), prompt, SamplingRow(seed=index, position=0, temperature=0.9 * (index % 2)))
        under_way: list[tuple[list[str], Any]] = []
        for plan in plans:
            if not behind:
                driver.step(plan)
                continue
            batch, names = driver.batch(plan), [name for name, _ in sorted(plan, key=lambda entry: entry[1] == 1)]
            if under_way:
                before = under_way[-1][0]
                of_rows = [before.index(name) if _awaited(driver, name) else -1 for name in names]
                source = np.repeat(np.array(of_rows, dtype=np.int64), np.diff(batch.query_start))
                batch = replace(batch, token_source=source if (source >= 0).any() else None)
                batch.check()
            sampled = [names[row] for row in batch.sample_rows.tolist()]
            under_way.append((sampled, runner.launch(batch)))
            for name, count in plan:
                driver.requests[name].computed += count
            for name in sampled:
                driver.requests[name].tokens.append(_COUNTED)
            if len(under_way) > 1:
                _fill_in(driver, *under_way.pop(0))
        while under_way:
            _fill_in(driver, *under_way.pop(0))
        answers.append([request.tokens for request in driver.requests.values()])
    assert answers[0] == answers[1]
    assert all(_COUNTED not in tokens for tokens in answers[1])


def _awaited(driver: Driver, name: str) -> bool:
    request = driver.requests[name]
    return request.tokens[request.computed] == _COUNTED


def _fill_in(driver: Driver, names: list[str], launched: Any) -> None:
    """A step's tokens take the places of the first that were counted."""
    for name, token in zip(names, launched.finish().tokens.tolist(), strict=True):
        tokens = driver.requests[name].tokens
        tokens[tokens.index(_COUNTED)] = token


@pytest.mark.parametrize("device_steps", [False, True])
@pytest.mark.parametrize("graphs", [GRAPHS, DeviceShare(graphs=0)])
def test_penalties_and_grammars_take_in_tokens_that_are_under_way(
    tmp_path: Path, device_steps: bool, graphs: DeviceShare
) -> None:
    """Rows behind one that ended, computed in vain, harm none beside them."""
    folder = save_random_model(CONFIGS["llama"](), tmp_path / "m")  # whose end token is the tokenizer's
    byte_level().save(str(folder / "tokenizer.json"))
    answers = []
    for behind in (False, True):
        runner = make_runner(folder, device_steps=device_steps, share=graphs)
        driver, outputs = Driver(runner), dict[str, int]()
        bound = GrammarInputs(grammar.of_regex("[0-9]{3}"))
        compile_grammars(runner, bound.text)
        for index, more in enumerate(
            (
                {"frequency_penalty": 1.5, "repetition_penalty": 1.4, "history": TokenHistory([5, 6, 7])},
                {"temperature": 0.9, "grammar": bound},
                {"temperature": 0.9},
                {"temperature": 0.0, "presence_penalty": 2.0, "history": TokenHistory([5, 6, 10])},
            )
        ):
            driver.add(str(index), [5, 6, 7 + index], SamplingRow(index, 3, **{"temperature": 0.3, **more}))
        under_way: list[Any] = []
        for step in range(7):
            batch = driver.batch([(name, 1 if step else 3) for name in driver.requests])
            awaits = step if behind else 0
            rows = tuple(replace(row, position=3 + step, awaits=awaits) for row in batch.sampling)
            batch = replace(batch, sampling=rows, grammars=(bound,))
            if behind and step:
                batch = replace(batch, token_source=np.arange(4))
            under_way.append(runner.launch(batch))
            for request in driver.requests.values():
                request.computed += 3 if step == 0 else 1
                request.tokens.append(_COUNTED)
            if len(under_way) > behind:
                outputs = _fill_all(driver, under_way.pop(0))
            for row, token in zip(rows if not behind else (), outputs.values(), strict=False):
                if row.history is not None:
                    row.history.extend([token])
                if row.grammar is not None:
                    row.grammar.output.append(token)
        for launched in under_way:
            _fill_all(driver, launched)
        answers.append([request.tokens[3:] for request in driver.requests.values()])
    assert answers[0] == answers[1]
    assert answers[1][1].index(END) == 3 and len(set(answers[1][3])) == 7, "bound, and never twice the same"


def _fill_all(driver: Driver, launched: Any) -> dict[str, int]:
    tokens = launched.finish().tokens.tolist()
    _fill_in(driver, list(driver.requests), launched)
    return dict(zip(driver.requests, tokens, strict=True))


def test_a_step_behind_one_that_was_split_or_failed(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = device_runner(model_folder("llama"))
    driver = Driver(runner)
    for index, prompt in enumerate(random_prompts([5, 9, 14])):
        driver.add(str(index), prompt)
    driver.step([(name, driver.remaining(name)) for name in driver.requests])
    expected = [driver.step([(name, 1) for name in driver.requests]).tokens.tolist() for _ in range(3)]
    for request in driver.requests.values():
        del request.tokens[-3:]
        request.computed -= 3
    steps: Any = runner._device_steps
    launch = steps.launch
    _step_behind(driver, None)
    monkeypatch.setattr(steps, "launch", refusing(launch, most_rows=2))
    assert _step_behind(driver, [0, 1, 2]) == expected[1]
    monkeypatch.setattr(steps, "launch", launch)
    assert _step_behind(driver, [0, 1, 2]) == expected[2]
    monkeypatch.setattr(steps.decode, "run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _step_behind(driver, [0, 1, 2])
    monkeypatch.undo()
    with pytest.raises(InvariantViolated):
        _step_behind(driver, [0, 1, 2])


def _step_behind(driver: Driver, source: list[int] | None) -> list[int]:
    """A decode step of all; with a `source` its own tokens are wrong, and those of the last step are taken."""
    batch = driver.batch([(name, 1) for name in driver.requests])
    if source is not None:
        batch = dataclasses.replace(
            batch, token_ids=np.zeros_like(batch.token_ids), token_source=np.array(source, dtype=np.int64)
        )
    found = driver.runner.launch(batch).finish().tokens.tolist()
    for request, token in zip(driver.requests.values(), found, strict=True):
        request.computed += 1
        request.tokens.append(token)
    return found
