"""How many values a body has and how deep they lie, before any of them is built.

A megabyte of text decodes in a millisecond; a megabyte of empty lists becomes half a million objects, a hundred
milliseconds and a hundred megabytes. So the bytes outside of strings are counted first, at memory speed and without a
pass of the interpreter. Called by `parsing.py` ahead of the decoder; pure. It does not judge whether the body is JSON:
up to the first fault both read alike, and there the decoder stops.
"""

from __future__ import annotations

from cohort.common.config import GatewayConfig
from cohort.common.errors import RequestError

# A chat message in its longest form: the message, its list of parts, two parts.
_CONTAINERS_PER_MESSAGE = 4
# Keys and values of a message in that form.
_STRINGS_PER_MESSAGE = 16
# Beside messages, prompts, biases and metadata: the body itself, its options, what is tolerated.
_OTHERS = 1024
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_OPENING = frozenset(b"[{")


def refuse_shape(data: bytes, config: GatewayConfig) -> None:
    """Raises `RequestError` for a body with more values, or deeper ones, than any request may have."""
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    strings = plain.count(b'"') // 2
    most = _STRINGS_PER_MESSAGE * config.max_messages + config.max_choices + config.max_logit_biases + _OTHERS
    if strings > most:
        raise RequestError(
            f"The body has {strings} texts and keys, but at most {most} are read: {_STRINGS_PER_MESSAGE} for each of "
            f"{config.max_messages} messages (gateway.max_messages), prompts, biases and options."
        )
    outside = b"".join(plain.split(b'"')[::2])
    brackets = outside.translate(None, _NOT_BRACKETS)
    containers = brackets.count(b"{") + brackets.count(b"[")
    most = _CONTAINERS_PER_MESSAGE * config.max_messages + config.max_choices + _OTHERS
    if containers > most:
        raise RequestError(
            f"The body has {containers} lists and objects, but at most {most} are read: {_CONTAINERS_PER_MESSAGE} for "
            f"each of {config.max_messages} messages (gateway.max_messages), prompts and options."
        )
    values = outside.count(b",")
    most = config.max_request_work + _STRINGS_PER_MESSAGE * config.max_messages + _OTHERS
    if values > most:
        raise RequestError(
            f"The body has more than {values} values, but at most {most} are read: token ids of prompts "
            f"(gateway.max_request_work: {config.max_request_work}), messages and options."
        )
    _refuse_depth(brackets, config.max_nesting)


def _refuse_depth(brackets: bytes, most: int) -> None:
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in _OPENING else -1
        if depth > most:
            raise RequestError(
                f"The body is nested too deeply: lists and objects may lie {most} deep (gateway.max_nesting)."
            )
