"""Parts of an answer in their order, content, reasoning and calls of tools, and the ids of calls.

Made by `answer_reader.py`, written by each API. Pure.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterable
from dataclasses import dataclass

from cohort.services.gateway.requests.formats import AnswerFormat

_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(slots=True)
class CallDelta:
    """Part of call number `index`: first its id and name, then pieces of its arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


Part = str | Reasoning | CallDelta
"""Piece of content, of reasoning, or of a call. A call ends where another part begins, or the answer ends."""


def whole_calls(deltas: Iterable[CallDelta]) -> list[CallDelta]:
    """Merge the deltas of a finished answer."""
    calls: list[tuple[CallDelta, list[str]]] = []
    for delta in deltas:
        if delta.index == len(calls):
            calls.append((delta, []))
        calls[delta.index][1].append(delta.arguments)
    return [CallDelta(call.index, call.id, call.name, "".join(arguments)) for call, arguments in calls]


def call_id(format_: AnswerFormat, ids: str, number: int) -> str:
    """Return the id of call `number`, if the model writes none; `ids` is the answer's own."""
    if format_.id_letters:
        return stable_letters(format_.id_letters, ids, number)
    return f"call_{stable_id(ids, number)[:24]}"


def stable_id(*parts: str | int) -> str:
    """Hash the parts to 32 hexadecimal digits: not random, as another gateway may write the answer again."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def stable_letters(count: int, *parts: str | int) -> str:
    """Hash the parts to letters and digits, at most 21."""
    number, letters = int(stable_id(*parts), 16), []
    for _ in range(count):
        number, digit = divmod(number, len(_ALPHANUMERIC))
        letters.append(_ALPHANUMERIC[digit])
    return "".join(letters)
