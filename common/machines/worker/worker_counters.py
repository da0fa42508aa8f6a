"""Counters and averages of a worker, for metrics, reports and cost estimates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from cohort.common.policies.interface import IterationPlan
from cohort.common.types import DraftSource, TrafficClass

NotAhead = Literal["prompts", "ended", "request", "kv_transfer", "news", "policy", "memory", "shared", "drafts"]
"""Why the step after the one in flight is not planned ahead: a prompt goes on, and its next chunk is still to be
decided; no row goes on; a sequence does not run any more; KV is under way or copied; there is news that only a decision
takes in; the scheduler might choose other rows; blocks lack; a row's next slot is, or may become, another sequence's
(`KvAllocator.extend_ahead`); the engine expects several tokens of a sequence, which only a decided step can draft."""


@dataclass(slots=True)
class Averages:
    """Moving averages of measured iterations, for reports and cost estimates."""

    step_s: float = 0.0
    decode_step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0

    def note(self, plan: IterationPlan, latency_s: float) -> None:
        self.step_s = mix(self.step_s, latency_s)
        prefill = sum([row.count for row in plan.rows if row.count > 1])
        if prefill == 0:
            self.decode_step_s = mix(self.decode_step_s, latency_s)
        else:
            self.prefill_tokens_per_s = mix(self.prefill_tokens_per_s, prefill / max(latency_s, 1e-9))

    def note_decodes(self, latencies_s: Iterable[float]) -> None:
        """`note` of so many iterations without a prompt."""
        step_s, decode_step_s = self.step_s, self.decode_step_s
        for latency_s in latencies_s:  # `mix`, written out
            step_s = latency_s if step_s == 0.0 else 0.9 * step_s + 0.1 * latency_s
            decode_step_s = latency_s if decode_step_s == 0.0 else 0.9 * decode_step_s + 0.1 * latency_s
        self.step_s, self.decode_step_s = step_s, decode_step_s


def mix(old: float, new: float) -> float:
    """The moving average after one more measurement; 0 = none so far."""
    return new if old == 0.0 else 0.9 * old + 0.1 * new


@dataclass(slots=True)
class WorkerCounters:
    """Totals since start, for metrics."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    transfers_out: int = 0
    transfers_in: int = 0
    transfer_failures: int = 0
    transfer_retries: int = 0
    exposed_transfer_s: float = 0.0
    """Of KV transfers to here: time from a segment's last row until the request could go on, which no compute hid."""
    stalls: int = 0
    fenced: int = 0
    """Commands refused because another manager leads."""
    misnamed: int = 0
    """Messages dropped because another peer than their sender would have to say them."""
    pooled: int = 0
    """Parked sequences moved to host memory (A2), prefetched back (A9), sent straight from there."""
    prefetched: int = 0
    from_host: int = 0
    planned_ahead: int = 0
    """Steps begun behind the one in flight, and requests for one that had to be refused, by `NotAhead`."""
    not_ahead: dict[NotAhead, int] = field(default_factory=dict)
    wasted_rows: int = 0
    """Rows computed for sequences that had ended meanwhile."""
    adapter_loads: int = 0
    adapter_failures: int = 0
    """LoRA adapters loaded, and those that could not be."""
    drafted_rows: dict[TrafficClass, int] = field(default_factory=lambda: {"rt": 0, "be": 0})
    drafted_tokens: dict[TrafficClass, int] = field(default_factory=lambda: {"rt": 0, "be": 0})
    accepted_tokens: dict[TrafficClass, int] = field(default_factory=lambda: {"rt": 0, "be": 0})
    """Decode rows that were computed with drafts, these drafts, and those of them that were right."""
    drafts_of: dict[DraftSource, int] = field(default_factory=dict)
    right_of: dict[DraftSource, int] = field(default_factory=dict)
    """The same tokens, by what expected them."""
    finished: dict[str, int] = field(default_factory=dict)
