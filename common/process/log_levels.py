"""The log level of a running process, changed by SIGUSR2: to the level that a file names, else to debug and back.

    cohort log-level gateway debug  ─▶ <run folder>/gateway.log-level ─▶ SIGUSR2 ─▶ the process takes the file
    kill -USR2 PID                  ─▶ no file: debug, or the configured level where it was debug already

`service.py` listens for every process; `cohort log-level` asks. A level lasts until the process ends: one that is
started again has the configured level. Decides nothing about what is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Literal, get_args

import structlog

from cohort.common.keys.private_files import write_private
from cohort.common.process.logs import log_level, set_log_level

Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = get_args(Level)


def level_file(run_dir: Path, instance: str) -> Path:
    return run_dir / f"{instance}.log-level"


def request_level(run_dir: Path, instance: str, level: Level) -> Path:
    """Write the file that the process reads at its next SIGUSR2, and return its path. Raises `OSError`."""
    path = level_file(run_dir, instance)
    write_private(path, level.encode())
    return path


def listen_for_levels(
    run_dir: Path, instance: str, configured: Level, log: structlog.stdlib.BoundLogger, loop: asyncio.AbstractEventLoop
) -> None:
    """Let SIGUSR2 change the level instead of ending the process. A file of an earlier process is removed."""
    path = level_file(run_dir, instance)
    with contextlib.suppress(OSError):  # a run folder that is not usable is refused elsewhere, by name
        path.unlink()

    def change() -> None:
        before = log_level()
        requested = _taken(path)
        if requested and requested not in LEVELS:
            log.warning("log level not changed: no such level", asked=requested[:40], known=LEVELS)
            return
        other: Level = "debug" if before != "debug" else configured
        level = next((known for known in LEVELS if known == requested), other)
        set_log_level(level)
        # As a warning, so that it is written whatever the level was and is; but for "error" on both sides.
        log.warning("log level changed", before=before, now=level)

    loop.add_signal_handler(signal.SIGUSR2, change)


def _taken(path: Path) -> str:
    """Return the file's content and remove the file: its absence tells the sender that it was read. "" without one."""
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
        path.unlink(missing_ok=True)
    except OSError:
        return ""
    return text
