from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.services.gateway.text.tokenizer import Tokenizer, TokenText
from tests.examples import examples
from tests.services.gateway import tiny_model


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(
        tiny_model.write_model(
            tmp_path_factory.mktemp("m") / "fallback",
            tiny_model.byte_fallback(),
            template=None,
            tokenizer_config={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        )
    )


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(
        tiny_model.write_model(
            tmp_path_factory.mktemp("m") / "pieces", tiny_model.word_piece(), template=None, tokenizer_config={}
        )
    )


def streamed(tokenizer: Tokenizer, ids: Sequence[int], *, context: Sequence[int] = ()) -> list[str]:
    stream = TokenText(tokenizer).stream(context=context)
    return [*(stream.feed(token) for token in ids), stream.flush()]


def test_never_cuts_a_character(tokenizer: Tokenizer) -> None:
    text = "Köln 🦊東京"
    out = streamed(tokenizer, tokenizer.encode(text, special_tokens=False))
    assert "".join(out) == text
    assert all("\ufffd" not in piece for piece in out)


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|end|>b", special_tokens=False)
    assert "".join(streamed(tokenizer, ids)) == "ab"
    stream = TokenText(tokenizer).stream(skip_special=False)
    assert "".join([stream.feed(token) for token in ids]) == "a<|end|>b"


@settings(max_examples=examples(2))
@given(data=st.data())
def test_byte_level_pieces_are_the_whole_decode_for_any_ids(data: st.DataObject, tokenizer: Tokenizer) -> None:
    """Also for bytes that are no UTF-8: all ids, many of them single bytes."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids, skip_special=True)


@given(data=st.data())
def test_the_same_with_a_real_vocabulary(data: st.DataObject, real_model_dir: Path) -> None:
    tokenizer = _real(real_model_dir)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1) | st.integers(17, 300), max_size=40))
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids, skip_special=True)


@functools.cache
def _real(path: Path) -> Tokenizer:
    return Tokenizer(path)


@given(st.text("abc hello world é,🦊\n", max_size=20))
def test_byte_fallback_pieces_are_the_whole_decode(fallback: Tokenizer, text: str) -> None:
    ids = fallback.encode(text, special_tokens=True)
    assert "".join(streamed(fallback, ids)) == fallback.decode(ids, skip_special=True)


def test_the_space_before_the_first_word_stays_when_a_prompt_is_continued(fallback: Tokenizer) -> None:
    prompt = fallback.encode("hello", special_tokens=True)
    answer = fallback.encode("world", special_tokens=False)
    assert fallback.decode([*prompt, *answer], skip_special=True) == "hello world"
    assert "".join(streamed(fallback, answer, context=prompt)) == " world"
    assert "".join(streamed(fallback, answer)) == "world"


def test_bytes_that_never_become_a_character_are_not_held_for_ever(fallback: Tokenizer) -> None:
    ff = 3 + 0xFF
    assert "".join(streamed(fallback, [ff, ff])[:-1]) == "\ufffd\ufffd"


@given(data=st.data())
def test_word_pieces_are_the_whole_decode(data: st.DataObject, pieces: Tokenizer) -> None:
    ids = data.draw(st.lists(st.integers(2, pieces.vocab_size - 1), max_size=12))
    assert "".join(streamed(pieces, ids)) == pieces.decode(ids, skip_special=True)


def test_token_bytes_spell_parts_of_characters(tokenizer: Tokenizer) -> None:
    text = TokenText(tokenizer)
    ids = tokenizer.encode("🦊", special_tokens=False)
    assert b"".join(text.token_bytes(token) for token in ids) == "🦊".encode()
    assert text.token_bytes(10**6) == b""
