"""An answer that may reason before what is bound: free until its reasoning ends, bound from there on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from cohort.common import grammar
from cohort.common.engine.step.batch import SamplingRow
from cohort.common.engine.step.grammar_masks import GrammarMasks
from cohort.common.engine.step.sampler import sample
from cohort.common.sampling_inputs import GrammarInputs
from tests.common.engine.step.test_grammar_masks import END, TOKENIZER, VOCAB, masks, ready, text_of

YES = grammar.of_choice(["yes"])
OPEN, CLOSE = VOCAB - 1, VOCAB - 2  # no grammar has them
FREE = frozenset(range(VOCAB)) - {END}


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def allowed(engine: GrammarMasks, inputs: GrammarInputs, ahead: tuple[int, ...] = ()) -> frozenset[int]:
    found = ready(engine, [SamplingRow(0, len(inputs.output) + len(ahead), grammar=inputs, ahead=ahead)])
    assert found is not None and not found.failures
    bits = np.unpackbits(found.bits[0].view(np.uint8), bitorder="little")[:VOCAB]
    return frozenset(np.flatnonzero(bits).tolist())


def brute(tokens: Sequence[int], opens: Sequence[int], closes: int) -> int:
    if any(token != opened for token, opened in zip(tokens, opens, strict=False)) or len(tokens) < len(opens):
        return 0
    rest = list(tokens[len(opens) :])
    return len(opens) + rest.index(closes) + 1 if closes in rest else -1


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=4),
       st.sampled_from([(), (0,), (0, 1)]), st.integers(0, 12))  # fmt: skip
@example([0, 1, 3], [3], (0, 1), 0)
def test_where_a_grammar_begins(output: list[int], ahead: list[int], opens: tuple[int, ...], known: int) -> None:
    closes = 3
    grown = GrammarInputs("", output[:known], opens=opens, closes=closes)
    grown.begin()
    grown.output.extend(output[known:])
    for inputs in (grown, GrammarInputs("", list(output), opens=opens, closes=closes)):
        assert inputs.begin() == brute(output, opens, closes)
        assert inputs.begin(tuple(ahead)) == brute([*output, *ahead], opens, closes)
    assert GrammarInputs("", output).begin(ahead) == 0


def test_reasoning_is_free_costs_nothing_and_does_not_end_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, inputs = masks(), GrammarInputs(YES, opens=(OPEN,), closes=CLOSE)
    first = allowed(engine, GrammarInputs(YES))
    assert allowed(engine, inputs) == first | {OPEN} and OPEN not in first
    monkeypatch.setattr(engine, "_compute", lambda *_: pytest.fail("a mask was computed"))
    for token in (OPEN, *ids("no!"), END - 1):
        inputs.output.append(token)
        assert allowed(engine, inputs) == FREE
    inputs.output.append(CLOSE)
    assert allowed(engine, inputs) == first, "the first mask is known, too"
    monkeypatch.undo()
    inputs.output += ids("yes")
    assert allowed(engine, inputs) == {END}


def test_a_prompt_may_have_begun_it_and_an_answer_may_leave_it_out() -> None:
    engine = masks()
    begun = GrammarInputs(YES, ids("hm"), closes=CLOSE)
    assert allowed(engine, begun) == FREE
    plain = GrammarInputs(YES, ids("yes"), opens=(OPEN,), closes=CLOSE)
    assert allowed(engine, plain) == {END}


def test_a_beginning_of_several_tokens_is_open_until_it_is_another() -> None:
    """As gpt-oss': the first token begins what is bound, too."""
    engine, [first, *_] = masks(), ids("yes")
    inputs = GrammarInputs(YES, opens=(first, OPEN), closes=CLOSE)
    assert first in allowed(engine, inputs) and OPEN not in allowed(engine, inputs)
    inputs.output.append(first)
    both = allowed(engine, inputs)
    assert OPEN in both and len(both) > 1
    inputs.output.append(OPEN)
    assert allowed(engine, inputs) == FREE
    inputs.output.append(CLOSE)
    assert allowed(engine, inputs) == allowed(masks(), GrammarInputs(YES))


@pytest.mark.parametrize("known", range(7))
def test_drafts_may_end_it_and_are_bound_behind(known: int) -> None:
    engine, tokens = masks(), [OPEN, *ids("a"), CLOSE, *ids("yes")]
    inputs = GrammarInputs(YES, tokens[:known], opens=(OPEN,), closes=CLOSE)
    for ahead in range(len(tokens) - known + 1):
        seen = tokens[: known + ahead]
        alone = GrammarInputs(YES, list(seen), opens=(OPEN,), closes=CLOSE)
        assert allowed(engine, inputs, tuple(seen[known:])) == allowed(masks(), alone)
    assert allowed(engine, inputs) == allowed(masks(), GrammarInputs(YES, tokens[:known], opens=(OPEN,), closes=CLOSE))


@pytest.mark.parametrize("cuts", [(), (1, 3), (5, 6, 9)])
def test_another_worker_goes_on_with_the_same_answer(cuts: tuple[int, ...]) -> None:
    def drive(cuts: tuple[int, ...]) -> list[int]:
        engine, generator, tokens = masks(), torch.Generator().manual_seed(5), list[int]()
        inputs = GrammarInputs(YES, opens=(OPEN,), closes=CLOSE)
        for position in range(40):
            if position in cuts:
                engine = masks()
                inputs = GrammarInputs(YES, list(tokens), opens=(OPEN,), closes=CLOSE)
            row = SamplingRow(3, position, grammar=inputs)
            logits = torch.randn(1, VOCAB, generator=generator)
            logits[0, OPEN if position == 0 else CLOSE if position == 6 else 0] += 50
            tokens.append(int(sample(logits, [row], ready(engine, [row])).tokens[0]))
            if tokens[-1] == END:
                break
            inputs.output.append(tokens[-1])
        return tokens

    whole = drive(())
    assert whole[0] == OPEN and whole[6] == CLOSE and text_of(whole[7:]) == "yes" and whole[-1] == END
    assert drive(cuts) == whole
