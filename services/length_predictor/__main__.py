"""Run the length predictor: `python -m cohort.services.length_predictor --config FILE`."""

from __future__ import annotations

import asyncio

from cohort.common.process.service import ServiceContext, service_main
from cohort.common.tracing.spans import Tracing
from cohort.services.length_predictor.service import LengthPredictor


async def build(context: ServiceContext) -> None:
    """Answer until asked to stop; then the training child saves what was learned."""
    service = LengthPredictor(context.config, context.bus, context.log, context.registry)
    service.tracing, service.activity = Tracing.opened(context), context.activity
    context.stats = service.stats
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(service.serve(), name="serve"),
            tasks.create_task(service.child.run(), name="training child"),
        ]
        context.ready = True
        await context.stopping.wait()
        for task in running:
            task.cancel()


if __name__ == "__main__":
    service_main("length_predictor", build)
