"""Workloads are the same for the same seed, have the statistics they name, and state what was clipped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.errors import ConfigError
from cohort.common.workloads.arrivals import AllAtOnce, ClosedLoop, RandomArrivals, TraceTimes, due_times
from cohort.common.workloads.generate import Drawn, FromTrace, Mixed
from cohort.common.workloads.lengths import Fixed, LogNormal, Shape, Uniform
from cohort.common.workloads.traces import Trace, TraceRow
from cohort.services.bench.http.load.prompts import PromptFactory, from_range
from cohort.services.bench.http.load.workload import RequestPlan, WorkloadSpec, build

SPEC = WorkloadSpec(Drawn(LogNormal(4, 1), Uniform(1, 99)), RandomArrivals(10.0), num_requests=200)
TRACE = Trace("cohort", (TraceRow(0.0, 10, 5), TraceRow(1.0, 20, 6), TraceRow(4.0, 3000, 700)), skipped_rows=2)


def due_gaps(cv: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    times = due_times(RandomArrivals(4.0, cv), 100_000, np.random.default_rng(0), None)
    assert times is not None
    return np.diff(times)


def test_same_seed_same_plans() -> None:
    assert build(SPEC) == build(SPEC)
    assert build(SPEC).plans != build(replace(SPEC, seed=1)).plans


def test_rate_changes_times_only() -> None:
    slow, fast = build(SPEC).plans, build(replace(SPEC, arrivals=RandomArrivals(20.0))).plans
    assert [p.prompt_tokens for p in slow] == [p.prompt_tokens for p in fast]
    assert [p.due_s for p in fast] == pytest.approx([(p.due_s or 0) / 2 for p in slow])


def test_more_requests_extend_the_same_workload() -> None:
    longer = build(replace(SPEC, num_requests=300)).plans
    assert longer[:200] == build(SPEC).plans


@pytest.mark.parametrize("cv", [1.0, 0.5, 3.0])
def test_gaps_have_the_asked_mean_and_variation(cv: float) -> None:
    gaps = due_gaps(cv)
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_poisson_counts_per_second_have_variance_like_mean() -> None:
    times = np.cumsum(due_gaps(1.0))
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.1)


def test_even_arrivals() -> None:
    assert due_times(RandomArrivals(4.0, 0.0), 3, np.random.default_rng(0), None) == [0.0, 0.25, 0.5]


def test_closed_loop_and_all_at_once() -> None:
    assert {p.due_s for p in build(replace(SPEC, arrivals=ClosedLoop(4))).plans} == {None}
    assert {p.due_s for p in build(replace(SPEC, arrivals=AllAtOnce())).plans} == {0.0}


def test_trace_times_are_scaled() -> None:
    spec = WorkloadSpec(FromTrace(TRACE, "t"), TraceTimes(0.5), num_requests=None)
    assert [p.due_s for p in build(spec).plans] == [0.0, 0.5, 2.0]


def test_trace_without_times_needs_arrivals() -> None:
    lengths = Trace("cohort", (TraceRow(None, 10, 5),), 0)
    with pytest.raises(ConfigError, match="arrival times"):
        build(WorkloadSpec(FromTrace(lengths, "t"), TraceTimes(), num_requests=None))
    assert build(WorkloadSpec(FromTrace(lengths, "t"), AllAtOnce(), None)).plans[0].prompt_tokens == 10


def test_clipping_is_stated() -> None:
    spec = WorkloadSpec(FromTrace(TRACE, "t"), TraceTimes(), None, max_prompt_tokens=15, max_output_tokens=600)
    found = build(spec)
    assert [(p.prompt_tokens, p.output_tokens) for p in found.plans] == [(10, 5), (15, 6), (15, 600)]
    assert (found.facts.clipped_prompts, found.facts.clipped_outputs, found.facts.skipped_rows) == (2, 1, 2)


def test_duration_cuts_an_open_loop() -> None:
    spec = WorkloadSpec(Drawn(Fixed(1), Fixed(1)), RandomArrivals(50.0), num_requests=None, duration_s=20.0)
    plans = build(spec).plans
    assert len(plans) == pytest.approx(1000, abs=130)
    assert plans[-1].due_s is not None and 19.0 < plans[-1].due_s < 20.0


def test_duration_of_a_closed_loop_needs_a_bound() -> None:
    with pytest.raises(ConfigError, match="--num-requests"):
        build(WorkloadSpec(Drawn(Fixed(1), Fixed(1)), ClosedLoop(2), num_requests=None, duration_s=2.0))


def test_mix_labels_its_kinds_and_classes_follow_their_shares() -> None:
    mix = Mixed((Shape(0.5, 8, 4), Shape(0.5, 80, 2)))
    spec = WorkloadSpec(mix, AllAtOnce(), 4000, class_mix=(("rt", 7), ("be", 3)))
    plans = build(spec).plans
    assert {(p.group, p.prompt_tokens, p.output_tokens) for p in plans} == {("8x4", 8, 4), ("80x2", 80, 2)}
    assert sum(p.traffic_class == "rt" for p in plans) / 4000 == pytest.approx(0.7, abs=0.03)
    # The class says nothing about the kind: their streams are independent.
    both = sum(p.traffic_class == "rt" and p.group == "8x4" for p in plans) / 4000
    assert both == pytest.approx(0.35, abs=0.03)


def prompts(salt: int = 0, block: int = 4) -> PromptFactory:
    return PromptFactory(from_range(1000, 1100), seed=0, salt=salt, hash_block_tokens=block)


@given(st.integers(1, 300), st.integers(0, 1000), st.lists(st.integers(0, 50), max_size=8))
def test_prompts_have_the_exact_length_and_safe_ids(count: int, index: int, hash_ids: list[int]) -> None:
    ids = prompts().token_ids(RequestPlan(index, None, count, 1, hash_ids=tuple(hash_ids)))
    assert len(ids) == count
    assert all(1000 <= token < 1100 for token in ids)


def test_equal_hash_ids_are_equal_tokens_and_nothing_else_is() -> None:
    first = prompts().token_ids(RequestPlan(0, None, 12, 1, hash_ids=(1, 2, 3)))
    second = prompts().token_ids(RequestPlan(1, None, 14, 1, hash_ids=(1, 2, 9)))
    assert first[:8] == second[:8]
    assert first[8:] != second[8:12]
    # What no hash id covers is the request's own.
    third = prompts().token_ids(RequestPlan(2, None, 14, 1, hash_ids=(1, 2, 9)))
    assert second[:12] == third[:12] and second[12:] != third[12:]


def test_turns_of_a_session_are_prefixes() -> None:
    short = prompts().token_ids(RequestPlan(0, None, 50, 1, session="s"))
    long = prompts().token_ids(RequestPlan(5, None, 90, 1, session="s"))
    other = prompts().token_ids(RequestPlan(6, None, 90, 1, session="t"))
    assert long[:50] == short
    assert other[:50] != short


def test_salt_changes_words_only() -> None:
    plan = RequestPlan(0, None, 64, 1, hash_ids=(1,))
    assert prompts(1).token_ids(plan) == prompts(1).token_ids(plan)
    assert prompts(1).token_ids(plan)[:4] != prompts(2).token_ids(plan)[:4]


def test_text_needs_words() -> None:
    with pytest.raises(ConfigError, match="--tokenizer"):
        prompts().text(RequestPlan(0, None, 5, 1))


def test_vocabulary_and_text_of_a_tokenizer(tmp_path: Path) -> None:
    """A byte-level BPE made here: n words are n tokens, specials are never drawn."""
    tokenizers = pytest.importorskip("tokenizers")
    from cohort.services.bench.http.load.prompts import from_tokenizer

    words = ["alpha", "beta", "gamma", "delta", "omega"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [" ".join(words + words)] * 50 + words * 50,
        tokenizers.trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["<s>", "</s>"],
            show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = from_tokenizer(tmp_path)
    assert set(vocabulary.words) == set(words)
    assert not {tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")} & set(vocabulary.token_ids.tolist())
    for count in (1, 2, 33):
        text = PromptFactory(vocabulary, seed=0, salt=0).text(RequestPlan(0, None, count, 1))
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) == count
        assert len(text.split()) == count


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    from cohort.services.bench.http.load.prompts import from_tokenizer

    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        from_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        from_tokenizer(tmp_path)
