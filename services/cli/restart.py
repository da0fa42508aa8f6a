"""`cohort restart`: asks the launcher of a running pipeline to restart its processes one after the other."""

from __future__ import annotations

import argparse

from cohort.services.cli.ports import add_port

DESCRIPTION = "Restart the processes of a running pipeline one after the other, without a lost request."

EPILOG = """\
examples:
  cohort restart                    all: monitor, predictor, manager, workers, gateways
  cohort restart decode-0 gateway   these, in that order
  cohort restart --port 9000        another pipeline

Each process drains, ends, starts again from the files as they are now, and is ready before the next one's turn.
Requests that run on a worker go on at another one; responses that a gateway has begun are completed first, for at most
drain_s, and new connections wait at the port meanwhile (with gateway.processes=2 none waits).
docs/guide/operations.md#upgrades has the rest.

Exit codes: 0 all are ready again, 1 one did not come back (the others were left as they were), 3 nothing runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("processes", nargs="*", metavar="PROCESS", help="decode-0, gateway … (default: all)")
    add_port(parser)


def run(options: argparse.Namespace) -> int:
    from cohort.common.paths import run_dir
    from cohort.services.launcher.control import restart
    from cohort.services.launcher.run_files import RunFiles

    return restart(RunFiles(run_dir(options.port)), options.port, options.processes)
