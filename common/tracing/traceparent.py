"""The W3C header `traceparent` (Trace Context, level 1): which trace a request belongs to, and the span above.

Pure. A header that is no valid one counts as none, as the recommendation wants.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HEADER = "traceparent"
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01


@dataclass(frozen=True, slots=True)
class TraceParent:
    """`trace_id` of 128 bits, `span_id` of 64, neither is 0. `sampled`: the caller records this trace."""

    trace_id: int
    span_id: int
    sampled: bool = True

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


def parse(header: str) -> TraceParent | None:
    """Parse a header of version 00, or the part of a later version that is laid out alike."""
    found = _FORM.fullmatch(header.strip())
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if version == "ff" or (version == "00" and more):
        return None
    trace_id, span_id = int(trace, 16), int(span, 16)
    if not trace_id or not span_id:
        return None
    return TraceParent(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))
