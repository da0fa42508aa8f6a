"""Ids that are made again wherever an answer is written again: of responses, messages, items and calls.

A stream that is resumed is rendered anew, perhaps by another gateway; a random id would then be another one. Pure.
"""

from __future__ import annotations

import hashlib
import string

_ALPHANUMERIC = string.ascii_letters + string.digits


def stable_id(*parts: str | int) -> str:
    """32 hexadecimal digits, the same for the same parts."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def stable_letters(count: int, *parts: str | int) -> str:
    """Letters and digits, at most 21 of them, the same for the same parts."""
    number, letters = int(stable_id(*parts), 16), []
    for _ in range(count):
        number, digit = divmod(number, len(_ALPHANUMERIC))
        letters.append(_ALPHANUMERIC[digit])
    return "".join(letters)
