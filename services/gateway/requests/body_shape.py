"""How many values a body has and how deep they lie, before any of them is built.

A megabyte of text decodes in a millisecond; a megabyte of empty lists becomes half a million objects, a hundred
milliseconds and a hundred megabytes. So the bytes outside of strings are counted first, at memory speed: a slice at a
time, because the interpreter serves no other thread while it is inside of one count, and no further than to the limit.
Called by `parsing.py` ahead of the decoder; pure. It does not judge whether the body is JSON: up to the first fault
both read alike, and there the decoder stops.
"""

from __future__ import annotations

from dataclasses import dataclass

from cohort.common.config import GatewayConfig
from cohort.common.errors import RequestError

SLICE_BYTES = 1 << 17
"""Counted at a time: a tenth of a millisecond, and at worst one."""
# A chat message in its longest form: the message, its list of parts, two parts.
_CONTAINERS_PER_MESSAGE = 4
# Keys and values of a message in that form.
_STRINGS_PER_MESSAGE = 16
# Beside messages, prompts, biases and metadata: the body itself, its options, what is tolerated.
_OTHERS = 1024
# Of a schema's text, or of tools', per text, key or value in it.
_BYTES_PER_SCHEMA_VALUE = 8
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_OPENING = frozenset(b"[{")


@dataclass(frozen=True, slots=True)
class _Limits:
    strings: int
    containers: int
    values: int
    depth: int
    what: str
    """What the strings and containers are there for, with the options that say how many."""

    @classmethod
    def of(cls, config: GatewayConfig, *, chat: bool) -> _Limits:
        messages = config.max_messages if chat else 0
        schemas = config.max_grammar_bytes // _BYTES_PER_SCHEMA_VALUE
        return cls(
            strings=_STRINGS_PER_MESSAGE * messages + config.max_choices + config.max_logit_biases + schemas + _OTHERS,
            containers=_CONTAINERS_PER_MESSAGE * messages + config.max_choices + schemas // 2 + _OTHERS,
            values=config.max_request_work + _STRINGS_PER_MESSAGE * messages + schemas + _OTHERS,
            depth=config.max_nesting,
            what=f"those of {messages} messages (gateway.max_messages), tools, schemas and options"
            if chat
            else f"those of {config.max_choices} prompts (gateway.max_choices), {config.max_logit_biases} biases "
            "(gateway.max_logit_biases), schemas and options",
        )


def refuse_shape(data: bytes, config: GatewayConfig, *, chat: bool) -> None:
    """Raises `RequestError` for a body with more values, or deeper ones, than any request of its endpoint may have."""
    limits = _Limits.of(config, chat=chat)
    quotes = containers = values = depth = 0
    cut = b""
    for start in range(0, len(data), SLICE_BYTES):
        text = cut + data[start : start + SLICE_BYTES]
        # A backslash without what it escapes belongs to the next slice.
        cut = b"\\" * ((len(text) - len(text.rstrip(b"\\"))) % 2)
        text = text[: len(text) - len(cut)]
        plain = text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text
        in_string = quotes % 2
        quotes += plain.count(b'"')
        if quotes // 2 > limits.strings:
            raise _too_many("texts and keys", limits.strings, limits.what)
        outside = b"".join(plain.split(b'"')[in_string::2])
        brackets = outside.translate(None, _NOT_BRACKETS)
        containers += brackets.count(b"{") + brackets.count(b"[")
        if containers > limits.containers:
            raise _too_many("lists and objects", limits.containers, limits.what)
        values += outside.count(b",")
        if values > limits.values:
            what = f"token ids of prompts (gateway.max_request_work: {config.max_request_work}), messages and options"
            raise _too_many("values", limits.values, what)
        depth = _depth_after(brackets, depth, limits.depth)
        if depth < 0:  # the decoder ends there
            return


def _too_many(what: str, most: int, of_which: str) -> RequestError:
    return RequestError(f"The body has more than {most} {what}, the most that are read: {of_which}.")


def _depth_after(brackets: bytes, depth: int, most: int) -> int:
    """Negative as soon as more is closed than was opened."""
    for bracket in brackets:
        depth += 1 if bracket in _OPENING else -1
        if depth > most:
            raise RequestError(
                f"The body is nested too deeply: lists and objects may lie {most} deep (gateway.max_nesting)."
            )
        if depth < 0:
            break
    return depth
