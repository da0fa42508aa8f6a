"""`cohort compare`: its name, summary and options; the work is `services.simulator`'s (`fronts.py`)."""

from __future__ import annotations

from cohort.services.cli.offline.fronts import simulator_front
from cohort.services.simulator import options as options_

add_parser, run = simulator_front(
    "compare",
    "systems side by side over workloads, loads and seeds, simulated",
    options_.add_compare_arguments,
    options_.COMPARE_EPILOG,
)
