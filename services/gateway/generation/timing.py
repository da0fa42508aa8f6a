"""Where a request's time went: the parts of its time to first token, and whether its SLO was kept.

Pure; called by `request_stats.py` for metrics and by `openai_shapes.py` for the answer's own extras. All times are
seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from cohort.common.machines.entry import Entry
from cohort.common.process.metrics import TtftStage
from cohort.common.types import Slo
from cohort.services.gateway.generation.request_trace import RequestTrace
from cohort.services.gateway.keys.key_lease import Judged


@dataclass(slots=True)
class GatewayTimes:
    """The gateway's own timestamps of a request (monotonic) and durations."""

    arrived_s: float
    tokenize_s: float = 0.0
    trace: RequestTrace | None = None
    judged: Judged | None = None
    """Told of each choice that had SLOs; None: no API key asked."""


def ttft_stages(times: GatewayTimes, entry: Entry) -> dict[TtftStage, float]:
    """Parts that add up to the time to first token; empty before there is one.

    `first_decode` is what no other part explains: the first token's way through sampling, the wire and this process.
    """
    if entry.first_token_s is None or entry.first_times is None:
        return {}
    worker = entry.first_times
    stages: dict[TtftStage, float] = {
        "tokenize": times.tokenize_s,
        "predict": entry.predict_s,
        "bucket": entry.bucket_s,
        "prefill_queue": worker.queue_s,
        "prefill": worker.prefill_s,
        "transfer": worker.transfer_s,
    }
    explained_s = sum(stages.values())
    stages["first_decode"] = max(0.0, entry.first_token_s - times.arrived_s - explained_s)
    return stages


def tpot_s(entry: Entry) -> float | None:
    """Mean time per output token after the first; None when there is no second."""
    if entry.first_token_s is None or entry.last_token_s is None or len(entry.output) < 2:
        return None
    return (entry.last_token_s - entry.first_token_s) / (len(entry.output) - 1)


def slo_outcomes(slo: Slo, *, ttft_s: float | None, per_token_s: float | None, e2e_s: float | None) -> dict[str, bool]:
    """Objective → met, for every objective that was promised. A time that never came (None) misses its objective,
    except the one per token: an answer of one token has none."""
    outcomes: dict[str, bool] = {}
    if slo.ttft_s:
        outcomes["ttft"] = ttft_s is not None and ttft_s <= slo.ttft_s
    if slo.tpot_s and (per_token_s is not None or ttft_s is None):
        outcomes["tpot"] = per_token_s is not None and per_token_s <= slo.tpot_s
    if slo.deadline_s:
        outcomes["deadline"] = e2e_s is not None and e2e_s <= slo.deadline_s
    return outcomes
