from __future__ import annotations

import pytest

from cohort.common.tracing.traceparent import TraceParent, parse

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_there_and_back() -> None:
    header = f"00-{TRACE}-{SPAN}-01"
    place = parse(header)
    assert place == TraceParent(int(TRACE, 16), int(SPAN, 16), True)
    assert str(place) == header
    assert parse(f" 00-{TRACE}-{SPAN}-00 ") == TraceParent(int(TRACE, 16), int(SPAN, 16), False)


def test_flags_of_later_versions_are_read_by_their_first_bit() -> None:
    later = parse(f"cc-{TRACE}-{SPAN}-03-what-the-future-will-be-like")
    assert later is not None and later.sampled
    unsampled = parse(f"00-{TRACE}-{SPAN}-02")
    assert unsampled is not None and not unsampled.sampled


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nothing of the kind",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE[:-1]}-{SPAN}-01",
    ],
)
def test_what_is_no_traceparent(header: str) -> None:
    assert parse(header) is None
