"""One request as the client saw it. Written by `client` and `driver`, read by `report`.

All times are seconds of one monotonic clock, relative to the start of the run.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal

from cohort.services.bench.http.load.workload import RequestPlan

Status = Literal["pending", "completed", "failed", "cancelled"]


@dataclass(slots=True)
class RequestRecord:
    """`token_s` holds one entry per chunk that carried output; `end_s` is the last chunk with choices, or the
    failure."""

    plan: RequestPlan
    due_s: float = 0.0
    sent_s: float = 0.0
    end_s: float = 0.0
    token_s: array[float] = field(default_factory=lambda: array("d"))
    status: Status = "pending"
    error_kind: str = ""
    error_detail: str = ""
    reported_prompt_tokens: int | None = None
    reported_output_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def output_tokens(self) -> int:
        """By the server's usage; where it sends none, chunks with output are counted instead."""
        return len(self.token_s) if self.reported_output_tokens is None else self.reported_output_tokens

    @property
    def prompt_tokens(self) -> int:
        return self.plan.prompt_tokens if self.reported_prompt_tokens is None else self.reported_prompt_tokens

    @property
    def client_queue_s(self) -> float:
        """Between due and sent: the client's own delay."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float | None:
        return self.token_s[0] - self.sent_s if self.token_s else None

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """(e2e - TTFT) / (n - 1); undefined for a single token."""
        ttft_s = self.ttft_s
        if ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - ttft_s) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between consecutive chunks with output."""
        return [later - earlier for earlier, later in zip(self.token_s, self.token_s[1:], strict=False)]
