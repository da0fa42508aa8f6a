"""`cohort log-level`: another log level for processes that run, until they end.

Finds the pipeline by its run folder, as `cohort serve --status` does; leaves each process a file and signals it
(`process/log_levels.py`). Signals only processes whose start time matches the one on record and that catch the signal:
one that is just starting would be ended by it.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cohort.common import paths
from cohort.common.process.log_levels import LEVELS, Level, request_level
from cohort.services.cli.ports import add_port
from cohort.services.launcher.control import EXIT_NOT_RUNNING, running
from cohort.services.launcher.run_files import ProcessMark, RunFiles

ANSWER_DEADLINE_S = 3.0
_POLL_S = 0.02

EPILOG = """\
examples:
  cohort log-level debug                   every process of the pipeline on port 8000
  cohort log-level gateway debug           one process, named as in `cohort status`
  cohort log-level worker info             all workers
  cohort log-level prefill debug           prefill-0, prefill-1 …
  kill -USR2 PID                           without this command: debug, and the next time back
  docker compose kill -s SIGUSR2 gateway   the same in containers

A level lasts until the process ends; `logging.level` is what it starts with.
Exit codes: 0 all of them changed, 1 a process did not, 2 no process has that name, 3 no pipeline is running."""


DESCRIPTION = "Change the log level of running processes: all, one, or those of one kind."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "service",
        nargs="?",
        default="",
        metavar="SERVICE",
        help="a process (gateway, manager, predictor, monitor, prefill-0 …) or a kind of worker (worker, prefill, "
        "decode, unified); default: all",
    )
    parser.add_argument("level", choices=LEVELS, metavar="LEVEL", help=f"one of {', '.join(LEVELS)}")
    add_port(parser)


def run(options: argparse.Namespace) -> int:
    files = RunFiles(paths.run_dir(options.port))
    if (state := running(files, options.port)) is None:
        return EXIT_NOT_RUNNING
    if state.nodes:
        sys.stderr.write(
            "the processes of this pipeline are on several machines: send SIGUSR2 to one on its own, "
            "`cohort serve --status` names them\n"
        )
        return 2
    chosen = matching(options.service, list(state.processes))
    if not chosen:
        sys.stderr.write(f"no process is called {options.service}; there are: {', '.join(state.processes)}\n")
        return 2
    return change(files.folder, {name: state.processes[name] for name in chosen}, options.level)


def matching(service: str, instances: Sequence[str]) -> list[str]:
    """Return the processes that a word names. A folder's name (bucketing_manager) names its process, too."""
    kind = {"bucketing_manager": "manager", "length_predictor": "predictor", "global_monitor": "monitor"}.get(
        service, service.removesuffix("_worker")
    )
    kinds = ("prefill", "decode", "unified")
    match kind:
        case "":
            return list(instances)
        case "worker" | "workers":
            return [name for name in instances if name.rpartition("-")[0] in kinds]
        case _:
            return [name for name in instances if name == kind or name.rpartition("-")[0] == kind]


def change(folder: Path, marks: Mapping[str, ProcessMark], level: Level) -> int:
    """Request the level of each process, and wait until it has read its file. 0: all did."""
    requested: dict[str, Path] = {}
    failed: dict[str, str] = {}
    for instance, mark in marks.items():
        if not catches(mark.pid, signal.SIGUSR2):
            failed[instance] = "is starting or has ended; try again"
            continue
        path = request_level(folder, instance, level)
        if mark.send(signal.SIGUSR2):
            requested[instance] = path
        else:
            path.unlink(missing_ok=True)
            failed[instance] = "has ended"
    deadline_s = time.monotonic() + ANSWER_DEADLINE_S
    while any(path.exists() for path in requested.values()) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    for instance, path in requested.items():
        if path.exists():
            failed[instance] = f"did not answer within {ANSWER_DEADLINE_S:.0f} s"
    for instance in marks:
        sys.stdout.write(f"{instance}: {failed.get(instance, level)}\n")
    return 1 if failed else 0


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether this process has a handler for the signal (`SigCgt`, a mask of 64 bits); False if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
        caught = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught, 16) >> (number - 1) & 1)
