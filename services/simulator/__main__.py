"""`cohort simulate`, `advise`, `compare`, `reproduce` and `replay`: options in, tables and JSON out, exit code back.

Also `python -m cohort.services.simulator simulate|advise|compare|reproduce|replay …`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from cohort.common.comparison import comparison, comparison_tables
from cohort.common.comparison.comparison import Cell, CellResult
from cohort.common.comparison.comparison_spec import load_spec
from cohort.common.devices.cores import usable_cores
from cohort.common.errors import CohortError, ConfigError
from cohort.common.machines.replayer import replay
from cohort.common.planning.settings import configured_shape, planner_settings
from cohort.common.planning.shape import Shape
from cohort.common.types import Slo
from cohort.services.simulator import options as options_
from cohort.services.simulator import render
from cohort.services.simulator.advise import advise as advise_
from cohort.services.simulator.advise import regret
from cohort.services.simulator.advise.planned_day import Day, DayReport, planned_day
from cohort.services.simulator.core import replays
from cohort.services.simulator.core.capacity import Load
from cohort.services.simulator.core.run import measure, simulate
from cohort.services.simulator.core.setup import (
    assigned,
    cluster_of,
    configuration,
    parse_roles,
    preset_names,
    simulation_options,
    traffic_of,
    warn_of_old_profiles,
)
from cohort.services.simulator.core.traffic import parse_slo
from cohort.services.simulator.figures.figure import shipped_unmapped
from cohort.services.simulator.hardware.hardware import load_cluster, load_model
from cohort.services.simulator.reproduce import reproduce, reproduction_page
from cohort.services.simulator.reproduce.judged_rows import PageNumbers, Rules

_PIPED_WIDTH = 140
_USUAL_SLO = "ttft=2,tpot=0.2"


def run_simulate(options: argparse.Namespace) -> int:
    what, values = _sweep(options.sweep)
    if options.planner and (what or options.capacity is not None):
        raise ConfigError("--planner compares shapes of its own: give neither --sweep nor --capacity")
    console = _console(quiet=options.json == "-")
    named = values if what == "cluster" else [options.cluster]
    warn_of_old_profiles([cluster_of(options, name) for name in named], _print)
    if options.capacity is not None:
        return _capacity(options, console)
    if options.planner:
        report = _planned(options)
        render.print_planned(report, console)
        _write_json(options.json, report)
        return 0
    model, traffic, sim_options = load_model(options.model), traffic_of(options), simulation_options(options)
    roles = parse_roles(options.roles)
    reports = []
    for value in values:
        preset = value if what == "preset" else options.preset
        cluster = cluster_of(options, value if what == "cluster" else options.cluster)
        rate = _number("--sweep rate", value) if what == "rate" else options.rate
        workload = traffic.workload(rate, options.concurrency)
        reports.append(
            simulate(configuration(options, preset, cluster=cluster), cluster, model, workload, sim_options, roles)
        )
    if what:
        render.print_head(reports[0], console)
        console.print(render.comparison(what, values, reports))
    else:
        render.print_report(reports[0], console)
    _write_json(options.json, reports)
    return 0 if all(report.overall.finished for report in reports) else 1


def _capacity(options: argparse.Namespace, console: Console) -> int:
    if not 0 < options.capacity <= 1:
        raise ConfigError(f"--capacity {options.capacity}: a share between 0 and 1")
    if parse_slo(options.slo) == Slo():
        raise ConfigError("--capacity needs an SLO to attain: give --slo")
    model, traffic, sim_options = load_model(options.model), traffic_of(options), simulation_options(options)
    cluster, config = cluster_of(options, options.cluster), configuration(options, options.preset)
    load = Load(config, cluster, model, traffic, sim_options, parse_roles(options.roles))
    capacity = load.capacity(options.rate or traffic.own_rate_per_s, options.capacity)
    console.print(render.capacity_line(capacity), soft_wrap=True)
    _write_json(options.json, capacity)
    return 0 if capacity.rate_per_s else 1


def _planned(options: argparse.Namespace) -> DayReport:
    """Simulate the planner's day. The cluster's instances bound the number of workers. Raises `ConfigError`."""
    cluster = cluster_of(options, options.cluster)
    if cluster.parts or cluster.shares:
        raise ConfigError("--planner: instances want to be alike, each with a device of its own")
    _judge_by_usual_slo(options)
    config = configuration(options, options.preset, cluster=cluster)
    most = min(config.planner.max_workers or cluster.instances, cluster.instances)
    planner = msgspec.structs.replace(config.planner, mode="act", max_workers=most)
    config = msgspec.structs.replace(config, planner=planner)
    given = parse_roles(options.roles)
    start = configured_shape(config) if given is None else Shape.of({(role, 1): n for role, n in given.items()})
    settings = planner_settings(config)
    if not settings.bounds.allows(start):
        raise ConfigError(f"--planner: {start} is not within section planner's bounds; name another with --roles")
    workload = traffic_of(options).workload(options.rate)
    day = Day(config, cluster, load_model(options.model), workload, settings, options.seed)
    return planned_day(day, start, start_s=options.worker_start, progress=_print)


def _judge_by_usual_slo(options: argparse.Namespace) -> None:
    if not options.slo:
        options.slo = _USUAL_SLO
        _print(f"no --slo: judged by the gateway's defaults for real-time requests, {_USUAL_SLO}")


def run_advise(options: argparse.Namespace) -> int:
    if options.plot and not options.plot.endswith(".svg"):
        raise ConfigError(f"--plot {options.plot}: pictures are SVG; name a file that ends so")
    options.jobs = options.jobs or usable_cores()
    if options.jobs < 1:
        raise ConfigError(f"--jobs {options.jobs}: must be at least 1")
    if options.regret is not None:
        return _regret(options)
    for name in ("trace", "cluster", "model"):
        if not getattr(options, name):
            raise ConfigError(f"--{name} is wanted")
    console = _console(quiet=options.json == "-", width=render.ADVICE_WIDTH, record=bool(options.plot))
    warn_of_old_profiles([cluster_of(options, options.cluster)], _print)
    _judge_by_usual_slo(options)
    with _progress("simulating") as progress:
        found = advise_.advise(
            options,
            _words(options.preset) or preset_names(),
            cluster_of(options, options.cluster),
            load_model(options.model),
            traffic_of(options),
            simulation_options(options),
            progress,
        )
    render.print_advice(found.advice, options.slo, console, everything=options.all)
    if options.plot:
        console.save_svg(options.plot, title="cohort advise")
    _write_json(options.json, found.advice)
    return 0


def _regret(options: argparse.Namespace) -> int:
    if options.regret < 1:
        raise ConfigError(f"--regret {options.regret}: must be at least 1")
    file = Path(options.results) if options.results else None
    pairs = regret.measure(options.regret, options.seed, options.jobs, file, _print)
    _console().print(render.regret_table(pairs))
    _write_json(options.json, pairs)
    return 0


@contextmanager
def _progress(label: str) -> Iterator[Callable[[float, float], None]]:
    """Show one line with the time that is left, on a terminal only."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    # Without a thread that refreshes: processes are forked meanwhile.
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(label, total=None)

        def progress(done: float, total: float) -> None:
            bar.update(task, completed=done, total=total, refresh=True)

        yield progress


def run_compare(options: argparse.Namespace, live: Callable[[Cell], CellResult] | None = None) -> int:
    """Run `cohort compare`. `live` measures a cell with `--live`: the command line has it from the measuring wing."""
    if options.jobs < 1 or (options.live and options.jobs > 1):
        raise ConfigError(f"--jobs {options.jobs}: must be {'1 with --live' if options.live else 'at least 1'}")
    if options.live and live is None:
        raise ConfigError("--live is for `cohort compare`")
    spec = load_spec(options.spec)
    cells = comparison.cells(
        spec,
        workloads=_words(options.workloads),
        systems=_words(options.systems),
        loads=[_number("--loads", word) for word in _words(options.loads)],
        seeds=[int(_number("--seeds", word)) for word in _words(options.seeds)],
        cluster=options.cluster,
        over=assigned(options.set),
        live=options.live,
    )
    others = list(comparison.read_results(Path(options.against)).values()) if options.against else []
    if not options.live:
        warn_of_old_profiles([load_cluster(name) for name in dict.fromkeys(cell.cluster for cell in cells)], _print)
    file = Path(options.results) if options.results else None
    results = comparison.run(cells, file, options.jobs, _print, live or measure)
    found = comparison_tables.Comparison(spec.description, comparison.rows(results, spec.tuning_seeds))
    page = comparison_tables.columns(results, others) if options.live or others else ""
    if "-" not in (options.json, options.markdown):
        _console().print(page or comparison_tables.table(found), markup=False, soft_wrap=bool(page))
        for each in comparison_tables.group_tables(found) if options.groups else ():
            _console().print(each, markup=False)
    if options.markdown:
        _write(options.markdown, (page or comparison_tables.markdown(found)).encode())
    _write_json(options.json, results if page else found)
    return 0


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def run_reproduce(options: argparse.Namespace) -> int:
    figures = reproduce.select(options.paper, options.figure)
    page = Path(options.docs) if options.docs else None
    numbers = PageNumbers.read(page.with_suffix(".json")) if page is not None else PageNumbers()
    if options.list and page is not None:
        _console().print(render.reproduction(numbers.results(figures)))
        return 0
    if options.list:
        console = _console()
        for figure in figures:
            console.print(f"{figure.id}: {figure.figure}, {figure.workload}, {figure.metric}", highlight=False)
        return 0
    if options.jobs < 1 or options.seeds < 1:
        raise ConfigError("--jobs and --seeds must be at least 1")
    if options.scatter is not None and options.scatter < 0:
        raise ConfigError(f"--scatter {options.scatter:g}: must not be below 0")
    if options.lacking:
        if page is None:
            raise ConfigError("--lacking needs --docs: the page whose rows are looked at")
        lacking = set(numbers.lacking(figures, options.seeds))
        figures = [figure for figure in figures if figure.id in lacking]
    results = reproduce.reproduce(
        figures,
        _print,
        range(options.seeds),
        results=Path(options.results) if options.results else None,
        jobs=options.jobs,
        scatter=options.scatter,
    )
    if options.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    else:
        _console().print(render.reproduction(results))
    if page is not None:
        known, rules = reproduce.all_figures(), Rules()
        numbers = numbers.with_results(results, known, rules)
        page.with_suffix(".json").write_bytes(numbers.encoded())
        written = reproduction_page.markdown(numbers.judged(known, rules), known, rules, shipped_unmapped())
        page.write_text(written, encoding="utf-8")
    return 0


def run_replay(options: argparse.Namespace) -> int:
    console, equal = _console(), True
    for path in map(Path, options.recordings):
        if options.show is not None:
            lines: Iterable[str] = replays.show(path, options.show, options.around)
        else:
            found = replay(path)
            equal &= not found.difference
            lines = [replays.summary(found)]
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0 if equal else 1


def _sweep(text: str | None) -> tuple[str, list[str]]:
    if not text:
        return "", [""]
    what, equals, values = text.partition("=")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if what not in ("rate", "preset", "cluster") or not equals or not found:
        raise ConfigError(f"--sweep {text}: wants rate=, preset= or cluster= and values separated by commas")
    return what, found


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{option}: {text!r} is not a number") from None


def _print(line: str) -> None:
    Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)


def _console(*, quiet: bool = False, width: int | None = None, record: bool = False) -> Console:
    console = Console(quiet=quiet, width=width, record=record)
    # A pipe has no width; 80 columns would wrap tables for no reader.
    return console if width or console.is_terminal else Console(width=_PIPED_WIDTH, quiet=quiet)


def _write_json(target: str | None, data: object) -> None:
    if target is None:
        return
    _write(target, msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n")


def _write(target: str, encoded: bytes) -> None:
    if target == "-":
        sys.stdout.buffer.write(encoded)
        sys.stdout.flush()
    else:
        Path(target).write_bytes(encoded)


COMMANDS = {
    "simulate": (options_.add_simulate_arguments, run_simulate),
    "advise": (options_.add_advise_arguments, run_advise),
    "compare": (options_.add_compare_arguments, run_compare),
    "reproduce": (options_.add_reproduce_arguments, run_reproduce),
    "replay": (options_.add_replay_arguments, run_replay),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="simulator")
    subparsers = parser.add_subparsers(required=True)
    for name, (add, run) in COMMANDS.items():
        subparser = subparsers.add_parser(name)
        add(subparser)
        subparser.set_defaults(run=run)
    options = parser.parse_args(argv)
    try:
        return int(options.run(options))
    except CohortError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False)
        return 2


if __name__ == "__main__":
    sys.exit(main())
