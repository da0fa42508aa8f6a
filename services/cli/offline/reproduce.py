"""`cohort reproduce`: its name, summary and options; the work is `services.simulator`'s (`fronts.py`)."""

from __future__ import annotations

from cohort.services.cli.offline.fronts import simulator_front
from cohort.services.simulator import options as options_

add_parser, run = simulator_front(
    "reproduce", "the papers' figures beside ours", options_.add_reproduce_arguments, options_.REPRODUCE_EPILOG
)
