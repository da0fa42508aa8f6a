"""A live comparison, measured: systems in turn A B A B, each as a pipeline of its own, for every load.

Round k has the same requests whatever the system and whenever it is measured. Called by `command`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cohort.services.bench.live.expressions import Reading
from cohort.services.bench.live.pipelines import pipeline
from cohort.services.bench.live.results import Run, run_of
from cohort.services.bench.live.spec import Case, Comparison

_ONE_TOKEN_A_STEP = "speculation.mode=off"
"""Unless a case says otherwise: responses to made-up prompts repeat themselves, and look-ups would find that."""


def in_turn(comparison: Comparison, loads: Sequence[str], systems: Sequence[str], rounds: range) -> Iterator[Case]:
    """In the order in which they are measured. Raises `ConfigError`."""
    for load in loads:
        for round_ in rounds:
            for system in systems:
                yield comparison.case(load, system, round_)


def measure(comparison: Comparison, case: Case, port: int, settings: Sequence[str]) -> Run:
    """One pipeline from its start to its end; `settings` lie over everything else. Raises `MeasurementFailed`."""
    with pipeline(case.preset, case.config, port, [_ONE_TOKEN_A_STEP, *case.settings, *settings]) as served:
        observed = served.load(case.clients)
        reading = Reading(
            overall={name: each.overall for name, each in observed.items()},
            rows={name: each.rows for name, each in observed.items()},
            stats=served.stats(),
            metrics=served.metrics(),
        )
    values = {title: column.number(case.parameters, reading) for title, column in comparison.columns.items()}
    return run_of(case.load, case.system, case.round, values)
