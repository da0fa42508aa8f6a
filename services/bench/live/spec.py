"""The specification of a live comparison: a YAML file, read and checked in full before anything starts.

    systems      what is compared: a preset, and what is laid over it
    loads        under what: the clients that run at once, each with options of `cohort bench`
    table        what is told of a run: a column's title, and the expression it is computed by (`expressions`)
    parameters   numbers and texts that `--param` may set; `${…}` anywhere in systems and loads computes with them

Over a preset lie, one over the other: `common`, the load's and the system's `config` (sections as in a configuration
file), then their `set` (SECTION.OPTION=VALUE). `${seed}` is the round: a client's `seed` unless it gives one, so that
every system meets the same requests in a round. A wrong key is a `ConfigError` that names file and key. Called by
`command`; the specifications that come with Cohort lie in configs/benchmarks.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args

import msgspec
import yaml

from cohort.common.config import CONFIGS_DIR, load_config
from cohort.common.errors import CohortError, ConfigError
from cohort.services.bench.http import arguments as http_arguments
from cohort.services.bench.http import options as http_options
from cohort.services.bench.http.results.export import CSV_COLUMNS
from cohort.services.bench.http.results.report import Distribution, Slice, SloReport
from cohort.services.bench.live.expressions import Expression, Known, Reading, Value, parse

FOLDER = CONFIGS_DIR / "benchmarks"
SEED = "seed"
NUMBERS_OF_A_REQUEST = frozenset(CSV_COLUMNS) - {"run", "server", "request_id", "class", "kind", "status", "error"}
_COMPUTED = re.compile(r"\$\{([^}]*)\}")
_OPTIONS_WE_GIVE = frozenset({"help", "url", "compare", "json", "csv", "quiet"})


class Overlay(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The overrides of a preset."""

    config: dict[str, Any] = {}
    set: list[str] = []


class System(Overlay, frozen=True, forbid_unknown_fields=True):
    """`usual` false: measured only when it is named."""

    preset: str = ""
    usual: bool = True
    note: str = ""


class Client(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `cohort bench` with these options (without their dashes), begun `after_s` seconds after the first."""

    options: dict[str, bool | int | float | str]
    after_s: float | str = 0.0


class Load(Overlay, frozen=True, forbid_unknown_fields=True):
    clients: dict[str, Client] = {}
    usual: bool = True
    note: str = ""


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    description: str
    systems: dict[str, System]
    loads: dict[str, Load]
    table: dict[str, str]
    parameters: dict[str, int | float | str] = {}
    common: Overlay = Overlay()
    rounds: int = 3
    port: int = 8300


@dataclass(frozen=True, slots=True)
class ClientCommand:
    """`arguments` of `cohort bench`, without the server and the output."""

    name: str
    arguments: tuple[str, ...]
    after_s: float


@dataclass(frozen=True, slots=True)
class Case:
    """One system under one load in one round, everything computed."""

    load: str
    system: str
    round: int
    preset: str
    config: Mapping[str, Any]
    settings: tuple[str, ...]
    clients: tuple[ClientCommand, ...]
    parameters: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A specification that was checked, with its parameters as they were set."""

    origin: str
    spec: Spec
    parameters: Mapping[str, Value]
    columns: Mapping[str, Expression]

    def case(self, load: str, system: str, round_: int) -> Case:
        """Raises `ConfigError` for a name that is not there, or a client's option that is wrong."""
        if load not in self.spec.loads:
            raise ConfigError(f"{self.origin}: no load {load!r}; there are {', '.join(self.spec.loads)}")
        parameters = {**self.parameters, SEED: round_}
        chosen, common, under = self._system(system), self.spec.common, self.spec.loads[load]
        config: dict[str, Any] = {}
        for layer, where in ((common, "common"), (under, f"loads.{load}"), (chosen, f"systems.{system}")):
            _lay_over(config, self._computed(layer.config, parameters, f"{where}.config"))
        settings = [*common.set, *under.set, *chosen.set]
        clients = [
            self._client(name, client, parameters, f"loads.{load}.clients.{name}")
            for name, client in under.clients.items()
        ]
        return Case(
            load=load,
            system=system,
            round=round_,
            preset=chosen.preset or system,
            config=config,
            settings=tuple(self._computed(settings, parameters, "set")),
            clients=tuple(clients),
            parameters=parameters,
        )

    def _system(self, name: str) -> System:
        """A preset that is not among the systems can be named too: `common` is laid over it."""
        known = [path.stem for path in sorted((CONFIGS_DIR / "presets").glob("*.yaml"))]
        if name not in self.spec.systems and name not in known:
            raise ConfigError(
                f"{self.origin}: no system {name!r}; there are {', '.join(self.spec.systems)}, and every preset"
            )
        return self.spec.systems.get(name, System())

    def _client(self, name: str, client: Client, parameters: Mapping[str, Value], where: str) -> ClientCommand:
        words = []
        for option, value in {SEED: "${seed}", **client.options}.items():
            given = self._computed(value, parameters, f"{where}.options.{option}")
            if isinstance(given, bool):
                words += [f"--{option}"] if given else []
            else:
                words.append(f"--{option}={given}")
        after_s = self._computed(client.after_s, parameters, f"{where}.after_s")
        return ClientCommand(name, tuple(words), float(after_s))

    def _computed(self, node: Any, parameters: Mapping[str, Value], where: str) -> Any:
        """The same with every `${…}` replaced; a text that is nothing else becomes what was computed."""
        match node:
            case dict():
                return {key: self._computed(value, parameters, f"{where}.{key}") for key, value in node.items()}
            case list():
                return [self._computed(value, parameters, where) for value in node]
            case str() if (whole := _COMPUTED.fullmatch(node)) is not None:
                return self._compute(whole[1], parameters, where)
            case str():
                return _COMPUTED.sub(lambda found: str(self._compute(found[1], parameters, where)), node)
            case _:
                return node

    def _compute(self, text: str, parameters: Mapping[str, Value], where: str) -> Value:
        try:
            return parse(text, Known(parameters=frozenset(parameters))).value(parameters, Reading())
        except ConfigError as error:
            raise ConfigError(f"{self.origin}: {where}: {error}") from error


def find(name: str) -> Path:
    """The file of that name, or the specification of that name that comes with Cohort. Raises `ConfigError`."""
    for path in (Path(name), FOLDER / f"{name}.yaml"):
        if path.is_file():
            return path
    raise ConfigError(f"{name}: no such file, and none of {', '.join(known())}")


def known() -> list[str]:
    """Specifications that come with Cohort."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read(path: Path, parameters: Mapping[str, Value] | None = None) -> Comparison:
    """The file with `parameters` in place of its own values, every part of it checked. Raises `ConfigError`."""
    try:
        spec = msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), Spec)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    for key in ("systems", "loads", "table"):
        if not getattr(spec, key):
            raise ConfigError(f"{path}: {key}: nothing there")
    values = _set_parameters(path, spec, parameters or {})
    clients = frozenset.intersection(*(frozenset(load.clients) for load in spec.loads.values()))
    names = Known(frozenset(values) | {SEED}, clients, REPORT_FIELDS, NUMBERS_OF_A_REQUEST)
    columns = {}
    for title, text in spec.table.items():
        try:
            columns[title] = parse(text, names)
        except ConfigError as error:
            raise ConfigError(f"{path}: table.{title}: {error}") from error
    comparison = Comparison(str(path), spec, values, columns)
    for load in spec.loads:
        for system in spec.systems:
            check(comparison.case(load, system, 0), str(path))
    return comparison


def check(case: Case, origin: str) -> None:
    """Refuse a case that would fail only once a pipeline is up, or silently not count. Raises `ConfigError`."""
    where = f"{origin}: systems.{case.system} under loads.{case.load}"
    if not case.clients:
        raise ConfigError(f"{origin}: loads.{case.load}.clients: nothing there")
    try:
        load_config(preset=case.preset, overrides=case.config)
    except CohortError as error:
        raise ConfigError(f"{where}: {str(error).removeprefix('command line: ')}") from error
    for setting in case.settings:
        if not re.fullmatch(r"\w+\.\w+=.*", setting):
            raise ConfigError(f"{where}: set: {setting!r}: expected SECTION.OPTION=VALUE")
    for client in case.clients:
        try:
            parser = _ClientParser(add_help=False, allow_abbrev=False)
            http_arguments.add_arguments(parser)
            ours = {f"--{name}" for name in _OPTIONS_WE_GIVE}
            if taken := [word for word in client.arguments if word.partition("=")[0] in ours]:
                raise ConfigError(f"{taken[0]}: not for a specification to say")
            http_options.from_args(parser.parse_args(list(client.arguments)))
        except ConfigError as error:
            place = f"{origin}: loads.{case.load}.clients.{client.name}.options"
            raise ConfigError(f"{place}: {error}") from error


def _set_parameters(path: Path, spec: Spec, given: Mapping[str, Value]) -> dict[str, Value]:
    values: dict[str, Value] = dict(spec.parameters)
    if SEED in values:
        raise ConfigError(f"{path}: parameters.{SEED}: that is the round; give it another name")
    for name, value in given.items():
        if name not in values:
            raise ConfigError(f"{path}: no parameter {name!r}; there are {', '.join(values) or 'none'}")
        if isinstance(value, str) != isinstance(values[name], str):
            raise ConfigError(f"{path}: parameter {name}: {value!r} is not of the kind of {values[name]!r}")
        values[name] = value
    return values


class _ClientParser(argparse.ArgumentParser):
    """Says what is wrong instead of ending the program."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _lay_over(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _lay_over(below[key], value)
        else:
            below[key] = value


def _report_fields() -> Iterator[str]:
    """Every number in a client's report of all its requests, dotted."""
    parts = {part: part.__struct_fields__ for part in (Distribution, SloReport)}
    for field in msgspec.structs.fields(Slice):
        nested = [part for part in get_args(field.type) if part in parts]
        if nested:
            yield from (f"{field.name}.{name}" for name in parts[nested[0]] if name not in ("limits_ms", "within"))
        else:
            yield field.name


REPORT_FIELDS = frozenset(_report_fields())
