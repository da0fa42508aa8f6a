"""`cohort bench live SPEC`: configurations in turn, each a live pipeline, under the same requests.

Starts and stops pipelines itself (`cohort serve --detach`), so nothing else should run. SPEC is a YAML file, or the
name of one that comes with Cohort (configs/benchmarks). Prints medians over the rounds, with the smallest and the
largest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.console import Console

from cohort.common.errors import ConfigError
from cohort.services.bench.live import runs, spec
from cohort.services.bench.live.expressions import Value
from cohort.services.bench.live.results import Results, read_results, table
from cohort.services.bench.output import check_writable, publish_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("spec", metavar="SPEC", help=f"file, or one of {', '.join(spec.known())}")
    parser.add_argument("--list", action="store_true", help="what SPEC compares and can be told; measures nothing")
    parser.add_argument("--systems", nargs="+", metavar="NAME", help="these only; a preset can be named too")
    parser.add_argument("--loads", nargs="+", metavar="NAME", help="these only")
    parser.add_argument(
        "--param", action="append", default=[], metavar="NAME=VALUE", help="in place of the specification's own value"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.OPTION=VALUE", help="over every system's configuration"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="default: as SPEC says")
    parser.add_argument("--first-round", type=int, default=0, metavar="K", help="its seed; to go on another time")
    parser.add_argument("--port", type=int, help="of the pipelines (default: as SPEC says)")
    parser.add_argument(
        "--json", metavar="FILE", help="every run and the summary, written after each run ('-': at the end to stdout)"
    )
    parser.add_argument("--resume", action="store_true", help="the runs already in --json FILE count too")


def run(args: argparse.Namespace) -> int:
    """Everything from parsed options. Raises `CohortError`."""
    path = spec.find(args.spec)
    comparison = spec.read(path, dict(map(_parameter, args.param)))
    if args.list:
        sys.stdout.write(_listing(comparison))
        return 0
    if args.json not in (None, "-"):
        check_writable(Path(args.json), "--json")
    results = _start(args, path.stem, comparison)
    cases = list(_cases(args, comparison))
    port = args.port or comparison.spec.port
    errors = Console(stderr=True)
    for number, case in enumerate(cases, start=1):
        found = runs.measure(comparison, case, port, args.set)
        results.runs.append(found)
        if args.json not in (None, "-"):
            publish_json(args.json, results.encode())
        told = ", ".join(f"{title} {'–' if value is None else f'{value:.4g}'}" for title, value in found.values.items())
        what = f"{number}/{len(cases)} {case.load}, round {case.round + 1}: {case.system}: {told}"
        errors.print(what, highlight=False, markup=False, soft_wrap=True)
    if args.json == "-":
        publish_json("-", results.encode())
    else:
        sys.stdout.write(table(results.runs))
    return 0


def _cases(args: argparse.Namespace, comparison: spec.Comparison) -> Sequence[spec.Case]:
    """The runs to measure, in order, all of them checked. Raises `ConfigError`."""
    rounds = args.rounds if args.rounds is not None else comparison.spec.rounds
    if rounds < 1 or args.first_round < 0:
        raise ConfigError("--rounds must be above 0, and --first-round not below")
    systems = args.systems or [name for name, system in comparison.spec.systems.items() if system.usual]
    loads = args.loads or [name for name, load in comparison.spec.loads.items() if load.usual]
    numbers = range(args.first_round, args.first_round + rounds)
    cases = list(runs.in_turn(comparison, loads, systems, numbers))
    for case in cases:
        if case.round == args.first_round:
            spec.check(case, comparison.origin)
    return cases


def _start(args: argparse.Namespace, name: str, comparison: spec.Comparison) -> Results:
    """Empty, or with the runs of earlier sittings. Raises `ConfigError`."""
    earlier = []
    if args.resume:
        if args.json in (None, "-"):
            raise ConfigError("--resume needs --json FILE, with the runs of earlier sittings")
        if Path(args.json).exists():
            found = read_results(Path(args.json))
            if found.spec != name:
                raise ConfigError(f"--resume: {args.json} is of {found.spec}, not of {name}")
            earlier = found.runs
    return Results(spec=name, parameters=dict(comparison.parameters), settings=list(args.set), runs=earlier)


def _parameter(text: str) -> tuple[str, Value]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigError(f"--param {text!r}: expected NAME=VALUE")
    given = yaml.safe_load(value) if value else ""
    return name, given if isinstance(given, int | float) and not isinstance(given, bool) else value


def _listing(comparison: spec.Comparison) -> str:
    found = comparison.spec
    lines = [found.description.strip(), "", "systems:"]
    for name, system in found.systems.items():
        lines.append(_line(name, system.note or system.preset or name, system.usual))
    lines.append("loads:")
    for name, load in found.loads.items():
        clients = "; ".join(f"{client}: {' '.join(_options(each))}" for client, each in load.clients.items())
        lines.append(_line(name, load.note or clients, load.usual))
    lines.append("parameters:")
    lines += [f"  {name}={value}" for name, value in comparison.parameters.items()]
    lines.append("table:")
    lines += [f"  {title} = {text}" for title, text in found.table.items()]
    return "\n".join(lines) + "\n"


def _options(client: spec.Client) -> list[str]:
    return [f"--{name} {value}" for name, value in client.options.items()]


def _line(name: str, text: str, usual: bool) -> str:
    return f"  {name:<20} {text}{'' if usual else ' (only when named)'}"
