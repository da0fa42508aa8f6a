"""The specification of a comparison: a YAML file, read and checked in full before anything runs.

    workloads    streams of requests at load 1.0, each with the SLO it is judged by
    systems      what is compared: a preset, and options laid over it
    loads, seeds every workload at every one of them; a load multiplies the rates

The same file is simulated or run live: the model and the cluster are the simulation's, a pipeline has its own machine.
Traces are named as by `cohort traces list`, or as files, here or in the folder that `COHORT_TRACES` names. A field that
is unset leaves digests of results as they were before there was such a field.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cohort.common.config import CONFIGS_DIR
from cohort.common.errors import ConfigError
from cohort.common.types import Role, TrafficClass
from cohort.common.workloads.agents import Agents
from cohort.common.workloads.generate import Drawn, Mixed
from cohort.common.workloads.lengths import parse_distribution, parse_mix
from cohort.common.workloads.papers import SHAPES
from cohort.common.workloads.trace_files import names, trace_file

FOLDER = CONFIGS_DIR / "comparisons"

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Part(_Section, frozen=True):
    """One stream: lengths drawn from a trace (times `scale`), as a paper prints them (`paper`, a name of
    common/workloads/papers.py), or by `lengths`: `64x64`, `0.8:64x64,0.2:768x32`, `uniform:16-96 x uniform:16-64`.
    Poisson arrivals (`cv` 1) at `rate` a second while it is on, or all `at_once`. With `users` a closed loop instead,
    without a trace: they ask together, and again when the last of them has its whole answer (BROS §7.1), or, not
    `together`, each when his own has come. `requests`: their number, however long they take. `name`: in the columns of
    a live run.

    `burst_s` of every `period_s` seconds it is on (0: always), from `start_s` to `end_s` (0: the end). `ttft_s`,
    `tpot_s`: one SLO, or several of which each request is given one by chance. `whole_s`: instead, twice (first +
    second · output tokens) for the whole answer (EcoServe §4, E9). `scaled` false: its rate is the same at every load.
    `tbt_s`, live alone: a bound on every gap between tokens, whose 99th percentile a request must keep, too. `agents`:
    its requests are turns of sessions. `in_order`: rows of the trace as they follow each other, from one by chance on,
    so that what they share stays together.
    """

    trace: str = ""
    rate: _NotNegative = 0.0
    paper: str = ""
    users: Annotated[int, msgspec.Meta(ge=0)] = 0
    cv: _NotNegative = 1.0
    traffic_class: TrafficClass = "rt"
    ttft_s: _NotNegative | list[_Positive] = 0.0
    tpot_s: _NotNegative | list[_Positive] = 0.0
    deadline_s: _NotNegative = 0.0
    whole_s: tuple[_NotNegative, _Positive] | None = None
    start_s: _NotNegative = 0.0
    end_s: _NotNegative = 0.0
    burst_s: _NotNegative = 0.0
    period_s: _NotNegative = 0.0
    max_prompt: int | None = None
    max_output: int | None = None
    max_total: int | None = None
    scaled: bool = True
    name: str | UnsetType = UNSET
    lengths: str | UnsetType = UNSET
    scale: _Positive | UnsetType = UNSET
    requests: Annotated[int, msgspec.Meta(ge=1)] | UnsetType = UNSET
    at_once: bool | UnsetType = UNSET
    together: bool | UnsetType = UNSET
    tbt_s: _Positive | UnsetType = UNSET
    agents: Agents | UnsetType = UNSET
    in_order: bool | UnsetType = UNSET


class TrafficSpec(_Section, frozen=True):
    """`judged`: the requests that count, of one class or all. `only`: systems that can run here (empty: all). `usual`
    false: run only when named. `tensor_parallel`: devices of an instance. The others override the specification's."""

    parts: list[Part]
    judged: Literal["all", "rt", "be"] = "all"
    model: str = ""
    cluster: str = ""
    tensor_parallel: Annotated[int, msgspec.Meta(ge=1)] = 1
    only: list[str] = []
    set: dict[str, Any] = {}
    loads: list[_Positive] = []
    duration_s: _Positive | None = None
    horizon_s: _Positive | None = None
    note: str = ""
    usual: bool | UnsetType = UNSET


class Compared(_Section, frozen=True):
    """A system: its preset, options over it, and how many instances have which role ({}: the preset's shares). `usual`
    false: run only when it is named. `variants`: further options, of which the best at the specification's tuning seeds
    is shown of each workload at a load. `clairvoyant`, simulated alone: lengths are known, and only requests come that
    the bound keeps on this share of the capacity; so what it keeps could be kept."""

    preset: str
    set: dict[str, Any] = {}
    instances: dict[Role, int] = {}
    usual: bool = True
    note: str = ""
    variants: list[dict[str, Any]] | UnsetType = UNSET
    clairvoyant: Annotated[float, msgspec.Meta(gt=0, le=1)] | UnsetType = UNSET


class Spec(_Section, frozen=True):
    """`tuning_seeds`: those of `seeds` that choose among variants; tables are made of the others."""

    description: str
    model: str
    cluster: str
    workloads: dict[str, TrafficSpec]
    systems: dict[str, Compared]
    loads: tuple[_Positive, ...] = (1.0,)
    seeds: tuple[int, ...] = (0,)
    tuning_seeds: tuple[int, ...] = ()
    duration_s: _Positive = 60.0
    horizon_s: _Positive = 120.0
    predictor: Literal["oracle", "noisy", "lognormal", "none"] = "lognormal"
    predictor_sigma: _NotNegative = 0.5
    set: dict[str, Any] = {}


def load_spec(text: str) -> Spec:
    """Load `NAME` of configs/comparisons, or a YAML file. Raises `ConfigError` that names file and key."""
    path = Path(text) if Path(text).is_file() else FOLDER / f"{text}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.yaml")))
        raise ConfigError(f"{text}: neither a file nor one of {known}")
    try:
        spec = msgspec.yaml.decode(path.read_bytes(), type=Spec)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    for name, workload in spec.workloads.items():
        if not workload.parts:
            raise ConfigError(f"{path}: workloads.{name}: has no parts")
        for part in workload.parts:
            _check(part, f"{path}: workloads.{name}")
        if unknown := [system for system in workload.only if system not in spec.systems]:
            raise ConfigError(f"{path}: workloads.{name}.only: no system named {unknown[0]!r}")
    return spec


def _check(part: Part, where: str) -> None:
    """Raise `ConfigError` if the fields of a part contradict each other or its trace is missing."""
    if sum(map(bool, (part.trace, part.paper, part.lengths))) != 1:
        raise ConfigError(f"{where}: a part has either a trace or a paper's lengths, or lengths of its own")
    if part.trace:
        part_trace(part.trace)
    elif part.lengths:
        parse_lengths(part.lengths, where)
    elif part.paper not in SHAPES:
        raise ConfigError(f"{where}: paper: no workload named {part.paper!r}; there are: {', '.join(SHAPES)}")
    if sum(map(bool, (part.rate, part.users, part.at_once))) != 1:
        raise ConfigError(f"{where}: a part has either a rate or users, or all at_once")
    if part.at_once and not part.requests:
        raise ConfigError(f"{where}: at_once needs a number of requests")
    if part.users and part.trace:
        raise ConfigError(f"{where}: users need lengths of their own or a paper's, no trace")
    if bool(part.burst_s) != bool(part.period_s) or part.burst_s > part.period_s:
        raise ConfigError(f"{where}: burst_s and period_s come together, the first no longer")
    if part.end_s and part.end_s <= part.start_s:
        raise ConfigError(f"{where}: ends at {part.end_s:g} s, begins at {part.start_s:g} s")
    if part.agents and (part.users or part.at_once or not part.rate):
        raise ConfigError(f"{where}: agents come at a rate")
    if part.whole_s and (part.ttft_s or part.tpot_s or part.deadline_s):
        raise ConfigError(f"{where}: whole_s stands for all SLOs of a part")


def parse_lengths(text: str, where: str) -> Drawn | Mixed:
    """Parse the `lengths` of a part (see `Part`). Raises `ConfigError`."""
    if re.match(r"[\d.]+:", text):
        return Mixed(parse_mix(text))
    prompt, _, output = text.partition(" x " if " x " in text else "x")
    return Drawn(parse_distribution(prompt, f"{where}: lengths"), parse_distribution(output, f"{where}: lengths"))


def part_trace(name: str) -> Path:
    """Find a trace: here, among those that ship, or in the folder that `COHORT_TRACES` names. Raises `ConfigError`."""
    folder = os.environ.get("COHORT_TRACES", "")
    if found := trace_file(name) or (trace_file(os.path.join(folder, name)) if folder else None):
        return found.resolve()
    where = f"in {folder}" if folder else "in a folder that the variable COHORT_TRACES names"
    raise ConfigError(f"trace {name}: neither a file here or {where}, nor one of {', '.join(names())}")
