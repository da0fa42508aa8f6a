"""`cohort replay`: its name, summary and options; the work is `services.simulator`'s (`fronts.py`)."""

from __future__ import annotations

from cohort.services.cli.offline.fronts import simulator_front
from cohort.services.simulator import options as options_

EPILOG = """\
Every file is fed to a fresh machine with the same policies, which must answer as the live process did: prints what was
compared and the first difference with its line. Exit status 1 if anything differs.

examples:
  cohort serve --set recording.folder=/tmp/run
  cohort replay /tmp/run/*.jsonl
  cohort replay /tmp/run/manager-*.jsonl --show 120"""

add_parser, run = simulator_front(
    "replay", "check or step through what live processes recorded", options_.add_replay_arguments, EPILOG
)
