"""`/metrics` for the whole pipeline: the monitor's own view, then every process's exposition merged into it.

Called by `server.py`. All processes are asked at once, each with a deadline; one that is down or slow costs nothing
but its own stats. An answer is kept for a moment, so that several scrapers cost no more than one. Decides no state
of its own: which processes are up, `aggregate.py` says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import aiohttp
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from structlog.stdlib import BoundLogger

from cohort.common.process.metrics import TOKEN_HEADER, exposition
from cohort.services.global_monitor.aggregate import Cluster, Process, Status
from cohort.services.global_monitor.federation import escape, merge

_SCRAPE_TIMEOUT_S = 0.75
_KEEP_S = 0.5
_MAX_BYTES = 16 << 20


class ClusterCollector(Collector):
    """The monitor's own view as metrics."""

    def __init__(self, cluster: Cluster, now_s: Callable[[], float]) -> None:
        self._cluster = cluster
        self._now_s = now_s

    def collect(self) -> Iterator[Metric]:
        now_s = self._now_s()
        up = GaugeMetricFamily("cohort_up", "1 while heartbeats of the process arrive.", labels=["instance", "role"])
        ready = GaugeMetricFamily("cohort_ready", "1 while the process says it is ready.", labels=["instance", "role"])
        age = GaugeMetricFamily(
            "cohort_heartbeat_age_seconds", "Seconds since the last heartbeat.", labels=["instance", "role"]
        )
        restarts = CounterMetricFamily("cohort_restarts", "Restarts after a failure.", labels=["instance", "role"])
        for process in self._cluster.processes.values():
            labels = [process.instance, process.role]
            up.add_metric(labels, float(process.status is Status.UP))
            ready.add_metric(labels, float(process.ready))
            age.add_metric(labels, process.age_s(now_s))
            restarts.add_metric(labels, process.restarts)
        yield from (up, ready, age, restarts)
        demand = self._cluster.demand
        for name, help_text, value in (
            ("cohort_arrival_rate", "Requests a second, moving average.", demand.rate),
            ("cohort_arrival_rate_forecast", "Requests a second, ten seconds from now.", demand.forecast()),
            ("cohort_mean_prompt_tokens", "Recent requests' prompts.", demand.mean_prompt_tokens),
            ("cohort_mean_output_tokens", "Recent requests' answers.", demand.mean_output_tokens),
        ):
            yield GaugeMetricFamily(name, help_text, value=value)


class Exporter:
    """Fetches and merges; one fetch at a time, shared by all requests that come meanwhile."""

    def __init__(
        self,
        instance: str,
        cluster: Cluster,
        registry: CollectorRegistry,
        session: aiohttp.ClientSession,
        log: BoundLogger,
    ) -> None:
        self._instance = instance
        self._cluster = cluster
        self._registry = registry
        self._session = session
        self._log = log
        self._lock = asyncio.Lock()
        self._exposition = b""
        self._collected_s = float("-inf")
        self._warned: set[str] = set()

    async def expose(self) -> bytes:
        """Return the joint exposition, at most `_KEEP_S` old."""
        async with self._lock:
            if time.monotonic() - self._collected_s > _KEEP_S:
                self._exposition = await self._collect()
                self._collected_s = time.monotonic()
            return self._exposition

    async def _collect(self) -> bytes:
        processes = [process for process in self._cluster.up() if process.metrics_url]
        targets = [process.instance for process in processes]
        answers = await asyncio.gather(*map(self._fetch, processes))
        sources = [(instance, text) for instance, text in zip(targets, answers, strict=True) if text is not None]
        reached = {instance for instance, _ in sources}
        own = exposition(self._registry).decode() + _scrape_states(targets, reached)
        merged = merge([(self._instance, own), *sources])
        for instance, lines in merged.skipped.items():
            self._warn_once(instance, "metrics_not_merged", lines=lines)
        return merged.text.encode()

    async def _fetch(self, process: Process) -> str | None:
        instance, shown = process.instance, {TOKEN_HEADER: process.metrics_token}
        try:
            timeout = aiohttp.ClientTimeout(total=_SCRAPE_TIMEOUT_S)
            # A gateway's certificate is for its clients' names; the address came from the process itself.
            async with self._session.get(
                process.metrics_url, headers=shown, timeout=timeout, allow_redirects=False, ssl=False
            ) as response:
                if response.status != 200:
                    self._warn_once(instance, "metrics_not_fetched", status=response.status)
                    return None
                body = bytearray()
                async for part in response.content.iter_chunked(1 << 16):
                    body += part
                    if len(body) > _MAX_BYTES:
                        self._warn_once(instance, "metrics_not_fetched", error="answer too large")
                        return None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            self._warn_once(instance, "metrics_not_fetched", error=str(error) or type(error).__name__)
            return None
        self._warned.discard(instance)
        return body.decode("utf-8", errors="replace")

    def _warn_once(self, instance: str, event: str, **details: object) -> None:
        """Warn once per process and failure, not three times a second."""
        if instance not in self._warned:
            self._warned.add(instance)
            self._log.warning(event, process=instance, **details)


def _scrape_states(targets: list[str], reached: set[str]) -> str:
    lines = [
        "# HELP cohort_scrape_up 1 if the process's own metrics are part of this answer.",
        "# TYPE cohort_scrape_up gauge",
    ]
    lines += [f'cohort_scrape_up{{instance="{escape(name)}"}} {int(name in reached)}' for name in targets]
    return "\n".join(lines) + "\n" if targets else ""
