"""Names of headers that say how a request is to be served, and clients' text as it may be sent back."""

from __future__ import annotations

CLASS_HEADER = "x-cohort-class"
TTFT_HEADER = "x-cohort-ttft-slo-ms"
TPOT_HEADER = "x-cohort-tpot-slo-ms"
IF_LATE_HEADER = "x-cohort-if-late"
RESUME_HEADER = "x-cohort-resume"
LAST_EVENT_HEADER = "Last-Event-ID"


def printable(text: str, limit: int = 100) -> str:
    """Return a client's own text for use in an answer: short, and encodable."""
    shown = text if len(text) <= limit else f"{text[:limit]}…"
    return shown.encode("utf-8", "backslashreplace").decode("utf-8")
