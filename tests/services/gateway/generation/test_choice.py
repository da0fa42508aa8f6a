from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.messages import TokenLogprob
from cohort.common.types import FinishReason
from cohort.services.gateway.generation.choice import Choice, Piece, ScoredToken, StopAutomaton
from cohort.services.gateway.text.tokenizer import Tokenizer, TokenText
from tests.examples import examples


def choice(tokenizer: Tokenizer, stops: Sequence[str] = (), *, min_tokens: int = 0, logprobs: bool = False) -> Choice:
    return Choice(TokenText(tokenizer).stream(), StopAutomaton(stops), min_tokens=min_tokens, logprobs=logprobs)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, special_tokens=False)


def test_text_comes_as_tokens_come(tokenizer: Tokenizer) -> None:
    one = choice(tokenizer)
    assert one.feed(ids(tokenizer, "The"), [], None) == Piece("The", [], False)
    assert one.feed(ids(tokenizer, " quick"), [], FinishReason.LENGTH) == Piece(" quick", [], False)


def test_a_stop_string_ends_it_and_later_tokens_do_not_count(tokenizer: Tokenizer) -> None:
    one = choice(tokenizer, ["xy"])
    assert one.feed(ids(tokenizer, "ax"), [], None) == Piece("a", [], False)
    tokens = [*ids(tokenizer, "y"), *ids(tokenizer, "b")]
    assert one.feed(tokens, [], FinishReason.LENGTH) == Piece("", [], True)
    assert (one.tokens, one.stop_string) == (len(ids(tokenizer, "ax")) + 1, "xy")


def test_text_held_back_leaves_with_the_end(tokenizer: Tokenizer) -> None:
    one = choice(tokenizer, ["xy"])
    assert one.feed(ids(tokenizer, "x"), [], None).text == ""
    assert one.feed([], [], FinishReason.STOP).text == "x"


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    one = choice(tokenizer, ["x"], min_tokens=2)
    assert one.feed([*ids(tokenizer, "x")] * 2, [], None) == Piece("xx", [], False)
    assert one.feed(ids(tokenizer, "x"), [], None) == Piece("", [], True)


def test_scores_leave_with_their_text_and_never_after_a_stop_string(tokenizer: Tokenizer) -> None:
    one = choice(tokenizer, ["xy"], logprobs=True)
    a, x, y = (ids(tokenizer, letter)[0] for letter in "axy")
    first = one.feed([a, x], [TokenLogprob(-1), TokenLogprob(-2)], None)
    assert first.scores == [ScoredToken(a, TokenLogprob(-1), 0)]
    assert one.feed([y], [TokenLogprob(-3)], None).scores == []


def test_scores_of_tokens_without_text_come_in_the_end(tokenizer: Tokenizer) -> None:
    one = choice(tokenizer, logprobs=True)
    end = tokenizer.encode("<|end|>", special_tokens=False)
    piece = one.feed(end, [TokenLogprob(-1)], FinishReason.STOP)
    assert (piece.text, len(piece.scores)) == ("", 1)


@settings(max_examples=examples(2))
@given(data=st.data())
def test_any_split_gives_the_same_text_scores_and_count(data: st.DataObject, tokenizer: Tokenizer) -> None:
    tokens = data.draw(st.lists(st.integers(3, tokenizer.vocab_size - 1), max_size=25))
    stops = data.draw(st.lists(st.text("aeo o", min_size=1, max_size=3), max_size=2))
    scores = [TokenLogprob(-float(index)) for index in range(len(tokens))]
    whole = choice(tokenizer, stops, logprobs=True)
    expected = whole.feed(tokens, scores, FinishReason.LENGTH)
    split = choice(tokenizer, stops, logprobs=True)
    text, at = "", 0
    found: list[ScoredToken] = []
    while True:
        size = data.draw(st.integers(1, 5))
        last = at + size >= len(tokens)
        piece = split.feed(tokens[at : at + size], scores[at : at + size], FinishReason.LENGTH if last else None)
        text += piece.text
        found += piece.scores
        at += size
        if piece.stopped or last:
            break
    assert (text, found, split.tokens, split.stop_string) == (
        expected.text,
        list(expected.scores),
        whole.tokens,
        whole.stop_string,
    )
