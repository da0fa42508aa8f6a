"""Prefill worker: computes prompts and hands their KV over.

Messages: StartSegment, Cancel, KV transfer (from manager, gateways, workers) → `WorkerMachine` → tokens to gateways,
KV and KV transfers to decode workers, reports to the manager. The configuration may give this process the unified
role; then it decodes as well: the engine is the same.
"""

from __future__ import annotations

from cohort.common.engine.worker.worker_process import run_worker
from cohort.common.policies import compose
from cohort.common.process.service import ServiceContext
from cohort.common.types import Role


async def serve(context: ServiceContext) -> None:
    await run_worker(context, Role.PREFILL, compose)
