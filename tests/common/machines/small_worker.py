"""One worker's machine with a small cache, told by hand; for tests that assert whole lists of effects."""

from __future__ import annotations

from random import Random
from typing import Any

from cohort.common.machines.events import LinkAddresses
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.machines.worker.worker_state import WorkerSettings, WorkerSetup
from cohort.common.messages import StartSegment
from cohort.common.policies.baselines.continuous_batching import ContinuousBatching
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.interface import KvAllocator
from cohort.common.types import Attempt, KvGeometry, Request, Role, SamplingParams, Segment, WorkerCapacity

BLOCK, BLOCKS, PROMPT = 4, 64, 12
GEOMETRY = KvGeometry(1, 1, 8, 2, BLOCK)


def setup(role: Role, host_blocks: int = 0, **settings: Any) -> WorkerSetup:
    """The instance is named like its role."""
    chosen: dict[str, Any] = {
        "links": ("link",),
        "offer_timeout_s": 5.0,
        "accept_timeout_s": 10.0,
        "lease_s": 5.0,
        "default_prediction": 8.0,
    }
    capacity = WorkerCapacity(role, "m", 128, 1, 1, 8, 2, BLOCK, BLOCKS, host_blocks, 16, 64)
    return WorkerSetup(role.value, 3, "ipc://inbox", "manager", capacity, WorkerSettings(**chosen | settings))


def machine(role: Role, kv: KvAllocator | None = None, **settings: Any) -> WorkerMachine:
    scheduler = ContinuousBatching(max_rows=16, max_step_tokens=64, prefill_chunk=64, preemption="recompute")
    allocator = kv or PagedAllocator(GEOMETRY, BLOCKS, 0, prefix_caching=False)
    worker = WorkerMachine(setup(role, allocator.host_blocks, **settings), scheduler, allocator, Random(0))
    assert worker.handle(0.0, LinkAddresses({"link": b"here"})) == []
    return worker


def segment(index: int, request_id: str = "r", max_tokens: int = 8, decoder: str | None = "decode") -> StartSegment:
    """Of a request whose prompt is computed by "prefill" and its output by `decoder` (None: bound later)."""
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(99,))
    request = Request(Attempt(request_id, 1), "gateway", [5] * PROMPT, PROMPT, sampling, 0.0)
    segments = [Segment(0, PROMPT, "prefill"), Segment(PROMPT, None, decoder)]
    return StartSegment(request, segments, index, "ipc://gateway", "ipc://next" if decoder and not index else "")


def whole(request_id: str = "r", max_tokens: int = 8) -> StartSegment:
    """Of a request that is computed here from its first position to its last."""
    asked = segment(0, request_id, max_tokens)
    return StartSegment(asked.request, [Segment(0, None, "unified")], 0, "ipc://gateway")
