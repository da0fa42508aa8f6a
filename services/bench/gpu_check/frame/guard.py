"""One broken item hides nothing: every item of a section runs guarded, with a deadline of its own.

    item raises              a row "fail" with the reason; the device is asked whether it still answers
      it answers             the next item runs
      it does not            its context is dead: all later items are "not run", with the cause; the process may end
    memory does not suffice  "does not fit", no verdict: another card would hold it
    deadline passed          an exception in the item; what that does not stop (a kernel that never ends) `runner` ends
                             with the section, its rows written

Made by `__main__` for each section's process, used by the sections. Decides verdicts of failures, never of metrics.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from cohort.services.bench.gpu_check.frame.report import Findings

_LEAST_S = 0.5
_POLL_S = 0.5
_MAX_CACHED_BYTES = 4 << 30
EXIT_ALONE = 3

Found = TypeVar("Found")


class DoesNotFit(Exception):
    """The item needs more memory than this device has."""


class NotInstalled(Exception):
    """The item needs a tool, a package or a function that is not installed."""


class Overrun(Exception):
    """The item's deadline has passed."""


def probe_device(device: torch.device) -> None:
    """Raise what the device raises if its context no longer works."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).item()


class Guard:
    """The items of one section. `seconds`: until the section is to end. `deadline_factor` stretches the items' own
    deadlines: without a GPU nothing is measured, and a busy machine may take its time."""

    def __init__(
        self,
        found: Findings,
        device: torch.device,
        seconds: float,
        *,
        deadline_factor: float = 1.0,
        probe: Callable[[torch.device], None] = probe_device,
    ) -> None:
        self._found = found
        self._device = device
        self._until_s = time.monotonic() + seconds
        self._deadline_factor = deadline_factor
        self._probe = probe
        self.dead = ""
        """Reason why the device no longer answers; "" = it does."""

    @property
    def remaining_s(self) -> float:
        """Seconds until the section is to end."""
        return self._until_s - time.monotonic()

    def item(self, name: str, call: Callable[[], Found], seconds: float = 60.0) -> Found | None:
        """Return `call`'s result; None where it failed, and then a row says why."""
        if (why := self.why_not()) != "":
            self._found.add_note(name, why, "not run")
            return None
        print(f"-- {name}", flush=True)
        started = time.monotonic()
        try:
            with self.deadline(seconds):
                found = call()
            self.settle()
            return found
        except Exception as error:  # of any kind: the row tells
            self.judge(name, error)
        finally:
            print(f"   {time.monotonic() - started:.1f} s", flush=True)
        return None

    def why_not(self) -> str:
        """Return why no item can begin any more; "" = one can."""
        if self.dead:
            return f"the device no longer answers: {self.dead}"
        return "no time was left" if self.remaining_s < _LEAST_S else ""

    def settle(self) -> None:
        """Wait for what the item launched, so that a failure is this item's and not the next one's. Return what the
        allocator keeps of a large item, lest its pieces be in the next one's way."""
        self._probe(self._device)
        if self._device.type == "cuda":
            cached_bytes = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            if cached_bytes > _MAX_CACHED_BYTES:
                torch.cuda.empty_cache()

    def judge(self, name: str, error: BaseException) -> None:
        """Add the row of an item that raised. Let go of what it held, then check that the device still answers."""
        if isinstance(error, NotInstalled):
            self._found.add_note(name, f"not there: {_first_line(error)}")
            return
        if isinstance(error, (torch.OutOfMemoryError, DoesNotFit)):
            self._found.add_note(name, f"does not fit: {_first_line(error)}")
        else:
            traceback.print_exception(error)
            message = str(error) if isinstance(error, Overrun) else f"{type(error).__name__}: {_first_line(error)}"
            self._found.add_note(name, message, "fail")
        for each in (error, error.__cause__, error.__context__):
            if each is not None and each.__traceback__ is not None:
                traceback.clear_frames(each.__traceback__)
        gc.collect()
        try:
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            self._probe(self._device)
        except Exception as broken:
            self.dead = f"{_first_line(broken)} (since: {name})"
            print(f"the device's context is dead: {self.dead}", flush=True)

    @contextlib.contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        """Stop Python code by SIGALRM. For the main thread."""
        seconds = max(_LEAST_S, min(seconds * self._deadline_factor, self.remaining_s))

        def passed(_signal: int, _frame: object) -> None:
            raise Overrun(f"not done after {seconds:.0f} s")

        before = signal.signal(signal.SIGALRM, passed)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def end_with(parent: int) -> None:
    """Start the thread that ends this process and all that it started when `parent`, which started it, is gone."""

    def keep_watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        with contextlib.suppress(OSError):
            os.killpg(0, signal.SIGTERM)
        os._exit(EXIT_ALONE)

    threading.Thread(target=keep_watch, name="watch", daemon=True).start()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
