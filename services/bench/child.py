"""A measuring process of ours: started, its progress shown, waited for.

The benchmark itself loads neither torch nor UCX; code that needs them runs as a child that writes its result to a file
and says on stderr what it is doing, as lines `progress DONE TOTAL WHAT`.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from cohort.common.errors import CohortError

Report = Callable[[int, int, str], None]
_LAST_LINES = 12
_PROGRESS = re.compile(r"progress (\d+) (\d+) (.*)")


class MeasurementFailed(CohortError):
    """The measuring process ended without a result."""


def shown_on(console: Console) -> Report:
    """Return a report of progress as lines; none on a quiet console."""
    return lambda done, total, what: console.print(f"{done + 1}/{total} {what}", highlight=False, markup=False)


def run_child(module: str, arguments: Sequence[str], report: Report) -> None:
    """Run a measuring process to its end. Raises `MeasurementFailed` with its last lines. Never leaves it behind."""
    command = [sys.executable, "-P", "-m", module, *arguments]
    last: deque[str] = deque(maxlen=_LAST_LINES)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        try:
            for line in child.stderr:
                if (found := _PROGRESS.match(line)) is not None:
                    report(int(found[1]), int(found[2]), found[3])
                else:
                    last.append(line.rstrip())
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        message = "\n".join(last) or f"{module} ended with {child.returncode}"
        raise MeasurementFailed(message.removeprefix("cohort bench: "))


@contextmanager
def leaves_when_terminated() -> Iterator[Callable[[], None]]:
    """End the block by `SystemExit` at SIGTERM, whose default would leave running what the block started: once the
    given function has been called, before which there may be nothing to end. Main thread only."""
    started, terminated = False, False

    def leave(*_: object) -> None:
        nonlocal terminated
        terminated = True
        if started:
            raise SystemExit(128 + signal.SIGTERM)

    def begin() -> None:
        nonlocal started
        started = True
        if terminated:
            raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield begin
    finally:
        signal.signal(signal.SIGTERM, before)
