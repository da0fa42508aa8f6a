"""The operator's view at the terminal: a live table while the pipeline starts, lines for everything else.

Without a terminal (a log file, CI, --detach) the table becomes one line per change of state. Never decides anything.
"""

from __future__ import annotations

import contextlib
import enum
import json
import select
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO, cast

from rich.console import Console as RichConsole
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from cohort.services.launcher.run_files import read_log


class State(enum.StrEnum):
    """State of one process, as the launcher sees it."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


_COLOUR = {State.READY: "green", State.FAILED: "red", State.STOPPED: "dim", State.WAITING: "dim"}
"""Colours; a state without one is shown in yellow, as on its way."""


@dataclass(slots=True)
class Line:
    """One row of the table."""

    instance: str
    port: int
    log: Path
    state: State = State.WAITING
    pid: int = 0
    note: str = ""
    shown_percent: int = 0  # of the weights, as the last line said
    node: str = ""
    """The machine it is on, where there are several."""


class _Output:
    """Standard output that never fails and never blocks: what a full disk, a reader that has gone or does not read, or
    a terminal's character set does not take is lost or written as an escape, and the pipeline goes on."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._poll: select.poll | None = None
        """Poll of the descriptor; None without one. A pipe takes 4 KiB when it says that it takes something."""
        with contextlib.suppress(OSError, ValueError):
            descriptor = file.fileno()
            self._poll = select.poll()
            self._poll.register(descriptor, select.POLLOUT)

    def write(self, text: str) -> None:
        if self._poll is not None and not self._poll.poll(0):
            return
        encoding = self._file.encoding or "utf-8"
        with contextlib.suppress(OSError):
            self._file.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Console:
    """`listener` gets every line of text as well: the process that waits for a detached pipeline reads along."""

    def __init__(
        self, lines: Iterable[Line] = (), *, terminal: bool | None = None, listener: Callable[[str], None] | None = None
    ) -> None:
        self._lines = {line.instance: line for line in lines}
        output = cast("IO[str]", _Output(sys.stdout))
        self._rich = RichConsole(file=output, highlight=False, force_terminal=terminal, soft_wrap=True)
        self._live: Live | None = None
        self._listener = listener

    def start(self) -> None:
        if self._rich.is_terminal:
            self._live = Live(self._table(), console=self._rich, auto_refresh=False)
            self._live.start()

    def show(self) -> None:
        """Print the table once."""
        self._rich.print(self._table())

    def add(self, line: Line) -> None:
        """Add a process that is started later."""
        self._lines[line.instance] = line

    def remove(self, instance: str) -> None:
        self._lines.pop(instance, None)

    def freeze(self) -> None:
        """Leave the table as it is; from now on changes are lines."""
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.stop()
            self._live = None

    def update(
        self,
        instance: str,
        state: State,
        *,
        pid: int | None = None,
        note: str = "",
        node: str | None = None,
        port: int | None = None,
    ) -> None:
        line = self._lines[instance]
        changed = line.state is not state or line.note != note or node not in (None, line.node)
        line.state, line.note, line.shown_percent = state, note, 0
        if pid is not None:
            line.pid = pid
        if node is not None:
            line.node = node
        if port is not None:
            line.port = port
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        elif changed:
            self.print_line(self._as_text(line))

    def print_line(self, text: str, *, style: str = "") -> None:
        body = escape(text)
        self._rich.print(f"[{style}]{body}[/{style}]" if style else body)
        if self._listener is not None:
            self._listener(text)

    def echo_log(self, instance: str, raw: str) -> None:
        """Show a line of a process's log if it is a warning or worse, or reports how far weights are read."""
        text = readable_warning(raw)
        if text:
            self.print_line(f"{instance}: {text}", style="yellow")
        elif (loading := read_loading(raw)) is not None:
            self._show_loading(self._lines[instance], *loading)

    def _show_loading(self, line: Line, percent: int, text: str) -> None:
        """Show progress in the table at once, or as a line per tenth; nothing if all is read within a second."""
        if line.state is not State.STARTING or (percent == 100 and not line.note):
            return
        tenth = percent // 10 > line.shown_percent // 10
        line.note = text
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        elif tenth or not line.shown_percent:
            line.shown_percent = max(1, percent)
            self.print_line(self._as_text(line))

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        on_nodes = any(line.node for line in self._lines.values())
        for heading in ("process", "state", *(("node",) if on_nodes else ()), "pid", "port", "log"):
            table.add_column(heading, justify="right" if heading in ("pid", "port") else "left")
        for line in self._lines.values():
            colour = _COLOUR.get(line.state, "yellow")
            state = f"[{colour}]{line.state}[/{colour}]" + (f" {escape(line.note)}" if line.note else "")
            place = (escape(line.node),) if on_nodes else ()
            table.add_row(line.instance, state, *place, str(line.pid or ""), str(line.port), escape(_short(line.log)))
        return table

    @staticmethod
    def _as_text(line: Line) -> str:
        note = f"  {line.note}" if line.note else ""
        node = f"on {line.node:<15} " if line.node else ""
        where = f"{node}pid {line.pid:<7} port {line.port:<5}"
        return f"{line.instance:<12} {line.state:<10} {where} {_short(line.log)}{note}"


class LogFollower:
    """Lines added to a process's log since the last call. Logs are plain files that the processes write themselves, so
    that a slow terminal or a dead launcher never blocks them; their warnings may be shown a moment late."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._partial = b""

    def new_lines(self) -> list[str]:
        data, end, _ = read_log(self._path, self._offset)
        if end - len(data) != self._offset:  # it was cut or begun anew, or is a flood
            self._partial = b""
        self._offset = end
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]


def readable_warning(raw: str) -> str:
    """Return the gist of a structured log line at level warning or above; "" for anything else."""
    text = readable(raw)
    return text if text != raw and text.startswith(("warning: ", "error: ", "critical: ")) else ""


def readable(raw: str) -> str:
    """Return the gist of a structured log line; any other line as it is."""
    try:
        event = json.loads(raw)
    except ValueError:
        return raw
    if not isinstance(event, dict) or "level" not in event:
        return raw
    known = {"level", "event", "service", "instance", "timestamp", "logger", "exception"}
    rest = " ".join(f"{key}={value}" for key, value in event.items() if key not in known)
    last = str(event.get("exception", "")).strip().rpartition("\n")[2]
    return " ".join(part for part in (f"{event['level']}: {event.get('event', '')}", rest, last) if part)


def read_loading(raw: str) -> tuple[int, str] | None:
    """Return how much of the weights a worker's log line reports as read: percent, and text; None for other lines."""
    if '"loading weights"' not in raw and '"weights read"' not in raw:
        return None
    try:
        event = json.loads(raw)
        rate = f"{event['gigabytes_per_s']:.2f} GB/s"
        if event["event"] == "weights read":
            return 100, f"weights read: {event['gigabytes']} GB in {event['seconds']} s, {rate}"
        percent = int(event["percent"])
    except (ValueError, KeyError, TypeError):
        return None
    return percent, f"reading weights: {percent} %, {rate}"


def _short(path: Path) -> str:
    home = str(Path.home())
    text = str(path)
    return "~" + text[len(home) :] if text.startswith(home + "/") else text
