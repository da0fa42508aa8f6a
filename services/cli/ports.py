"""`--port`, by which every command finds a pipeline of this machine, and where its monitor is then."""

from __future__ import annotations

import argparse

from cohort.services.launcher.options import DEFAULT_PORT


def add_port(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        metavar="PORT",
        help="where the clients of the pipeline come, as with `cohort serve --port` (default: %(default)s)",
    )


def monitor_at(port: int) -> str:
    """Return the address of the monitor of the pipeline on this port: as it is configured, the usual one if none runs.
    Raises `CohortError` for a configuration that cannot be read."""
    from cohort.common.config import load_config
    from cohort.common.paths import run_dir
    from cohort.services.launcher.plan import MONITOR_OFFSET, http_base
    from cohort.services.launcher.run_files import RunFiles

    files = RunFiles(run_dir(port))
    if not (files.claimed and files.config_file.is_file()):
        return http_base("", port + MONITOR_OFFSET)
    monitor = load_config([files.config_file]).monitor
    return http_base(monitor.host, monitor.port)
