"""The headers and options of a request that say how it is to be served: class, SLO, and what if it would be late.

Called by `parsing`. Headers win over the body, because proxies set them.
"""

from __future__ import annotations

from collections.abc import Mapping

from cohort.common.config import GatewayConfig
from cohort.common.errors import RequestError
from cohort.common.types import IfLate, Slo, TrafficClass
from cohort.services.gateway.http.bodies import LEAST_MS, MOST_MS, CohortOptions

CLASS_HEADER = "x-cohort-class"
TTFT_HEADER = "x-cohort-ttft-slo-ms"
TPOT_HEADER = "x-cohort-tpot-slo-ms"
IF_LATE_HEADER = "x-cohort-if-late"


def class_and_slo(
    options: CohortOptions, headers: Mapping[str, str], config: GatewayConfig
) -> tuple[TrafficClass, Slo, bool]:
    """Class and SLO as named; headers win over the body, because proxies set them. A target not named has a default of
    its class, which is filled in on admission."""
    traffic_class: TrafficClass = options.traffic_class or config.default_class
    named = headers.get(CLASS_HEADER)
    if named is not None:
        match named.strip().lower():
            case "rt":
                traffic_class = "rt"
            case "be":
                traffic_class = "be"
            case other:
                raise RequestError(
                    f"{CLASS_HEADER}: {printable(other)!r} is neither 'rt' nor 'be'.", param=CLASS_HEADER
                )
    ttft_ms = _milliseconds(headers, TTFT_HEADER) or options.ttft_slo_ms
    tpot_ms = _milliseconds(headers, TPOT_HEADER) or options.tpot_slo_ms
    slo = Slo(
        ttft_s=ttft_ms / 1000 if ttft_ms else 0.0,
        tpot_s=tpot_ms / 1000 if tpot_ms else 0.0,
        deadline_s=options.deadline_ms / 1000 if options.deadline_ms else 0.0,
    )
    return traffic_class, slo, options.online is not False


def if_late_of(options: CohortOptions, headers: Mapping[str, str], slo: Slo) -> IfLate:
    """As named; a client that names a TTFT SLO and no outcome prefers an error at once to an answer that is late."""
    named = headers.get(IF_LATE_HEADER)
    if named is None:
        return options.if_late or ("refuse" if slo.ttft_s else "")
    match named.strip().lower():
        case "refuse" | "best_effort" | "serve" as outcome:
            return outcome
        case other:
            raise RequestError(
                f"{IF_LATE_HEADER}: {printable(other)!r} is none of 'refuse', 'best_effort' and 'serve'.",
                param=IF_LATE_HEADER,
            )


def _milliseconds(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not LEAST_MS <= value <= MOST_MS:  # also false for NaN
        raise RequestError(f"{name}: {printable(text)!r} is no number of milliseconds.", param=name)
    return value


def printable(text: str, limit: int = 100) -> str:
    """A client's own text as it may appear in an answer: short, and encodable."""
    shown = text if len(text) <= limit else f"{text[:limit]}…"
    return shown.encode("utf-8", "backslashreplace").decode("utf-8")
