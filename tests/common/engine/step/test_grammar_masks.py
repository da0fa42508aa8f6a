"""Answers bound to a grammar: every text conforms, however it is sampled, taken over or driven."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common import grammar
from cohort.common.engine.device.uploads import Uploads
from cohort.common.engine.step import grammar_masks
from cohort.common.engine.step.batch import SamplingRow
from cohort.common.engine.step.device_sampler import sample_on_device
from cohort.common.engine.step.grammar_masks import GrammarMasks, TokenMasks, _Compiled, _cost_s, _expected_s
from cohort.common.engine.step.sampler import sample
from cohort.common.grammar import GrammarError, GrammarTokens
from cohort.common.sampling_inputs import GrammarInputs, LogitBias, TokenHistory
from tests.examples import examples
from tests.services.gateway.tiny_model import EOS, byte_level, costly

TOKENIZER = byte_level()
END = TOKENIZER.token_to_id(EOS)
VOCAB = 390  # more logits than tokens, and no multiple of 32
TOKENS = GrammarTokens(TOKENIZER.to_str(), [END], VOCAB)
TOKENS.account_s = grammar.ACCOUNT_S  # of a fast machine
SHORT = {"type": "string", "maxLength": 3}


def masks() -> GrammarMasks:
    return GrammarMasks(TOKENS, VOCAB)


def ready(engine: GrammarMasks, rows: list[SamplingRow]) -> TokenMasks | None:
    """Masks of these rows, once none of them is late."""
    while True:
        engine.prepare([row.grammar for row in rows if row.grammar is not None])
        found = engine.of(rows)
        if found is None or not found.late:
            return found


def drive(
    text: str, seed: int, *, most: int = 120, engine: GrammarMasks | None = None, cuts: tuple[int, ...] = (), **row: Any
) -> list[int]:
    """Random logits, sampled under the grammar; at a cut another worker takes over with nothing but the tokens."""
    engine = engine or masks()
    generator = torch.Generator().manual_seed(seed)
    inputs, tokens = GrammarInputs(text), list[int]()
    for position in range(most):
        if position in cuts:
            inputs, engine = GrammarInputs(text, list(tokens)), masks()
        sampling = SamplingRow(seed, position, grammar=inputs, **row)
        logits = torch.randn(1, VOCAB, generator=generator) * 3
        output = sample(logits, [sampling], ready(engine, [sampling]))
        assert not output.failures
        tokens.append(int(output.tokens[0]))
        if tokens[-1] == END:
            break
        inputs.output.append(tokens[-1])
    return tokens


def text_of(tokens: list[int]) -> str:
    return str(TOKENIZER.decode(tokens, skip_special_tokens=True))


def ended(tokens: list[int]) -> bool:
    return tokens[-1] == END


leaves = st.sampled_from(
    [
        {"type": "integer", "minimum": 0, "maximum": 99},
        {"type": "boolean"},
        {"type": "null"},
        SHORT,
        {"enum": ["red", "grün", 7, None]},
        {"const": 'x"y\\z'},
        {"type": "string", "pattern": "^[a-c]{1,4}$"},
    ]
)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3)),
        st.dictionaries(st.sampled_from(["a", "b c", "ключ"]), inner, max_size=3).map(
            lambda fields: {
                "type": "object",
                "properties": fields,
                "required": sorted(fields)[:2],
                "additionalProperties": False,
            }
        ),
    ),
    max_leaves=5,
)


@settings(max_examples=examples(0.3), deadline=None)
@given(schemas, st.integers(0, 2**32), st.sampled_from([0.0, 0.7, 2.0]))
def test_every_answer_that_ends_conforms_to_its_schema(schema: dict[str, Any], seed: int, temperature: float) -> None:
    tokens = drive(grammar.of_json_schema(schema), seed, most=150, temperature=temperature, top_p=0.95)
    if ended(tokens):  # random logits may fill an answer with white space for ever
        jsonschema.validate(json.loads(text_of(tokens)), schema)


@settings(max_examples=examples(0.3), deadline=None)
@given(schemas, st.integers(0, 2**32), st.sets(st.integers(1, 40), max_size=4))
def test_another_worker_goes_on_with_the_same_text(schema: dict[str, Any], seed: int, cuts: set[int]) -> None:
    text = grammar.of_json_schema(schema)
    assert drive(text, seed, cuts=tuple(cuts)) == drive(text, seed)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (grammar.of_regex("[0-9]{3}/[ab]"), r"\d{3}/[ab]"),
        (grammar.of_choice(["yes", 'no "way"', "na\nja"]), '(yes|no "way"|na\nja)'),
        (grammar.of_grammar('root ::= "a" [0-9]+ "z"'), r"a\d+z"),
        (grammar.of_grammar('start: "x" NUM\nNUM: /[1-9]{1,2}/'), r"x[1-9]{1,2}"),
    ],
)
def test_the_kinds_of_grammars(text: str, expected: str) -> None:
    import re

    found = [drive(text, seed) for seed in range(8)]
    assert any(map(ended, found))
    assert all(re.fullmatch(expected, text_of(tokens)) for tokens in found if ended(tokens))


def test_an_answer_may_end_only_where_its_grammar_accepts() -> None:
    row = SamplingRow(0, 0, grammar=GrammarInputs(grammar.of_choice(["ab"])))
    assert row.grammar is not None
    bits = ready(masks(), [row])
    assert bits is not None and not bits.bits[0, END // 32] >> END % 32 & 1
    row.grammar.output.extend(TOKENIZER.encode("ab").ids)
    bits = ready(masks(), [row])
    assert bits is not None and _allowed(bits.bits[0]) == [END]


def test_a_complete_answer_ends_whatever_min_tokens_says_and_an_incomplete_one_keeps_to_it() -> None:
    whole = GrammarInputs(grammar.of_choice(["ab"]), list(TOKENIZER.encode("ab").ids))
    open_ = GrammarInputs(grammar.of_regex("a+"), list(TOKENIZER.encode("a").ids))
    found = ready(masks(), [SamplingRow(0, 0, grammar=each, banned=(END,)) for each in (whole, open_)])
    assert found is not None
    assert _allowed(found.bits[0]) == [END]
    assert END not in _allowed(found.bits[1]) and _allowed(found.bits[1])


def test_a_bias_chooses_among_what_the_grammar_allows_and_never_beyond() -> None:
    yes, no = (TOKENIZER.encode(word).ids[0] for word in ("y", "n"))
    other = TOKENIZER.encode("q").ids[0]
    bias = LogitBias.of({no: 100.0, other: 100.0, yes: -100.0})
    for temperature in (0.0, 1.0):
        tokens = drive(grammar.of_choice(["y", "n"]), 3, temperature=temperature, logit_bias=bias)
        assert text_of(tokens) == "n"


def test_both_samplers_agree_under_grammars() -> None:
    texts = [grammar.of_regex("[0-9 a-f]{4,9}"), grammar.of_json_schema({}), ""]
    engine, uploads = masks(), Uploads(torch.device("cpu"))
    for seed in range(20):
        rows = [
            SamplingRow(
                seed + index,
                9,
                temperature=random.Random(seed + index).choice([0.0, 0.8]),
                top_k=random.Random(seed).choice([0, 3]),
                grammar=GrammarInputs(text) if text else None,
                logprobs=1,
            )
            for index, text in enumerate(texts)
        ]
        logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed))
        found = ready(engine, rows)
        host = sample(logits, rows, found)
        uploads.restart()
        device = sample_on_device(logits, rows, uploads, found).output()
        assert host.tokens.tolist() == device.tokens.tolist()
        assert host.logprobs[0] is not None  # of the logits as they were
        assert host.logprobs[0].logprob == pytest.approx(float(logits[0].log_softmax(-1)[host.tokens[0]]), abs=1e-5)


def test_a_row_whose_grammar_fails_is_named_and_its_neighbours_are_not() -> None:
    engine = masks()
    good = SamplingRow(1, 0, temperature=0.0, grammar=GrammarInputs(grammar.of_choice(["ab"])))
    broken = replace(good, grammar=GrammarInputs(grammar.of_regex("(")))
    strayed = replace(good, grammar=GrammarInputs(grammar.of_choice(["ab"]), [TOKENIZER.encode("q").ids[0]]))
    plain = SamplingRow(1, 0, temperature=0.0)
    rows = [plain, broken, good, strayed]
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(1))
    output = sample(logits, rows, ready(engine, rows))
    assert set(output.failures) == {1, 3} and "unclosed group" in output.failures[1]
    assert output.tokens[0] == int(logits[0].argmax())
    assert text_of([int(output.tokens[2])]) in ("a", "ab")


@settings(max_examples=examples(0.3), deadline=None)
@given(schemas, st.integers(0, 2**32), st.integers(0, 20), st.lists(st.integers(0, 300), max_size=3))
def test_drafts_are_looked_beyond_and_leave_nothing_behind(
    schema: dict[str, Any], seed: int, known: int, strays: list[int]
) -> None:
    """The tokens that may follow drafts are those that may follow them once they are said; wrong ones fail alone."""
    text, tokens = grammar.of_json_schema(schema), drive(grammar.of_json_schema(schema), seed, most=40)
    known = min(known, len(tokens) - 1)  # an end is nothing that is known
    engine, inputs = masks(), GrammarInputs(text, tokens[:known])
    for drafts in (tokens[known : known + 4], [*tokens[known : known + 2], *strays]):
        for count in range(len(drafts) + 1):
            found = ready(engine, [SamplingRow(0, known + count, grammar=inputs, ahead=tuple(drafts[:count]))])
            fresh = ready(engine, [SamplingRow(0, 0, grammar=GrammarInputs(text, [*tokens[:known], *drafts[:count]]))])
            assert found is not None and fresh is not None
            assert (found.bits.tolist(), found.failures) == (fresh.bits.tolist(), fresh.failures)
    assert not inputs.failure and inputs.output == tokens[:known]


def test_a_grammar_that_breaks_behind_drafts_goes_on_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limits end it for good, so it is stepped anew."""
    engine, inputs = masks(), GrammarInputs(grammar.of_choice(["abc", "abd"]))
    a, b, c = TOKENIZER.encode("abc").ids
    first = ready(engine, [SamplingRow(0, 0, grammar=inputs)])
    with monkeypatch.context() as patch:
        patch.setattr(grammar.Matcher, "broken", True)
        patch.setattr(GrammarMasks, "_mask", lambda *_: (_ for _ in ()).throw(GrammarError("too much")))
        failed = ready(engine, [SamplingRow(0, 1, grammar=inputs, ahead=(a,))])
    assert failed is not None and "too much" in failed.failures[0] and not inputs.failure
    again, behind = (ready(engine, [SamplingRow(0, 0, grammar=inputs, ahead=ahead)]) for ahead in ((), (a, b)))
    assert first is not None and again is not None and behind is not None
    assert again.bits.tolist() == first.bits.tolist() and c in _allowed(behind.bits[0])


def test_a_model_without_end_tokens_or_bytes_has_no_grammars() -> None:
    from cohort.common.errors import ModelError
    from tests.services.gateway.tiny_model import word_piece

    with pytest.raises(ModelError, match="end token"):
        GrammarTokens(TOKENIZER.to_str(), [])
    with pytest.raises(ModelError, match="tokenizer"):
        GrammarTokens(word_piece().to_str(), [1])
    row = SamplingRow(0, 0, grammar=GrammarInputs(grammar.of_choice(["a"])))
    found = ready(GrammarMasks(None, VOCAB, "why not"), [row])
    assert found is not None and "why not" in found.failures[0]


def test_tokens_that_the_model_has_no_logits_for_are_never_allowed() -> None:
    fewer = 300
    engine = GrammarMasks(GrammarTokens(TOKENIZER.to_str(), [END], fewer), fewer)
    found = ready(engine, [SamplingRow(0, 0, grammar=GrammarInputs(grammar.of_json_schema({})))])
    assert found is not None and found.bits.shape == (1, 10)
    assert max(_allowed(found.bits[0])) < fewer


def test_tokens_of_a_tokenizer_beyond_the_logits_are_never_allowed() -> None:
    """A last word of which some tokens have logits, and some are the tokenizer's alone."""
    fewer = TOKENIZER.get_vocab_size() - 4
    assert fewer % 32
    found = ready(GrammarMasks(TOKENS, fewer), [SamplingRow(0, 0, grammar=GrammarInputs(grammar.of_regex(".*")))])
    assert found is not None
    assert max(_allowed(found.bits[0])) == fewer - 1


def test_hostile_grammars_are_errors() -> None:
    with pytest.raises(GrammarError):
        TOKENS.compile(grammar.of_regex("(" * 30_000 + ")" * 30_000))
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2600)}}
    with pytest.raises(GrammarError):
        matcher = TOKENS.compile(grammar.of_json_schema(wide))
        matcher.take(TOKENS.tokens.tokenize_str("{"))
        matcher.mask(np.zeros(TOKENS.words, dtype=np.int32))


def test_a_written_grammar_whose_items_are_costly_is_given_up_before_it_has_computed_many() -> None:
    """However it hides them behind a first token, which the gateway's check does not take."""
    for rules in (100, 240):
        text = grammar.of_grammar(costly(rules, 'start: "a" | "b" (s "x")*'))
        engine, inputs = masks(), GrammarInputs(text)
        row = SamplingRow(0, 0, grammar=inputs)
        first = ready(engine, [row])
        assert first is not None and not first.failures
        inputs.output.extend(TOKENIZER.encode("b").ids)
        found = ready(engine, [row])
        assert found is not None and found.failures
        assert "limit 1000" in found.failures[0] or "max is 500" in found.failures[0]
    with pytest.raises(GrammarError, match="limit for this grammar: 1000"):
        TOKENS.compile(grammar.of_grammar(costly(300)))
    assert TOKENS.compile(grammar.of_lark(costly(300))), "those of the gateway's own are as large as their schemas"


class Ticks:
    """A clock that moves by so many seconds with every look at it: that many a mask of the engine thread."""

    def __init__(self, steps_s: list[float]) -> None:
        self._steps_s, self._now_s, self._looks = steps_s, 0.0, 0

    def __call__(self) -> float:
        self._looks += 1
        self._now_s += self._steps_s[self._looks % len(self._steps_s)]
        return self._now_s


def _compiled(engine: GrammarMasks, *texts: str) -> GrammarMasks:
    for text in texts:
        engine._begin(text).result()
    return engine


def test_a_wait_for_the_interpreters_lock_is_no_cost_of_a_mask() -> None:
    assert _cost_s((1.0, 5.0), (1.1, 5.5)) == 0.0, "a fifth of the elapsed time"
    assert _cost_s((1.0, 5.0), (1.1, 5.1), replay_s=0.03) == pytest.approx(0.07)


def test_a_dear_grammar_is_refused_on_a_machine_that_other_programs_keep_busy() -> None:
    """The masks' thread has four tenths of a core, so each mask of 100 ms takes 250."""
    cost_s = _cost_s((1.0, 5.0), (1.1, 5.25))
    assert cost_s == pytest.approx(0.05)
    compiled = TOKENS.compile(grammar.of_regex("[ab]{40}"))
    found = _Compiled(TOKENS, compiled, np.zeros(1, dtype=np.int32), 0.0)
    found.note(cost_s)
    with pytest.raises(GrammarError, match="took"):
        found.check()


def test_a_grammar_that_fails_to_compile_between_two_looks_ends_its_request_alone() -> None:
    inputs = GrammarInputs(grammar.of_regex("("))
    row, plain = SamplingRow(0, 0, grammar=inputs), SamplingRow(0, 0)
    engine = masks()
    engine.prepare([inputs])
    with pytest.raises(GrammarError):
        engine._begin(inputs.text).result()
    assert _expected_s(row) == 0.0
    found = engine.of([row, plain])
    assert found is not None and set(found.failures) == {0} and not found.late


def test_a_request_whose_masks_are_slow_ends_with_both_figures() -> None:
    text = grammar.of_regex("[ab]{40}")
    engine, inputs = _compiled(GrammarMasks(TOKENS, VOCAB, clock=Ticks([0.006])), text), GrammarInputs(text)
    a, counted = TOKENIZER.encode("a").ids[0], 0
    while not inputs.failure:
        ready(engine, [SamplingRow(0, counted, grammar=inputs)])
        inputs.output.append(a)
        counted += 1
    assert "took 42 ms" in inputs.failure and "for 7 tokens; the limit is 40 ms for 8" in inputs.failure
    assert counted == 8, "the first mask is the grammar's, made when it is compiled"


def test_a_slow_machine_gives_every_answer_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many times more as the largest honest schema takes there."""
    monkeypatch.setattr(time, "thread_time", itertools.count(0.0, 0.3).__next__)  # for the first masks of any grammar
    slow = GrammarTokens(TOKENIZER.to_str(), [END])
    slow.check_first(slow.compile(grammar.of_json_schema({})))
    assert slow.account_s == pytest.approx(4 * 0.3)
    slow.check_account(1.1, 8)
    with pytest.raises(GrammarError, match="1300 ms of processor time for 8 tokens; the limit is 1200 ms for 8"):
        slow.check_account(1.3, 8)


def test_time_that_a_busy_machine_adds_once_refuses_no_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, times_s = GrammarTokens(TOKENIZER.to_str(), [END]), iter([0.0, 0.3, 1.0, 1.02])
    tokens.account_s = grammar.ACCOUNT_S
    monkeypatch.setattr(time, "thread_time", times_s.__next__)
    tokens.check_first(tokens.compile(grammar.of_json_schema({})))
    assert not list(times_s)


def test_one_mask_beyond_the_whole_account_ends_every_answer_of_its_grammar() -> None:
    text = grammar.of_regex("[ab]{40}")
    engine = _compiled(GrammarMasks(TOKENS, VOCAB, clock=Ticks([0.039])), text)
    rows = [SamplingRow(0, 1, grammar=GrammarInputs(text, TOKENIZER.encode("a").ids)) for _ in range(5)]
    engine._clock = Ticks([0.05])
    found = ready(engine, rows)
    assert found is not None and set(found.failures) == set(range(5))


def test_a_step_computes_what_its_account_has_time_for_and_a_helper_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    text, threads = grammar.of_regex("[ab]{40}"), list[str]()
    engine = _compiled(GrammarMasks(TOKENS, VOCAB, clock=Ticks([0.002])), text)
    masked = GrammarMasks._mask

    def counted(self: GrammarMasks, matcher: Any) -> Any:
        threads.append(threading.current_thread().name)
        return masked(self, matcher)

    monkeypatch.setattr(GrammarMasks, "_mask", counted)
    rows = [SamplingRow(0, 1, grammar=GrammarInputs(text, TOKENIZER.encode("ab").ids)) for _ in range(40)]
    rows.append(SamplingRow(0, 0))
    given, steps = set[int](), 0
    while len(given) < 40:
        engine.prepare([row.grammar for row in rows if row.grammar])
        before = threads.count("MainThread")
        found = engine.of(rows)
        assert found is not None and threads.count("MainThread") - before <= 5
        assert 40 not in found.late, "a row without a grammar waits for none"
        given |= set(range(40)) - found.late
        steps += 1
    assert any(name.startswith("masks") for name in threads)


def test_the_helper_computes_a_cheap_mask_before_costly_ones_that_came_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    dear, cheap = grammar.of_regex("[ab]{40}"), grammar.of_regex("[ac]{40}")
    computed, go = list[str](), threading.Event()
    engine = _compiled(masks(), dear, cheap)
    for text, slowest_s in ((dear, 0.03), (cheap, 0.011)):
        engine._begin(text).result().slowest_s = slowest_s
    found = GrammarMasks._help

    def counted(self: GrammarMasks, inputs: GrammarInputs, answer: Any) -> Any:
        computed.append(inputs.text)
        return found(self, inputs, answer)

    monkeypatch.setattr(GrammarMasks, "_help", counted)
    a = TOKENIZER.encode("a").ids
    rows = [SamplingRow(0, 1, grammar=GrammarInputs(text, list(a))) for text in [*[dear] * 20, cheap]]
    engine._helper.submit(go.wait)
    late = engine.of([*rows, SamplingRow(0, 0)])
    go.set()
    assert late is not None and late.late == set(range(21))
    wait([row.grammar.answer.mask for row in rows if row.grammar is not None], timeout=60.0)
    assert computed == [cheap, *[dear] * 20]


def test_no_step_waits_for_a_grammar_that_is_compiled() -> None:
    engine, go = masks(), threading.Event()
    engine._compiler.submit(go.wait)
    inputs = GrammarInputs(grammar.of_choice(["ab"]))
    rows = [SamplingRow(0, 0, grammar=inputs), SamplingRow(0, 0)]
    for _ in range(3):
        engine.prepare([inputs])
        found = engine.of(rows)
        assert found is not None and (found.late, found.failures) == ({0}, {}) and inputs.late
    go.set()
    found = ready(engine, rows)
    assert found is not None and _allowed(found.bits[0]) == TOKENIZER.encode("a").ids and not inputs.late


def test_a_row_behind_a_late_one_has_no_token_and_takes_none() -> None:
    """The step before sampled nothing that means anything; penalties do not count it either."""
    text = grammar.of_choice(["ab"])
    inputs, history = GrammarInputs(text, late=True), TokenHistory([1])
    behind = SamplingRow(0, 1, presence_penalty=1.0, history=history, grammar=inputs, awaits=1)
    behind.apply_last_token(7)
    assert inputs.output == [] and history.output_tokens == 0
    found = _compiled(masks(), text).of([behind, SamplingRow(0, 0)])
    assert found is not None and found.late == {0} and inputs.late


@settings(max_examples=examples(0.3), deadline=None)
@given(
    st.lists(schemas, min_size=1, max_size=3),
    st.integers(0, 2**32),
    st.lists(st.sampled_from([0.0, 0.0005, 0.003, 0.009]), min_size=1, max_size=9),
)
def test_rows_that_sit_steps_out_say_the_same(schemas: list[Any], seed: int, steps_s: list[float]) -> None:
    """Whatever is late, whenever: slow masks are the helper's, and grammars are compiled while others go on."""
    texts = [grammar.of_json_schema(schema) for schema in schemas]
    expected = [drive(text, seed, most=25) for text in texts]
    engine = GrammarMasks(TOKENS, VOCAB, clock=Ticks(steps_s))
    generators = [torch.Generator().manual_seed(seed) for _ in texts]
    inputs, answers = [GrammarInputs(text) for text in texts], [list[int]() for _ in texts]
    logits = [torch.randn(1, VOCAB, generator=each) * 3 for each in generators]
    while open_ := [index for index, tokens in enumerate(answers) if tokens[-1:] != [END] and len(tokens) < 25]:
        rows = [SamplingRow(seed, len(answers[index]), grammar=inputs[index]) for index in open_]
        engine.prepare([inputs[index] for index in open_], rows)
        output = sample(torch.cat([logits[index] for index in open_]), rows, engine.of(rows))
        for place, index in enumerate(open_):
            if place in output.failures:  # the account is used up
                assert "of processor time" in output.failures[place]
                assert answers[index] == expected[index][: len(answers[index])]
                answers[index] = [END]
            elif place not in output.late:
                answers[index].append(int(output.tokens[place]))
                if answers[index][-1] != END:
                    inputs[index].output.append(answers[index][-1])
                logits[index] = torch.randn(1, VOCAB, generator=generators[index]) * 3
    assert all(found in (right, [END]) for found, right in zip(answers, expected, strict=True))


def test_compiled_grammars_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_masks, "_COMPILED_BYTES", 1 << 20)
    engine = masks()
    texts = [grammar.of_choice([f"{index}", *["x" * 500] * 2]) for index in range(12)]
    inputs = [GrammarInputs(text) for text in texts]
    engine.prepare(inputs)
    assert 0 < engine._compiled_bytes <= 1 << 20 and list(engine._compiled) == texts[-len(engine._compiled) :]
    assert len(engine._compiled) < 12
    found = ready(engine, [SamplingRow(0, 0, grammar=each) for each in inputs])  # their answers have them still
    assert found is not None and not found.failures
    alone = grammar.of_choice(["y" * 9000])
    engine.prepare([GrammarInputs(alone)])
    assert list(engine._compiled) == [alone], "a large one pushes all others out"


def _allowed(bits: np.ndarray) -> list[int]:
    return [token for token in range(len(bits) * 32) if bits[token // 32] >> token % 32 & 1]
