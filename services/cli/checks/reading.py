"""One reading of a running pipeline: the monitor's state, its joint metrics, and every process's own word.

Made by `doctor.py`, looked at by `pipeline.py`. Asks each process once, all at the same time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

from cohort.services.cli.scraped import Scraped, get, unreachable

HISTORY_S = 120.0


@dataclass(frozen=True, slots=True)
class HealthReply:
    """A process's answer to /health, and to /version where it has one. `error`: why there is none; `ahead_s`: how much
    its clock is ahead of ours, in whole seconds."""

    error: str = ""
    version: str = ""
    ahead_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reading:
    state: Mapping[str, Any]
    metrics: Scraped
    replies: Mapping[str, HealthReply] = field(default_factory=dict)

    @property
    def processes(self) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = self.state["processes"]
        return found

    @staticmethod
    def of(url: str) -> Reading:
        """Read monitor and processes. Raises `OSError`, `ValueError` if no monitor answers."""
        base = url.rstrip("/")
        state = json.loads(get(f"{base}/api/state?history_s={HISTORY_S:.0f}")[0])
        if not isinstance(state, dict) or "processes" not in state:
            raise ValueError(f"{url} does not answer as a Cohort monitor does")
        metrics = Scraped.of(url)
        urls = {
            process["instance"]: process["metrics_url"].removesuffix("/metrics") or base
            for process in state["processes"]
            if process["status"] != "left"
        }
        with ThreadPoolExecutor(max(1, min(32, len(urls)))) as threads:
            replies = dict(zip(urls, threads.map(_health_reply, urls.values()), strict=True))
        return Reading(state, metrics, replies)


def _health_reply(base: str) -> HealthReply:
    try:
        body, headers = get(f"{base}/health")
        data = json.loads(body)
        if "version" not in data:  # the gateway has a page for it
            data = json.loads(get(f"{base}/version")[0])
    except OSError as error:
        return HealthReply(error=unreachable(error))
    except ValueError as error:
        return HealthReply(error=f"no JSON: {error}")
    return HealthReply(version=str(data.get("version", "")), ahead_s=_ahead(headers.get("Date", "")))


def _ahead(date: str) -> float:
    try:
        server_s = parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return 0.0
    passed_s = server_s - time.time()
    return 0.0 if -2.0 <= passed_s <= 1.0 else passed_s  # whole seconds, some of them on the way
