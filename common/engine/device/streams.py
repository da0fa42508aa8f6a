"""Orders of work on a device: one interface over CUDA streams and over the processor, where all work is done at once.

Used by modules that launch work for the device (steps, copies), so that the order they ask for can be tested without
one. Decides nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Block the calling thread until everything before the point is done; other threads go on meanwhile."""


class Stream(Protocol):
    """Work is done in the order in which it was launched."""

    def use(self) -> AbstractContextManager[Any]:
        """Let the calling thread launch its work here, within this context."""

    def mark(self) -> Mark:
        """Return the point behind all that was launched so far."""

    def after(self, mark: Mark) -> None:
        """Make work launched from now on run after that point of another stream; no thread waits."""


class HostStream:
    """The processor: launched is done, so any mark is passed."""

    def use(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self) -> Mark:
        return self

    def wait(self) -> None:
        return None

    def after(self, mark: Mark) -> None:
        mark.wait()


class _CudaMark:
    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()


class CudaStream:
    """A stream of its own: it neither waits for the device's default stream nor holds it up."""

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def use(self) -> AbstractContextManager[Any]:
        manager: AbstractContextManager[Any] = torch.cuda.stream(self.stream)
        return manager

    def mark(self) -> Mark:
        # Blocking: the waiting thread sleeps instead of spinning on a core that the event loop needs.
        event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return _CudaMark(event)

    def after(self, mark: Mark) -> None:
        if isinstance(mark, _CudaMark):
            self.stream.wait_event(mark.event)
        else:
            mark.wait()


def stream_for(device: torch.device) -> Stream:
    """Make a stream on that device."""
    return CudaStream(device) if device.type == "cuda" else HostStream()
