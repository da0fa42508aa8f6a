"""`cohort advise`: its name, summary and options; the work is `services.simulator`'s (`fronts.py`)."""

from __future__ import annotations

from cohort.services.cli.offline.fronts import simulator_front
from cohort.services.simulator import options as options_

add_parser, run = simulator_front(
    "advise", "which preset, roles and settings suit a traffic and a cluster", options_.add_advise_arguments
)
