"""The command line of a process that `service_main` runs: the same options for every role.

Called by `service.py` alone. Decides names, defaults and help; reads no configuration.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cohort.common.addresses import ROLES


def option_parser(role: str) -> argparse.ArgumentParser:
    """Of `config`, `preset`, `instance`, `run_dir`, `metrics_port`; exits with 2 on an option it does not know."""
    parser = argparse.ArgumentParser(
        prog=f"python -m cohort.services.{role}",
        description=f"Run Cohort's {role.replace('_', ' ')} as one process. `cohort serve` starts a whole pipeline; "
        "by hand, give all its processes the same configuration.",
        epilog="Exit codes: 0 ended on request, 1 failed, 2 a wrong option or configuration, 75 no share of a GPU is "
        "left. SIGTERM or Ctrl-C drains and ends; a second one ends at once.",
    )
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="YAML configuration; may be repeated, later files win",
    )
    parser.add_argument("--preset", default="", metavar="NAME", help="preset from configs/presets, beneath the files")
    parser.add_argument(
        "--instance",
        default="",
        metavar="NAME",
        help=f"name of this process in the pipeline (default: {ROLES.get(role, role)})",
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=None,
        metavar="DIR",
        help="folder of the pipeline's sockets (default: in the cache folder, by gateway port)",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        default=None,
        metavar="PORT",
        help="port of /metrics and /health (default: from metrics.base_port; 0 = any)",
    )
    return parser
