"""The monitor's joint metrics, read over HTTP, and their sums. Used by `cohort status` and `cohort doctor`."""

from __future__ import annotations

import math
import ssl
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families

from cohort.common.http.tls import unverified

ANSWER_DEADLINE_S = 3.0
Labels = frozenset[tuple[str, str]]


def get(url: str, timeout_s: float = ANSWER_DEADLINE_S) -> tuple[bytes, Mapping[str, str]]:
    """Return body and headers; uses no proxy. Raises `OSError`, also for an HTTP status beyond 299."""
    encrypted: ssl.SSLContext | None = unverified() if url.startswith("https:") else None
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if encrypted is not None:
        handlers.append(urllib.request.HTTPSHandler(context=encrypted))
    with urllib.request.build_opener(*handlers).open(url, timeout=timeout_s) as answer:
        return answer.read(), dict(answer.headers.items())


class Scraped:
    """One reading."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, dict[Labels, float]] = defaultdict(dict)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples[sample.name][frozenset(sample.labels.items())] = sample.value

    @staticmethod
    def of(url: str) -> Scraped:
        """Read the metrics of the monitor at this address. Raises `OSError`, `ValueError`."""
        return Scraped(get(url.rstrip("/") + "/metrics")[0].decode("utf-8", "replace"))

    def each(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """Yield the series of this name with these labels."""
        wanted = labels.items()
        for found, value in self._samples.get(name, {}).items():
            if found >= wanted:
                yield dict(found), value

    def total(self, name: str, **labels: str) -> float:
        return sum(value for _, value in self.each(name, **labels) if not math.isnan(value))


def unreachable(error: OSError) -> str:
    """Return for a person why an address did not answer."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}"
    return str(getattr(error, "reason", error)) or type(error).__name__
