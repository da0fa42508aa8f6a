"""Sends a prepared workload on time and collects the records: open loop by due times, closed loop by free slots.

Called by `harness`. Owns the tasks of the run (one TaskGroup), measures its own lateness, and stops early
when `stop` is set: requests in flight are then cancelled and counted as such. Never builds a body and never interprets
a result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from cohort.common.workloads.arrivals import Arrivals, ClosedLoop
from cohort.services.bench.http.load.client import HttpStreamClient, PreparedRequest, RequestRecord, now_s

LAG_PERIOD_S = 0.01


@dataclass(frozen=True, slots=True)
class RunLog:
    """Everything observed: records in the order of the plans that were sent, lateness of the client's own loop."""

    records: tuple[RequestRecord, ...]
    loop_lag_s: tuple[float, ...]
    interrupted: bool


class Driver:
    """One run."""

    def __init__(
        self,
        client: HttpStreamClient,
        requests: Sequence[PreparedRequest],
        arrivals: Arrivals,
        *,
        duration_s: float | None = None,
        stop: asyncio.Event | None = None,
    ) -> None:
        self._client = client
        self._requests = requests
        self._arrivals = arrivals
        self._duration_s = duration_s
        self._stop = stop or asyncio.Event()
        self._records: list[RequestRecord] = []
        self._start_s = 0.0

    async def run(self) -> RunLog:
        lag: list[float] = []
        self._start_s = now_s()
        async with asyncio.TaskGroup() as group:
            probe = group.create_task(measure_loop_lag(lag))
            sending = group.create_task(self._send_all())
            stopped = group.create_task(self._stop.wait())
            await asyncio.wait((sending, stopped), return_when=asyncio.FIRST_COMPLETED)
            for task in (sending, stopped, probe):
                task.cancel()
        return RunLog(tuple(self._records), tuple(lag), self._stop.is_set())

    async def _send_all(self) -> None:
        if isinstance(self._arrivals, ClosedLoop):
            await self._closed_loop(self._arrivals.concurrency)
        else:
            await self._open_loop()

    async def _open_loop(self) -> None:
        async with asyncio.TaskGroup() as group:
            for request in self._requests:
                due_s = request.plan.due_s or 0.0
                delay_s = self._start_s + due_s - now_s()
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                group.create_task(self._exchange(request, due_s))

    async def _closed_loop(self, concurrency: int) -> None:
        waiting = iter(self._requests)

        async def user() -> None:
            for request in waiting:
                due_s = now_s() - self._start_s
                if self._duration_s is not None and due_s >= self._duration_s:
                    return
                await self._exchange(request, due_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(self._requests))):
                group.create_task(user())

    async def _exchange(self, request: PreparedRequest, due_s: float) -> None:
        record = RequestRecord(request.plan, due_s=due_s)
        self._records.append(record)
        await self._client.stream(request, record, self._start_s)


async def measure_loop_lag(lag_s: list[float], period_s: float = LAG_PERIOD_S) -> None:
    """How late this process wakes up: if that is not small, the client and not the server is being measured.

    Sleeping in steps is the measurement itself here.
    """
    while True:
        asked_s = now_s()
        await asyncio.sleep(period_s)
        lag_s.append(max(0.0, now_s() - asked_s - period_s))
