"""Turns what `cohort profile` measured into files that `--cluster` and `--model` take by name.

    FOLDER/devices/NAME.yaml     the device, with what was measured, when, and by which code
    FOLDER/clusters/NAME.yaml    how many of it, and what they share
    FOLDER/models/MODEL.yaml     the model's shape, where none that is known is the same

Called by `profile.py`; measures and fits nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from cohort.common.errors import ConfigError
from cohort.common.policies.cost_model import DeviceShape, ModelShape
from cohort.services.bench.fit.machine import Machine
from cohort.services.simulator.hardware.data_files import locate
from cohort.services.simulator.hardware.hardware import load_model
from cohort.services.simulator.hardware.profile_note import ProfileNote

_SHARED_LATENCY_S = 0.0025
_DISTURBED = 0.25
"""Median error on held-out points beyond which a fit is not worth having."""
_SAME = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "experts", "experts_per_token")
"""Fields in which models differ."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Conditions of a measurement: `instances` of `threads` on `cores`; the model that ran, and its folder."""

    name: str
    gpu: bool
    memory_bytes: int
    units: int
    instances: int
    threads: int
    cores: int
    model: ModelShape
    model_folder: Path
    machine: str
    measured_on: str

    @property
    def shares_cores(self) -> bool:
        """Engines of one thread that leave no core to the other processes: the one form of sharing that is modelled."""
        return not self.gpu and self.threads == 1 and self.cores > 1 and self.instances >= self.cores


def model_of(shape: Mapping[str, Any]) -> tuple[ModelShape, bool]:
    """Return the measured model, and whether its shape has no file yet. Raises `ConfigError` if its name is taken."""
    found = ModelShape(**shape)
    if locate(found.name, "models") is None:
        return found, True
    known = load_model(found.name)
    different = [field for field in _SAME if getattr(known, field) != getattr(found, field)]
    if different:
        raise ConfigError(f"--model-name {found.name}: that model has other {', '.join(different)}; give another name")
    if (known.weight_bytes, known.kv_bytes) == (found.weight_bytes, found.kv_bytes):
        return known, False
    return model_of({**shape, "name": f"{found.name}-{8 * found.weight_bytes}bit"})


def template(measured: Measured) -> DeviceShape:
    """Return the device's facts that no step shows. Those of its links are assumed, and the file says so."""
    return DeviceShape(
        name=measured.name,
        flops_per_s=1.0,
        memory_bytes_per_s=1.0,
        memory_bytes=measured.memory_bytes,
        compute_efficiency=0.5,
        memory_efficiency=0.5,
        attention_efficiency=0.3,
        units=measured.units,
        unit_speedup=2.5 if measured.gpu else 1.0,
        exchange_bytes_per_s=24.0e9 if measured.gpu else 5.0e9,
        exchange_latency_s=10e-6 if measured.gpu else 50e-6,
        host_bytes_per_s=24.0e9 if measured.gpu else 5.0e9,
    )


def write(folder: Path, measured: Measured, machine: Machine, *, new_model: bool) -> list[Path]:
    """Write device, cluster and a new model; return the files. Raises `ConfigError` if the folder is not writable."""
    contents = {"devices": (measured.name, device_text(measured, machine))}
    contents["clusters"] = (measured.name, cluster_text(measured, machine))
    if new_model:
        skipped = ("kv_scale_bytes",)  # of a cache, not of the model
        shape = {field: getattr(measured.model, field) for field in ModelShape.__slots__ if field not in skipped}
        contents["models"] = (measured.model.name, f"# From {measured.model_folder}\n{_yaml(shape)}")
    written = []
    for kind, (name, text) in contents.items():
        path = folder / kind / f"{name}.yaml"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
        written.append(path)
    return written


def device_text(measured: Measured, machine: Machine) -> str:
    device, stack = machine.device, machine.stack
    skipped = ("name", "operators", "scaled")
    data: dict[str, Any] = {"name": measured.name, "kind": "gpu" if measured.gpu else "cpu"}
    data |= {field: _short(getattr(device, field)) for field in DeviceShape.__slots__ if field not in skipped}
    data["reserve_bytes"] = 2_000_000_000 if measured.gpu else 0
    data["within"] = "pcie4" if measured.gpu else "shm"
    times = {field: _short(getattr(stack, field)) for field in ("launch_s", "step_s", "row_s", "mixed_share")}
    data["stacks"] = {stack.name: times}
    data["scatter"] = _short(machine.scatter)
    data["scatter_lasting"] = _short(machine.scatter_lasting)
    if machine.scatter_prompts is not None:
        data["scatter_prompts"] = _short(machine.scatter_prompts)
    note = ProfileNote(
        **ProfileNote.fingerprint(measured.model_folder),
        model=measured.model.name,
        threads=measured.threads,
        measured_on=measured.measured_on,
        machine=measured.machine,
    )
    data["profile"] = msgspec.to_builtins(note)
    head = [
        f"{measured.machine}, {measured.threads} thread(s) an instance, measured by `cohort profile` on "
        f"{measured.measured_on} with {measured.model.name}.",
        "Peaks are nominal: twice the best rate that a step reached. Links and memory for swapping are assumed.",
        "Error on what was held out:",
        *(f"  {line}" for line in error_lines(machine)),
    ]
    return "".join(f"# {line}\n" for line in head) + _yaml(data)


def cluster_text(measured: Measured, machine: Machine) -> str:
    data: dict[str, Any] = {"device": measured.name, "instances": measured.instances}
    head = f"{measured.instances} instance(s) of {measured.threads} thread(s) on {measured.cores} core(s)"
    if measured.gpu:
        head = f"{measured.instances} GPU(s) of one machine"
    elif measured.shares_cores:
        data |= {
            "within": "shm-shared",
            "cores": measured.cores,
            "service_step_s": _short(machine.service_step_s),
            "service_row_s": _short(machine.service_row_s),
            "core_contention": _short(machine.contention.core),
            "memory_contention": _short(machine.contention.memory),
            "cache_contention": _short(machine.contention.cache),
            "control_latency_s": _SHARED_LATENCY_S,
        }
        head += " that gateway, manager and client run on, too. Links and control_latency_s are those of cpu-2x1"
        head += f".\n# {contention_line(machine).capitalize()}" if machine.contention.decodes else ""
    else:
        head += "; what the services take is in the device's step_s and row_s"
    if not machine.live_errors:
        head += ". What the services take was not measured"
    return f"# {head}.\n{_yaml(data)}"


def error_lines(machine: Machine) -> list[str]:
    """Format the errors by phase: of the engine alone, and of a live worker's cycles."""
    return [
        f"{of:7s} {kind:8s} median {middle:6.1%}   p90 {p90:6.1%}   worst {worst:6.1%} ({where})"
        for of, table in (("engine", machine.engine_errors), ("live", machine.live_errors))
        for kind in ("prefill", "decode", "mixed")
        if kind in table
        for middle, p90, worst, where in (table[kind],)
    ]


def contention_line(machine: Machine) -> str:
    """Describe how engines slow each other down; "" if that was not measured."""
    found = machine.contention
    if not found.decodes:
        return ""
    return (
        f"engines beside each other: decode steps {found.decodes:.2f} x ({found.lowest:.2f} to {found.highest:.2f}) as "
        f"long as alone, services included; {found.core:.0%} by what else they share, {found.cache:.0%} of what reads "
        f"memory, {found.memory:.0%} of what reads it in both"
    )


def disturbed(machine: Machine) -> str:
    """Return a warning if the error shows that the machine was busy; "" otherwise."""
    worst = max(middle for table in (machine.engine_errors, machine.live_errors) for middle, *_ in table.values())
    if worst <= _DISTURBED:
        return ""
    return (
        f"warning: half of the points held out are over {_DISTURBED:.0%} off: the machine was busy, or is one that "
        "the cost model does not fit; measure again when nothing else runs"
    )


def _short(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _yaml(data: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True, width=120))
