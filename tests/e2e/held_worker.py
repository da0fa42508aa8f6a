"""A worker that generates so many tokens and then waits for its test: what happens while streams are open happens at a
number of tokens, however fast the machine is and whoever on it is not scheduled for seconds.

    python -m tests.e2e.held_worker --config … --instance … --run-dir …

    Hold (file) ──▶ its steps go on until so many tokens are sent, of so many requests ──▶ the same in another file
                    then none begins until the first file is gone or says more; heartbeats and connections live

Everything else is the real worker.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.messages import TokenBatch
from cohort.common.process.service import service_main
from cohort.common.transport.zmq_bus import ZmqBus
from tests.e2e.held_file import Hold, content, held_file, hold_file

LOOK_S = 0.01


class _Counter:
    def __init__(self, hold: Path, held: Path) -> None:
        self._hold, self._held = hold, held
        self._wanted: Hold | None = None
        self._said = self._answered = b""
        self._tokens, self._requests = 0, set[str]()

    def sent(self, batch: TokenBatch) -> None:
        self._tokens += sum(len(update.tokens) for update in batch.updates)
        self._requests |= {update.attempt.request_id for update in batch.updates if update.tokens}

    def before_step(self) -> None:
        """By the engine's thread."""
        while (said := self._asked()) and self._reached():
            if self._answered != said:
                fresh = self._held.with_suffix(".new")
                fresh.write_bytes(said)
                fresh.replace(self._held)
                self._answered = said
            time.sleep(LOOK_S)

    def _asked(self) -> bytes:
        """Empty where nothing is."""
        said = content(self._hold)
        if said != self._said:
            self._said, self._answered = said, b""
            self._held.unlink(missing_ok=True)
            self._wanted = msgspec.json.decode(said, type=Hold) if said else None
            self._tokens, self._requests = 0, set()
        return said

    def _reached(self) -> bool:
        wanted = self._wanted
        return wanted is not None and self._tokens >= wanted.tokens and len(self._requests) >= wanted.requests


def _count(counter: _Counter) -> None:
    send, launch = ZmqBus.send, ModelRunner.launch

    def counted_send(bus: ZmqBus, peer: Any, message: Any) -> None:
        send(bus, peer, message)
        if isinstance(message, TokenBatch):
            counter.sent(message)

    def held_launch(runner: ModelRunner, batch: Any) -> Any:
        counter.before_step()
        return launch(runner, batch)

    ZmqBus.send = counted_send  # type: ignore[method-assign]
    ModelRunner.launch = held_launch  # type: ignore[method-assign]


if __name__ == "__main__":
    from cohort.services.decode_worker.service import serve as decode
    from cohort.services.prefill_worker.service import serve as prefill

    given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    folder, name = Path(given["--run-dir"]), given["--instance"]
    _count(_Counter(hold_file(folder, name), held_file(folder, name)))
    if name.startswith("decode"):
        service_main("decode_worker", decode)
    service_main("prefill_worker", prefill)
