"""Every message survives the wire, any msgpack library can read it, and nothing else is taken for one."""

from __future__ import annotations

import types
import typing
from typing import Any

import msgpack  # type: ignore[import-untyped]
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cohort.common import messages
from cohort.common.codec import decode, encode
from cohort.common.errors import WireError
from cohort.common.messages import Message, Registered
from cohort.common.tokens import PackedTokens, packed
from tests.examples import examples

MEMBERS: tuple[type[msgspec.Struct], ...] = typing.get_args(Message)

_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(st.characters(codec="utf-8"), max_size=20),
    bytes: st.binary(max_size=40),
    type(None): st.none(),
    PackedTokens: st.builds(PackedTokens, st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3)),
}


def strategy_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a declared type, built from the declaration alone: a new message is covered without a line here."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return st.floats(kind.__metadata__[0].ge, kind.__metadata__[0].le)
    if origin is list:
        return st.lists(strategy_of(arguments[0]), max_size=3)
    if origin is tuple:
        assert arguments[1] is ...
        return st.lists(strategy_of(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(strategy_of(arguments[0]), strategy_of(arguments[1]), max_size=3)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([strategy_of(argument) for argument in arguments])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind, include_extras=True)
        return st.builds(kind, **{name: strategy_of(hints[name]) for name in kind.__struct_fields__})
    if isinstance(kind, type):
        return st.sampled_from(kind)  # an enum
    raise AssertionError(f"no strategy for {kind}")


def test_every_declared_message_is_in_the_union() -> None:
    declared = {
        value
        for value in vars(messages).values()
        if isinstance(value, type) and issubclass(value, messages._Base) and value is not messages._Base
    }
    assert declared == set(MEMBERS)


@pytest.mark.parametrize("kind", MEMBERS, ids=lambda kind: kind.__name__)
def test_round_trip_and_plain_msgpack(kind: type[msgspec.Struct]) -> None:
    @settings(max_examples=examples(0.15), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(strategy_of(kind))
    def check(message: Any) -> None:
        data = encode(message)
        assert decode(data) == message
        assert type(decode(memoryview(data))) is kind
        plain = msgpack.unpackb(data, strict_map_key=False)  # logit_bias has integer keys
        assert plain["type"] == kind.__name__
        assert plain == {"type": kind.__name__, **_plain(message)}

    check()


def _plain(message: msgspec.Struct) -> dict[str, Any]:
    """What a reader without our types should see."""
    built = msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=packed)
    assert isinstance(built, dict)
    return {key: _lists(value) for key, value in built.items() if key != "type"}


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_lists(item) for item in value]
    return value


STATS = ("arrival_rate", "arrival_rate_forecast", "mean_prompt_tokens", "mean_output_tokens")
WRONG = {
    "empty": b"",
    "reserved byte": b"\xc1",
    "text": b"hello, I am no message",
    "json": b'{"type": "Registered", "incarnation": 1}',
    "no type": msgpack.packb({"incarnation": 1}),
    "unknown type": msgpack.packb({"type": "Unknown", "incarnation": 1}),
    "missing field": msgpack.packb({"type": "Registered"}),
    "wrong field": msgpack.packb({"type": "Registered", "incarnation": "one"}),
    "quiet for a day": msgpack.packb({"type": "ClusterStats", **dict.fromkeys(STATS, 1.0), "quiet_s": 86_400.0}),
    "an array": msgpack.packb([1, 2, 3]),
    "truncated": encode(Registered(2**40))[:-1],
    "trailing": encode(Registered(1)) + b"\x00",
    "broken text": b"\x82\xa4type\xa2\xff\xfe\xabincarnation\x01",
}


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG.keys())
def test_other_bytes_are_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


@settings(max_examples=examples(2))
@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_or_a_wire_error(data: bytes) -> None:
    try:
        message = decode(data)
    except WireError:
        return
    assert isinstance(message, MEMBERS)


@settings(max_examples=examples(2))
@given(st.data())
def test_damaged_messages_are_a_message_or_a_wire_error(data: st.DataObject) -> None:
    whole = bytearray(encode(data.draw(strategy_of(messages.WorkerReport))))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(whole))
    except WireError:
        return


def test_unknown_fields_are_ignored() -> None:
    """A newer peer may say more."""
    assert decode(msgpack.packb({"type": "Registered", "incarnation": 1, "new": [1]})) == Registered(1)
