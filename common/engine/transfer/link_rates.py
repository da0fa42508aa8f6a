"""What the links to each peer carry, learned from every message sent there, and what follows for the next ones.

    begun ──▶ bytes under way ──▶ ended      rate = bytes that arrived / time in which any were under way

Called by the transfer agent on its event loop. A rate is of a peer and a link: messages side by side share it. What was
measured last weighs most, by bytes, so that a link whose rate changes is known again after a few messages.

At most a window of bytes is under way to a peer: what the link carries in a part of a run's deadline, so that something
arrives well before any of them is given up. Without a rate the window is small. One message may always go.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

FIRST_WINDOW_BYTES = 8 << 20
WINDOW_SHARE = 0.25
"""Of `run_timeout_s`, that the bytes under way may take."""
MEMORY_BYTES = 64 << 20
"""What was measured before so many bytes counts a half."""
LEAST_S = 0.05
"""Of a link in use, or a quarter of the window: before that a new figure is not told."""
NEWS = 0.1
"""Share by which a rate differs from what was told."""


@dataclass(slots=True)
class _Peer:
    under_way: int = 0
    since_s: float = 0.0
    """When it was last looked at while bytes were under way."""
    bytes: float = 0.0
    seconds: float = 0.0
    told: float = 0.0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)

    @property
    def rate(self) -> float:
        """Bytes a second; 0 until known."""
        return self.bytes / self.seconds if self.seconds >= LEAST_S or self.bytes >= FIRST_WINDOW_BYTES else 0.0


class LinkRates:
    def __init__(
        self, run_timeout_s: float, now_s: Callable[[], float], tell: Callable[[str, str, float], None]
    ) -> None:
        """`tell(peer, link, bytes_per_s)`: a rate is known, or differs from what was told before."""
        self._window_s = WINDOW_SHARE * run_timeout_s
        self._now_s, self._tell = now_s, tell
        self._peers: dict[tuple[str, str], _Peer] = {}

    def rate(self, peer: str, link: str) -> float:
        """Bytes a second; 0 until known."""
        known = self._peers.get((peer, link))
        return 0.0 if known is None else known.rate

    async def begin(self, peer: str, link: str, nbytes: int) -> None:
        """Returns when these bytes may go, in the order of the calls. Every one that returns needs an `end`."""
        known = self._peers.setdefault((peer, link), _Peer())
        if known.waiting or not self._may_go(known, nbytes):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry = (nbytes, turn)
            known.waiting.append(entry)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.end(peer, link, nbytes, arrived=False)
                elif entry in known.waiting:
                    known.waiting.remove(entry)
                    self._let_go(known)
                raise
        else:
            self._go(known, nbytes)

    def end(self, peer: str, link: str, nbytes: int, *, arrived: bool) -> None:
        known = self._peers[peer, link]
        now_s = self._now_s()
        known.seconds += now_s - known.since_s
        known.since_s = now_s
        known.under_way -= nbytes
        if arrived:
            known.bytes += nbytes
            kept = 0.5 ** (nbytes / MEMORY_BYTES)
            known.bytes, known.seconds = known.bytes * kept, known.seconds * kept
        elif known.under_way == 0 and known.bytes == 0.0:
            known.seconds = 0.0  # nothing has ever arrived: a dead peer is not a slow link
        rate = known.rate
        if rate and abs(rate - known.told) > NEWS * known.told:
            known.told = rate
            self._tell(peer, link, rate)
        self._let_go(known)

    def forget(self, peer: str) -> None:
        """The peer is another process now, or elsewhere."""
        for key in [key for key, known in self._peers.items() if key[0] == peer and not known.under_way]:
            if not self._peers[key].waiting:
                del self._peers[key]

    def _may_go(self, known: _Peer, nbytes: int) -> bool:
        window = max(self._window_s * known.rate, FIRST_WINDOW_BYTES if not known.rate else 0)
        return known.under_way == 0 or known.under_way + nbytes <= window

    def _go(self, known: _Peer, nbytes: int) -> None:
        now_s = self._now_s()
        if known.under_way:
            known.seconds += now_s - known.since_s
        known.since_s = now_s
        known.under_way += nbytes

    def _let_go(self, known: _Peer) -> None:
        while known.waiting and self._may_go(known, known.waiting[0][0]):
            nbytes, turn = known.waiting.popleft()
            if not turn.done():
                self._go(known, nbytes)
                turn.set_result(None)
