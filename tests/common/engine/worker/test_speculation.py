"""Live speculation: whatever is drafted, right or wrong, the answers are those of a step a token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cohort.common import grammar
from cohort.common.engine.drafts.batch_drafts import DraftModel
from cohort.common.engine.runner import drafting
from cohort.common.engine.step.grammar_masks import GrammarMasks
from cohort.common.messages import TokenBatch
from cohort.common.policies.speculation import Speculation
from tests.common.engine.drafts.learned_head import learn_by_heart
from tests.common.engine.drafts.test_eagle_head import head_folder
from tests.common.engine.driver import random_prompts, save_random_model
from tests.common.engine.worker.test_worker_loop import HeldBus, ModelFolder, Running, late_in_turn, request, worker
from tests.engine_models import CONFIGS, VOCAB
from tests.examples import another_of_its_kind
from tests.services.gateway.tiny_model import byte_level
from tests.support.kinds import by_default

PROMPTS = random_prompts((5, 17, 9, 30))
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "seed": 3, "logprobs": 2},
    "nucleus": {"temperature": 1.0, "seed": 5, "top_p": 0.9, "top_k": 40},
    "stop tokens": {"temperature": 0.8, "seed": 8, "stop_token_ids": tuple(range(0, VOCAB, 13)), "min_tokens": 6},
    "frequency": {"temperature": 0.5, "seed": 7, "frequency_penalty": 0.7, "presence_penalty": 0.2},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.3},
    "bias": {"temperature": 0.7, "seed": 9, "logit_bias": {4: 3.0, 9: -5.0}},
}
OFTEN_AHEAD: dict[str, Any] = {"plan_ahead": True, "pause_s": 0.002}
Answers = dict[str, tuple[list[int], list[float], str]]


class Oracle:
    """Drafts what was answered without drafts, wrong at some positions."""

    known: ClassVar[list[list[int]]] = []
    wrong = 5

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        length = len(tokens)
        for whole in self.known:
            if whole[:length] == list(tokens):
                return [
                    (token + (position % self.wrong == 0)) % VOCAB
                    for position, token in enumerate(whole[length : length + limit], start=length)
                ]
        return []


def _three_each(
    self: Speculation, times: Any, shape: Any, candidates: Sequence[Any], most: int, within_s: float
) -> tuple[list[int], float]:
    """A policy for which a tiny model's times, which are all noise, decide nothing."""
    allotted: list[int] = []
    for _, limit in candidates:
        allotted.append(min(3, limit, most - sum(allotted)))
    return allotted, 2.0


def _answers(bus: HeldBus) -> Answers:
    """By request: tokens, their log-probabilities, how it ended."""
    found: Answers = {}
    for message in bus.said:
        for update in message.updates if isinstance(message, TokenBatch) else ():
            tokens, logprobs, _ = found.get(update.attempt.request_id, ([], [], ""))
            logprobs = [*logprobs, *(each.logprob for each in update.logprobs)]
            found[update.attempt.request_id] = ([*tokens, *update.tokens], logprobs, str(update.finish))
    return found


async def _asked(running: Running, asked: Sequence[Any], *, together: bool) -> Answers:
    bus = running.bus
    for number, each in enumerate(asked, start=1):
        bus.inbox.put_nowait(each)
        if not together:
            await bus.until(lambda: sum(finish is not None for _, finish in bus.updates().values()) == number)  # noqa: B023
    await bus.until(lambda: sum(finish is not None for _, finish in bus.updates().values()) == len(asked))
    await bus.until(lambda: running.machine.idle)
    running.machine.check()
    assert running.machine.kv.owners() == {}
    return _answers(bus)


def _same(one: Answers, other: Answers) -> None:
    assert {name: (tokens, finish) for name, (tokens, _, finish) in one.items()} == {
        name: (tokens, finish) for name, (tokens, _, finish) in other.items()
    }
    for name, (_, logprobs, _) in one.items():
        assert logprobs == pytest.approx(other[name][1], abs=1e-5)


@pytest.mark.parametrize(
    ("device_steps", "together"), by_default(product((False, True), repeat=2), (False, False), (True, True))
)
async def test_answers_are_the_same_with_drafts(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_steps: bool, together: bool
) -> None:
    """One request alone, or all together, of which some are sampled under penalties that look back on drafts."""
    folder = model_folder("llama")
    asked = [
        request(name, PROMPTS[index % len(PROMPTS)], max_tokens=24, **kind)
        for index, (name, kind) in enumerate(KINDS.items())
    ]
    monkeypatch.setattr(Speculation, "_best", _three_each)
    options: dict[str, Any] = {**OFTEN_AHEAD, "device_steps": device_steps, "max_rows": 16}
    with monkeypatch.context() as patch:
        async with worker(folder, tmp_path, patch, **options) as running:
            plain = await _asked(running, asked, together=together)
            assert sum(running.machine.counters.drafted_tokens.values()) == 0
    known = [[*message.request.tokens, *plain[message.request.request_id][0]] for _, message in asked]
    monkeypatch.setattr(Oracle, "known", known)
    monkeypatch.setattr(drafting, "PromptLookup", Oracle)
    with monkeypatch.context() as patch:
        async with worker(folder, tmp_path, patch, speculation="lookup", **options) as running:
            drafted = await _asked(running, asked, together=together)
            counters = running.machine.counters
    _same(drafted, plain)
    assert 40 < counters.accepted_tokens["rt"] < counters.drafted_tokens["rt"]
    assert counters.decode_tokens == sum(len(tokens) - 1 for tokens, _, _ in plain.values())
    if not together:
        assert counters.steps < counters.decode_tokens


@pytest.mark.parametrize("device_steps", [False, True])
async def test_a_grammar_binds_drafted_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_steps: bool
) -> None:
    """And penalties count them, where both look back on drafts that are sampled by the same launch too."""
    monkeypatch.setattr(Speculation, "_best", _three_each)
    folder = save_random_model(CONFIGS["llama"](), tmp_path / "m")
    byte_level().save(str(folder / "tokenizer.json"))
    digits = {"temperature": 0.9, "seed": 4, "grammar": grammar.of_regex("[0-9]{30}"), "stop_token_ids": (2,)}
    digits |= {"frequency_penalty": 0.6, "repetition_penalty": 1.1, "logprobs": 1}
    asked = [
        request("bound", [5, 6, 7], max_tokens=40, **digits),
        request("free", [8, 9], max_tokens=30, temperature=0.9, seed=5),
    ]
    options: dict[str, Any] = {**OFTEN_AHEAD, "device_steps": device_steps}
    with monkeypatch.context() as patch:
        async with worker(folder, tmp_path, patch, **options) as running:
            plain = await _asked(running, asked, together=False)
    monkeypatch.setattr(Oracle, "known", [[5, 6, 7, *plain["bound"][0]], [8, 9, *plain["free"][0]]])
    monkeypatch.setattr(drafting, "PromptLookup", Oracle)
    async with worker(folder, tmp_path, monkeypatch, speculation="lookup", **options) as running:
        drafted = await _asked(running, asked, together=False)
        assert running.machine.counters.accepted_tokens["rt"] > 30  # more than the free one alone has
    _same(drafted, plain)
    assert byte_level().decode(drafted["bound"][0]).strip("\x00").isdecimal()


@pytest.mark.parametrize("device_steps", [False, True])
async def test_drafted_rows_that_sit_steps_out_have_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_steps: bool
) -> None:
    monkeypatch.setattr(Speculation, "_best", _three_each)
    folder = save_random_model(CONFIGS["llama"](), tmp_path / "m")
    byte_level().save(str(folder / "tokenizer.json"))
    digits: dict[str, Any] = {"grammar": grammar.of_regex("[0-9]{30}"), "stop_token_ids": (2,), "logprobs": 1}
    asked = [request("bound", [5, 6, 7], max_tokens=40, temperature=0.9, seed=4, **digits)]
    options: dict[str, Any] = {**OFTEN_AHEAD, "device_steps": device_steps}
    with monkeypatch.context() as patch:
        async with worker(folder, tmp_path, patch, **options) as running:
            plain = await _asked(running, asked, together=False)
    monkeypatch.setattr(Oracle, "known", [[5, 6, 7, *plain["bound"][0]]])
    monkeypatch.setattr(drafting, "PromptLookup", Oracle)
    monkeypatch.setattr(GrammarMasks, "prepare", late_in_turn(GrammarMasks.prepare))
    async with worker(folder, tmp_path, monkeypatch, speculation="lookup", **options) as running:
        drafted = await _asked(running, asked, together=False)
        counters = running.machine.counters
        assert counters.accepted_tokens["rt"] > 0 and counters.late_rows > 0
    _same(drafted, plain)


async def test_a_prompt_that_repeats_is_drafted_from_itself(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny model's greedy answer ends in a loop, which prompt lookup finds."""
    monkeypatch.setattr(Speculation, "_best", _three_each)
    folder = model_folder("llama")
    asked = [request("r", PROMPTS[1], max_tokens=100, temperature=0.0)]
    found: list[Answers] = []
    steps: list[int] = []
    accepted: list[int] = []
    for mode in ("off", "lookup"):
        with monkeypatch.context() as patch:
            options: dict[str, Any] = {**OFTEN_AHEAD, "device_steps": False, "speculation": mode}
            async with worker(folder, tmp_path, patch, **options) as running:
                found.append(await _asked(running, asked, together=True))
                steps.append(running.machine.counters.steps)
                accepted.append(running.machine.counters.accepted_tokens["rt"])
    _same(*found)
    assert steps[0] - steps[1] == accepted[1] > 0


@pytest.mark.parametrize(
    "drafts_by",
    [
        "itself",
        "itself on a device",
        pytest.param("another", marks=another_of_its_kind()),
        "head",
        pytest.param("learned head", marks=another_of_its_kind()),
        "learned head on a device",
    ],
)
async def test_answers_are_the_same_with_a_model_that_drafts(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafts_by: str
) -> None:
    """The model itself, whose drafts are right under penalties too, a head that has learned these answers, whose are
    now and then, and others, whose are not."""
    monkeypatch.setattr(Speculation, "_best", _three_each)
    kind, _, device = drafts_by.partition(" on a ")
    folder, source, on_device = model_folder("llama"), "head" if "head" in kind else "model", bool(device)
    draft = (
        model_folder("qwen3") if kind == "another" else head_folder(tmp_path / "head") if source == "head" else folder
    )
    asked = [
        request(name, PROMPTS[index % len(PROMPTS)], max_tokens=40, **kind)
        for index, (name, kind) in enumerate(KINDS.items())
    ]
    options: dict[str, Any] = {**OFTEN_AHEAD, "device_steps": on_device, "max_rows": 16}
    found = list[Answers]()
    for mode in ("off", "model"):
        with monkeypatch.context() as patch:
            named = None if mode == "off" else draft
            if named is not None and kind == "learned head":
                texts = [[*PROMPTS[i % len(PROMPTS)], *found[0][name][0]] for i, name in enumerate(KINDS)]
                learn_by_heart(folder, draft, texts)
            async with worker(folder, tmp_path, patch, speculation=mode, draft=named, **options) as running:
                found.append(await _asked(running, asked, together=True))
                counters = running.machine.counters
    _same(*found)
    drafts, right = counters.drafts_of[source], counters.right_of[source]  # type: ignore[index]
    least, most = {"itself": (0.95, 1.0), "learned head": (0.2, 1.0)}.get(kind, (0.0, 0.2))
    assert drafts > 40 and least * drafts <= right <= most * drafts


async def test_a_draft_model_that_fails_costs_no_response(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speculation, "_best", _three_each)
    folder, asked = model_folder("llama"), [request("r", PROMPTS[1], max_tokens=40, temperature=1.0, seed=6)]
    calls = 0

    def broken(self: DraftModel, rows: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("broken")
        return propose_all(self, rows)

    options: dict[str, Any] = {**OFTEN_AHEAD, "device_steps": False, "speculation": "model", "draft": folder}
    propose_all, found = DraftModel.propose_all, list[Answers]()
    for patched in (propose_all, broken):
        monkeypatch.setattr(DraftModel, "propose_all", patched)
        with monkeypatch.context() as patch:
            async with worker(folder, tmp_path, patch, **options) as running:
                found.append(await _asked(running, asked, together=True))
    _same(*found)
    assert calls == 5
