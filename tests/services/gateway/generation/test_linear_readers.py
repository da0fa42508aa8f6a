"""Whatever reads or writes an answer's stream looks at each piece once: twice the stream is about twice the work.

Work is characters that string methods looked at or copied, and bytes that each piece allocated.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cohort.common.messages import TokenLogprob
from cohort.common.types import FinishReason
from cohort.services.gateway.apis.messages_api_events import MessageWriter
from cohort.services.gateway.generation.answer_parts import CallDelta, whole_calls
from cohort.services.gateway.generation.answer_reader import AnswerReader
from cohort.services.gateway.generation.answering import Answering
from cohort.services.gateway.generation.choice import Choice, Piece, ScoredToken, StopAutomaton, StopStrings
from cohort.services.gateway.generation.openai_shapes import ChatScores, CompletionScores, CompletionShape
from cohort.services.gateway.requests.formats import AnswerFormat
from cohort.services.gateway.text.tokenizer import Tokenizer, TokenText
from tests.counting import Looks, bytes_allocated
from tests.services.gateway import tiny_model
from tests.services.gateway.generation.family_answers import row_of
from tests.services.gateway.generation.test_responses_writing import writer as response_writer

HERMES, LLAMA, MISTRAL, NAMED, CODER, HARMONY, KIMI = (
    row_of(name) for name in ("hermes", "llama-3", "mistral", "mistral-args", "qwen3-coder", "gpt-oss", "kimi-k2")
)
BEGUN, HELD = '{"name": "f", "arguments": {"x": "', '{"arguments": {"x": "'  # the name comes after the arguments
SCORE = ScoredToken(1, TokenLogprob(-1.0, [1], [-1.0]), 0)

Feed = Callable[[str], object]
Make = Callable[[Looks], tuple[Feed, Callable[[], object]]]
"""A reader's `feed`, and what is called at the end."""


def parser(format_: AnswerFormat) -> Make:
    def make(_: Looks) -> tuple[Feed, Callable[[], object]]:
        made = AnswerReader(format_, calls=True)
        return made.feed, made.finish

    return make


class OneScore:
    """A choice whose every token has a score."""

    text = ""

    def feed(self, tokens: Any, _: Any, finish: Any) -> Piece:
        return Piece(self.text if tokens else "", [SCORE], stopped=False)


def scored(_: Looks) -> tuple[Feed, Callable[[], object]]:
    answering: Any = SimpleNamespace(
        readers=[AnswerReader(HERMES, calls=True)], choices=[OneScore()], _unsent={}, reasoning_tokens={}
    )

    def feed(text: str, finish: FinishReason | None = None) -> object:
        answering.choices[0].text = text
        return Answering._read(answering, 0, [] if finish else [1], [], finish)

    return feed, lambda: feed("", FinishReason.STOP)


def whole(looks: Looks) -> tuple[Feed, Callable[[], object]]:
    deltas = [CallDelta(0, "i", "f")]
    return lambda text: deltas.append(CallDelta(0, arguments=text)), lambda: whole_calls(deltas)


def stops(*strings: str) -> Make:
    def make(_: Looks) -> tuple[Feed, Callable[[], object]]:
        made = StopStrings(StopAutomaton(strings))
        return made.feed, made.flush

    return make


def response(_: Looks, *, calls: bool) -> tuple[Feed, Callable[[], object]]:
    made = response_writer()
    list(made.take(Piece("", (), stopped=False, parts=[CallDelta(0, "c", "f")] if calls else ())))
    return lambda text: encoded(made.take(piece(text, calls=calls), b"{}")), lambda: encoded(
        made.close(FinishReason.STOP)
    )


def message(_: Looks, *, calls: bool) -> tuple[Feed, Callable[[], object]]:
    made = MessageWriter("m", "tiny")
    list(made.take(Piece("", (), stopped=False, parts=[CallDelta(0, "c", "f")] if calls else ())))
    return lambda text: encoded(made.take(piece(text, calls=calls))), lambda: encoded(made._close())


def piece(text: str, *, calls: bool) -> Piece:
    text = str(text)  # JSON is made from nothing that counts
    return Piece("", (), False, [CallDelta(0, arguments=text)]) if calls else Piece(text, (), False)


def encoded(events: Any) -> list[bytes]:
    return [msgspec.json.encode(event) for event in events]


def chat_scores(_: Looks) -> tuple[Feed, Callable[[], object]]:
    made = ChatScores(lambda scores: [None for _ in scores])  # type: ignore[misc]
    return lambda _: made.add([SCORE]), made.json


def completion_scores(_: Looks) -> tuple[Feed, Callable[[], object]]:
    shape = CompletionShape(SimpleNamespace(token_bytes=lambda _: b"x"))  # type: ignore[arg-type]
    made = CompletionScores(shape._logprobs, None)
    return lambda _: made.add([SCORE]), made.json


def choice(build: Callable[[], Any], token: str, *, logprobs: bool = False) -> Make:
    """A choice whose tokens are all the same one."""

    def make(looks: Looks) -> tuple[Feed, Callable[[], object]]:
        tokenizer = tokenizer_of(build)
        decode, token_id = tokenizer.decode, tokenizer._backend.token_to_id(token)

        def counted(ids: Any, *, skip_special: bool) -> str:
            looks.characters += len(ids)
            return decode(ids, skip_special=skip_special)

        tokenizer.decode = counted  # type: ignore[method-assign]
        made = Choice(TokenText(tokenizer).stream(), StopAutomaton(()), min_tokens=0, logprobs=logprobs)
        scores = [TokenLogprob(-1.0)] if logprobs else []
        return lambda _: made.feed([token_id], scores, None), lambda: made.feed([], [], FinishReason.STOP)

    return make


FOLDERS: dict[Any, Path] = {}


def tokenizer_of(build: Callable[[], Any]) -> Tokenizer:
    return Tokenizer(FOLDERS[build])


@pytest.fixture(scope="module", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    for build in (tiny_model.byte_level, tiny_model.byte_fallback, tiny_model.word_piece):
        folder = tmp_path_factory.mktemp("m") / "m"
        FOLDERS[build] = tiny_model.write_model(folder, build(), template=None, tokenizer_config={})


READERS: dict[str, tuple[Make, str, str]] = {
    "hermes: arguments": (parser(HERMES), f"<tool_call>{BEGUN}", 'x{\\"'),
    "hermes: held call": (parser(HERMES), f"<tool_call>{HELD}", "x{>]"),
    "hermes: no JSON": (parser(HERMES), "<tool_call>", "{<>}"),
    "hermes: calls": (parser(HERMES), "", f"<tool_call>{BEGUN}" + '"}}</tool_call>'),
    "hermes: white space": (parser(HERMES), "a", " \n\t "),
    "hermes: beginnings": (parser(HERMES), "", "<too"),
    "llama: arguments": (parser(LLAMA), BEGUN, "x{}]"),
    "llama: held call": (parser(LLAMA), HELD, "x{}]"),
    "llama: white space": (parser(LLAMA), "", "  \n\t"),
    "llama: a tag and white space": (parser(LLAMA), " <|python", "  \n\t"),
    "llama: text": (parser(LLAMA), "a", "{ab "),
    "mistral: arguments": (parser(MISTRAL), f"[TOOL_CALLS][{BEGUN}", "x{}]"),
    "mistral: held call": (parser(MISTRAL), f"[TOOL_CALLS][{HELD}", "x{}]"),
    "mistral: white space": (parser(MISTRAL), "[TOOL_CALLS]", "  [ "),
    "mistral: named": (parser(NAMED), '[TOOL_CALLS]f[ARGS]{"x": "', "x{}]"),
    "mistral: no name": (parser(NAMED), "[TOOL_CALLS]?{", "x{}{"),
    "reasoning": (parser(HERMES), "<think>", "a </th"),
    "reasoning: white space": (parser(HERMES), "<think>a", " \n"),
    "coder: a text": (parser(CODER), "<tool_call><function=f><parameter=x>", 'a"</par'),
    "coder: arguments": (parser(CODER), "<tool_call><function=f>", "<parameter=x>1</parameter>"),
    "harmony: messages": (parser(HARMONY), "", "<|channel|>final<|message|>a<|end|>"),
    "harmony: arguments": (parser(HARMONY), "<|channel|>x to=f<|message|>", "a<|e"),
    "kimi: heads": (parser(KIMI), "", "<|tool_call_begin|>?"),
    "log-probabilities of a held call": (scored, f"<tool_call>{HELD}", "abcd"),
    "whole calls": (whole, "", "abcd"),
    "stop strings: held": (stops("ab" * 60 + "c", "b" * 100), "", "abab"),
    "stop strings: many": (stops(*(f"{n}x" for n in range(16))), "", "1 2 "),
    "responses: text": (lambda looks: response(looks, calls=False), "", "abcd"),
    "responses: arguments": (lambda looks: response(looks, calls=True), "", "abcd"),
    "messages: text": (lambda looks: message(looks, calls=False), "", "abcd"),
    "messages: arguments": (lambda looks: message(looks, calls=True), "", "abcd"),
    "scores of a chat": (chat_scores, "", ""),
    "scores of a completion": (completion_scores, "", ""),
    "byte level": (choice(tiny_model.byte_level, "a"), "", ""),
    "byte level: scores of parts of characters": (choice(tiny_model.byte_level, "Ã", logprobs=True), "", ""),
    "byte fallback": (choice(tiny_model.byte_fallback, "<0xE2>"), "", ""),
    "window": (choice(tiny_model.word_piece, "story"), "", ""),
    "window: skipped tokens": (choice(tiny_model.word_piece, "[PAD]"), "", ""),
}


def work(name: str, pieces: int, *, at_once: bool) -> int:
    make, begin, filler = READERS[name]
    looks = Looks()
    feed, end = make(looks)
    texts = [begin + filler * pieces] if at_once else [begin, *[filler] * pieces]
    allocated = 0
    gc.disable()
    tracemalloc.start()
    try:
        for text in texts:
            counted = looks.text(text)
            allocated += bytes_allocated(lambda: feed(counted))  # noqa: B023 -- called at once
        end()
    finally:
        tracemalloc.stop()
        gc.enable()
    return looks.characters + allocated


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", READERS)
def test_twice_the_stream_is_about_twice_the_work(name: str, at_once: bool) -> None:
    if at_once and not READERS[name][2]:
        return  # its pieces are tokens
    once, twice = (work(name, pieces, at_once=at_once) for pieces in (150, 300))
    assert twice <= 2.5 * once, (once, twice)
