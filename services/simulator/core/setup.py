"""Parsed options → the parts of a simulation: configuration, cluster, model, roles. Every fault is a `ConfigError`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from cohort.common.config import CONFIGS_DIR, Config, load_config, nested, parse_yaml
from cohort.common.config.device_defaults import Machine
from cohort.common.errors import ConfigError
from cohort.common.types import Role
from cohort.services.simulator.core.sim_options import SimOptions
from cohort.services.simulator.core.traffic import Traffic, parse_slo
from cohort.services.simulator.hardware import profile_note
from cohort.services.simulator.hardware.acceptance import RecordedDrafts, recorded_drafts
from cohort.services.simulator.hardware.hardware import Cluster, load_cluster, load_model


def configuration(
    options: argparse.Namespace, preset: str, settings: Sequence[str] = (), cluster: Cluster | None = None
) -> Config:
    """Load the configuration. `cluster`: other than the options'. With `engine.device=cuda` its device's memory decides
    on sizes as it does live; `auto` keeps a processor's, which all published comparisons have."""

    overrides = nested(assigned((*options.set, *settings)), "--set") or None

    def machine() -> Machine:
        simulated = cluster or cluster_of(options, options.cluster)
        return Machine(0, simulated.device.memory_bytes, 0)

    return load_config([Path(file) for file in options.config], preset=preset, overrides=overrides, machine=machine)


def assigned(texts: Iterable[str]) -> dict[str, Any]:
    """Parse the options of `--set`, by name. Raises `ConfigError`."""
    flat: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or "." not in key:
            raise ConfigError(f"--set {text}: wants SECTION.OPTION=VALUE")
        flat[key] = parse_yaml(value)
    return flat


def cluster_of(options: argparse.Namespace, text: str) -> Cluster:
    return load_cluster(
        text, {"tensor_parallel": options.tensor_parallel, "stack": options.stack, "pace": options.pace}
    )


def warn_of_old_profiles(clusters: Sequence[Cluster], warn: Callable[[str], None]) -> None:
    """Report profiles that are older than the code."""
    parts = {part.device.name: part for cluster in clusters for part in (cluster.parts or (cluster,))}
    for name, part in parts.items():
        for line in profile_note.warnings(name, part.profile):
            warn(f"warning: {line}")


def traffic_of(options: argparse.Namespace, *, count: int | None = None) -> Traffic:
    return Traffic(
        options.trace,
        count=count if count is not None else options.count,
        duration_s=options.duration,
        time_scale=options.time_scale,
        cv=options.cv,
        seed=options.seed,
        slo=parse_slo(options.slo),
        best_effort=options.best_effort,
        sort=options.sort,
    )


def simulation_options(options: argparse.Namespace) -> SimOptions:
    if options.scatter is not None and options.scatter < 0:
        raise ConfigError(f"--scatter {options.scatter:g}: must not be below 0")
    acceptance, recorded = _acceptance(options.acceptance)
    return SimOptions(
        seed=options.seed,
        predictor=options.predictor,
        predictor_sigma=options.predictor_sigma,
        max_tokens=options.max_tokens,
        horizon_s=getattr(options, "horizon", None) or float("inf"),
        warmup_s=getattr(options, "warmup", 0.0),
        slo_defaults=True,
        if_late=options.if_late,
        scatter=options.scatter,
        acceptance=acceptance,
        draft_rates=() if recorded is None else recorded.rates,
        draft_model=load_model(options.draft_model) if options.draft_model else None,
        draft_s=0.0 if recorded is None else recorded.draft_s,
        adapter_load_s=options.adapter_load,
    )


def _acceptance(text: str) -> tuple[float, RecordedDrafts | None]:
    try:
        mean = float(text)
    except ValueError:
        return 0.0, recorded_drafts(Path(text))
    if not 0.0 <= mean <= 1.0:
        raise ConfigError(f"--acceptance {mean:g}: must be between 0 and 1")
    return mean, None


def parse_roles(text: str | None) -> dict[Role, int] | None:
    if not text:
        return None
    roles: dict[Role, int] = {}
    for part in text.split(","):
        name, _, count = part.partition("=")
        if name.strip() not in list(Role) or not count.isdigit() or int(count) < 1:
            raise ConfigError(f"--roles {text}: {part!r} is not ROLE=N with a role of {', '.join(Role)}")
        roles[Role(name.strip())] = int(count)
    return roles


def preset_names() -> list[str]:
    return sorted(path.stem for path in (CONFIGS_DIR / "presets").glob("*.yaml"))
