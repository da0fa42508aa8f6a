"""Settings of mechanisms: values that measurements and tests change, and that no operator could choose.

A record for each mechanism holds the options of its section, where it has one, and its settings. The mapping
`experiment` of the configuration changes settings, and nothing else does: `--set experiment.bros.drops=false`. The
builders of policies read their record; machines, engine and simulator read those of `engine` and `transfer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from cohort.common.config import BrosConfig, Config
from cohort.common.config.kinds import Positive, Seconds, Section
from cohort.common.config.reading import meant, readable
from cohort.common.errors import ConfigError

Record = TypeVar("Record", bound=Section)


class BrosSettings(BrosConfig, frozen=True):
    """docs/papers/bros.md"""

    group_tokens: Positive = 1  # tokens after the first that share one deadline, of as many TPOT targets (R15)
    first_batch: Positive = 32  # requests in an iteration at the start and after a deadline cut one short (R6)
    batch_step: Positive = 8  # requests more after every iteration that no deadline cut short (R6)
    cut_prompts: bool = True  # prompts are computed in chunks that deadlines leave time for; false = whole if on time
    starving_every: Positive = 10  # at most one iteration in so many begins with a starving request; 1 = every one
    bound_real_time: bool = False  # the size of a batch (R6) bounds real-time rows too, as the paper's loop
    drops: bool = True  # who finds no block takes those of others (R11); false = it is computed again itself


class PlannerPace(Section, frozen=True):
    """docs/guide/planner.md"""

    interval_s: Seconds = 30.0  # least time between two rounds of simulations
    window_s: Seconds = 180.0  # of traffic that is replayed; at least settle_s
    max_requests: Positive = 400  # of it, the latest
    confirmations: Positive = 2  # rounds in succession that want fewer devices, or other roles; of more devices one


KINDS: Mapping[str, type[Section]] = {"bros": BrosSettings, "planner": PlannerPace}
"""By the mechanism's name, below `experiment`."""


def names(mechanism: str) -> tuple[str, ...]:
    """Of its settings, without its options."""
    options = getattr(Config(), mechanism).__struct_fields__
    return tuple(name for name in KINDS[mechanism].__struct_fields__ if name not in options)


def settings_of(config: Config, kind: type[Record]) -> Record:
    """The options of this mechanism and its settings. Raises `ConfigError` that names what is wrong."""
    mechanism = next(name for name, known in KINDS.items() if known is kind)
    section = getattr(config, mechanism)
    options = msgspec.to_builtins(section) if issubclass(kind, type(section)) else {}
    given = config.experiment.get(mechanism, {})
    for name in given:
        if name in section.__struct_fields__:
            raise ConfigError(f"experiment.{mechanism}.{name}: it is an option: {mechanism}.{name}")
        if name not in kind.__struct_fields__:
            raise ConfigError(f"unknown setting 'experiment.{mechanism}.{name}'; {meant(name, names(mechanism))}")
    try:
        return msgspec.convert({**options, **given}, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"experiment.{mechanism}.{readable(str(error))}") from error


def check(config: Config) -> None:
    """Raises `ConfigError` for a mechanism or a setting of `experiment` that does not exist, or of another type."""
    for mechanism in config.experiment:
        if mechanism not in KINDS:
            raise ConfigError(f"unknown mechanism 'experiment.{mechanism}'; {meant(mechanism, KINDS)}")
        settings_of(config, KINDS[mechanism])


def placed(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides for `load_config` of sections in which settings stand beside options: each value where it belongs."""
    found, experiment = dict(overrides), dict(overrides.get("experiment", {}))
    for mechanism in KINDS.keys() & found.keys():
        settings = names(mechanism)
        given = found[mechanism].items()
        found[mechanism] = {name: value for name, value in given if name not in settings}
        moved = {name: value for name, value in given if name in settings}
        experiment[mechanism] = {**experiment.get(mechanism, {}), **moved}
    return {**found, "experiment": experiment}
