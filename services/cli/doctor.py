"""`cohort doctor`: what is wrong with this machine or with a running pipeline, and what helps.

Collects what the checks (`checks/`) look at, runs them, shows what they say. Changes nothing. A check that fails itself
is a finding, too: the others still run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from cohort.common import paths
from cohort.common.config import Config, load_config
from cohort.common.devices import host_memory, inventory
from cohort.common.devices.fit import check_host_fit, host_need, need
from cohort.common.engine.config.model_config import read_geometry
from cohort.common.errors import CohortError, ConfigError, ModelError
from cohort.common.http import exposure
from cohort.common.hub.model_source import located
from cohort.common.process.other_programs import OtherPrograms
from cohort.services.cli.checks import files, machine, pipeline
from cohort.services.cli.checks.finding import Finding, fine, problem, refused, skipped
from cohort.services.cli.checks.reading import Reading
from cohort.services.launcher.run_files import RunFiles

EPILOG = """\
examples:
  cohort doctor                                  this machine, and the pipeline on port 8000 if one runs
  cohort doctor --model Qwen/Qwen3-8B            would this be served?
  cohort doctor --url http://gpu-box:8001        a pipeline elsewhere: its monitor's address
  cohort doctor --json | jq '.[] | select(.status == "problem")'

Exit codes: 0 nothing is wrong (warnings may be), 1 there is a problem, 2 a wrong option or configuration."""


DESCRIPTION = "Look at this machine and at a running pipeline: what does not work, what works badly, what helps."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", help="as for `cohort serve`; nothing is fetched")
    parser.add_argument("--revision", metavar="NAME", help="likewise")
    parser.add_argument("--kv-cache-dtype", metavar="NAME", help="likewise")
    parser.add_argument("--preset", default="", metavar="NAME", help="likewise")
    parser.add_argument("--config", action="append", type=Path, default=[], metavar="FILE", help="likewise")
    parser.add_argument("--set", action="append", default=[], dest="assignments", metavar="KEY=VALUE", help="likewise")
    parser.add_argument("--port", type=int, metavar="PORT", help="likewise; of the pipeline that is looked at, too")
    parser.add_argument("--url", default="", help="only the pipeline whose monitor answers here, not this machine")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")


def run(options: argparse.Namespace) -> int:
    found = list(of_pipeline(options.url, wanted=True)) if options.url else list(of_both(options))
    if options.json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(found), indent=1) + "\n")
    else:
        _show(found)
    return 1 if any(finding.status == "problem" for finding in found) else 0


def of_both(options: argparse.Namespace) -> Iterator[Finding]:
    """Check this machine, with the configuration of the pipeline on the port, or of the options where there is none or
    they name a model, and that pipeline."""
    from cohort.services.launcher.options import keys_of, overrides_of

    overrides = overrides_of(options, keys_of(options.config))
    config = load_config(options.config, preset=options.preset, overrides=overrides, machine=inventory.this_machine)
    run_files = RunFiles(paths.run_dir(config.gateway.port))
    running = run_files.claimed
    if running and run_files.config_file.is_file() and not options.model:
        config = load_config([run_files.config_file])
    yield from of_machine(config, running=running, launcher=_launcher(run_files) if running else 0)
    yield from of_pipeline(monitor_url(config), wanted=running)


def _launcher(files: RunFiles) -> int:
    state = files.state()
    return 0 if state is None else state.launcher.pid


def monitor_url(config: Config) -> str:
    from cohort.services.launcher.plan import http_base

    return http_base(config.monitor.host, config.monitor.port)


def of_machine(config: Config, *, running: bool, launcher: int = 0) -> Iterator[Finding]:
    """Check this machine. `launcher`: the process of the pipeline that runs, 0 = none does."""
    from cohort.common.devices.cores import usable_cores
    from cohort.common.http.ports import free_port
    from cohort.common.policies import compose
    from cohort.services.launcher.box import on_box
    from cohort.services.launcher.plan import plan, resolve
    from cohort.services.simulator.hardware.data_files import names, user_folder
    from cohort.services.simulator.hardware.hardware import load_device

    cores = usable_cores()
    unknown: Finding | None = None
    try:
        config = located(config)
    except ModelError as error:
        unknown = problem("model", str(error), "`cohort serve --download` with this --model, or --model FOLDER")
    folder = Path(config.model.path).expanduser() if config.model.path else paths.default_model_dir()
    try:
        compose.check_names(config)
        settled = on_box(config, inventory.visible_gpus(), workers_given=True, model=folder)
        settled = resolve(settled, model=folder, cores=cores, free_port=free_port)
    except CohortError as error:
        yield problem("configuration", str(error), "cohort serve --print-config shows what is configured")
        settled = config
    moves_kv = compose.moves_kv(settled)
    folders = {"cache": paths.cache_dir(), "state": paths.state_dir(settled.state.folder)}
    own = [name for name in names("devices") if (user_folder() / "devices" / f"{name}.yaml").is_file()]
    load = _checked("load", lambda: machine.load(_others(launcher)))
    yield from (
        unknown or _checked("model", lambda: files.model(config, folder)),
        _checked("ports", lambda: machine.ports(plan(settled, cores), running)),
        _checked("disk space", lambda: machine.disk(folders)),
        _checked("memory", lambda: memory(settled, folder)),
        _checked("threads", lambda: machine.threads(settled, cores)),
        load,
        _checked("autogroup", lambda: machine.autogroup(load.status == "warning")),
        _checked("processor clocks", machine.governor),
        _checked("open files", machine.descriptors),
        _checked("shared memory", lambda: machine.shared_memory(moves_kv)),
        _checked("UCX", lambda: files.ucx(settled, moves_kv)),
        _checked("GPU", lambda: files.gpu(settled, files.probe_torch)),
        _checked("GPU clocks", lambda: machine.gpu_clocks(inventory.throttling())),
        _checked("clock", lambda: machine.clock(exposure.is_one_machine(settled))),
        _checked("certificate", lambda: files.certificate(settled)),
        _checked("traces", lambda: files.traces(settled)),
        _checked("profiles", lambda: files.profiles(settled, [(n, load_device(n)[1].profile) for n in own])),
    )


def _others(launcher: int) -> float | None:
    """Return the share of the processors that other programs take, over half a second."""
    others = OtherPrograms(launcher)
    others.share()
    time.sleep(0.5)
    return others.share()


def memory(config: Config, folder: Path) -> Finding:
    """Check memory for the workers, with weights as this kind of device stores them: codes, or dequantised."""
    if config.model.path and not folder.exists():
        return skipped("memory", "the model is not here")
    available = host_memory.available_bytes()
    if not (folder / "config.json").is_file():
        return machine.memory(config, files.weights_bytes(folder), available)
    geometry = read_geometry(folder, config.model.quantization)
    if config.on_gpu:
        return fine("memory", f"of its GPU a worker needs {need(config, folder, geometry).summary}")
    wanted = host_need(config, folder, geometry, computes_bfloat16=host_memory.computes_bfloat16())
    try:
        name = config.model.served_name or folder.name
        check_host_fit(config, name, wanted, available, len(config.instance_roles))
    except ConfigError as error:
        return refused("memory", error)
    return machine.memory(config, wanted.weights or files.weights_bytes(folder), available)


def of_pipeline(url: str, *, wanted: bool) -> Iterator[Finding]:
    """Check a running pipeline. `wanted`: one should be there."""
    try:
        reading = Reading.of(url)
    except (OSError, ValueError) as error:
        if wanted:
            yield problem("monitor", f"no monitor answers at {url}: {error}", "cohort serve --status; its log")
        else:
            yield skipped("pipeline", "none runs on this port")
        return
    for check in pipeline.CHECKS:
        yield _checked(check.__name__, lambda check=check: check(reading))  # type: ignore[misc]


def _checked(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except ConfigError as error:
        return problem(name, str(error), "mend the configuration")
    except Exception as error:
        return problem(name, f"the check itself failed: {type(error).__name__}: {error}", "report this as a defect")


def _show(found: list[Finding]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warning": "yellow", "problem": "bold red", "skipped": "dim"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("check", "", "what was found"):
        table.add_column(column, no_wrap=column != "what was found")
    for finding in found:
        says = Text(finding.says)
        if finding.cure:
            says.append(f"\n→ {finding.cure}", "cyan")
        table.add_row(finding.check, Text(finding.status, colours[finding.status]), says)
    console = Console() if sys.stdout.isatty() else Console(width=140)
    console.print(table)
    problems, warned = (sum(finding.status == status for finding in found) for status in ("problem", "warning"))
    counted = f"{_number(problems, 'problem')}, {_number(warned, 'warning')}"
    console.print(counted if problems + warned else "nothing is wrong")


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
