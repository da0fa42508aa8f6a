"""The parser gives the same events however the bytes are cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cohort.services.bench.http.load.client import EventParser

STREAM = (
    b': keep-alive\r\n\r\nevent: x\r\ndata: {"a":"\xc3\xa9"}\r\n\r\n'
    b'data:{"b":2}\n\ndata: {"c":"data: inside"}\n\ndata: [DONE]\n\n'
)
EVENTS = [b'{"a":"\xc3\xa9"}', b'{"b":2}', b'{"c":"data: inside"}', b"[DONE]"]


def parse(pieces: list[bytes]) -> list[bytes]:
    parser = EventParser()
    found = [event for piece in pieces for event in parser.feed(piece)]
    return found + parser.finish()


def test_whole_stream() -> None:
    assert parse([STREAM]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    assert parse([STREAM[a:b] for a, b in pairwise(edges)]) == EVENTS


def test_last_line_without_an_end() -> None:
    assert parse([b"data: 1\n\ndata: [DO", b"NE]"]) == [b"1", b"[DONE]"]
