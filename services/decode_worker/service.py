"""Decode worker: takes over computed prompts and generates.

Messages: StartSegment, Cancel, KV transfer (from manager, gateways, workers) → `WorkerMachine` → tokens to gateways,
acceptances to prefill workers, reports to the manager. It can compute prompts too: after a preemption, and for
requests placed here when no prefill worker lives.
"""

from __future__ import annotations

from cohort.common.engine.worker.worker_process import run_worker
from cohort.common.policies import compose
from cohort.common.process.service import ServiceContext
from cohort.common.types import Role


async def serve(context: ServiceContext) -> None:
    await run_worker(context, Role.DECODE, compose)
