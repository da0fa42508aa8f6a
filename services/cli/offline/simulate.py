"""`cohort simulate`: its name, summary and options; the work is `services.simulator`'s (`fronts.py`)."""

from __future__ import annotations

from cohort.services.cli.offline.fronts import simulator_front
from cohort.services.simulator import options as options_

add_parser, run = simulator_front(
    "simulate",
    "replay traffic on a cluster that need not exist",
    options_.add_simulate_arguments,
    options_.SIMULATE_EPILOG,
)
