"""A warning that a peer can cause at will, logged once a second however often it is caused.

Called where messages are skipped: malformed ones by buses and links, those of a wrong type by services. Each counts in
`times`; the last one's details stand for all.
"""

from __future__ import annotations

import asyncio

import structlog

EVERY_S = 1.0
"""Time between two lines: 43,800 malformed messages in ten seconds were 17 MB of logs, one line each."""


class RepeatedWarning:
    def __init__(self, log: structlog.stdlib.BoundLogger, event: str) -> None:
        self._log = log
        self._event = event
        self._times = 0
        self._details: dict[str, object] = {}
        self._pause: asyncio.TimerHandle | None = None

    def __call__(self, **details: object) -> None:
        """Log the first one at once, those of the second after it together."""
        self._times += 1
        self._details = details
        if self._pause is None:
            self._write()

    def _write(self) -> None:
        self._log.warning(self._event, **self._details, times=self._times)
        self._times = 0
        self._pause = asyncio.get_running_loop().call_later(EVERY_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        if self._times:
            self._write()
