"""Token ids on the wire: bytes, which a process that only passes them on need not look into.

A prompt of 32,000 tokens as a list of integers costs its reader a millisecond. Gateways send packed ones; a list serves
wherever no message is sent (the simulator, tests), and is read too. In JSON, as in recordings, ids are a list.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    _Array: TypeAlias = array[int]
    Tokens: TypeAlias = Sequence[int]
    """Type of a message's field: what decoding makes is packed, a sender may give a list."""
else:
    _Array = array  # which no Python before 3.12 lets name its items


class PackedTokens(_Array):
    """Token ids of 32 bits each, little-endian as all machines that serve. Equal to a list of the same ids."""

    __slots__ = ()

    def __new__(cls, tokens: Iterable[int] | bytes = b"") -> PackedTokens:
        """Copy ids. Raises `ValueError` for bytes that are no ids, and for an id beyond 32 bits."""
        try:
            return super().__new__(cls, "i", tokens)  # type: ignore[return-value]
        except OverflowError as error:
            raise ValueError(f"a token id beyond 32 bits: {error}") from error

    def __eq__(self, other: object) -> bool:
        return self.tolist() == other if isinstance(other, list) else super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]  # it can change


if not TYPE_CHECKING:
    Tokens = PackedTokens


def packed(value: Any) -> bytes:
    """Encode a field for msgpack."""
    if isinstance(value, array):
        return value.tobytes()
    raise TypeError(f"{type(value).__name__} is in no message")


def listed(value: Any) -> list[int]:
    """Encode a field for JSON."""
    if isinstance(value, array):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is in no message")


def unpacked(kind: type, value: Any) -> PackedTokens:
    """Decode a field, from bytes or a list."""
    assert kind is PackedTokens, f"{kind.__name__} is in no message"
    if not isinstance(value, bytes | list):
        raise ValueError(f"token ids are bytes or a list, not {type(value).__name__}")
    return PackedTokens(value)


def joined(tokens: Sequence[int], more: Sequence[int]) -> Sequence[int]:
    """Return all ids, packed if `tokens` are."""
    if not more:
        return tokens
    return tokens + PackedTokens(more) if isinstance(tokens, array) else [*tokens, *more]
