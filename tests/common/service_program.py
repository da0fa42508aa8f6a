"""A service with one behaviour per instance name, run as a real process by `test_service`."""

from __future__ import annotations

import asyncio

from aiohttp import web

from cohort.common.errors import ConfigError, NoDeviceLeft
from cohort.common.machines.effects import Send
from cohort.common.machines.events import Tick
from cohort.common.messages import KvRenew, Registered
from cohort.common.process import service
from cohort.common.process.guard import guarded
from cohort.common.process.service import ServiceContext, metrics_routes, service_main

SHORT_S = 0.5


class Contradictory:
    def handle(self, now_s: float, *events: Tick) -> list[Send]:
        held = {"r": 2}
        assert held["r"] == 1, f"{held} are held"
        return []

    def check(self) -> None:
        pass


async def build(context: ServiceContext) -> None:
    match context.instance:
        case "fails":
            raise RuntimeError("it was not meant to be")
        case "fails-later":
            await asyncio.sleep(0.1)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_fail())
        case "bad-option":
            raise ConfigError("model.path: /nowhere holds no model")
        case "no-device":
            raise NoDeviceLeft("no share of a GPU is left for this worker")
        case "returns":
            return
        case "stuck" | "stuck-2":
            if context.instance == "stuck":
                service.DRAIN_MARGIN_S = SHORT_S
            context.ready = True
            await asyncio.Event().wait()
        case "contradicts-itself":
            machine = guarded(context, Contradictory())
            asyncio.get_running_loop().call_later(0.1, machine.handle, 1.0, Tick())  # where no task would end by it
            await asyncio.Event().wait()
        case "deaf":
            service.DRAIN_MARGIN_S = service.CANCEL_S = SHORT_S
            context.ready = True
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    context.log.info("not listening")
        case "own-metrics":
            application = web.Application()
            application.add_routes(metrics_routes(context))
            runner = web.AppRunner(application)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            context.metrics_url = f"http://127.0.0.1:{runner.addresses[0][1]}/metrics"
            context.ready = True
            await context.stopping.wait()
            await runner.cleanup()
        case _:
            await _echo(context)


async def _fail() -> None:
    raise RuntimeError("a part of it failed")


async def _echo(context: ServiceContext) -> None:
    """Answers Registered with KvRenew; drains until it has answered one more."""
    beats, looked = 0, asyncio.Event()

    def stats() -> dict[str, float]:
        nonlocal beats
        beats += 1
        if beats == 2:
            raise RuntimeError("figures are not ready")
        return {"beats": float(beats)}

    context.stats = stats
    context.metrics.counter("echoes", "Messages answered")().inc()
    context.ready = True

    async def answer() -> None:
        while True:
            peer, message = await context.bus.receive()
            if isinstance(message, Registered):
                context.bus.send(peer, KvRenew([message.incarnation]))
                if context.stopping.is_set():
                    looked.set()

    task = asyncio.create_task(answer())
    await context.stopping.wait()
    await looked.wait()
    context.log.info("drained")
    task.cancel()


if __name__ == "__main__":
    import sys

    service_main("decode_worker", build, serve_metrics="own-metrics" not in sys.argv)
