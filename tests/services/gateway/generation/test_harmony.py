"""gpt-oss' answers beside OpenAI's own parser, whose vocabulary is a download: it skips where neither is there."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.services.gateway.generation.answer_parts import CallDelta, Reasoning
from cohort.services.gateway.generation.answer_reader import AnswerReader
from tests.examples import examples
from tests.services.gateway.generation.family_answers import CASES, merged, row_of

TEXTS = st.text(st.characters(exclude_characters="<|>", exclude_categories=("Cs",)), min_size=1, max_size=30)
MESSAGES = st.one_of(
    st.tuples(st.just("<|channel|>analysis"), TEXTS),
    st.tuples(st.just("<|channel|>final"), TEXTS),
    st.tuples(st.just("<|channel|>commentary"), TEXTS),
    st.tuples(st.just("<|channel|>commentary to=functions.f <|constrain|>json"), TEXTS),
    st.tuples(st.just(" to=functions.g<|channel|>commentary json"), TEXTS),
)


@pytest.fixture(scope="module")
def harmony() -> Any:
    library = pytest.importorskip("openai_harmony")
    try:
        return library.load_harmony_encoding("HarmonyGptOss")
    except Exception as error:
        pytest.skip(f"no vocabulary: {error}")


def theirs(harmony: Any, text: str) -> list[Any]:
    from openai_harmony import Role  # type: ignore[import-not-found, unused-ignore]

    tokens = harmony.encode(text, allowed_special="all")
    found: list[Any] = []
    for message in harmony.parse_messages_from_completion_tokens(tokens, role=Role.ASSISTANT):
        body = "".join(part.text for part in message.content)
        if message.recipient not in (None, "all"):
            found.append((message.recipient.removeprefix("functions."), body))
        elif message.channel == "analysis":
            found.append(Reasoning(body))
        else:
            found.append(body)
    return found


def ours(text: str) -> list[Any]:
    reader = AnswerReader(row_of("gpt-oss"), calls=True, ids="x")
    return [part[:2] if isinstance(part, tuple) else part for part in merged([*reader.feed(text), *reader.finish()])]


def joined(parts: list[Any]) -> list[Any]:
    """Join neighbours of one kind, and put a line's end before the second body of a kind, as the reader does."""
    seen: set[type] = set()
    spaced: list[Any] = []
    for part in parts:
        match part:
            case Reasoning():
                spaced.append(Reasoning("\n" + part.text) if Reasoning in seen else part)
            case str():
                spaced.append("\n" + part if str in seen else part)
            case _:
                spaced.append(CallDelta(0, "x", part[0], part[1]))
        seen.add(type(part))
    return [part[:2] if isinstance(part, tuple) else part for part in merged(spaced)]


def test_answers_are_read_as_openai_reads_them(harmony: Any) -> None:
    texts = [case.text for case in CASES if case.row == "gpt-oss"]
    assert len(texts) > 2
    for text in texts:
        assert ours(text) == joined(theirs(harmony, text))


@settings(max_examples=examples(5))
@given(messages=st.lists(MESSAGES, min_size=1, max_size=5))
def test_so_are_messages_in_any_order(harmony: Any, messages: list[tuple[str, str]]) -> None:
    written = [f"{header}<|message|>{body}" for header, body in messages]
    text = "<|end|><|start|>assistant".join(written) + "<|return|>"
    assert ours(text) == joined(theirs(harmony, text))
